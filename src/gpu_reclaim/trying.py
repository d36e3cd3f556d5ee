"""A unit started with other flags while its host is held: the scripts, as shell text.

A drop-in in /run, which a reboot clears, gives the unit its other flags and takes the place of the
hold's. Whatever ends the hold stops what was on trial first (`restoring`), so nobody has to
remember anything, and the unit's own files are never touched.
"""

from __future__ import annotations

import shlex

from gpu_reclaim.commands import Section
from gpu_reclaim.holding import Claim
from gpu_reclaim.lease import HOST, Places
from gpu_reclaim.restoring import filled, functions
from gpu_reclaim.taking import OURS

_SAME = r"""
same() { [ -e "$1" ] && [ "$(cat "$1"; echo .)" = "$TEXT." ]; }
"""

_WRITE = r"""
ours || { show_lease; tell status lost; exit 0; }
# Flags may hold a key, so nobody else reads the file; systemd does.
write() {
  mkdir -p "${1%/*}" && ( umask 077; printf '%s' "$TEXT" >"$1.new" ) && mv "$1.new" "$1" ||
    { rm -f "$1.new"; return 1; }
}
"""

_BEGIN = r"""
file="$UNITS/$UNIT.d/$TRIAL" active=$(state "$UNIT" ActiveState)
case "$active" in
  inactive | failed) ;;
  *)
    # Begun before, and the answer was lost.
    ! same "$file" || { tell status taken; exit 0; }
    tell status running; tell "why it is $active"; exit 0;;
esac
grep -qxF -- "$UNIT" "$RUN/trials" || printf '%s\n' "$UNIT" >>"$RUN/trials" &&
  write "$file" && rm -f "$UNITS/$UNIT.d/$HOLD" && systemctl daemon-reload &&
  { systemctl reset-failed -- "$UNIT" || :; } &&
  systemctl --no-ask-password start --no-block --job-mode=ignore-dependencies -- "$UNIT" &&
  tell status taken || { tell status unset; tell "why it could not be started"; }
"""

_CLOSE = r"""
for name in $(cat "$RUN/trials"); do
  drop "$UNITS/$name.d/$TRIAL"
  hold_back "$name" || { tell status unset; exit 0; }
done
systemctl daemon-reload && tell status taken || tell status unset
"""

_KEEP = r"""
command_of() { state "$UNIT" ExecStart | sed 's/ ; ignore_errors=.*//'; state "$UNIT" Environment; }
file="@FOLDER@/$UNIT.d/@FILE@" old=$(command_of) trial=$(cat "$UNITS/$UNIT.d/$TRIAL")
save() {
  mkdir -p "$RUN/keeping" && { [ ! -e "$file" ] || cp -p "$file" "$RUN/keeping/$UNIT.before"; } &&
    printf '%s\n' "$file" >"$RUN/keeping/$UNIT.path"
}
# Another file may come after ours in systemd's order: what it would start must be what runs.
if save && write "$file" && drop "$UNITS/$UNIT.d/$TRIAL" && systemctl daemon-reload &&
  [ "$(command_of)" = "$old" ] &&
  { grep -vxF -- "$UNIT" "$RUN/trials" >"$RUN/trials.new" || :; } &&
  mv "$RUN/trials.new" "$RUN/trials" && rm -rf "$RUN/keeping"; then
  timeout 10 sync "$file" || :
  tell status taken
else
  # What runs stays on trial, and is stopped with it.
  undo_keep "$UNIT"
  TEXT="$trial
" && write "$UNITS/$UNIT.d/$TRIAL"
  systemctl daemon-reload
  tell status unset
  tell "why $file could not be made what systemd starts the unit with"
fi
"""

_KEPT = r"""
if same "@FOLDER@/$UNIT.d/@FILE@" && [ ! -e "$UNITS/$UNIT.d/$TRIAL" ] &&
  ! grep -qxF -- "$UNIT" "$RUN/trials" && [ "$(state "$UNIT" ActiveState)" = active ]; then
  echo kept yes
fi
"""

_LOOK = r"""
show() { sed "s/^/$1 /"; }
systemctl show --no-pager -p ActiveState,SubState,Result,ExecMainStatus,InvocationID -- "$UNIT" |
  tr '=' ' ' | show state
"""

_JOURNAL = r"""
run=$(state "$UNIT" InvocationID)
case "$run" in
  "") journalctl --no-pager -o cat -n @LINES@ -u "$UNIT";;
  *) journalctl --no-pager -o cat -n @LINES@ "_SYSTEMD_INVOCATION_ID=$run";;
esac | sed 's/^/journal /'
"""


def begin(claim: Claim, unit: str, text: str, *, places: Places = HOST) -> str:
    """Shell text that starts a held unit with a drop-in; systemd is not waited for.

    Args:
        claim: Whose hold it is.
        unit: The unit's own name.
        text: The drop-in.
        places: Where things are.
    """
    return _joined(claim, _named(unit, text), _BEGIN, places)


def close(claim: Claim, *, places: Places = HOST) -> str:
    """Shell text after which no unit on trial can be started again; what runs goes on running."""
    return _joined(claim, "UNIT= TEXT=", _CLOSE, places)


def keep(
    claim: Claim, unit: str, text: str, *, file: str, lasting: bool, places: Places = HOST
) -> str:
    """Shell text that makes what is on trial the unit's own setting; it goes on running.

    Args:
        claim: Whose hold it is.
        unit: The unit's own name.
        text: The drop-in.
        file: Its name.
        lasting: Write it to /etc; else to /run.
        places: Where things are.
    """
    return _joined(claim, _named(unit, text), _filed(_KEEP, file, lasting), places)


def kept(unit: str, text: str, *, file: str, lasting: bool, places: Places = HOST) -> str:
    """Shell text that looks whether that was done already; touches nothing."""
    body = _filed(_KEPT, file, lasting)
    return "\n".join([functions(places), _named(unit, text), _SAME, filled(body, places)])


def _filed(body: str, file: str, lasting: bool) -> str:
    return body.replace("@FOLDER@", "$ETC" if lasting else "$UNITS").replace("@FILE@", file)


def look(unit: str, *, places: Places = HOST) -> str:
    """Shell text that prints a unit's state; touches nothing."""
    return "\n".join([functions(places), f"UNIT={shlex.quote(unit)}", _LOOK])


def journal(unit: str, lines: int, *, places: Places = HOST) -> str:
    """Shell text that prints the last lines of what the unit's present or last run said."""
    body = _JOURNAL.replace("@LINES@", str(lines))
    return "\n".join([functions(places), f"UNIT={shlex.quote(unit)}", body])


def parse_state(section: Section) -> dict[str, str]:
    """The unit's properties."""
    return dict(line.split(" ", 1) for line in section.lines("state") if " " in line)


def _named(unit: str, text: str) -> str:
    return f"UNIT={shlex.quote(unit)} TEXT={shlex.quote(text)}"


def _joined(claim: Claim, names: str, body: str, places: Places) -> str:
    head = [functions(places), claim.shell(), names, OURS, _SAME, _WRITE]
    return "\n".join([*head, filled(body, places)])
