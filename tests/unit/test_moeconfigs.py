"""Files of MoE kernel configs: named, read and filled as SGLang's own loader goes by them."""

from __future__ import annotations

import json
from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpu_reclaim.errors import BadInput
from gpu_reclaim.moeconfigs import (
    GRID,
    ConfigName,
    chosen,
    filled,
    parse_name,
    parse_table,
    text_of,
    usable_rows,
)

GPU = "NVIDIA_RTX_PRO_6000_Blackwell_Server_Edition"
PLAIN = ConfigName(256, 256, GPU)
BLOCKS = ConfigName(256, 256, GPU, "fp8_w8a8", (128, 128))
ROW: dict[str, int | bool] = {
    "BLOCK_SIZE_M": 16,
    "BLOCK_SIZE_N": 64,
    "BLOCK_SIZE_K": 128,
    "GROUP_SIZE_M": 1,
    "num_warps": 4,
    "num_stages": 3,
}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (PLAIN, f"E=256,N=256,device_name={GPU}.json"),
        (
            BLOCKS,
            f"E=256,N=256,device_name={GPU},dtype=fp8_w8a8,block_shape=[128, 128].json",
        ),
        (
            ConfigName(256, 256, "NVIDIA_H200", down=True),
            "E=256,N=256,device_name=NVIDIA_H200_down.json",
        ),
        (
            ConfigName(8, 14336, "NVIDIA_H200", "int8_w8a8", per_channel=True, down=True),
            "E=8,N=14336,device_name=NVIDIA_H200,dtype=int8_w8a8,per_channel_quant=True_down.json",
        ),
        (
            ConfigName(8, 14336, "NVIDIA_H200", down=True),
            "E=8,N=14336,device_name=NVIDIA_H200_down.json",
        ),
        (
            ConfigName(8, 14336, "NVIDIA_H200", "fp8_w8a8", down=True),
            "E=8,N=14336,device_name=NVIDIA_H200,dtype=fp8_w8a8_down.json",
        ),
    ],
)
def test_a_name_says_what_a_file_is_for(name: ConfigName, text: str) -> None:
    assert str(name) == text
    assert parse_name(text) == name


@pytest.mark.parametrize(
    "text",
    [
        "",
        "README",
        f"E=256,N=256,device_name={GPU}",
        f"E=256,N=256,device_name={GPU}.json.bak",
        f"E=0,N=256,device_name={GPU}.json",
        f"N=256,E=256,device_name={GPU}.json",
        "E=256,N=256,device_name=RTX PRO 6000.json",
        "E=256,N=256,device_name=../x.json",
        f"E=256,N=256,device_name={GPU},block_shape=[128,128].json",
        f"E=256,N=256,device_name={GPU}.json\n",
    ],
)
def test_what_the_server_never_asks_for_is_no_name(text: str) -> None:
    assert parse_name(text) is None


