"""What a tuning tries, how long it takes, what it can gain."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_reclaim.errors import BadInput
from gpu_reclaim.moeconfigs import ConfigName, parse_table, text_of
from gpu_reclaim.moespace import (
    SHARED_MEMORY,
    SPACE,
    Shape,
    default_sizes,
    element_bytes,
    expectation,
    fitting,
    minutes,
    needed_bytes,
)

BLACKWELL, HOPPER, AMPERE, ADA = (12, 0), (9, 0), (8, 0), (8, 9)
DTYPES = ("", "auto", "bfloat16", "float32", "fp8_w8a8", "int8_w8a8", "int8_w8a16", "int4_w4a16")
QWEN = Shape(256, 256, 2048, 8)


def row(m: int, n: int, k: int, stages: int) -> dict[str, int]:
    return {"BLOCK_SIZE_M": m, "BLOCK_SIZE_N": n, "BLOCK_SIZE_K": k, "num_stages": stages}


def test_it_is_the_grid_of_the_tuning_script() -> None:
    assert len(SPACE) == 1920
    assert len({tuple(sorted(x.items())) for x in SPACE}) == 1920
    first, last = SPACE[0], SPACE[-1]
    assert list(first.values()) == [16, 32, 64, 1, 4, 2]
    assert list(last.values()) == [256, 256, 256, 64, 8, 5]


def test_every_row_is_one_that_a_file_may_have() -> None:
    name = ConfigName(256, 256, "NVIDIA_H200")
    table = dict(enumerate(SPACE, start=1))
    assert parse_table(text_of(table), name) == table


@pytest.mark.parametrize(
    ("capability", "dtype", "what", "counted"),
    [
        # As the compiler of Triton 3.6.0 counted for a plain matrix product by pointers.
        (AMPERE, "", row(128, 128, 64, 3), 65_536),
        (AMPERE, "", row(16, 32, 64, 2), 6_144),
        (ADA, "fp8_w8a8", row(128, 256, 128, 4), 147_456),
        (HOPPER, "", row(128, 256, 128, 4), 393_216),
        (HOPPER, "", row(64, 64, 64, 3), 49_152),
        (HOPPER, "", row(16, 128, 128, 4), 110_592),
        (HOPPER, "fp8_w8a8", row(128, 128, 64, 3), 49_152),
        (BLACKWELL, "", row(128, 128, 64, 3), 65_536),
        # SGLang's issue #28019, for which 101376 bytes were too few.
        (BLACKWELL, "fp8_w8a8", row(128, 256, 128, 4), 147_456),
        # Weights that are widened before they are multiplied.
        (HOPPER, "int8_w8a16", row(64, 64, 64, 3), 24_576),
        (HOPPER, "int4_w4a16", row(16, 32, 64, 2), 3_072),
        ((10, 0), "int8_w8a8", row(128, 128, 64, 3), 32_768),
        (None, "", row(16, 32, 64, 2), 12_288),
    ],
)
def test_shared_memory(
    capability: tuple[int, int] | None, dtype: str, what: dict[str, int], counted: int
) -> None:
    assert needed_bytes(what, dtype, capability) == counted


def test_on_10_x_barriers_are_left_out() -> None:
    assert 0 <= 98_320 - needed_bytes(row(128, 128, 64, 3), "", (10, 0)) < 64


@given(
    st.sampled_from(SPACE),
    st.sampled_from(DTYPES),
    st.sampled_from([*SHARED_MEMORY, (13, 0)]),
)
def test_no_gpu_needs_more_than_the_most(
    one: dict[str, int], dtype: str, capability: tuple[int, int]
) -> None:
    assert 0 < needed_bytes(one, dtype, capability) <= needed_bytes(one, dtype)


@pytest.mark.parametrize(
    ("dtype", "capability", "block", "rows"),
    [
        ("", BLACKWELL, None, 976),
        ("fp8_w8a8", BLACKWELL, None, 1_456),
        ("fp8_w8a8", BLACKWELL, (128, 128), 1_128),
        ("", HOPPER, None, 1_304),
        ("fp8_w8a8", HOPPER, (128, 128), 1_248),
        ("", (13, 0), None, 1_920),
        ("fp8_w8a8", (13, 0), (128, 128), 1_280),
        ("fp8_w8a8", (13, 0), (64, 64), 640),
        ("fp8_w8a8", (13, 0), (1, 32), 0),
    ],
)
def test_rows_that_fit(
    dtype: str, capability: tuple[int, int], block: tuple[int, int] | None, rows: int
) -> None:
    assert len(fitting(dtype, capability, block)) == rows


@pytest.mark.parametrize("capability", SHARED_MEMORY)
def test_they_are_all_that_fit_and_no_others(capability: tuple[int, int]) -> None:
    most = SHARED_MEMORY[capability]
    fits = [x for x in SPACE if needed_bytes(x, "fp8_w8a8", capability) <= most]
    assert fitting("fp8_w8a8", capability) == fits
    assert 640 < len(fits) <= 1920


def test_a_dtype_without_a_kernel() -> None:
    with pytest.raises(BadInput, match="'fp4' is no dtype"):
        element_bytes("fp4")


@pytest.mark.parametrize(
    ("levels", "draft", "prefill", "running", "sizes"),
    [
        ([1, 16, 64], 4, 8192, 64, [4, 64, 256, 8192]),
        ([1, 16, 64, 128], 4, 8192, 48, [4, 64, 192, 8192]),
        ([1, 16], 0, -1, 0, [1, 16]),
        ([1, 64], 1, 64, 64, [1, 64]),
        ([], 4, 2048, 8, [2048]),
        ([], 4, 0, 8, []),
    ],
)
def test_sizes(levels: list[int], draft: int, prefill: int, running: int, sizes: list[int]) -> None:
    assert default_sizes(levels, draft, prefill, running) == sizes


def test_time() -> None:
    assert minutes(1, 1, 1920) == pytest.approx(44.065)
    assert minutes(18, 4, 1920) == pytest.approx(5 * 44.065)
    assert minutes(4, 4, 600, seconds_per_row=0.5) == 5
    assert minutes(0, 4, 600) == 0


def test_what_can_be_gained() -> None:
    assert expectation(QWEN, [4, 4096, 64], "fp8_w8a8") == (
        "An expectation, by arithmetic alone: at M = 4 a layer reads 30.5 of 256 experts "
        "(48.0 MB on each rank) at 2.1 FLOP/byte, under 150, so bound by reading weights, and "
        "tuning can gain little there; at M = 4096 a layer reads 256.0 of 256 experts (402.7 MB on "
        "each rank) at 256.0 FLOP/byte, not under 150, so it may be bound by arithmetic, and "
        "tuning can gain there."
    )


def test_one_token_reads_the_experts_it_is_sent_to() -> None:
    # One byte for each weight, which is multiplied and added once.
    assert "reads 8.0 of 256 experts" in expectation(QWEN, [1], "fp8_w8a8")
    assert "at 2.0 FLOP/byte" in expectation(QWEN, [1], "fp8_w8a8")
    assert "at 1.0 FLOP/byte" in expectation(QWEN, [1], "")
    assert expectation(QWEN, [1], "").count("at M =") == 1


def test_fewer_experts_than_a_token_is_sent_to() -> None:
    assert "reads 4.0 of 4 experts" in expectation(Shape(4, 256, 2048, 8), [1], "")


def test_no_sizes() -> None:
    assert expectation(QWEN, [], "") == ""


@given(st.integers(1, 1 << 20), st.integers(1, 512), st.integers(1, 16), st.sampled_from(DTYPES))
def test_more_tokens_never_lessen_the_ratio(
    tokens: int, experts: int, topk: int, dtype: str
) -> None:
    shape = Shape(experts, 128, 512, topk)

    def ratio(size: int) -> float:
        return float(expectation(shape, [size], dtype).split(" FLOP/byte")[0].split()[-1])

    assert ratio(2 * tokens) >= ratio(tokens)
