"""Batch sizes tuned on the GPUs of a held host: whatever the script does is told in a sentence."""

from __future__ import annotations

import math
import re
import shlex
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from gpu_reclaim import jobs
from gpu_reclaim.commands import PATHS, Script
from gpu_reclaim.errors import BadInput, CommandFailed, LinkLost
from gpu_reclaim.moeconfigs import Table, text_of
from gpu_reclaim.moefound import MoeFound
from gpu_reclaim.moejobs import KERNEL_LIMIT_S, SPACE_FILE
from gpu_reclaim.moestage import Window, harvest, last_line, time_kernels, tune
from gpu_reclaim.session import Session
from gpu_reclaim.transport.links import Links
from gpu_reclaim.transport.scripted import Answer, ScriptedTransport
from gpu_reclaim.tuning import KernelTime, TunedSize
from unit.moe_host import BLOCKS, NAME, ROW, environment, info, moe_found, script_answer
from unit.scenery import Clock
from unit.tuned import KEY
from unit.values import said

BEST = {**ROW, "num_stages": 3}
START = f"Start tuning over 976 configurations to create {NAME}...\n"


def best(tokens: int) -> dict[str, str]:
    return {str(NAME): text_of({tokens: BEST})}


@dataclass
class Ran:
    """What the script does for one size."""

    code: int | None = 0
    text: str = START
    files: Mapping[str, str] | None = None
    seconds: float = 10


def wrote(table: Table) -> Ran:
    """It wrote that, whatever it was asked for."""
    return Ran(files={str(NAME): text_of(table)})


@dataclass
class StageHost:
    """A host that runs jobs by the scripted clock.

    Attributes:
        does: What a job does, by its name.
        started: Jobs in the order of their starts: their scripts, by name.
        ended: Names of those that were ended.
        token: Of the hold that its jobs were started in.
        refuse: Called with each script first; what it returns is the answer.
    """

    does: dict[str, Ran] = field(default_factory=dict)
    started: dict[str, tuple[float, str]] = field(default_factory=dict)
    ended: list[str] = field(default_factory=list)
    token: str = "t"
    refuse: Callable[[Script], Answer | None] = lambda _: None
    clock: Clock = field(default_factory=Clock)

    @property
    def session(self) -> Session:
        links = Links(ScriptedTransport(self.answer))
        sleep = self.clock.sleep
        return Session("llm", links, token="t", clock=self.clock.read, sleep=sleep)

    def answer(self, script: Script) -> Answer:
        told = self.refuse(script)
        if told is not None:
            return told
        if script.name.startswith("start job "):
            name = script.name.removeprefix("start job ")
            self.started[name] = (self.clock.now, script.sections["hold"])
        elif script.name == "end jobs":
            self.ended += re.findall(rf"{jobs.PREFIX}(\S+?)\.service", script.sections["hold"])
        elif script.name == "look at the jobs":
            names = re.findall(r"^look_at (\S+) \S+ (\d+)$", script.sections["jobs"], re.M)
            return {"jobs": "\n".join(self._look(name, int(n)) for name, n in names)}
        else:
            return {"file": self._file(script.sections["file"])}
        return {"hold": "status taken"}

    def _ran(self, name: str) -> Ran:
        return self.does.get(name, Ran())

    def _look(self, name: str, offset: int) -> str:
        if name not in self.started:
            return f"{name} state inactive"
        ran, (began, body) = self._ran(name), self.started[name]
        over = self.clock.now >= began + ran.seconds
        lines = [
            f"state {'inactive' if over else 'active'}",
            f"token {self.token}",
            f"began {began}",
        ]
        lines += [f"now {min(self.clock.now, began + ran.seconds)}", f"gpu {env(body)[jobs.GPU]}"]
        lines += [f"from {offset}", f"hex {ran.text.encode()[offset:].hex()}"]
        if over:
            files = best(tokens_of(body)) if ran.files is None else ran.files
            lines += [f"code {ran.code}"] if ran.code is not None else []
            lines += [f"file {file}" for file in files]
        return "\n".join(f"{name} {line}" for line in lines)

    def _file(self, body: str) -> str:
        *_, folder, file = shlex.split(body.split("\n", maxsplit=1)[0].partition("=")[2])[0].split(
            "/"
        )
        files = self._ran(f"moe-{folder}").files
        text = (best(int(folder)) if files is None else files)[file]
        return f"hex {text.encode().hex()}"


