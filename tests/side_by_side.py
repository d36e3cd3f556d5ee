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

PYTEST = [sys.executable, "-m", "pytest"]


def main(arguments: Sequence[str]) -> int:
    """The first exit status that is not 0."""
    # Whoever started this in the background may have had SIGINT ignored too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with tempfile.TemporaryFile("w+") as kept:
        beside = [*PYTEST, "-m", "not lab and not exhaustive", *arguments]
        others = subprocess.Popen(beside, stdout=kept, stderr=subprocess.STDOUT)
        lab = subprocess.run([*PYTEST, "-m", "lab and not exhaustive", *arguments], check=False)
        status = others.wait()
        kept.seek(0)
        sys.stdout.write(kept.read())
    return lab.returncode or status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
