r"""Putting back what a hold stopped: the script that does it, also with no client left.

The same text serves a client, who sends it, and the host's own dead-man timer, which runs it from
/run/gpu-reclaim/restore. It needs a POSIX shell, coreutils and systemctl.

What is on a host while it is held:

    /run/gpu-reclaim/lease       who holds it and until when, for everybody to read
    /run/gpu-reclaim/hold        as long as it is there, no held unit starts
    /run/gpu-reclaim/restore     this script
    /run/gpu-reclaim/retry       when to try again, after a unit did not start
    /run/gpu-reclaim-lock        link to `PID:START` of the one script that works at it
    /run/gpu-reclaim/trials      units that were started with other flags, to be stopped first
    /run/systemd/system/UNIT.d/50-gpu-reclaim-hold.conf
    /run/systemd/system/UNIT.d/zzz-gpu-reclaim-trial.conf
    /var/lib/gpu-reclaim/record  what to put back; survives a restart of the host

What a tuning leaves on purpose, and nothing here takes away:

    /etc/systemd/system/UNIT.d/zz-gpu-reclaim.conf   a winner's flags (or /run, until a reboot)
    /etc/systemd/system/UNIT.d/zz-gpu-reclaim-moe.conf   and its MoE kernel configs, which are in
    /var/lib/gpu-reclaim-moe/UNIT/
    /var/lib/gpu-reclaim-tuning/UNIT/KEY/            what was measured

A unit is started without its dependencies (`--job-mode=ignore-dependencies`): exactly what was
stopped comes back, and nothing that was down before. The order of the record stands in for
systemd's own.
"""

from __future__ import annotations

from typing import get_args

from gpu_reclaim.commands import PATHS, Section
from gpu_reclaim.lease import HOST, PRELUDE, TRIAL_FILE, Places
from gpu_reclaim.models import RestoredUnit, RestoreOutcome

START_LIMIT_S = 120
"""Longest wait for one unit to be up, in seconds; its start goes on afterwards."""

TIMER = "gpu-reclaim-deadman"

STAGE = "gpureclaim.slice"
"""Control group of what may use the GPUs while they are held; ended before anything is put back. (A
dash in a slice's name would make it a part of another slice.)"""

STAGE_COMMAND = ("systemd-run", "--quiet", "--scope", "--collect", f"--slice={STAGE}", "--")
"""What a command on the host is begun with, so that its processes are known to be the stage's: they
are no intruders, and are ended before anything is put back."""

STAGE_GRACE_S = 4
"""How long a stage's processes have after TERM, in seconds."""

EVERY_S = 5
"""How often the dead-man timer looks at the lease, in seconds."""


