"""Kinds that cannot be made on a test machine, by what the real commands print.

Each is a whole reclaim over a host in memory: right verdict, an explanation, nobody innocent ended.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.errors import GpusNotReclaimed
from gpu_reclaim.models import GOOD_VERDICTS, Process, ReclaimPolicy, Verdict
from gpu_reclaim.reclaim import reclaim
from unit.scenery import Host, Unit, scene
from unit.values import UUIDS, process

SGLANG = "sglang.service"
USER = "/user.slice/user-1000.slice/user@1000.service/app.slice"


@dataclass
class Kind:
    """A kind of day: the host, what is asked, and what must come of it.

    Attributes:
        ended: Pids that are to be ended; nobody else may be.
        says: Part of summary or remedy.
    """

    name: str
    verdict: Verdict
    host: Callable[[], Host]
    ended: set[int] = field(default_factory=set)
    says: str = ""
    policy: dict[str, object] = field(default_factory=dict)
    units: tuple[str, ...] = ()


def holding(*people: Process, used: int | str = 900, **more: object) -> Callable[[], Host]:
    def made() -> Host:
        host = Host(used=[used], processes=[x.model_copy() for x in people])
        for name, value in more.items():
            setattr(host, name, value)
        return host

    return made


def failing(code: int, text: str) -> Callable[[], Host]:
    """nvidia-smi ends with a status and prints no row."""

    def made() -> Host:
        host = Host(used=[], smi_code=code)
        host._gpus = lambda: f"gpu {text}\n"  # type: ignore[method-assign]
        return host

    return made


def printing(text: str) -> Callable[[], Host]:
    """nvidia-smi succeeds, and prints this."""
    return failing(0, text)


def serving() -> Callable[[], Host]:
    """A unit with one worker."""
    return holding(process(50, unit=SGLANG), memory={50: (0, 900)}, units={SGLANG: Unit()})


def restarting(active: str, invocation: str) -> Callable[[], Host]:
    """Another unit's worker is ended, and systemd has started it again by the last look."""

    def made() -> Host:
        host = holding(process(50, unit="vllm.service"), memory={50: (0, 900)})()
        host.units = {"vllm.service": Unit()}

        def hook(script: Script) -> None:
            if script.name == "verify_nvidia_smi":
                host.units["vllm.service"] = Unit(active=active, invocation=invocation)

        host.hook = hook
        return host

    return made


def worker(pid: int = 50, **more: object) -> Process:
    return process(pid, **more)  # type: ignore[arg-type]


