"""nvidia-smi: what to ask, and how to read the answer.

Few fields are asked, those that every driver from 418 to 610 knows. What is no number is None,
never zero; anything but rows of the asked shape makes the whole reading a problem.
"""

from __future__ import annotations

import re

from gpu_reclaim.commands import Section, printable
from gpu_reclaim.models import Gpu, GpuApp, GpuReading

GPU_FIELDS = ("index", "uuid", "name", "memory.used", "memory.total")
APP_FIELDS = ("gpu_uuid", "pid", "used_memory")

TIME_LIMIT_S = 60
"""Without persistence mode each call sets the GPUs up anew: tens of seconds on boxes of eight."""

SLOW = "it did not answer in time"

CODES = {
    2: "it does not know a field that was asked",
    3: "the operation is not supported",
    4: "no permission",
    6: "no devices were found",
    8: "a GPU's power cable is not attached",
    9: "the NVIDIA driver is not loaded or does not answer",
    10: "an interrupt problem of a GPU",
    12: "libnvidia-ml is missing",
    13: "libnvidia-ml is of another version",
    15: "a GPU has fallen off the bus",
    16: "a GPU needs a reset",
    17: "the device control group forbids access to a GPU",
    18: "driver and library versions differ",
    124: SLOW,
    127: "nvidia-smi is not installed or not on PATH",
    137: f"{SLOW} and had to be killed",
}
"""nvidia-smi's exit statuses: its manual up to 15, nvml.h beyond; 124 and 137 come from timeout."""

WARNING_CODES = (0, 14)
"""14 (infoROM corrupt) is a warning: the rows are valid (nvidia-smi's manual)."""

_FAULT = re.compile(r"unknown error|gpu is lost|err!|reset required|requires re(set|start)", re.I)
_ANY_UUID = re.compile(r"(GPU|MIG)-[0-9a-fA-F-]{8,}")
_ROW = re.compile(rf"\s*\d|.*{_ANY_UUID.pattern}")


def query_gpus(limit_s: float = TIME_LIMIT_S) -> str:
    """Shell text that prints one `gpu` line a row, and the exit status."""
    return _query("gpu", f"--query-gpu={','.join(GPU_FIELDS)}", limit_s)


def query(fields: str, limit_s: float = TIME_LIMIT_S) -> str:
    """Shell text that prints other fields, one `gpu` line a row, and the exit status."""
    return _query("gpu", f"--query-gpu={fields}", limit_s)


def query_apps(limit_s: float = TIME_LIMIT_S) -> str:
    """Shell text that prints one `app` line a compute process, and the exit status."""
    return _query("app", f"--query-compute-apps={','.join(APP_FIELDS)}", limit_s)


def _query(word: str, option: str, limit_s: float) -> str:
    return "\n".join(
        [
            f"out=$(timeout -k 1 {limit_s:g} nvidia-smi {option} --format=csv,noheader,nounits"
            " 2>&1); rc=$?",
            f"printf '%s\\n' \"$out\" | sed 's/^/{word} /'",
            "exit $rc",
        ]
    )


def parse_gpus(section: Section) -> GpuReading:
    """Rows of `query_gpus`; `problem` says why they cannot be trusted."""
    lines = [line for line in section.lines("gpu") if line.strip()]
    rows = [_gpu(line) for line in lines]
    gpus = sorted((gpu for gpu in rows if gpu), key=lambda gpu: gpu.index)
    return GpuReading(gpus=gpus, problem=_problem(section, lines, rows, gpus))


def _problem(section: Section, lines: list[str], rows: list[Gpu | None], gpus: list[Gpu]) -> str:
    said = printable(" ".join(lines), limit=300)
    if section.code not in WARNING_CODES:
        why = CODES.get(section.code, "an error")
        return f"nvidia-smi failed with exit status {section.code} ({why}): {said}"
    if not lines:
        return "nvidia-smi printed no GPU"
    # Beside the warning of code 14 stands text, but a row that is cut or garbled is no such text.
    odd = [line for line, row in zip(lines, rows, strict=True) if row is None]
    if not gpus or (odd and section.code == 0) or any(_ROW.match(line) for line in odd):
        return f"nvidia-smi printed something that is no GPU row: {said}"
    if len({gpu.index for gpu in gpus}) < len(gpus) or len({gpu.uuid for gpu in gpus}) < len(gpus):
        return f"nvidia-smi listed a GPU twice: {said}"
    return ""


def _gpu(line: str) -> Gpu | None:
    # A board's name may hold a comma, so the row is read from both ends.
    parts = [part.strip() for part in line.split(",")]
    if len(parts) < len(GPU_FIELDS) or not re.fullmatch(r"\d{1,4}", parts[0], re.ASCII):
        return None
    used, total = parts[-2:]
    uuid, name = parts[1], ", ".join(parts[2:-2])
    if not _ANY_UUID.fullmatch(uuid) and not _FAULT.search(uuid):
        return None
    # Two rows run into one another would read as the first one's name and the second one's memory.
    if _ANY_UUID.search(",".join(parts[2:])):
        return None
    notes = {text for text in (uuid, name, used, total) if _FAULT.search(text)}
    if mib(used) is None:
        notes.add(f"memory.used reads {printable(used)}")
    return Gpu(
        index=int(parts[0]),
        uuid=uuid,
        name=printable(name, limit=100),
        memory_used_mib=mib(used),
        memory_total_mib=mib(total),
        note="; ".join(sorted(notes)),
    )


def mib(text: str) -> int | None:
    """A number of MiB, or None for `[N/A]`, `[Unknown Error]` and whatever else is no number."""
    match = re.fullmatch(r"(0|[1-9]\d{0,8})(?: MiB)?", text.strip(), re.ASCII)
    return int(match[1]) if match else None


def timed_out(reading: GpuReading) -> bool:
    """It did not answer in time; whether something is wrong is not known."""
    return SLOW in reading.problem


def is_fault(gpu: Gpu) -> bool:
    """The driver itself says that something is wrong with this GPU."""
    return bool(_FAULT.search(gpu.note))


def parse_apps(section: Section) -> list[GpuApp]:
    """Compute processes; lines without a plain pid and UUID are left out, they prove nothing."""
    apps = []
    for line in section.lines("app"):
        parts = [part.strip() for part in line.split(",")]
        if len(parts) == len(APP_FIELDS) and re.fullmatch(r"[1-9]\d{0,9}", parts[1], re.ASCII):
            apps.append(GpuApp(gpu_uuid=parts[0], pid=int(parts[1]), memory_used_mib=mib(parts[2])))
    return apps
