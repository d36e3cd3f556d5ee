"""Ending processes: TERM, wait, look again who it is, KILL, wait.

All of it is one script, so that a lost connection cannot leave the work half planned, and the
identity of each process (pid and start time, in the PID namespace it was seen in) is read right
before each signal with nothing but shell builtins in between. The waits are measured with
/proc/uptime, which needs no program to be started.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_reclaim.commands import Result, Section
from gpu_reclaim.errors import BadAnswer
from gpu_reclaim.models import Ended, Process

KILL_WAIT_S = 5
"""How long to wait after KILL before a process counts as one that does not die. An ordinary process
is gone within milliseconds; one that frees tens of GiB of pinned memory needs seconds."""

END = r"""
[ "$(readlink /proc/self/ns/pid)" = '@NAMESPACE@' ] || { echo 'refused namespace'; exit 78; }
look() {
  stat=; state=; threads=; start=
  [ -r "/proc/$1/stat" ] || return 1
  while IFS= read -r part || [ -n "$part" ]; do stat="$stat $part"; done < "/proc/$1/stat"
  set -- ${stat##*) }
  [ $# -ge 20 ] || return 1
  state=$1; threads=${18}; start=${20}
}
ticks=0
# Where /proc/uptime cannot be read, the pauses of the wait are counted instead.
now() {
  up=; read -r up rest < /proc/uptime
  case $up in
    *[0-9].[0-9]*) up=${up%.*}${up#*.};;
    *) ticks=$((ticks + 5)); up=$ticks;;
  esac
}
# A dead leader whose threads live on still holds everything, and can be signalled.
dead() { [ "$state" = X ] || { [ "$state" = Z ] && [ "$threads" -le 1 ]; }; }
there() { look "$1" && [ "$start" = "$2" ] && ! dead; }
signal() {
  look "$1" || { echo "gone $1"; return; }
  [ "$start" = "$2" ] || { echo "changed $1"; return; }
  ! dead || { echo "zombie $1"; return; }
  if kill -s "$3" "$1"; then echo "sent $1 $3"; else
    if there "$1" "$2"; then echo "denied $1"; else echo "gone $1"; fi
    return
  fi
  sent="$sent $1:$2"
  # A stopped process sees no TERM until it goes on.
  [ "$state" != T ] || kill -s CONT "$1"
}
wait_for() {
  now; until=$((up + $1))
  while :; do
    left=
    for one in $targets; do there "${one%:*}" "${one#*:}" && left="$left $one"; done
    targets=$left
    now
    [ -n "$targets" ] && [ "$up" -lt "$until" ] || return 0
    sleep 0.05 || sleep 1
  done
}
# Only who was sent a signal is waited for: of the others nothing will come.
each() { sent=; for one in $targets; do signal "${one%:*}" "${one#*:}" "$1"; done; targets=$sent; }
targets='@TARGETS@'
each TERM
wait_for @GRACE@
each KILL
wait_for @KILL_WAIT@
for one in $targets; do
  there "${one%:*}" "${one#*:}" || continue
  wchan=; [ ! -r "/proc/${one%:*}/wchan" ] || read -r wchan < "/proc/${one%:*}/wchan"
  echo "left ${one%:*} $state $wchan"
done
exit 0
"""


def end(processes: Sequence[Process], namespace: str, *, grace_s: float) -> str:
    """Shell text that ends processes.

    Args:
        processes: Whom, by pid and start time.
        namespace: The PID namespace they were seen in; in another one nothing is signalled.
        grace_s: Seconds between TERM and KILL.

    Raises:
        BadAnswer: The namespace is not what the kernel prints.
    """
    if not re.fullmatch(r"pid:\[[0-9]+\]", namespace):
        raise BadAnswer(f"{namespace!r} is no PID namespace; nothing was signalled")
    targets = " ".join(f"{process.pid}:{process.start_time}" for process in processes)
    return (
        END.replace("@NAMESPACE@", namespace)
        .replace("@TARGETS@", targets)
        .replace("@GRACE@", str(round(grace_s * 100)))
        .replace("@KILL_WAIT@", str(KILL_WAIT_S * 100))
    )


def time_limit_s(grace_s: float) -> float:
    """Limit for the script of `end`, in seconds."""
    return grace_s + KILL_WAIT_S + 30


def parse_end(
    result: Result, section: Section, processes: Sequence[Process], owners: dict[int, str], via: str
) -> list[Ended]:
    """What became of each process.

    Raises:
        BadAnswer: The script did not signal anybody, for example in another PID namespace.
    """
    if section.code != 0:
        raise BadAnswer(
            f"{result.where}: nothing was signalled: the PID namespace is not the one in which the "
            "processes were seen",
            remedy="run it again; if it happens again, look at how the host is reached",
            result=result,
        )
    return [_ended(process, section, owners.get(process.pid, ""), via) for process in processes]


def _ended(process: Process, section: Section, owner: str, via: str) -> Ended:
    said = {word: _said(section, word, process.pid) for word in ("sent", "left", *_WORDS)}
    sent = [rest[0] for rest in said["sent"] if rest]
    return Ended(
        pid=process.pid,
        start_time=process.start_time,
        name=process.name,
        owner=owner,
        signal=sent[-1] if sent else "",
        via=via,
        outcome=_outcome(sent, said["left"], [word for word in _WORDS if said[word]]),
        devices=process.devices,
        wchan=said["left"][0][1] if said["left"] and len(said["left"][0]) > 1 else "",
    )


_WORDS = ("denied", "changed", "zombie", "gone")


def _said(section: Section, word: str, pid: int) -> list[list[str]]:
    """What follows the pid on the lines about it that begin with a word."""
    rows = [line.split() for line in section.lines(word)]
    return [row[1:] for row in rows if row[:1] == [str(pid)]]


def _outcome(sent: list[str], left: list[list[str]], words: list[str]) -> str:
    if left:
        return left[0][0] if left[0] else "unknown"
    if sent and "denied" not in words:
        return "ended"
    return words[0] if words else "unknown"