_RESTORE = r"""
drop() {
  rm -f "$1"
  [ ! -d "${1%/*}" ] || [ -n "$(ls -A "${1%/*}")" ] || rmdir "${1%/*}"
}

# From the next reload on it cannot be started while the hold is there.
hold_back() {
  mkdir -p "$UNITS/$1.d" &&
    printf '[Unit]\nAssertPathExists=!%s\n' "$RUN/hold" >"$UNITS/$1.d/$HOLD"
}

# What is on trial runs with flags that are not its own, so it does not count as back.
end_trials() {
  [ -e "$RUN/trials" ] || return 0
  for name in $(cat "$RUN/trials"); do drop "$UNITS/$name.d/$TRIAL"; done
  for name in $(cat "$RUN/trials"); do undo_keep "$name" || unkept="$unkept $name "; done
  systemctl daemon-reload
  for name in $(cat "$RUN/trials"); do
    # It would only come back with the same flags.
    case "$unkept" in *" $name "*) continue;; esac
    timeout -k 1 @LIMIT@ systemctl --no-ask-password stop -- "$name"
    # Its workers may be spared by a stop, and are all of the trial.
    case "$(state "$name" ControlGroup)" in "") ;; *) systemctl kill -s KILL -- "$name";; esac
    tries=0
    while is_up "$name" && [ "$tries" -lt 50 ]; do sleep 0.2 || sleep 1; tries=$((tries + 1)); done
    ! is_up "$name" || stuck="$stuck $name "
  done
  [ -n "$stuck$unkept" ] || rm -f "$RUN/trials"
}

is_up() { case "$(state "$1" ActiveState)" in inactive | failed) return 1;; esac; }

# A keep that did not get to its end leaves no file that was not there before; status 1 where the
# file cannot be changed, and then what it was before stays at hand for the next try.
undo_keep() {
  [ -e "$RUN/keeping/$1.path" ] || return 0
  file=$(cat "$RUN/keeping/$1.path") before="$RUN/keeping/$1.before"
  if [ -e "$before" ]; then
    cp -p "$before" "$file.new" && mv "$file.new" "$file" || { rm -f "$file.new"; return 1; }
  else
    drop "$file"
    [ ! -e "$file" ] || return 1
  fi
  rm -f "$file.new" "$before" "$RUN/keeping/$1.path"
}

let_go() {
  rm -f "$RUN/hold"
  changed=
  set +f
  for file in "$UNITS"/*.d/"$HOLD"; do
    [ -e "$file" ] || continue
    drop "$file"
    changed=1
  done
  set -f
  [ -z "$changed" ] || systemctl daemon-reload
}

# A stop that was cut leaves the drop-in that keeps systemd from sending KILL; status 1 while the
# unit still stops, and needs it.
may_kill_again() {
  file="$UNITS/$1.d/gpu-reclaim-no-kill.conf"
  [ -e "$file" ] || return 0
  [ "$2" != deactivating ] || return 1
  drop "$file"
  systemctl daemon-reload
}

# PID:START is there, and not only a zombie.
lives() {
  [ -e "/proc/${1%%:*}/stat" ] || return 1
  case "$(sed 's/.*) //' "/proc/${1%%:*}/stat" | cut -d ' ' -f 1,20)" in
    Z*) return 1;;
    *" ${1#*:}") return 0;;
  esac
  return 1
}
living() { for who in $rest; do ! lives "$who" || printf '%s ' "$who"; done; }

# A stop that was cut, or a KillMode that spares workers, leaves some of the unit. Those alone are
# ended who were chosen for it before the stop.
end_rest() {
  rest=$(value "$LIB/record" "rest $(quoted "$1")")
  [ -n "$rest" ] && [ "$(value "$LIB/record" boot)" = "$(boot)" ] || return 0
  for sign in TERM KILL; do
    rest=$(living) tries=0
    for who in $rest; do kill -s "$sign" "${who%%:*}"; done
    while [ -n "$(living)" ] && [ "$tries" -lt 25 ]; do
      sleep 0.2 || sleep 1
      tries=$((tries + 1))
    done
  done
}

start_it() {
  # Refused starts count too, and a unit started too often is refused by systemd itself.
  # (Of a unit that is not loaded it keeps no count, and says so.)
  systemctl reset-failed -- "$1"
  timeout -k 1 @LIMIT@ systemctl --no-ask-password start --job-mode=ignore-dependencies -- "$1"
}

put_back() {
  case "$unkept" in
    *" $1 "*)
      is_up "$1" || start_it "$1"
      failing="$failing $1 " file=$(cat "$RUN/keeping/$1.path")
      tell "unit $1 failed it runs with $file, which cannot be taken back"
      return;;
  esac
  active=$(state "$1" ActiveState)
  case "$active/$stuck" in
    */*" $1 "*) failing="$failing $1 "; tell "unit $1 failed its trial does not stop"; return;;
    /*) failing="$failing $1 "; tell "unit $1 failed systemctl does not show it"; return;;
  esac
  case "$active" in
    active | reloading | refreshing | activating | maintenance)
      tell "unit $1 running"; return;;
  esac
  if [ "$(state "$1" LoadState)" = not-found ]; then tell "unit $1 gone"; return; fi
  may_kill_again "$1" "$active" || {
    failing="$failing $1 "; tell "unit $1 failed it is still stopping"; return
  }
  if [ "$(print_of "$1")" != "$2" ]; then tell "unit $1 edited"; return; fi
  # systemd may have refused to reload: it would start what is not there any more.
  [ "$(state "$1" NeedDaemonReload)" != yes ] || systemctl daemon-reload
  if [ "$(state "$1" NeedDaemonReload)" = yes ]; then
    failing="$failing $1 "; tell "unit $1 failed systemd does not reload its files"; return
  fi
  end_rest "$1"
  if start_it "$1"; then begun="$begun $1:0"; else begun="$begun $1:$?"; fi
}

# What ends as soon as it was started did not come back.
look_again() {
  [ -z "$begun" ] || sleep 1
  for row in $begun; do
    name=${row%:*} code=${row##*:}
    active=$(state "$name" ActiveState) sub=$(state "$name" SubState)
    again=$(state "$name" NRestarts)
    case "$active/$sub/$code/${again:-0}" in
      failed/* | */auto-restart/* | inactive/*/[!0]*/* | */[1-9] | */[1-9][0-9]*)
        failing="$failing $name "
        tell "unit $name failed it is $active ($sub), restarted ${again:-0} times";;
      active/* | inactive/*) tell "unit $name started";;
      *) tell "unit $name started it is still $active ($sub)";;
    esac
  done
}

# What a stage started is ended before a service that needs the GPUs is started again.
end_stage() {
  case "$(state @STAGE@ ActiveState)" in active | deactivating) ;; *) return 0;; esac
  timeout -k 1 @GRACE@ systemctl --no-ask-password stop -- @STAGE@ || {
    systemctl kill -s KILL -- @STAGE@
    timeout -k 1 @GRACE@ systemctl --no-ask-password stop -- @STAGE@
  }
}

# All that is on the record, each with a line on what became of it; status 1 when one failed.
restore_record() {
  stuck= unkept=
  end_stage
  end_trials
  let_go
  failing= begun=
  [ -e "$LIB/record" ] || return 0
  while read -r word name role enabled print <&3; do
    [ "$word $role" != "unit restore" ] || put_back "$name" "$print" 3<&-
  done 3<"$LIB/record"
  look_again
  if ! whole "$LIB/record"; then
    tell "unit (record) failed $LIB/record was cut: what is missing in it nobody knows"
    return 1
  fi
  [ -n "$failing" ] || { rm -f "$LIB/record"; return 0; }
  while IFS= read -r line; do
    name=${line#unit }
    case "$line/$failing" in
      "unit "*/*" ${name%% *} "* | [!u]* | url*) printf '%s\n' "$line";;
    esac
  done <"$LIB/record" >"$LIB/record.new"
  # Rather the old one again, with what is back already, than a part of the new one.
  ! whole "$LIB/record.new" || mv "$LIB/record.new" "$LIB/record"
  rm -f "$LIB/record.new"
  return 1
}

# The timer goes last: until then it would finish what is broken off here.
leave_no_trace() {
  rm -rf "$LIB"
  rm -f "$RUN/lease" "$RUN/retry"
  [ "$(state @TIMER@.timer ActiveState)" = inactive ] || systemctl stop @TIMER@.timer
  rm -rf "$RUN"
}

try_later() {
  [ -d "$RUN" ] || return 0
  wait=$(value "$RUN/retry" wait); wait=$((${wait:-15} * 2))
  [ "$wait" -le 600 ] || wait=600
  printf 'wait %s\nat %s\n' "$wait" "$(($(now) + wait))" >"$RUN/retry"
  [ ! -e "$RUN/lease" ] || {
    sed 's/^expires_uptime .*/expires_uptime 0/' "$RUN/lease" >"$RUN/lease.new"
    mv "$RUN/lease.new" "$RUN/lease"
  }
}

# `expired`: only if nobody holds the host; `any`: whoever does; `run:ID`: if that run does; else
# the token of who does.
restore() {
  if [ "$1" = expired ]; then
    NOTE='<4>gpu-reclaim: '
    if valid; then exit 0; fi
    later=$(value "$RUN/retry" at)
    [ "$(now)" -ge "${later:-0}" ] || exit 0
    lock 0 || exit 0
    if valid; then unlock; exit 0; fi
  else
    lock 300 || { tell status busy; exit 0; }
  fi
  trap unlock EXIT
  trap 'exit 143' INT TERM
  file="$RUN/lease"; [ -e "$file" ] || file="$LIB/record"
  token=$(value "$file" token)
  case "$1" in
    expired | any | "${token:-$1}") ;;
    run:*)
      case " $(value "$file" runs) " in
        *" ${1#run:} "*) ;;
        *) tell status other; exit 0;;
      esac;;
    *) tell status other; exit 0;;
  esac
  [ ! -e "$file" ] || { tell "owner $(value "$file" owner)"; tell "url $(value "$file" url)"; }
  if [ ! -e "$file" ] && [ ! -e "$RUN" ]; then let_go; tell status nothing; exit 0; fi
  if restore_record; then leave_no_trace; tell status done; else try_later; tell status failed; fi
}
"""