def env(body: str) -> dict[str, str]:
    """Variables of a job, as its script sets them."""
    found = re.findall(r"^  export ([A-Za-z_]+)=(.*)$", body.replace("'\"'\"'", "'"), re.M)
    return {name: shlex.split(value)[0] if value else "" for name, value in found}


def tokens_of(body: str) -> int:
    return int(re.findall(r"--batch-size (\d+)", body)[0])


@pytest.fixture
def host() -> StageHost:
    return StageHost()


MOE = moe_found()


def window(clock: Clock, until: float = math.inf, size_s: float = 60) -> Window:
    return Window(clock.read, until, size_s)


def tuned(
    host: StageHost,
    *sizes: int,
    moe: MoeFound = MOE,
    gpus: int = 2,
    heard: list[Any] | None = None,
    **more: float,
) -> list[TunedSize]:
    few = replace(moe, devices=moe.devices[:gpus])
    seen = heard if heard is not None else []
    return list(
        tune(
            host.session,
            few,
            sizes,
            limit_s=5400,
            window=window(host.clock, **more),
            progress=lambda job, rows: seen.append((job.name, rows)),
        )
    )


def test_each_gpu_tunes_a_size(host: StageHost) -> None:
    found = tuned(host, 4, 64, 8192)

    assert [(x.tokens, x.row, x.failure) for x in found] == [(m, BEST, "") for m in (4, 64, 8192)]
    assert [(x.gpu, x.seconds, x.limit_s) for x in found] == [
        *(("0", 10, 5400), ("1", 10, 5400), ("0", 10, 5400)),
    ]
    assert list(host.started) == ["moe-4", "moe-64", "moe-8192"]
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d", found[0].at)


def test_what_a_job_is_told(host: StageHost) -> None:
    told = {"read a part of its environment": environment("HF_HOME=/it's here", "PATH=/opt/bin")}
    tuned(host, 64, moe=moe_found({**told, **info(ep_size=2)}))
    body = host.started["moe-64"][1]
    folder = f"{MOE.place.rpartition('/')[0]}/"

    assert f"FOLDER={folder}" in body
    assert "--model /models/glm --tp-size 4 --ep-size 2 --dtype auto --batch-size 64 --tune" in body
    assert "timeout -k 5 5400 /opt/sglang/bin/python /src/sglang/benchmark/" in body
    assert f"--search-space-file {folder}" in body
    found = env(body)
    assert (found["PATH"], found["HF_HUB_OFFLINE"]) == (f"/opt/bin:{PATHS}", "1")
    assert found["RAY_TMPDIR"] == "/run/gpu-reclaim/ray-64"
    assert found["TRITON_CACHE_DIR"].endswith("/64/cache/triton")
    assert (found["CUDA_DEVICE_ORDER"], found[jobs.GPU]) == ("PCI_BUS_ID", "0")


def test_a_script_without_a_space_of_ours(host: StageHost) -> None:
    tuned(host, 64, moe=moe_found({"look for the tuning script": script_answer()}))

    assert SPACE_FILE not in host.started["moe-64"][1]


def test_a_number_format_is_told(host: StageHost) -> None:
    moe = replace(MOE, name=replace(BLOCKS, per_channel=True))
    host.does = {"moe-64": Ran(text="", files={})}
    tuned(host, 64, moe=moe)

    assert (
        "--dtype fp8_w8a8 --batch-size 64 --tune --per-channel-quant" in host.started["moe-64"][1]
    )


