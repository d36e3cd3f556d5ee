"""A held unit that runs with other flags, on a pretend host: the real scripts in a real shell."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest

from unit.held_host import HeldHost
from unit.shells import stub

UNIT = "sglang.service"
OTHER = "embed.service"
TEXT = "[Service]\nExecStart=\nExecStart=/opt/py -m x --name \"a b\" 'c' $$HOME %%n \\\\ \u2603\n"
TRIAL = "zzz-gpu-reclaim-trial.conf"
TUNED = "zz-gpu-reclaim.conf"
HELD = "50-gpu-reclaim-hold.conf"


@pytest.fixture
def host(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> HeldHost:
    """A host with two units that were stopped under a hold."""
    made = HeldHost(tmp_path)
    monkeypatch.setenv("PATH", f"{made.tools}:/usr/bin:/bin")
    for name in (UNIT, OTHER):
        made.unit(name)
    assert made.take(UNIT, OTHER).status == "taken"
    made.stop(UNIT, OTHER)
    return made


def test_it_starts_with_exactly_the_drop_in_and_the_other_stays_held(host: HeldHost) -> None:
    assert host.begin(UNIT, TEXT).status == "taken"
    file = host.places_of(f"systemd/system/{UNIT}.d/{TRIAL}")
    assert file.read_text() == TEXT
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert host.state(UNIT) == "active"
    assert host.drop_ins(UNIT) == [TRIAL]
    assert host.drop_ins(OTHER) == [HELD]
    assert not host.start(OTHER)


def test_begun_again_after_a_lost_answer_nothing_is_done_twice(host: HeldHost) -> None:
    host.begin(UNIT, TEXT)
    starts = host.started
    assert host.begin(UNIT, TEXT).status == "taken"
    assert host.started == starts


def test_a_unit_that_runs_is_not_put_on_trial(host: HeldHost) -> None:
    host.begin(UNIT, TEXT)
    answer = host.begin(UNIT, "[Service]\n")
    assert (answer.status, answer.why) == ("running", "it is active")
    assert host.places_of(f"systemd/system/{UNIT}.d/{TRIAL}").read_text() == TEXT


def test_one_that_failed_is_started_anew(host: HeldHost) -> None:
    host.begin(UNIT, TEXT)
    (host.home / f"{UNIT}.state").write_text("ActiveState=failed\nSubState=failed\n")
    assert host.begin(UNIT, TEXT).status == "taken"
    assert host.state(UNIT) == "active"


def test_closed_it_runs_on_and_cannot_be_started_again(host: HeldHost) -> None:
    host.begin(UNIT, TEXT)
    assert host.close().status == "taken"
    assert host.state(UNIT) == "active"
    assert host.drop_ins(UNIT) == [HELD]
    host.stop(UNIT)
    assert not host.start(UNIT)
    assert host.begin(UNIT, TEXT).status == "taken"
    assert host.drop_ins(UNIT) == [TRIAL]


@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("end", ["restore", "dead man", "next run"])
def test_whatever_ends_the_hold_it_comes_back_as_it_was(
    host: HeldHost, end: str, closed: bool
) -> None:
    """It runs, but not with its own flags: so it is stopped before it is put back."""
    host.begin(UNIT, TEXT)
    if closed:
        host.close()
    before = len(host.calls)
    if end == "restore":
        assert host.restore() == ("done", {UNIT: "started", OTHER: "started"})
    else:
        host.expire()
        if end == "dead man":
            host.dead_man()
        else:
            found = host.take(UNIT, OTHER, token="t2").found
            assert {x.unit: x.outcome for x in found} == {UNIT: "started", OTHER: "started"}
            assert TRIAL not in host.drop_ins(UNIT)
            return
    after = host.calls[before:]
    stop = next(n for n, line in enumerate(after) if " stop " in f"{line} " and UNIT in line)
    start = next(n for n, line in enumerate(after) if " start " in line and UNIT in line)
    assert stop < start
    assert host.state(UNIT) == "active"
    assert host.drop_ins(UNIT) == []
    assert host.traces == []


@pytest.mark.parametrize("lasting", [False, True])
def test_what_is_kept_runs_on_and_outlives_the_hold(host: HeldHost, lasting: bool) -> None:
    host.begin(UNIT, TEXT)
    assert host.keep(UNIT, TEXT, lasting=lasting).status == "taken"
    assert host.drop_ins(UNIT) == [TUNED]
    root = host.places.etc if lasting else host.places.run
    assert (Path(root) / f"systemd/system/{UNIT}.d/{TUNED}").read_text() == TEXT
    before = len(host.calls)
    assert host.restore() == ("done", {UNIT: "running", OTHER: "started"})
    assert not [x for x in host.calls[before:] if " stop " in f"{x} " and UNIT in x]
    assert host.drop_ins(UNIT) == [TUNED]


def test_what_is_kept_and_dies_is_started_again_with_it(host: HeldHost) -> None:
    """Our own file is no edit of somebody else's."""
    host.begin(UNIT, TEXT)
    host.keep(UNIT, TEXT, lasting=True)
    host.stop(UNIT)
    assert host.restore() == ("done", {UNIT: "started", OTHER: "started"})