def filled(text: str, places: Places = HOST) -> str:
    """Shell text with the places and limits in it."""
    values = {
        "RUN": places.run,
        "LIB": places.lib,
        "ETC": places.etc,
        "TRIAL": TRIAL_FILE,
        "LIMIT": str(START_LIMIT_S),
        "TIMER": TIMER,
        "STAGE": STAGE,
        "GRACE": str(STAGE_GRACE_S),
    }
    for name, value in values.items():
        text = text.replace(f"@{name}@", value)
    return text


def functions(places: Places = HOST) -> str:
    """Shell functions that take, prove and restore share."""
    return filled(PRELUDE + _RESTORE, places)


def script_file(places: Places = HOST) -> str:
    """The whole of /run/gpu-reclaim/restore."""
    head = "# Puts back what a run of gpu-reclaim stopped. By hand: sh restore any"
    path = f'PATH="$PATH:{PATHS}"; LC_ALL=C; LANG=C; export PATH LC_ALL LANG'
    return "\n".join([head, path, functions(places), 'restore "${1:-any}"', ""])


def parse_units(section: Section) -> list[RestoredUnit]:
    """What became of each unit."""
    rows = [line.split(" ", 2) for line in section.lines("unit")]
    return [
        RestoredUnit.model_validate(
            {"unit": row[0], "outcome": row[1], "detail": row[2] if row[2:] else ""}
        )
        for row in rows
        if row[1:] and row[1] in get_args(RestoreOutcome)
    ]
