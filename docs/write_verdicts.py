"""Write the table in verdicts.md anew from the code."""

from __future__ import annotations

from pathlib import Path

from gpu_reclaim import causes

FILE = Path(__file__).with_name("verdicts.md")


def main() -> None:
    """Keep what stands before the table."""
    before = FILE.read_text().partition("| Verdict")[0]
    FILE.write_text(before + causes.table())


if __name__ == "__main__":
    main()
