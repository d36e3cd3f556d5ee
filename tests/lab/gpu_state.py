"""The nvidia-smi stand-in's state folder, from the host's side."""

import shutil
from dataclasses import dataclass
from pathlib import Path

from lab.paths import STATE


@dataclass(frozen=True)
class Call:
    """One call of the stand-in.

    Attributes:
        monotonic_ns: When it was answered.
        argv: Its arguments.
        used_mib: MiB in use on each GPU, whatever the call was told to print.
    """

    monotonic_ns: int
    argv: tuple[str, ...]
    used_mib: dict[int, int]


def set_state(name: str, content: str | None) -> None:
    """Writes a state file, or removes it; guest/gpu_charges.py says what each one does."""
    path = STATE / name
    if content is None:
        path.unlink(missing_ok=True)
        return
    partial = path.with_name(path.name + ".new")
    partial.write_text(content)
    partial.replace(path)


def calls() -> list[Call]:
    """Returns all calls since the last reset, the oldest first."""
    path = STATE / "calls"
    return [_call(line) for line in path.read_text().splitlines()] if path.exists() else []


def clear_state() -> None:
    """Removes every state file and every charge; the mounts' own folders stay."""
    STATE.mkdir(parents=True, exist_ok=True)
    for entry in STATE.iterdir():
        if not entry.is_dir():
            entry.unlink()
        elif entry.name.startswith("mem"):
            _empty(entry)


def _empty(folder: Path) -> None:
    for entry in folder.iterdir():
        if entry.is_dir():
            shutil.rmtree(entry)
        else:
            entry.unlink()


def _call(line: str) -> Call:
    moment, argv, readings = line.split("\t")
    pairs = [reading.split(":") for reading in readings.split(",") if reading]
    return Call(int(moment), tuple(argv.split()), {int(gpu): int(mib) for gpu, mib in pairs})