WITHOUT = "it ended well without the file that the server asks for: it wrote"
UNUSABLE = f"what it wrote cannot be used: {NAME}"
FAILURES: dict[str, tuple[Ran, str]] = {
    "its limit": (
        Ran(124, f"{START} 3%|# | 30/976 [00:10<1:00]"),
        "it did not end within 5400 s (it was at row 30 of 976)",
    ),
    "memory": (Ran(1, "torch.OutOfMemoryError: CUDA out of memory."), "a GPU had too little mem"),
    "an error": (Ran(1, "ValueError: no"), "it ended with status 1: ValueError: no"),
    "silent": (Ran(3, ""), "it ended with status 3 and named no error"),
    "killed": (Ran(None, "x", seconds=30), "it was ended from outside"),
    "no file": (Ran(files={}), f"{WITHOUT} none"),
    "only ours": (Ran(files={SPACE_FILE: "[]"}), f"{WITHOUT} none"),
    "another file": (Ran(files={"E=1.json": "{}", SPACE_FILE: ""}), f"{WITHOUT} E=1.json"),
    "another size": (wrote({128: BEST}), "it was asked for 64, and wrote 128"),
    "more sizes": (wrote({64: BEST, 128: BEST}), "it was asked for 64, and wrote 64, 128"),
    "a bad row": (wrote({64: {"BLOCK_SIZE_M": 16}}), f"{UNUSABLE} lacks BLOCK_SIZE_N at 64"),
    "a word for the reader": (
        Ran(files={str(NAME): '{"triton_version": "3.6.0", "64": {}}'}),
        f"{UNUSABLE} has the key 'triton_version'",
    ),
    "an empty file": (Ran(files={str(NAME): ""}), f"{UNUSABLE} is no JSON"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_size_that_fails_and_the_rest_goes_on(host: StageHost, name: str) -> None:
    ran, why = FAILURES[name]
    host.does["moe-64"] = ran
    found = {x.tokens: x for x in tuned(host, 4, 64, 8192)}

    assert found[64].failure.startswith(why)
    assert (found[64].row, found[64].limit_s) == ({}, 5400)
    assert [found[m].row for m in (4, 8192)] == [BEST, BEST]
    assert host.ended == []


SHARED = "shared memory, Required: 200704, Hardware limit: 101376"
FINAL: dict[str, tuple[Ran, bool, str]] = {
    "its limit": (Ran(124, seconds=5400), True, "it did not end within 5400 s"),
    "its limit, and deaf to TERM": (Ran(137, seconds=5405), True, "it did not end within 5400 s"),
    "killed before": (Ran(137, seconds=5399), False, "it was killed; perhaps the host ran out"),
    "no row fits": (Ran(1, f"OutOfResources: {SHARED}"), True, "a row needs 200704 bytes"),
    "a crash": (Ran(1, "ValueError: no"), False, "it ended with status 1: ValueError: no"),
    "memory": (Ran(1, "torch.OutOfMemoryError: CUDA out of memory."), False, "a GPU had too"),
    "a signal": (Ran(139, ""), False, "it ended with status 139"),
    "from outside": (Ran(None, "x", seconds=30), False, "it was ended from outside"),
    "no file": (Ran(files={}), True, WITHOUT),
    "an empty file": (Ran(files={str(NAME): ""}), True, UNUSABLE),
}


@pytest.mark.parametrize("name", FINAL)
def test_what_would_fail_again(host: StageHost, name: str) -> None:
    host.does["moe-64"], final, why = FINAL[name]
    (found,) = tuned(host, 64)

    assert (found.final, found.row) == (final, {})
    assert found.failure.startswith(why)


def test_a_size_that_was_found_is_no_failure(host: StageHost) -> None:
    (found,) = tuned(host, 64)

    assert (found.final, found.failure) == (False, "")


# What a dead run has left.


@pytest.mark.parametrize(
    ("ran", "rows"),
    [
        (Ran(), [BEST]),
        (Ran(seconds=1e9), []),
        (Ran(1), []),
        (Ran(124), []),
        (Ran(None), []),
        (Ran(files={}), []),
        (wrote({128: BEST}), []),
        (wrote({64: {"BLOCK_SIZE_M": 16}}), []),
    ],
)
def test_what_its_scripts_have_finished(
    host: StageHost, ran: Ran, rows: list[dict[str, int | bool]]
) -> None:
    tuned(host, 4, 64)
    before = list(host.started)
    host.does["moe-64"], host.token = ran, "another"
    found = harvest(host.session, MOE, [64, 8192])

    assert [x.row for x in found] == rows
    assert [(x.tokens, x.seconds, x.failure) for x in found] == [(64, 10, "")] * len(rows)
    # Nothing is started or ended.
    assert (list(host.started), host.ended) == (before, [])


def test_nothing_is_left(host: StageHost, caplog: pytest.LogCaptureFixture) -> None:
    """What was never begun is no failure, in the log neither."""
    assert harvest(host.session, MOE, [4, 64]) == []
    assert said(caplog) == []
    assert harvest(host.session, MOE, []) == []


def test_its_last_words_without_secrets(host: StageHost, caplog: pytest.LogCaptureFixture) -> None:
    words = [f"line {n}" for n in range(30)]
    text = "\n".join([*words, f"args --api-key {KEY}", "HF_TOKEN=hf_abc", "ValueError: no\x1b[1m"])
    host.does["moe-64"] = Ran(1, text)
    (found,) = tuned(host, 64)

    lines = found.detail.split("\n")
    assert (len(lines), lines[0]) == (15, "line 18")
    assert lines[-3:-1] == ["args --api-key ***", "HF_TOKEN=***"]
    assert KEY not in repr(found) + "".join(said(caplog))
    assert "\x1b" not in found.detail


def test_nor_does_the_sentence_tell_one(host: StageHost, caplog: pytest.LogCaptureFixture) -> None:
    host.does["moe-64"] = Ran(1, f"HTTPError: Bearer {KEY} was refused")
    (found,) = tuned(host, 64)

    assert found.failure == "it ended with status 1: HTTPError: Bearer *** was refused"
    assert KEY not in repr(found) + "".join(said(caplog))


def test_another_file_is_announced(host: StageHost) -> None:
    """Seen as soon as it is said: the default of two ranks costs no hour."""
    wrong = replace(NAME, shard=512)
    for name in ("moe-64", "moe-4"):
        host.does[name] = Ran(text=START.replace(str(NAME), str(wrong)), seconds=3600)
    with pytest.raises(BadInput, match=f"makes {wrong}, and the server asks for {NAME}"):
        tuned(host, 4, 64, 8192)

    assert host.clock.now < 1060
    assert sorted(host.ended) == ["moe-4", "moe-64"]
    assert "moe-8192" not in host.started


def test_progress_is_told(host: StageHost) -> None:
    host.does["moe-64"] = Ran(text=f"{START}  5%|# | 50/976 [00:10<1:00, 2s/it]")
    heard: list[Any] = []
    tuned(host, 64, heard=heard)

    assert heard == [("moe-64", (50, 976))]


@pytest.mark.parametrize(
    ("now", "fits", "over"),
    [(0, True, False), (40, True, False), (41, False, False), (100, False, True)],
)
def test_a_window(now: float, fits: bool, over: bool) -> None:
    made = Window(lambda: now, until=100, size_s=60)

    assert (made.fits, made.over) == (fits, over)


def test_no_window(host: StageHost) -> None:
    made = window(host.clock)

    assert (made.fits, made.over) == (True, False)


def test_what_would_not_end_in_time_is_not_begun(host: StageHost) -> None:
    for name in ("moe-4", "moe-64"):
        host.does[name] = Ran(seconds=30)
    found = tuned(host, 4, 64, 8192, until=1070, size_s=60)

    assert [x.tokens for x in found] == [4, 64]
    assert (list(host.started), host.ended) == (["moe-4", "moe-64"], [])


def test_what_runs_at_the_end_of_the_window_is_ended(host: StageHost) -> None:
    host.does["moe-64"] = Ran(seconds=500)
    found = tuned(host, 4, 64, until=1070, size_s=60)

    assert ([x.tokens for x in found], host.ended) == ([4], ["moe-64"])
    assert host.clock.now <= 1072


def test_a_job_that_cannot_be_started(host: StageHost) -> None:
    def refuse(script: Script) -> Answer | None:
        return {"hold": "status unset"} if script.name == "start job moe-64" else None

    host.refuse = refuse
    with pytest.raises(CommandFailed):
        tuned(host, 4, 64)

    assert "moe-4" in host.ended


def test_a_host_that_is_gone(host: StageHost) -> None:
    host.refuse = lambda _: LinkLost("gone")
    with pytest.raises(LinkLost):
        tuned(host, 4)


@pytest.mark.parametrize(
    ("text", "line"), [("", ""), ("\n \n", ""), ("a\nb \n\n", "b"), ("x" * 300, "x" * 200 + "...")]
)
def test_the_last_line(text: str, line: str) -> None:
    assert last_line(text) == line


# Kernels alone.


def timed(host: StageHost, arms: Mapping[str, str], moe: MoeFound = MOE) -> list[KernelTime]:
    few = replace(moe, sizes=(4, 64), devices=moe.devices[:1])
    return list(
        time_kernels(host.session, few, arms, window=window(host.clock), progress=lambda *_: None)
    )


def kernel(tokens: int, us: float) -> Ran:
    return Ran(text=f"Batch size: {tokens}, config: {{}}\nKernel time: {us} us\n")


def test_each_arm_at_each_size(host: StageHost) -> None:
    times = [kernel(4, 90.5), kernel(4, 80), kernel(64, 120), kernel(64, 110)]
    host.does = {f"kernel-{n}": ran for n, ran in enumerate(times)}
    found = timed(host, {"present": "", "tuned": "/var/lib/x/0123"})

    assert [(x.arm, x.tokens, x.us) for x in found] == [
        *(("present", 4, 90.5), ("tuned", 4, 80), ("present", 64, 120), ("tuned", 64, 110)),
    ]
    bodies = [body for _, body in host.started.values()]
    assert [env(x).get("SGLANG_MOE_CONFIG_DIR", "") for x in bodies] == ["", "/var/lib/x/0123"] * 2
    assert [tokens_of(x) for x in bodies] == [4, 4, 64, 64]
    assert not [x for x in bodies if "--tune" in x or SPACE_FILE in x]
    assert all(f"timeout -k 5 {KERNEL_LIMIT_S} " in x for x in bodies)


def test_the_folder_in_use_is_what_the_present_arm_is_timed_with(host: StageHost) -> None:
    told = {
        "read a part of its environment": environment("SGLANG_MOE_CONFIG_DIR=/own", of_unit="1")
    }
    timed(host, {"present": "", "tuned": "/made"}, moe_found(told))

    folders = [env(body)["SGLANG_MOE_CONFIG_DIR"] for _, body in host.started.values()]
    assert folders == ["/own", "/made"] * 2


@pytest.mark.parametrize(
    ("ran", "why"),
    [
        (Ran(1, "ValueError: no"), "it ended with status 1: ValueError: no"),
        (Ran(124, ""), f"it did not end within {KERNEL_LIMIT_S} s"),
        (Ran(137, "", seconds=KERNEL_LIMIT_S), f"it did not end within {KERNEL_LIMIT_S} s"),
        (Ran(137, "", seconds=30), "it was killed; perhaps the host ran out of memory"),
        (Ran(None, "x", seconds=30), "it was ended from outside"),
        (Ran(text="Batch size: 8, config: {}\nKernel time: 3 us"), "it told no time"),
        (Ran(text="Batch size: 4, config: {}\nKernel time: nan us"), "it told no time"),
        (Ran(1, f"HTTPError: Bearer {KEY} no"), "it ended with status 1: HTTPError: Bearer *** no"),
    ],
)
def test_a_kernel_that_cannot_be_timed(host: StageHost, ran: Ran, why: str) -> None:
    host.does = {"kernel-0": ran, "kernel-1": kernel(64, 7)}
    found = timed(host, {"present": ""})

    assert [(x.us, x.failure) for x in found] == [(None, why), (7, "")]


def test_no_job_has_a_secret() -> None:
    host = StageHost()
    tuned(host, 4)
    timed(host, {"present": ""})

    assert not [x for _, x in host.started.values() if KEY in x]


def test_jobs_have_folders_of_their_own(host: StageHost) -> None:
    tuned(host, 4, 64)
    timed(host, {"present": "", "tuned": "/made"})
    folders = re.findall(r"FOLDER=(\S+)", "\n".join(body for _, body in host.started.values()))

    assert len(set(folders)) == len(host.started) == 6
    assert all(x.startswith(f"{MOE.place}/") for x in folders)