def test_a_table_comes_back_as_it_was_written() -> None:
    table = {64: ROW, 1: {**ROW, "BLOCK_SIZE_N": 128}, 4096: {**ROW, "USE_TMA": False}}
    text = text_of(table)
    assert parse_table(text, PLAIN) == table
    assert list(json.loads(text)) == ["1", "64", "4096"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("{", "is no JSON"),
        ("[]", "has no rows"),
        ("{}", "has no rows"),
        ('{"1": 5}', "has no row of parameters at 1"),
        (f'{{"1": {json.dumps(ROW)}, "1": {json.dumps(ROW)}}}', "a key is there twice"),
    ],
)
def test_no_table_at_all(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_table(text, PLAIN)


@pytest.mark.parametrize(
    "key", ["triton_version", "", "0", "-1", "1.5", " 1", "1_6", "٣", "9" * 30]
)
def test_a_key_that_is_no_number_of_tokens(key: str) -> None:
    """The loader says int() to every key: one of another project's breaks the server's start."""
    with pytest.raises(BadInput, match="which is no number of tokens"):
        parse_table(json.dumps({"16": ROW, key: ROW}), PLAIN)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"BLOCK_SIZE_M": 8}, "BLOCK_SIZE_M = 8"),
        ({"BLOCK_SIZE_N": 96}, "BLOCK_SIZE_N = 96"),
        ({"BLOCK_SIZE_K": 2048}, "BLOCK_SIZE_K = 2048"),
        ({"BLOCK_SIZE_K": "64"}, "BLOCK_SIZE_K = '64'"),
        ({"BLOCK_SIZE_K": 64.0}, "BLOCK_SIZE_K = 64.0"),
        ({"GROUP_SIZE_M": 0}, "GROUP_SIZE_M = 0"),
        ({"num_warps": 3}, "num_warps = 3"),
        ({"num_warps": 64}, "num_warps = 64"),
        ({"num_warps": True}, "num_warps = True"),
        ({"num_stages": None}, "num_stages = None"),
        ({"num_ctas": 3}, "num_ctas = 3"),
        ({"USE_TMA": 1}, "USE_TMA = 1"),
        ({"waves_per_eu": 2}, "'waves_per_eu' at 16, which is no parameter"),
        ({"SPLIT_K": 2}, "'SPLIT_K' at 16, which is no parameter"),
    ],
)
def test_what_the_kernel_does_not_take(change: Mapping[str, object], words: str) -> None:
    with pytest.raises(BadInput, match=words):
        parse_table(json.dumps({"16": {**ROW, **change}}), PLAIN)


@pytest.mark.parametrize("field", list(ROW)[:4])
def test_a_block_that_is_missing(field: str) -> None:
    row = {name: value for name, value in ROW.items() if name != field}
    with pytest.raises(BadInput, match=f"lacks {field} at 16"):
        parse_table(json.dumps({"16": row}), PLAIN)


def test_warps_and_stages_may_be_left_to_triton() -> None:
    row = dict(list(ROW.items())[:4])
    assert parse_table(json.dumps({"16": row}), PLAIN) == {16: row}


def test_a_step_beyond_a_quantized_block_would_be_scaled_wrongly() -> None:
    text = json.dumps({"64": {**ROW, "BLOCK_SIZE_K": 256}})
    assert parse_table(text, PLAIN)
    with pytest.raises(BadInput, match="BLOCK_SIZE_K = 256 at 64, and quantized blocks of 128"):
        parse_table(text, BLOCKS)


rows = st.sampled_from([{**ROW, "num_stages": n} for n in range(1, 6)])
tables = st.dictionaries(st.integers(1, 5000), rows, min_size=1, max_size=8)


@given(tables, tables)
def test_no_size_that_was_not_tuned_gets_another_row(
    tuned: dict[int, dict[str, int | bool]], before: dict[int, dict[str, int | bool]]
) -> None:
    found = filled(tuned, lambda tokens: chosen(before, tokens), {*GRID, *before})
    assert set(found) == {*GRID, *before, *tuned}
    for size in found:
        assert chosen(found, size) == (tuned[size] if size in tuned else chosen(before, size))


@pytest.mark.parametrize(
    "bad",
    [
        {"2": {**ROW, "BLOCK_SIZE_N": 96}},
        {"2": {**ROW, "BLOCK_SIZE_K": 256}},
        {"2": {}, "x": ROW, "3": 5},
    ],
)
def test_rows_that_the_kernel_cannot_run_are_dropped_and_no_others(bad: dict[str, object]) -> None:
    text = json.dumps({"1": ROW, **bad, "64": {**ROW, "num_warps": 8}})

    assert usable_rows(text, BLOCKS) == {1: ROW, 64: {**ROW, "num_warps": 8}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "is no JSON"),
        ("[]", "has no rows"),
        ("{}", "has no rows"),
        (json.dumps({"1": {**ROW, "BLOCK_SIZE_N": 96}}), "BLOCK_SIZE_N = 96 at 1"),
    ],
)
def test_no_row_is_left(text: str, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        usable_rows(text, PLAIN)
