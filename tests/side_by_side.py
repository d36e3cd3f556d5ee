"""Run the tests of the lab and all others at the same time; the others' output comes after.

The lab mostly waits for its guest. A shell would start the second one with SIGINT ignored (POSIX,
"Asynchronous Lists"), which tests of interrupted programs inherit; this does not.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import IO

PYTEST = [sys.executable, "-m", "pytest"]
NO_GUEST = "tests/real_gpu"
"""Needs what the lab needs (root, gcc), and no guest."""
LAB = ["-m", "lab and not exhaustive"]
OTHERS = (["-m", "not lab and not exhaustive"], [*LAB, NO_GUEST])


def main(arguments: Sequence[str]) -> int:
    """The first exit status that is not 0."""
    # Whoever started this in the background may have had SIGINT ignored too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryFile("w+") as kept:
        with ThreadPoolExecutor() as pool:
            others = pool.submit(_others, kept, arguments)
            argv = [*PYTEST, *LAB, f"--ignore={NO_GUEST}", *arguments]
            lab = subprocess.run(argv, check=False)
            status = others.result()
        kept.seek(0)
        sys.stdout.write(kept.read())
    return lab.returncode or status


def _others(kept: IO[str], arguments: Sequence[str]) -> int:
    codes = [
        subprocess.run(
            [*PYTEST, *some, *arguments], stdout=kept, stderr=subprocess.STDOUT, check=False
        ).returncode
        for some in OTHERS
    ]
    return max(codes, key=abs)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
