"""The scripts of jobs, as shell text; they go on where the functions of `restoring` end."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence

PUT = r"""
umask 077
put() { printf '%s' "$2" >"$FOLDER/$1.new" && mv "$FOLDER/$1.new" "$FOLDER/$1"; }
uptime() { read -r up rest </proc/uptime; printf '%s\n' "$up"; }
"""
"""Writing a file of a job, whole or not at all; and the time that both files and looks are in."""

START = r"""
ours || { show_lease; tell status lost; exit 0; }
case "$(state "$UNIT" ActiveState)/$(state "$UNIT" Job)" in
  /*) tell status unset; tell "why systemctl does not show $UNIT"; exit 0;;
  inactive/ | failed/) ;;
  *)
    # Started before, and the answer was lost.
    [ "$(cat "$FOLDER/token")" != "$TOKEN" ] || { tell status taken; exit 0; }
    tell status running; tell "why $UNIT runs since an earlier hold"; exit 0;;
esac
others() {
  ( cd "$FOLDER" &&
    find . -mindepth 1 -maxdepth 1 ! -name cache ! -name token ! -name token.new "$@" )
}
# All but the cache is deleted, so it must be a job's. The old code goes before the new token comes:
# a start that is cut must not leave them side by side.
make_room() {
  mkdir -p "$FOLDER" || return 1
  [ -e "$FOLDER/token" ] || [ -z "$(others)" ] || { why="$FOLDER is no job's folder"; return 1; }
  rm -f "$FOLDER/code" && put token "$TOKEN" && others -exec rm -rf {} \; && [ -z "$(others)" ]
}
launch() {
  why=$(systemd-run --quiet --collect --no-block --unit="$UNIT" --slice=@STAGE@ \
    --description='gpu-reclaim: a job on held GPUs' -p WorkingDirectory="$FOLDER" \
    -p RuntimeMaxSec="$LIFE" -p TimeoutStopSec="$GRACE" -p KillMode=control-group -p Restart=no \
    -p StandardInput=null -p StandardOutput=null -p StandardError=null \
    -- /bin/sh ./run.sh 2>&1)
}
why='its folder could not be written'
# A unit that failed earlier may still be known by that name; most often none is.
make_room && fill && { systemctl reset-failed -- "$UNIT" 2>/dev/null || :; } && launch &&
  tell status taken || {
    tell status unset
    tell "why $UNIT could not be started: $(printf '%s\n' "$why" | head -n 1)"
  }
"""
"""Start a job's unit; goes on after `PUT` and a function `fill` that writes its files."""

LOOK = r"""
one_line() { [ ! -e "$FOLDER/$1" ] || tell "$NAME $1 $(head -n 1 "$FOLDER/$1")"; }
new_text() {
  [ -f "$FOLDER/log" ] || return 0
  size=$(wc -c <"$FOLDER/log"); size=${size:-0}
  [ "$from" -le "$size" ] || from=0
  [ "$((size - from))" -le @MOST@ ] || from=$((size - @MOST@))
  tell "$NAME from $from"
  # In hexadecimal, so that nothing in it can be taken for a line of ours. It grows meanwhile.
  printf '%s hex ' "$NAME"
  tail -c "+$((from + 1))" "$FOLDER/log" 2>/dev/null | head -c "$((size - from))" |
    od -An -v -tx1 | tr -d ' \n'
  echo
}
files() {
  ( cd "$FOLDER" && find . -mindepth 1 -maxdepth 1 -type f -name '*.json' ! -name '*
*' ) | sort | sed "s/^\.\//$NAME file /"
}
# The unit first: what one that has ended left is then complete.
look_at() {
  NAME=$1 FOLDER=$2 from=$3
  tell "$NAME state $(state "@PREFIX@$NAME.service" ActiveState)"
  [ -d "$FOLDER" ] || return 0
  for each in code began ended gpu token; do one_line "$each"; done
  tell "$NAME now $(uptime)"
  new_text
  files
}
"""
"""Functions that print a job's state; go on after `PUT`."""

READ = r"""
[ -f "$FILE" ] && [ "$(wc -c <"$FILE")" -le @MOST@ ] || exit 0
printf 'hex '
od -An -v -tx1 <"$FILE" | tr -d ' \n'
echo
"""
"""Print a file."""

END = r"""
ours || { show_lease; tell status lost; exit 0; }
# (Of a unit that is gone by now it says so, and stops the others all the same.)
timeout -k 1 @STOP@ systemctl --no-ask-password stop -- $UNITS_OF_JOBS
left=
for name in $UNITS_OF_JOBS; do
  ! is_up "$name" || { left="$left $name"; systemctl kill -s KILL -- "$name"; }
done
still=
for name in $left; do
  tries=0
  while is_up "$name" && [ "$tries" -lt 25 ]; do sleep 0.2 || sleep 1; tries=$((tries + 1)); done
  ! is_up "$name" || still="$still $name"
done
[ -n "$still" ] || { tell status taken; exit 0; }
tell status unset
tell "why not stopped:$still"
"""
"""Stop jobs' units."""


def run_script(argv: Sequence[str], env: Mapping[str, str], limit_s: int, kill_after_s: int) -> str:
    """What a job's unit runs: the command under its limit, then a note of how it ended.

    Args:
        argv: The command.
        env: Its variables; the script itself goes without them.
        limit_s: Seconds until it is sent TERM.
        kill_after_s: Seconds from then to KILL.
    """
    exports = [f"  export {name}={shlex.quote(value)}" for name, value in env.items()]
    lines = [
        "umask 077",
        "(",
        *exports,
        f"  exec timeout -k {kill_after_s} {limit_s} {shlex.join(argv)}",
        ") </dev/null >log 2>&1",
        "code=$?",
        "read -r up rest </proc/uptime",
        "printf '%s\\n' \"$up\" >ended",
        "printf '%s\\n' \"$code\" >code.new && mv code.new code",
    ]
    return "\n".join([*lines, ""])
