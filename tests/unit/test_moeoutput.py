"""What the tuning script printed."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_reclaim.moeconfigs import ConfigName
from gpu_reclaim.moeoutput import Log, failure, parse_log

NAME = ConfigName(256, 256, "NVIDIA_H200", "fp8_w8a8", (128, 128))
WORKER = "\x1b[36m(BenchmarkWorker pid=4711)\x1b[0m"
BARS = "".join(
    f"\r{WORKER}:  {100 * n // 1280:2d}%|█▏        | {n}/1280 [00:{n % 60:02d}<29:11,  1.37s/it]"
    for n in (0, 1, 40, 97)
)
TUNED = f"""2026-11-30 13:05:59,101\tINFO worker.py:1927 -- Started a local Ray instance.
Start tuning over 1280 configurations to create {NAME}...
{BARS}
{WORKER} Mon Nov 30 13:35:59 2026] Completed tuning for batch_size=64
Writing best config to {NAME}...
Tuning took 1801.25 seconds
"""
CONFIG = "{'BLOCK_SIZE_M': 16, 'BLOCK_SIZE_N': 64, 'BLOCK_SIZE_K': 64, 'GROUP_SIZE_M': 1}"
TIMED = f"""Batch size: 1, config: {CONFIG}
Kernel time: 45.12 us
Batch size: 64, config: {CONFIG}
{WORKER} a word of a worker
Kernel time: 210.00 us
"""


def test_a_tuning_to_its_end() -> None:
    assert parse_log(TUNED) == Log(
        planned=NAME,
        planned_name=str(NAME),
        rows=1280,
        written=str(NAME),
        done=(64,),
        progress=(97, 1280),
        seconds=1801.25,
    )


def test_a_tuning_that_was_cut() -> None:
    found = parse_log(TUNED[: TUNED.index(" 97/1280")])
    assert (found.planned, found.written, found.done) == (NAME, "", ())
    assert (found.progress, found.seconds) == ((40, 1280), None)


def test_times() -> None:
    assert parse_log(TIMED).kernel_us == {1: 45.12, 64: 210.0}


@pytest.mark.parametrize(
    ("text", "times"),
    [
        (f"Batch size: 1, config: {CONFIG}\n", {}),
        ("Kernel time: 45.12 us\n", {}),
        (f"Batch size: 1, config: {CONFIG}\nKernel time: inf us\n", {}),
        (f"{TIMED}Kernel time: 9.00 us\n", {1: 45.12, 64: 210.0}),
        (f"Batch size: 1, config: {CONFIG}\nKernel time: 1.2.3 us\n", {}),
        (f"Batch size: 1, config: {CONFIG}\n{TIMED[TIMED.index('Batch size: 64') :]}", {64: 210.0}),
    ],
)
def test_times_that_are_none(text: str, times: dict[int, float]) -> None:
    assert parse_log(text).kernel_us == times


def test_a_name_that_no_server_asks_for() -> None:
    found = parse_log("Start tuning over 5 configurations to create E=x,N=2.json...")
    assert (found.planned, found.planned_name, found.rows) == (None, "E=x,N=2.json", 5)


def test_nothing_was_said() -> None:
    assert parse_log("") == Log()


@given(st.text())
def test_any_text_is_read(text: str) -> None:
    assert parse_log(text).kernel_us == {}
    assert failure(1, text, 60)


TRACE = 'Traceback (most recent call last):\n  File "x.py", line 1, in <module>\n'
SHARED = (
    "triton.runtime.errors.OutOfResources: out of resource: shared memory, Required: 147456, "
    "Hardware limit: 101376. Reducing block sizes or `num_stages` may help."
)
MEMORY = (
    "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total "
    "capacity of 94.97 GiB of which 1.20 GiB is free."
)


@pytest.mark.parametrize(
    ("code", "text", "expected"),
    [
        (124, TUNED[: TUNED.index(" 97/")], "it did not end within 600 s (it was at row 40 of"),
        (137, "", "it did not end within 600 s"),
        (
            1,
            f"{TRACE}{SHARED}",
            "a row needs 147456 bytes of shared memory, and the GPU gives a thread block 101376",
        ),
        (
            1,
            f"{TRACE}ray.exceptions.RayTaskError(OutOfMemoryError): ray::BenchmarkWorker.tune()\n"
            f"{MEMORY}",
            "a GPU had too little memory free: CUDA out of memory. Tried to allocate 2.00 GiB.",
        ),
        (1, f"{TRACE}{MEMORY}", "a GPU had too little memory free: CUDA out of memory. Tried"),
        (
            1,
            f"{TRACE}RuntimeError: CUDA error: an illegal memory access was encountered\nCUDA ker",
            "CUDA failed: CUDA error: an illegal memory access was encountered",
        ),
        (
            1,
            f"{TRACE}ModuleNotFoundError: No module named 'ray'",
            "a module is missing: ModuleNotFoundError: No module named 'ray'",
        ),
        (
            1,
            f"ImportError: a warning of long ago\n{TRACE}ValueError: --search-space-file must",
            "it ended with status 1: ValueError: --search-space-file must",
        ),
        (1, f"{TRACE}KeyError: 'GPU'", "Ray saw no GPU: KeyError: 'GPU'"),
        (
            1,
            f"{TRACE}    assert best_config is not None\nAssertionError",
            "no row of the space could be run: assert best_config is not None",
        ),
        (
            1,
            f"{TRACE}{WORKER} ValueError: one\n{WORKER} TypeError: 'NoneType' object\nbye",
            "it ended with status 1: TypeError: 'NoneType' object",
        ),
        (
            2,
            "usage: tuning_fused_moe_triton.py [-h]\n"
            "tuning_fused_moe_triton.py: error: unrecognized arguments: --x",
            "it ended with status 2: tuning_fused_moe_triton.py: error: unrecognized arguments",
        ),
        (1, f"{BARS}\rValueError: one", "it ended with status 1: ValueError: one"),
        (139, "", "it ended with status 139 and named no error"),
    ],
)
def test_why_it_failed(code: int, text: str, expected: str) -> None:
    assert failure(code, text, 600).startswith(expected)


def test_what_is_quoted_is_short_and_printable() -> None:
    said = failure(1, "ValueError: \x07" + "x" * 5000, 1)
    assert len(said) < 400
    assert "\\x07" in said