KINDS = [
    Kind(
        "state D after KILL",
        Verdict.UNKILLABLE,
        holding(worker(), memory={50: (0, 900)}, immortal={50}),
        says="waiting in nvidia_close",
    ),
    Kind(
        "state D, memory free all the same",
        Verdict.UNKILLABLE,
        holding(worker(), used=0, immortal={50}),
        says="still there after KILL",
    ),
    Kind(
        "state D from before, descriptors gone",
        Verdict.UNKILLABLE,
        holding(worker(holds=False, state="D"), memory={50: (0, 900)}),
        says="in state D: sglang::scheduler (pid 50)",
    ),
    Kind(
        "a zombie that nvidia-smi still lists",
        Verdict.ZOMBIE,
        holding(worker(holds=False, state="Z", ppid=7), memory={50: (0, 900)}),
        says="end its parent (pid 7)",
    ),
    Kind(
        "a zombie that has nothing to do with it",
        Verdict.HELD_UNSEEN,
        holding(worker(holds=False, state="Z")),
        says="no holder can be seen",
    ),
    Kind(
        "a listed pid that is another process by now",
        Verdict.HELD_UNSEEN,
        holding(worker(holds=False, name="cron", command_line="cron"), memory={50: (0, 900)}),
        says="pid 50, which is cron here and holds no GPU",
    ),
    Kind(
        "a listed pid that does not exist here",
        Verdict.HELD_UNSEEN,
        holding(apps=f"app {UUIDS[0]}, 4026531, 900\n"),
        says="pid 4026531, which is not here",
    ),
    Kind(
        "absurd pids, Idx and -",
        Verdict.CLEAN,
        holding(
            worker(),
            memory={50: (0, 900)},
            apps=f"app {UUIDS[0]}, Idx, 5\napp {UUIDS[0]}, -, -\napp {UUIDS[0]}, -4, 7\n"
            f"app {UUIDS[0]}, 99999999999999999999, 7\napp [Unknown Error], 0, 7\n",
        ),
        ended={50},
    ),
    Kind(
        "MIG instances' processes listed by their GPU",
        Verdict.CLEAN,
        holding(worker(), memory={50: (0, 900)}, mig="Enabled"),
        ended={50},
        policy={"gpus": [0]},
    ),
    Kind(
        "MIG memory that is not ours to read",
        Verdict.UNKNOWN,
        holding(worker(), used="[Insufficient Permissions]"),
        says="shown per instance only to the privileged",
    ),
    Kind(
        "a reserve counted as used",
        Verdict.HELD_UNSEEN,
        holding(used=448, driver="450.80.02"),
        says="drivers before 510",
    ),
    Kind("GPU lost", Verdict.DRIVER_FAULT, failing(15, "GPU is lost"), says="off the bus"),
    Kind(
        "driver not loaded",
        Verdict.DRIVER_FAULT,
        failing(9, "NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver."),
        says="not loaded",
    ),
    Kind(
        "driver and library differ",
        Verdict.DRIVER_FAULT,
        failing(18, "Failed to initialize NVML: Driver/library version mismatch"),
        says="versions differ",
    ),
    Kind("a reset is required", Verdict.DRIVER_FAULT, failing(16, "reset required"), says="reset"),
    Kind("nvidia-smi missing", Verdict.DRIVER_FAULT, failing(127, "sh: not found"), says="PATH"),
    Kind("nvidia-smi hangs", Verdict.UNKNOWN, failing(124, ""), says="persistence mode"),
    Kind(
        "no GPU at all", Verdict.DRIVER_FAULT, printing("No devices were found"), says="no GPU row"
    ),
    Kind(
        "a row cut off",
        Verdict.DRIVER_FAULT,
        printing(f"0, {UUIDS[0]}, L40S, 0, 46068\ngpu 1, GPU-bbbbbbbb"),
        says="no GPU row",
    ),
    Kind(
        "two rows in one line",
        Verdict.DRIVER_FAULT,
        printing(f"0, {UUIDS[0]}, L40S, 30000, 46068gpu 1, {UUIDS[1]}, L40S, 0, 46068"),
        says="no GPU row",
    ),
    Kind(
        "the same GPU twice",
        Verdict.DRIVER_FAULT,
        printing(f"0, {UUIDS[0]}, L40S, 0, 46068\ngpu 1, {UUIDS[0]}, L40S, 0, 46068"),
        says="twice",
    ),
    Kind(
        "a user's own unit",
        Verdict.CLEAN,
        holding(worker(cgroups=[f"{USER}/ollama.service"]), memory={50: (0, 900)}),
        ended={50},
    ),
    Kind(
        "a rootless container",
        Verdict.HELD_BY_PROTECTED,
        holding(worker(cgroups=[f"{USER}/libpod-{'0f' * 32}.scope"]), memory={50: (0, 900)}),
        says="sudo -u '#1000' XDG_RUNTIME_DIR=/run/user/1000 podman stop 0f0f0f0f0f0f",
    ),
    Kind(
        "a container that the host's unit runs stops with it",
        Verdict.HELD_BY_PROTECTED,
        holding(
            worker(cgroups=[f"/system.slice/docker-{'0f' * 32}.scope"]),
            memory={50: (0, 900)},
            units={SGLANG: Unit()},
        ),
        units=(SGLANG,),
        says="docker stop 0f0f0f0f0f0f",
    ),
    Kind(
        "a Slurm job of the first control group version",
        Verdict.HELD_BY_PROTECTED,
        holding(worker(cgroups=["/slurm/uid_1000/job_71/step_0/task_0"]), memory={50: (0, 900)}),
        says="scancel 71",
    ),
    Kind(
        "another guest's process, whatever its longest path says",
        Verdict.HELD_BY_PROTECTED,
        holding(
            worker(cgroups=["/user.slice/user-0.slice/session-3.scope", "/lxc/130"]),
            memory={50: (0, 900)},
        ),
        says="another machine",
    ),
    Kind(
        "a display without a listed process",
        Verdict.HELD_BY_PROTECTED,
        holding(worker(exe="/usr/lib/xorg/Xorg", name="Xorg")),
        says="it drives a display",
    ),
    Kind(
        "a monitor that only has the nodes open",
        Verdict.HELD_UNSEEN,
        holding(worker(exe="/usr/bin/telegraf", name="telegraf")),
        says="no holder can be seen",
    ),
    Kind(
        "another unit's daemon that went on",
        Verdict.CLEAN,
        restarting("active", "1"),
        ended={50},
    ),
    Kind(
        "another unit that has started again, without a GPU yet",
        Verdict.RESPAWNED,
        restarting("active", "2"),
        ended={50},
        says="systemctl stop vllm.service",
    ),
    Kind(
        "another unit that is starting",
        Verdict.RESPAWNED,
        restarting("activating", "1"),
        ended={50},
        says="systemctl stop vllm.service",
    ),
    Kind("the good day", Verdict.CLEAN, serving(), ended={50}, units=(SGLANG,)),
]


@pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
def test_kind(kind: Kind, record_property: Callable[[str, object], None]) -> None:
    host = kind.host()
    stage = scene(host, units=list(kind.units))
    before = {x.pid for x in host.processes}
    try:
        report = reclaim(stage.session, ReclaimPolicy.model_validate(kind.policy))
    except GpusNotReclaimed as error:
        report = error.report
    gone = before - {x.pid for x in host.processes}
    in_use = [mib for mib in host.used if isinstance(mib, int) and mib > 100]
    innocents = gone - kind.ended
    false_clean = report.verdict in GOOD_VERDICTS and bool(in_use or kind.ended - gone)
    row = {"group": "scripted", "name": kind.name}
    record_property("kind", row | {"innocents": len(innocents), "false_clean": false_clean})

    assert report.verdict == kind.verdict, str(report)
    assert (gone, false_clean) == (kind.ended, False)
    assert kind.says in f"{report.summary} {report.remedy}"