def test_one_that_was_edited_meanwhile_is_still_left_alone(host: HeldHost) -> None:
    host.begin(UNIT, TEXT)
    host.keep(UNIT, TEXT, lasting=True)
    host.stop(UNIT)
    (host.home / f"{UNIT}.file").write_text("[Service]\nExecStart=/other\n")
    assert host.restore() == ("done", {UNIT: "edited", OTHER: "started"})


def test_nobody_else_puts_anything_on_trial(host: HeldHost) -> None:
    assert host.begin(UNIT, TEXT, token="other").status == "lost"
    host.begin(UNIT, TEXT)
    assert host.close(token="other").status == "lost"
    assert host.keep(UNIT, TEXT, lasting=True, token="other").status == "lost"
    assert host.drop_ins(UNIT) == [TRIAL]
    host.expire()
    assert host.begin(OTHER, TEXT).status == "lost"
    assert host.state(OTHER) == "inactive"


def test_a_file_that_cannot_be_written_starts_nothing(host: HeldHost) -> None:
    folder = host.places_of(f"systemd/system/{UNIT}.d")
    for path in folder.iterdir():
        path.unlink()
    folder.rmdir()
    folder.write_text("in the way")
    assert host.begin(UNIT, TEXT).status == "unset"
    assert host.state(UNIT) == "inactive"


def tuned_file(host: HeldHost) -> Path:
    return Path(host.places.etc) / f"systemd/system/{UNIT}.d/{TUNED}"


EARLIER = pytest.mark.parametrize("earlier", ["", "[Service]\nExecStart=\nExecStart=/earlier\n"])


def cut_in_the_keep(host: HeldHost, earlier: str) -> None:
    """The winner's file is written, in the place of an earlier one's or of none; no more."""
    host.begin(UNIT, TEXT)
    notes = host.places_of("gpu-reclaim/keeping")
    notes.mkdir()
    (notes / f"{UNIT}.path").write_text(f"{tuned_file(host)}\n")
    if earlier:
        (notes / f"{UNIT}.before").write_text(earlier)
    tuned_file(host).parent.mkdir(parents=True)
    tuned_file(host).write_text(TEXT)


def assert_undone(host: HeldHost, earlier: str) -> None:
    """The winner's file is gone, and an earlier one is back."""
    assert host.drop_ins(UNIT) == ([TUNED] if earlier else [])
    assert not earlier or tuned_file(host).read_text() == earlier


def test_whether_it_was_kept_already_is_seen(host: HeldHost) -> None:
    """An attempt whose answer was lost is not made again."""
    host.begin(UNIT, TEXT)
    assert not host.kept(UNIT, TEXT, lasting=True)
    host.keep(UNIT, TEXT, lasting=True)
    assert host.kept(UNIT, TEXT, lasting=True)
    assert not host.kept(UNIT, "[Service]\n", lasting=True)
    assert not host.kept(UNIT, TEXT, lasting=False)
    host.stop(UNIT)
    assert not host.kept(UNIT, TEXT, lasting=True)


