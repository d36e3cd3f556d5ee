"""Reclaim, hold and restore over and over with random faults: the host is as before each time.

`make soak` runs 200 cycles, `make test` a few. The seed is printed; GPU_LAB_SEED repeats one, and
GPU_LAB_CYCLES sets how many.
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from prefect import flow

from gpu_reclaim.errors import GpuReclaimError
from gpu_reclaim.flows import exclusive_gpus, restore_services
from gpu_reclaim.restoring import STAGE
from guest import cutting, holds, ways, witness
from guest.ways import UNIT
from lab.guest_files import HOLDER
from lab.lab import Lab

pytestmark = [pytest.mark.lab, pytest.mark.usefixtures("prefect_server", "stand_in_devices")]

CYCLES = int(os.environ.get("GPU_LAB_CYCLES", "200"))
FEW = 2
WARM = 5
"""Cycles until what is made once is made: threads of the client, caches."""

SPAN_S = 6.0
"""About as long a cycle takes; faults that come from outside come at any time of it."""


class Fault(Exception):
    """Raised by a stage."""


class Cycle:
    """One pass, with what goes wrong in it."""

    def __init__(self, lab: Lab, dice: random.Random) -> None:
        self.lab = lab
        self.dice = dice
        self.at = dice.uniform(0, SPAN_S)
        self.stage: Callable[[], object] = lambda: None
        self.outside: Callable[[], object] | None = None
        self.inside = False
        self.name = dice.choice(sorted(FAULTS))
        FAULTS[self.name](self)

    def run(self) -> str:
        """The pass; how it ended."""
        timer = threading.Timer(self.at, self.outside) if self.outside else None
        if timer:
            timer.start()
        try:
            self.inside = True
            self._pipeline()
            self.inside = False
        except (GpuReclaimError, Fault, KeyboardInterrupt) as error:
            return type(error).__name__
        finally:
            self.inside = False
            if timer:
                timer.cancel()
                timer.join()
            self._mend()
        return "well"

    def _mend(self) -> None:
        """End what the faults brought in; the host is to mend the rest itself."""
        self.lab.smi("fail", None)
        for each in self.lab.guest.processes():
            if each.title.startswith(HOLDER) and not each.in_unit(STAGE):
                each.end()

    def _pipeline(self) -> None:
        @flow
        def pipeline() -> None:
            with exclusive_gpus("lab", holds.policy()) as gpus:
                command = " ".join(gpus.command(HOLDER, "--gpus", "0", "--mib", "700"))
                self.lab.do(f"{command} >/dev/null 2>&1 </dev/null &")
                self.stage()

        pipeline()


def fails(cycle: Cycle) -> None:
    def stage() -> None:
        raise Fault

    cycle.stage = stage


def is_intruded(cycle: Cycle) -> None:
    cycle.stage = lambda: cycle.lab.hold("--gpus", "1", "--mib", "300")


def expires(cycle: Cycle) -> None:
    def stage() -> None:
        holds.expire(cycle.lab)
        time.sleep(60)

    cycle.stage = stage


def is_restored(cycle: Cycle) -> None:
    cycle.stage = lambda: restore_services("lab")


def loses_its_mark(cycle: Cycle) -> None:
    def stage() -> None:
        cycle.lab.do("rm /run/gpu-reclaim/hold")
        time.sleep(60)

    cycle.stage = stage


def loses_connections(cycle: Cycle) -> None:
    def outside() -> None:
        for each in [*cutting.guest_sessions(cycle.lab), *cutting.node_sessions(cycle.lab)]:
            each.end()

    cycle.outside = outside


def loses_the_wire(cycle: Cycle) -> None:
    for_s = cycle.dice.uniform(0.2, 4)

    def outside() -> None:
        with cycle.lab.cut():
            time.sleep(for_s)

    cycle.outside = outside


def is_interrupted(cycle: Cycle) -> None:
    def outside() -> None:
        if cycle.inside:
            os.kill(os.getpid(), signal.SIGINT)

    cycle.outside = outside


def meets_a_thief(cycle: Cycle) -> None:
    """Somebody starts GPU work while the GPUs are being freed."""
    cycle.outside = lambda: cycle.lab.attach(
        f"setsid {HOLDER} --gpus 2 </dev/null >/dev/null 2>&1 &"
    )


def cannot_read(cycle: Cycle) -> None:
    cycle.outside = lambda: cycle.lab.smi("fail", "9 Unable to determine the device handle")


def starts_anew(cycle: Cycle) -> None:
    cycle.stage = cycle.lab.guest.restart


FAULTS: dict[str, Callable[[Cycle], None]] = {
    kind.__name__: kind
    for kind in (
        fails,
        is_intruded,
        expires,
        is_restored,
        loses_its_mark,
        loses_connections,
        loses_the_wire,
        is_interrupted,
        meets_a_thief,
        cannot_read,
        starts_anew,
    )
}
FAULTS["goes_well"] = lambda _: None


def resources() -> dict[str, int]:
    """Of this process: what could leak."""
    rss = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    children = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    return {
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
        "threads": threading.active_count(),
        "children": len(children),
        "RSS (MiB)": int(rss.split()[1]) // 1024,
    }


def soak(lab: Lab, cycles: int, seed: int) -> list[dict[str, int]]:
    """So many cycles; what this process had after each."""
    print(f"seed {seed}, {cycles} cycles")
    dice = random.Random(seed)
    ways.save_host(lab)
    lab.start_server()
    before = holds.running(lab), files(lab)
    seen = []
    for number in range(1, cycles + 1):
        cycle = Cycle(lab, dice)
        began = time.monotonic()
        ended = cycle.run()
        if not (back_soon := _is_back(lab, 25)):
            # Its client was cut off in the middle of putting back: the host's own timer does it.
            holds.expire(lab)
            holds.wait_back(lab, UNIT, within=60)
        lab.wait_ready()
        what = f"{number} of {cycles}, seed {seed}, {cycle.name} at {cycle.at:.1f} s: {ended}"
        assert holds.running(lab) == before[0], what
        assert files(lab) ^ before[1] == set(), what
        assert witness.memory(lab) == [90_000, 90_100, 90_200, 90_300], what
        seen.append(resources())
        how = "" if back_soon else ", by the host's own timer"
        print(f"{what}{how}, {time.monotonic() - began:.1f} s, {seen[-1]}", flush=True)
    return seen


def files(lab: Lab) -> set[str]:
    """Every file of the guest, but for the private folders that systemd makes with each start."""
    return {row for row in holds.files(lab) if "/systemd-private-" not in row}


def _is_back(lab: Lab, within: float) -> bool:
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if witness.state_of(lab) == "active" and not holds.traces(lab):
            return True
        time.sleep(0.3)
    return False


def test_a_few_cycles_with_faults(lab: Lab) -> None:
    soak(lab, FEW, int(os.environ.get("GPU_LAB_SEED", "7")))


@pytest.mark.exhaustive
def test_many_cycles_with_faults_leak_nothing(lab: Lab) -> None:
    seed = int(os.environ.get("GPU_LAB_SEED", random.randrange(1 << 30)))
    seen = soak(lab, CYCLES, seed)
    first, last = seen[min(WARM, CYCLES - 1)], seen[-1]
    print(f"after {WARM} cycles {first}, after {CYCLES} {last}")
    for what in ("descriptors", "threads", "children"):
        assert last[what] <= first[what] + 2, what
