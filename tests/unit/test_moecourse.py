"""A tuning of MoE kernels on its way: what is left, how long it takes, and how it is reported."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest

from gpu_reclaim.course import GO_ON, RECLAIM_S, SEE_WHY, Tuning
from gpu_reclaim.errors import BadInput, HoldLost
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.moecourse import WITHIN_NOISE, MoeTuning
from gpu_reclaim.moefound import PRESENT, TUNED, MoeFound
from gpu_reclaim.moejobs import KERNEL_LIMIT_S
from gpu_reclaim.moespace import SECONDS_PER_ROW
from gpu_reclaim.plans import MoeTunePlan
from gpu_reclaim.tuning import KernelTime, TunedSize
from unit.moe_host import PLAN, file_of, moe_found, size
from unit.tuned import visit

CANDIDATE = "/configs/a.json"
MOE = moe_found(
    plan=PLAN.model_copy(update={"candidates": [CANDIDATE]}), files={"a.json": file_of()}
)
ALONE = moe_found()
GUESS_S = 976 * SECONDS_PER_ROW
OVERLAYS = "/var/lib/gpu-reclaim-moe/sglang.service/"


def work(
    *sizes: TunedSize, moe: MoeFound = ALONE, kernels: list[KernelTime] | None = None, **plan: Any
) -> MoeTuning:
    given = MoeTunePlan(**(PLAN.model_dump() | plan))
    made = MoeTuning("glm", "llm", given, ReclaimPolicy(), moe, kernels=kernels or [])
    for one in sizes:
        made.add(one)
    return made


def played(
    made: MoeTuning, factors: dict[str, float] | None = None, *, differing: float = 0
) -> Tuning:
    """All its trials, where some arms are that much faster."""
    trials = made.tried = made.trials()
    while turn := trials.turn:
        arm, number = turn
        times = (1 + 0.001 * number) * (factors or {}).get(arm, 1)
        other = 0 if arm == PRESENT else differing
        seen = visit(arm, number, 100 * times, 1000 * times, differing=other)
        trials.visits.append(seen)
    return trials


# What is left.


def failed(tokens: int, seconds: float, limit_s: float = 5400) -> TunedSize:
    return size(tokens, "it failed", seconds=seconds, limit_s=limit_s)


@pytest.mark.parametrize(
    ("sizes", "plan", "missing"),
    [
        ([], {}, [4, 64, 8192]),
        ([], {"mode": "plan"}, [4, 64, 8192]),
        ([], {"mode": "kernels"}, []),
        ([], {"tune": False, "candidates": [CANDIDATE]}, []),
        ([size(64)], {}, [4, 8192]),
        ([size(4), size(64), size(8192), size(2048)], {}, []),
        ([size(2048)], {}, [4, 64, 8192]),
        # What failed is not tried again.
        ([failed(64, 100)], {}, [4, 8192]),
        # Unless it had no time, and there is more.
        ([failed(64, 5400)], {}, [4, 8192]),
        ([failed(64, 5401)], {"size_timeout_minutes": 91}, [4, 64, 8192]),
        ([failed(64, 100)], {"size_timeout_minutes": 91}, [4, 8192]),
        ([failed(64, 5401)], {"size_timeout_minutes": 60}, [4, 8192]),
        ([failed(64, 100, 0)], {"size_timeout_minutes": 91}, [4, 8192]),
    ],
)
def test_what_is_missing(sizes: list[TunedSize], plan: dict[str, Any], missing: list[int]) -> None:
    assert work(*sizes, **plan).missing == missing


def test_the_last_word_on_a_size_counts() -> None:
    made = work(failed(64, 100), size(4), size(64))

    assert [(x.tokens, x.failure) for x in made.planned().sizes] == [(4, ""), (64, "")]


@pytest.mark.parametrize(
    ("one", "counts"),
    [
        (size(4), True),
        (size(4, "no file", final=True), True),
        (size(4, "it crashed"), False),
        (size(4, "it was ended from outside"), False),
    ],
)
def test_a_failure_by_chance_does_not_count_in_the_next_run(one: TunedSize, counts: bool) -> None:
    assert work().known([one, size(64)]) == [one, size(64)][not counts :]


# How long.


@pytest.mark.parametrize(
    ("sizes", "minutes", "plan", "refused"),
    [
        ([size(4, seconds=600)], 0, {}, ""),
        ([size(4, seconds=600)], 60, {}, ""),
        ([size(4, seconds=600)], 1, {}, "one batch size and the server's start"),
        ([], 1, {"mode": "kernels"}, "a window of 1 min is too short"),
        ([], 60, {"mode": "kernels"}, ""),
        # Nothing is to be tuned: only trials, which have a limit of their own.
        ([size(4), size(64), size(8192)], 1, {}, ""),
        ([], 1, {"tune": False, "candidates": [CANDIDATE]}, ""),
    ],
)
def test_a_window_that_is_too_short(
    sizes: list[TunedSize], minutes: float, plan: dict[str, Any], refused: str
) -> None:
    made = work(*sizes, window_minutes=minutes, **plan)
    if not refused:
        made.check_window()
        return
    with pytest.raises(BadInput, match=refused) as caught:
        made.check_window()
    least = round((made.window().size_s + made.moe.found.start_s + RECLAIM_S) / 60)
    assert f"expected to take {least} min" in caught.value.message
    assert caught.value.remedy


def test_trials_leave_time_to_start_the_service() -> None:
    made = work()
    assert made.trials().reserve_s == made.moe.found.start_s + RECLAIM_S > 0


def test_a_size_is_guessed_at_first_and_measured_then() -> None:
    assert work().size_s == pytest.approx(GUESS_S)
    assert work(size_timeout_minutes=10).size_s == 600
    assert work(size(4, seconds=100), size(64, seconds=300)).size_s == 200
    # A failure says nothing of how long one takes.
    assert work(size(4, seconds=100), failed(64, 3)).size_s == 100


@pytest.mark.parametrize(("gpus", "rounds"), [(4, 1), (2, 2), (1, 3)])
def test_each_gpu_tunes_one_at_a_time(gpus: int, rounds: int) -> None:
    made = work(moe=replace(ALONE, devices=ALONE.devices[:gpus]))

    assert made.stage_minutes == pytest.approx(rounds * GUESS_S / 60)
    assert work(size(4), size(64), size(8192)).stage_minutes == 0


def test_all_of_it() -> None:
    visit_minutes = work().trials().visit_s / 60
    tuned = (size(4), size(64), size(8192))

    assert work(*tuned).most_minutes == pytest.approx(2 * 6 * visit_minutes)
    assert work(*tuned, moe=MOE).most_minutes == pytest.approx(3 * 6 * visit_minutes)
    assert work().most_minutes == pytest.approx(2 * 6 * visit_minutes + GUESS_S / 60)
    assert work(mode="kernels").most_minutes == 0
    alone = work(moe=MOE, tune=False, candidates=[CANDIDATE])
    assert alone.most_minutes == pytest.approx(2 * 6 * visit_minutes)


def test_a_window_leaves_time_to_start_the_service() -> None:
    made = work(size(4, seconds=600), window_minutes=60)
    window = made.window()

    left = window.until - time.monotonic()
    assert left == pytest.approx(3600 - made.moe.found.start_s - RECLAIM_S, abs=5)
    assert (window.size_s, window.fits, window.over) == (600, True, False)
    assert not work(size(4, seconds=600), window_minutes=15).window().fits
    assert work(window_minutes=5).window().over
    assert (work().window().fits, work().window().over) == (True, False)


def test_a_kernel_alone_takes_less() -> None:
    assert work(mode="kernels").window().size_s == KERNEL_LIMIT_S


# What is said.


def test_a_plan() -> None:
    found = work(size(4)).planned()

    assert (found.outcome, found.current, found.winner) == ("planned", PRESENT, PRESENT)
    assert found.summary == (
        f"3 batch sizes would be tuned for {ALONE.name} and Triton 3.6.0, 2 of them are missing; "
        f"all of it takes {found.estimated_minutes:.0f} min at most"
    )
    assert (found.remedy, found.raw, found.sizes) == ("", ALONE.place, [size(4)])


def test_a_window_that_was_over() -> None:
    found = work(size(4)).cut()

    assert (found.outcome, found.remedy) == ("unfinished", GO_ON)
    assert found.summary == (
        "The window is over, and the service is back. Still to be tuned: 64, 8192."
    )


def test_nothing_to_try() -> None:
    same = size(4, row=dict(ALONE.before[4]))
    found = work(same).fruitless()

    assert (found.outcome, found.remedy) == ("kept", "")
    assert found.summary.startswith("There is nothing to try beside the configs in use")


def test_no_size_that_could_be_tuned() -> None:
    found = work(failed(8192, 1), size(4, "out of memory")).fruitless()

    assert (found.outcome, found.remedy) == ("unfinished", SEE_WHY)
    assert found.summary == (
        "No batch size could be tuned, nothing was changed. 8192: it failed; 4: out of memory."
    )
    assert [x.tokens for x in found.sizes] == [4, 8192]


def times(arm: str, *us: float | None) -> list[KernelTime]:
    return [KernelTime(arm=arm, tokens=m, us=x) for m, x in zip([4, 64, 8192], us, strict=False)]


@pytest.mark.parametrize(
    ("present", "other", "words"),
    [
        ((100, 200, 400), (90, 180, 360), ": -10.0 % time over 3 batch sizes."),
        ((100, 200, 400), (200, 200, 200), ": +0.0 % time over 3 batch sizes."),
        ((100, None, 400), (50, 1, None), ": -50.0 % time over 1 batch sizes."),
        ((None, None, None), (1, 2, 3), " could not be compared."),
    ],
)
def test_kernels_that_were_timed(
    present: tuple[float | None, ...], other: tuple[float | None, ...], words: str
) -> None:
    kernels = [*times(PRESENT, *present), *times("a.json", *other)]
    found = work(moe=MOE, kernels=kernels, mode="kernels").measured()

    assert found.summary == f"a.json{words} Nothing was changed."
    assert (found.outcome, found.kernels) == ("measured", kernels)


def test_kernels_that_a_window_cut() -> None:
    kernels = [*times(PRESENT, 100, 200), *times("a.json", 90)]
    found = work(moe=MOE, kernels=kernels, mode="kernels").measured()

    assert found.summary == (
        "The window was over after 3 of 6 kernels. a.json: -10.0 % time over 1 batch sizes. "
        "Nothing was changed."
    )


def test_only_what_is_in_use_was_timed() -> None:
    found = work(kernels=times(PRESENT, 1, 2, 3), mode="kernels").measured()

    assert found.summary == "Only the configs in use were timed. Nothing was changed."


def told(made: MoeTuning, **more: Any) -> Any:
    assert made.tried is not None
    given = {"not_kept": "", "proof": "it says so"} | more
    return made.told(made.tried.report(**given))


def test_a_better_one_replaces_them() -> None:
    made = work(size(4), size(64))
    played(made, {TUNED: 1.3}).applied = True
    found = told(made)

    assert (found.outcome, found.winner) == ("replaced", TUNED)
    assert found.overlay == made.before.folders[TUNED]
    assert found.overlay.startswith(OVERLAYS)
    assert found.drop_in.endswith("/zz-gpu-reclaim-moe.conf")
    assert found.sizes == [size(4), size(64)]
    assert WITHIN_NOISE not in found.summary


def test_one_that_was_found_and_not_applied_leaves_no_folder() -> None:
    made = work(size(4))
    played(made, {TUNED: 1.3})
    found = told(made)

    assert (found.outcome, found.overlay, found.drop_in) == ("found", "", "")


def test_one_that_is_as_quick_is_rolled_back() -> None:
    made = work(size(4))
    played(made)
    found = told(made)

    assert found.outcome == "kept"
    assert found.summary.startswith("Identical within noise: rolled back. ")


@pytest.mark.parametrize(
    ("factors", "differing"),
    [({TUNED: 0.8}, 0), ({TUNED: 1.3}, 90), ({TUNED: 0.8, "a.json": 1}, 0)],
)
def test_one_that_is_worse_or_wrong_is_not_within_noise(
    factors: dict[str, float], differing: float
) -> None:
    made = work(size(4), moe=MOE if len(factors) > 1 else ALONE)
    played(made, factors, differing=differing)
    found = told(made)

    assert (found.outcome, WITHIN_NOISE in found.summary) == ("kept", False)


def test_an_error_before_the_trials() -> None:
    found = work(size(4)).broken(HoldLost("gone"))

    assert (found.outcome, found.remedy, found.sizes) == ("unfinished", GO_ON, [size(4)])
    assert found.summary == "It was ended by an error: HoldLost: gone"
    assert "secret" not in work().broken(RuntimeError("sk-secret")).summary


def test_an_error_in_the_middle_of_them() -> None:
    made = work(size(4))
    made.tried = made.trials()
    assert made.broken(HoldLost("gone")).visits == []

    made.tried.visits.append(visit(PRESENT, 1))
    found = made.broken(HoldLost("gone"))
    assert (found.outcome, found.sizes, len(found.visits)) == ("unfinished", [size(4)], 1)
    assert (found.drop_in, found.overlay) == ("", "")


def test_an_error_after_the_keep_says_what_is_in_force() -> None:
    made = work(size(4))
    played(made, {TUNED: 1.3}).applied = True
    found = made.broken(HoldLost("gone"))

    assert (found.outcome, found.overlay) == ("unfinished", made.before.folders[TUNED])
    assert f"rm {found.drop_in}; systemctl daemon-reload" in found.remedy


def test_no_key_is_told() -> None:
    made = work(size(4))
    played(made)

    assert "sk-secret" not in repr(made) + repr(told(made)) + repr(made.planned())