@EARLIER
def test_a_keep_that_fails_leaves_what_was_there(host: HeldHost, earlier: str) -> None:
    """Here systemd refuses to reload; what runs stays on trial, and ends with the hold."""
    if earlier:
        tuned_file(host).parent.mkdir(parents=True)
        tuned_file(host).write_text(earlier)
    host.begin(UNIT, TEXT)
    (host.home / "stale").touch()
    answer = host.keep(UNIT, TEXT, lasting=True)
    assert (answer.status, answer.why.split()[0]) == ("unset", str(tuned_file(host)))
    (host.home / "stale").unlink()
    assert host.drop_ins(UNIT) == sorted([TRIAL, *([TUNED] if earlier else [])])
    assert host.restore()[0] == "done"
    assert host.state(UNIT) == "active"
    assert_undone(host, earlier)


@EARLIER
def test_a_keep_that_was_cut_is_undone(host: HeldHost, earlier: str) -> None:
    cut_in_the_keep(host, earlier)
    host.expire()
    host.dead_man()
    assert host.state(UNIT) == "active"
    assert_undone(host, earlier)
    assert host.traces == []


def test_files_after_ours_are_still_seen_as_they_are(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = HeldHost(tmp_path)
    monkeypatch.setenv("PATH", f"{host.tools}:/usr/bin:/bin")
    host.unit(UNIT)
    late = tuned_file(host).with_name("zzzz-limits.conf")
    late.parent.mkdir(parents=True)
    late.write_text("[Service]\nLimitNOFILE=1000\n")
    host.take(UNIT)
    host.stop(UNIT)
    host.begin(UNIT, TEXT)
    host.keep(UNIT, TEXT, lasting=True)
    host.stop(UNIT)
    assert host.restore() == ("done", {UNIT: "started"})

    host.take(UNIT)
    host.stop(UNIT)
    late.write_text("[Service]\nLimitNOFILE=2\n")
    assert host.restore() == ("done", {UNIT: "edited"})


def test_what_systemd_does_not_reload_is_not_started(host: HeldHost) -> None:
    """It would start with the trial's flags, and be told as put back."""
    host.begin(UNIT, TEXT)
    (host.home / "stale").touch()
    assert host.restore() == ("failed", {UNIT: "failed", OTHER: "failed"})
    assert host.state(UNIT) == "inactive"
    (host.home / "stale").unlink()
    assert host.restore() == ("done", {UNIT: "started", OTHER: "started"})
    assert host.traces == []


def test_a_trial_that_does_not_stop_is_told_and_not_taken_for_the_unit(host: HeldHost) -> None:
    """It runs with flags that are not its own; once it does stop, the unit comes back."""
    stub(host.tools, "sleep", ":")
    host.begin(UNIT, TEXT)
    deaf = host.home / f"{UNIT}.deaf"
    deaf.touch()
    assert host.restore() == ("failed", {UNIT: "failed", OTHER: "started"})
    assert host.drop_ins(UNIT) == []
    assert host.places_of("gpu-reclaim/trials").read_text() == f"{UNIT}\n"
    deaf.unlink()
    assert host.restore() == ("done", {UNIT: "started"})
    assert host.traces == []


@EARLIER
def test_a_keep_that_cannot_be_undone_is_told_and_tried_again(host: HeldHost, earlier: str) -> None:
    """/etc became read-only: the server runs on meanwhile, for it could only come back the same."""
    cut_in_the_keep(host, earlier)
    for tool in ("rm", "mv", "cp"):
        refusal = f'case "$*" in *{TUNED}*) exit 1;; esac\nexec /bin/{tool} "$@"'
        stub(host.tools, tool, refusal)
    starts = len(host.started)
    assert host.restore() == ("failed", {UNIT: "failed", OTHER: "started"})
    assert tuned_file(host).read_text() == TEXT
    assert (host.state(UNIT), len(host.started)) == ("active", starts + 1)

    for tool in ("rm", "mv", "cp"):
        (host.tools / tool).unlink()
    assert host.restore() == ("done", {UNIT: "started"})
    assert_undone(host, earlier)
    assert host.traces == []
