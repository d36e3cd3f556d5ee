"""SGLang's benchmark client: its command run by a real shell, and its record."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path

import pytest

from gpu_reclaim import benching
from gpu_reclaim.benching import NEEDED, Load, Run, Tool, find_tool, measurement, parse_run
from gpu_reclaim.commands import Section
from unit.shells import here, stub
from unit.tuned import KEY, RECORD, TOOL

SCOPE = """
printf '%s\\n' "$@" >@HOME@/scope
while [ "$1" != -- ]; do shift; done
shift
exec "$@"
"""

PYTHON = """
printf '%s\\n' "$@" >@HOME@/argv
printf '%s\\n' "$OPENAI_API_KEY|$HF_HUB_OFFLINE|$no_proxy" >@HOME@/environment
echo "Namespace(x=1)"
echo "the last word" >&2
while [ "$1" != --output-file ]; do shift; done
[ ! -e @HOME@/record ] || cat @HOME@/record >>"$2"
. @HOME@/then
"""


@dataclass
class Client:
    """A host with a benchmark client that writes what it is told to."""

    home: Path
    python: str

    def run(self, load: Load, record: object = RECORD, then: str = "exit 0") -> Run:
        (self.home / "then").write_text(then)
        if record is not None:
            text = record if isinstance(record, str) else json.dumps(record)
            (self.home / "record").write_text(f"{text}\n")
        body = benching.run(self.python, TOOL, load)
        return parse_run(here({"bench": body}).section("bench"))

    def words(self, name: str) -> list[str]:
        return (self.home / name).read_text().splitlines()


@pytest.fixture
def client(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Client:
    home, own = tmp_path / "home", tmp_path / "it's own"
    for folder in (home, own):
        folder.mkdir()
    stub(home, "systemd-run", SCOPE.replace("@HOME@", str(home)))
    python = stub(own, "python", PYTHON.replace("@HOME@", str(home)))
    monkeypatch.setenv("PATH", f"{home}:{os.environ['PATH']}")
    return Client(home, str(python))


@pytest.fixture
def load(tmp_path: Path) -> Load:
    return Load(
        level=4,
        requests=16,
        base_url="http://127.0.0.1:30000",
        model="/models/it's mine",
        dataset_name="sharegpt",
        dataset_path='/data/my "own" $(touch x).json',
        timeout_s=30,
        folder=str(tmp_path / "kept" / "it's here"),
        name="it's NEXTN-2.1.3-round-1-at-4",
        api_key=KEY,
    )


def test_a_measurement_from_end_to_end(client: Client, load: Load) -> None:
    ran = client.run(load)

    assert (ran.code, ran.said) == (0, "Namespace(x=1)\nthe last word")
    found = measurement(ran, load)
    assert found is not None
    assert (found.level, found.requests, found.completed, found.seconds) == (4, 16, 16, 12.5)
    assert (found.output_tok_s, found.accept_length) == (121.5, 2.35)
    assert (found.ttft_ms, found.ttft_p99_ms) == (90.5, 181)
    assert (found.tpot_ms, found.tpot_p99_ms) == (7.25, 11)
    assert found.at == ran.at
    assert len(ran.at) == len("2026-11-30 13:05:59")


def test_every_word_reaches_the_client_as_it_is(client: Client, load: Load) -> None:
    client.run(load)

    argv = client.words("argv")
    pairs = dict(pairwise(argv))
    assert argv[:2] == ["-m", "sglang.bench_serving"]
    assert pairs["--model"] == pairs["--tokenizer"] == load.model
    assert pairs["--dataset-path"] == load.dataset_path
    assert pairs["--output-file"] == f"{load.name}.jsonl"
    assert (pairs["--num-prompts"], pairs["--max-concurrency"]) == ("16", "4")
    assert (pairs["--warmup-requests"], pairs["--seed"]) == ("4", "1")
    assert pairs["--base-url"] == load.base_url
    assert "--flush-cache" in argv
    assert "--disable-tqdm" not in argv


def test_a_flag_is_given_only_to_a_client_that_knows_it(load: Load) -> None:
    knows = Tool(TOOL.module, TOOL.flags | {"--disable-tqdm"})

    assert "--disable-tqdm" in benching.run("python", knows, load)


def test_it_belongs_to_the_stage(client: Client, load: Load) -> None:
    client.run(load)

    scope = client.words("scope")
    assert "--scope" in scope
    assert "--slice=gpureclaim.slice" in scope


def test_the_key_is_in_its_environment_and_nowhere_else(client: Client, load: Load) -> None:
    client.run(load)

    assert client.words("environment") == [f"{KEY}|1|*"]
    kept = [path.read_text() for path in Path(load.folder).iterdir()]
    assert KEY not in "\n".join([*client.words("argv"), *client.words("scope"), *kept])
    assert KEY not in repr(load)


def test_without_a_key_none_is_set(client: Client, load: Load) -> None:
    client.run(replace(load, api_key=""))

    assert client.words("environment") == ["|1|*"]


def test_its_records_are_for_root_alone(client: Client, load: Load) -> None:
    client.run(load)

    folder = Path(load.folder)
    assert sorted(path.name for path in folder.iterdir()) == [
        f"{load.name}.jsonl",
        f"{load.name}.log",
    ]
    assert [oct(path.stat().st_mode & 0o777) for path in folder.iterdir()] == ["0o600"] * 2
    assert [path.stat().st_mode & 0o777 for path in (folder, folder.parent)] == [0o700] * 2


def test_a_second_run_of_that_name_starts_anew(client: Client, load: Load) -> None:
    client.run(load, RECORD | {"duration": 1})
    ran = client.run(load, RECORD | {"duration": 2})

    assert ran.record["duration"] == 2
    assert len((Path(load.folder) / f"{load.name}.jsonl").read_text().splitlines()) == 1


def test_the_last_line_is_the_record(client: Client, load: Load) -> None:
    ran = client.run(load, f"a warning\n{json.dumps(RECORD)}")

    assert ran.record == RECORD


def test_what_an_earlier_run_wrote_is_not_taken_for_this_ones(client: Client, load: Load) -> None:
    client.run(load)
    (client.home / "record").unlink()
    ran = client.run(load, None)

    assert (ran.code, ran.record) == (0, {})
    assert measurement(ran, load) is None


def test_the_exit_status_and_the_last_lines_of_a_client_that_fails(
    client: Client, load: Load
) -> None:
    ran = client.run(load, None, "seq 100; exit 3")

    assert ran.code == 3
    assert ran.said.split("\n") == [*map(str, range(86, 101))]


def test_half_of_the_requests_and_status_0(client: Client, load: Load) -> None:
    found = measurement(client.run(load, RECORD | {"completed": 8}), load)

    assert found is not None
    assert (found.completed, found.requests) == (8, 16)


def test_a_client_that_hangs_is_ended(client: Client, load: Load) -> None:
    ran = client.run(replace(load, timeout_s=0.2), None, "exec sleep 20")

    assert ran.code == 124


def test_a_folder_that_cannot_be_made(client: Client, load: Load) -> None:
    ran = client.run(replace(load, folder="/proc/no/such"))

    assert (ran.code, ran.record) == (-1, {})
    assert not (client.home / "argv").exists()


NEEDED_NUMBERS = [name for name in RECORD if name not in ("accept_length", "request_rate")]


@pytest.mark.parametrize("name", NEEDED_NUMBERS)
@pytest.mark.parametrize("value", [math.nan, math.inf, None, True, "12", [1], 10**400])
def test_a_number_that_is_none(name: str, value: object, load: Load) -> None:
    text = json.dumps(RECORD | {name: value})

    assert measurement(parse_run(Section(f"exit 0\nrecord {text}\n", 0)), load) is None


@pytest.mark.parametrize("name", NEEDED_NUMBERS)
def test_a_number_that_is_missing(name: str, load: Load) -> None:
    record = {key: value for key, value in RECORD.items() if key != name}

    assert measurement(Run(0, record), load) is None


def test_half_a_request_is_none(load: Load) -> None:
    assert measurement(Run(0, RECORD | {"completed": 15.5}), load) is None


@pytest.mark.parametrize("value", [None, math.nan, "x", True])
def test_who_speculates_not_has_no_accept_length(value: object, load: Load) -> None:
    found = measurement(Run(0, RECORD | {"accept_length": value}), load)

    assert found is not None
    assert found.accept_length is None


@pytest.mark.parametrize(
    ("text", "ran"),
    [
        ("", Run(-1, {})),
        ("exit x\nrecord [1]\n", Run(-1, {})),
        ('exit 0\nrecord {"duration": 1', Run(0, {})),
        ("exit 1\nsaid a\nsaid b\nat now", Run(1, {}, "a\nb", "now")),
    ],
)
def test_how_it_ended(text: str, ran: Run) -> None:
    assert parse_run(Section(text, 0)) == ran


HELP = "printf 'usage: [--backend X]\\n%s\\n' '{flags}'; exit 0"


@pytest.fixture
def python(tmp_path: Path) -> Callable[[str], str]:
    """An interpreter in a folder with a space, of a shell text that is given the module."""

    def make(text: str) -> str:
        folder = tmp_path / "my venv"
        folder.mkdir()
        return str(
            stub(folder, "python", f'module=$2; [ "$1 $3" = "-m --help" ] || exit 9\n{text}')
        )

    return make


def asked(python: str) -> Section:
    return here({"tool": find_tool(python)}).section("tool")


def test_the_newest_name_is_taken(python: Callable[[str], str]) -> None:
    tool = benching.parse_tool(asked(python(HELP.format(flags=" ".join(NEEDED)))))

    assert tool is not None
    assert (tool.module, tool.missing) == ("sglang.benchmark.serving", [])


def test_an_older_client_that_lacks_a_flag(python: Callable[[str], str]) -> None:
    flags = " ".join(flag for flag in NEEDED if flag != "--flush-cache")
    text = f"case $module in *benchmark*) exit 1;; esac; {HELP.format(flags=flags)}"
    tool = benching.parse_tool(asked(python(text)))

    assert tool is not None
    assert (tool.module, tool.missing) == ("sglang.bench_serving", ["--flush-cache"])


def test_no_client_at_all(python: Callable[[str], str]) -> None:
    section = asked(python('seq 9; echo "No module named $module" >&2; exit 1'))

    assert benching.parse_tool(section) is None
    assert section.lines("said") == [
        *("sglang.benchmark.serving: 8", "sglang.benchmark.serving: 9"),
        "sglang.benchmark.serving: No module named sglang.benchmark.serving",
        *("sglang.bench_serving: 8", "sglang.bench_serving: 9"),
        "sglang.bench_serving: No module named sglang.bench_serving",
    ]


def test_no_such_interpreter() -> None:
    section = asked("/opt/no such/python")

    assert benching.parse_tool(section) is None
    assert "/opt/no such/python" in section.value("said")
