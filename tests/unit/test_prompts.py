"""The file with prompts, looked at by a real interpreter."""

from __future__ import annotations

import json
import re
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from gpu_reclaim.errors import BadAnswer, BadInput, GpuReclaimError
from gpu_reclaim.prompts import look_at_prompts, look_at_tokenizer
from unit.tuned import SERVER, on_this_machine

TALK = [{"from": "human", "value": "a \u2603"}, {"from": "gpt", "value": "b c"}]
CUSTOM = [{"role": "user", "content": "a b"}, {"role": "assistant", "content": "c d"}]


def rows(talk: object, name: str = "conversations", count: int = 3) -> list[dict[str, object]]:
    return [{"id": number, name: talk} for number in range(count)]


def lines(rows: list[dict[str, object]]) -> str:
    return "\n\n".join(json.dumps(row, ensure_ascii=False) for row in rows) + "\n"


def looked_at(folder: Path, content: str | bytes, needed: int = 3, name: str = "p.json") -> str:
    file = folder / name
    file.write_bytes(content.encode() if isinstance(content, str) else content)
    server = replace(SERVER, python=sys.executable, dataset_path=str(file))
    return look_at_prompts(on_this_machine(folder), server, needed)


GOOD = [
    json.dumps(rows(TALK)),
    json.dumps(rows(TALK, "conversation")),
    lines(rows(TALK)),
    lines(rows(CUSTOM)),
    lines(rows([*TALK, {"value": None}])),
    lines([*rows(TALK), *rows([]), {"other": 1}]),
    lines(rows([{"value": "\u4f60" * 16}, {"value": "\u597d" * 16}])),
]
SHORT = [[{"value": "a b"}, {"value": text}] for text in ("", " ", "Yes", "\n no \n")]


@pytest.mark.parametrize("content", GOOD)
def test_prompts_enough(content: str, tools: str, tmp_path: Path) -> None:
    found = looked_at(tmp_path, content)

    assert re.fullmatch(rf"[0-9]+ {len(content.encode())}", found)


def test_another_file_has_another_checksum(tmp_path: Path) -> None:
    one, same, other = (looked_at(tmp_path, GOOD[number], 1) for number in (0, 0, 3))

    assert one == same != other


@pytest.mark.parametrize(
    "name", ["it's mine.json", 'my "own".json', "$(touch x) \\.json", "\u2603"]
)
def test_any_name(name: str, tools: str, tmp_path: Path) -> None:
    assert looked_at(tmp_path, GOOD[0], name=name)


@pytest.mark.parametrize(
    "content",
    [
        *(GOOD[0], GOOD[3], "[]", "", lines(rows(TALK[:1], count=9))),
        # The benchmark passes these over, and would then answer fewer requests than it should.
        *(lines(rows(talk, count=9)) for talk in (*SHORT, *(talk[::-1] for talk in SHORT))),
    ],
)
def test_too_few(content: str, tmp_path: Path) -> None:
    with pytest.raises(
        BadInput, match=r"has [03] conversations of more than a word, and .* needs 4 requests"
    ) as caught:
        looked_at(tmp_path, content, 4)

    assert "fewer requests" in caught.value.remedy


NO_LIST = "it is no list of conversations"


@pytest.mark.parametrize(
    ("content", "why"),
    [
        ("hello", "Expecting value: line 1 column 1 (char 0)"),
        ('{"a": 1}\nhello', "Expecting value: line 1 column 1 (char 0)"),
        (b"\xff\xfe", "'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        ("[" * 100_000, "maximum recursion depth exceeded"),
        ('{"conversations": []}', NO_LIST),
        ("3", NO_LIST),
        ("null", NO_LIST),
        ("[1, 2]", NO_LIST),
        ("[[1, 2], []]", NO_LIST),
        ("[null]", NO_LIST),
        (json.dumps(rows(None)), NO_LIST),
        (json.dumps(rows(7)), NO_LIST),
        (json.dumps(rows("hello")), NO_LIST),
        (json.dumps(rows({"a": 1, "b": 2})), NO_LIST),
        (json.dumps(rows(["a", "b"])), NO_LIST),
        (json.dumps(rows([{"value": "a"}, {"text": "b"}])), NO_LIST),
        (json.dumps(rows([{"value": "a"}, {"value": 7}])), NO_LIST),
    ],
)
def test_a_file_of_another_kind(content: str | bytes, why: str, tmp_path: Path) -> None:
    with pytest.raises(BadInput) as caught:
        looked_at(tmp_path, content)

    said = caught.value.message
    head = f"llm: {tmp_path}/p.json cannot be read as sharegpt: "
    assert said.startswith(head + why)
    assert "Traceback" not in said
    assert "dataset_path" in caught.value.remedy


def refused(path: str, tmp_path: Path, python: str = sys.executable) -> GpuReclaimError:
    server = replace(SERVER, python=python, dataset_path=path)
    with pytest.raises(GpuReclaimError) as caught:
        look_at_prompts(on_this_machine(tmp_path), server, 1)
    return caught.value


def test_no_file_and_a_folder(tmp_path: Path) -> None:
    assert "No such file" in refused(f"{tmp_path}/none", tmp_path).message
    assert "Is a directory" in refused(str(tmp_path), tmp_path).message


def test_no_path(tmp_path: Path) -> None:
    error = refused("", tmp_path)

    assert error.message == "llm: no prompts to measure with are named"
    assert "dataset_path" in error.remedy


def test_an_interpreter_that_cannot_be_run_is_no_fault_of_the_file(tmp_path: Path) -> None:
    error = refused(f"{tmp_path}/none", tmp_path, "/opt/no such/python")

    assert isinstance(error, BadAnswer)
    assert error.message == "llm: /opt/no such/python cannot be run there"


TRANSFORMERS = """
import os
class AutoTokenizer:
    @staticmethod
    def from_pretrained(name, trust_remote_code):
        assert trust_remote_code
        assert (os.environ["HF_HUB_OFFLINE"], os.environ["TRANSFORMERS_OFFLINE"]) == ("1", "1")
        if not os.path.isdir(name):
            raise OSError("We couldn't connect to the hub\\nsecond line")
"""


def test_a_tokenizer_that_the_benchmark_finds(
    tools: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "transformers.py").write_text(TRANSFORMERS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    (tmp_path / "it's a model").mkdir()
    server = replace(SERVER, python=sys.executable)
    look_at_tokenizer(on_this_machine(tmp_path), server, f"{tmp_path}/it's a model")

    with pytest.raises(BadInput) as caught:
        look_at_tokenizer(on_this_machine(tmp_path), server, "Qwen/Qwen3-8B")
    said = "llm: the benchmark cannot load the tokenizer of Qwen/Qwen3-8B: We couldn't connect"
    assert caught.value.message == f"{said} to the hub"
    assert "model_path" in caught.value.remedy


def test_without_its_packages_no_tokenizer_is_found(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="No module named 'transformers'"):
        look_at_tokenizer(on_this_machine(tmp_path), replace(SERVER, python=sys.executable), "/m")


def test_an_interpreter_that_is_not_there_loads_nothing(tmp_path: Path) -> None:
    with pytest.raises(BadAnswer):
        look_at_tokenizer(on_this_machine(tmp_path), replace(SERVER, python="/no/python"), "/m")
