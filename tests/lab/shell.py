"""Running commands on the host for the lab's own purposes."""

import subprocess
from collections.abc import Sequence

from lab.errors import LabError


def run(argv: Sequence[str], *, timeout: float = 60, check: bool = True) -> str:
    """Runs a command and returns its output.

    Args:
        argv: The command; no shell is involved.
        timeout: Seconds after which the command is ended.
        check: Whether a non-zero exit code is an error.

    Returns:
        Standard output.

    Raises:
        LabError: The command is missing, failed, or took too long; both streams are shown.
    """
    try:
        done = subprocess.run(
            argv,
            check=False,
            capture_output=True,
            text=True,
            timeout=timeout,
            stdin=subprocess.DEVNULL,
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise LabError(f"{argv[0]}: {error}") from error
    if check and done.returncode != 0:
        output = (done.stdout + done.stderr).strip()[-2000:]
        raise LabError(f"{' '.join(argv)}: exit code {done.returncode}\n{output}")
    return done.stdout
