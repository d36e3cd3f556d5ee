"""The scripts of a hold, as shell text; they go on where the functions of `restoring` end.

`taken` is the one good answer of each; what else a script may answer is said in `holding.Answer`.
"""

from __future__ import annotations

OURS = r"""
lock 100 || { tell status busy; exit 0; }
trap unlock EXIT
trap 'exit 143' INT TERM
token() { value "$1" token; }
# "lease WORD VALUE" for each line of it.
show_lease() { [ ! -e "$RUN/lease" ] || sed 's/^/lease /' "$RUN/lease"; }
ours() { valid && [ "$(token "$RUN/lease")" = "$TOKEN" ] && [ -e "$RUN/hold" ]; }
date_of() { date -d "@$1" '+%Y-%m-%d %H:%M:%S %z'; }
write_lease() {
  at=$(date +%s)
  printf '%s\n' "token $TOKEN" "owner $OWNER" "url $URL" "runs $RUNS" \
    "since $(date_of "${1:-$at}")" "since_s ${1:-$at}" "expires $(date_of $((at + TTL)))" \
    "expires_uptime $(($(now) + TTL))" "boot $(boot)" >"$RUN/lease.$$" &&
    chmod 644 "$RUN/lease.$$"
}
renew() {
  OWNER=$(value "$RUN/lease" owner) URL=$(value "$RUN/lease" url) RUNS=$(value "$RUN/lease" runs)
  write_lease "$(value "$RUN/lease" since_s)" && mv "$RUN/lease.$$" "$RUN/lease"
}
"""
"""What take, prove and renew begin with: the lock, and the lease."""

TAKE = r"""
# Sets `role`: whether a unit is to be put back later. One that is just stopping is not.
role_of() {
  case "$(state "$1" ActiveState)" in
    inactive | failed | deactivating) role=hold;;
    "") tell status unshown; tell "why systemctl does not show $1"; exit 0;;
    *) role=restore;;
  esac
}
line_of() {
  case "$carried" in
    *" $1 "*) sed -n "/^unit $(quoted "$1") /p" "$LIB/record";;
    *)
      enabled=$(systemctl --no-pager is-enabled -- "$1" | head -n 1)
      printf '%s\n' "unit $1 $role ${enabled:--} $(print_of "$1")";;
  esac
}
remember() { case " $all " in *" $1 "*) return 1;; esac; all="$all $1"; }

# Sets `before`, `units` and `after`: lines of the record. A socket comes before its service,
# which could not take it over otherwise.
choose() {
  before= units= after= all=
  for unit in $ORDER; do
    role_of "$unit"
    case " $OWN /$role" in *" $unit "* | */restore) ;; *) continue;; esac
    remember "$unit" || continue
    units="$units$(line_of "$unit")
"
    for trigger in $(state "$unit" TriggeredBy); do
      remember "$trigger" || continue
      role_of "$trigger"
      case "$trigger" in
        *.socket) before="$before$(line_of "$trigger")
";;
        *) after="$after$(line_of "$trigger")
";;
      esac
    done
  done
  # What a former restore could not start stays on the record, whoever holds the host.
  for name in $carried; do
    remember "$name" && units="$units$(line_of "$name")
"
  done
}

write_record() {
  # A lock alone stops nothing, and has nothing to put back.
  [ -n "$all" ] || return 0
  mkdir -p -m 700 "$LIB" && chmod 700 "$LIB" || return 1
  (
    umask 077
    printf '%s\n' "boot $(boot)" "token $TOKEN" "owner $OWNER" "url $URL" "runs $RUNS" \
      "since $(date_of "$(date +%s)")" "$before$units$after" "$REST" end |
      sed '/^$/d' >"$LIB/record.new"
  ) && whole "$LIB/record.new" && mv "$LIB/record.new" "$LIB/record" || return 1
  # Should power fail, it must be on the disk; but nothing is stopped for a slow disk's sake.
  timeout 10 sync "$LIB/record" || :
}

write_restore() {
  cat >"$RUN/restore.new" <<'@gr-restore'
@SCRIPT@
@gr-restore
  chmod 700 "$RUN/restore.new" && mv "$RUN/restore.new" "$RUN/restore"
}

dead_man() {
  case "$(state @TIMER@.timer ActiveState)" in active) return 0;; esac
  systemd-run --quiet --collect --unit=@TIMER@ \
    --description='gpu-reclaim: puts back what was stopped, once nobody holds the host' \
    --on-active=@EVERY@ --on-unit-inactive=@EVERY@ --timer-property=AccuracySec=1s \
    --property=LogLevelMax=warning /bin/sh "$RUN/restore" expired
}

set_hold() {
  : >"$RUN/hold" || return 1
  [ -n "$all" ] || return 0
  for unit in $all; do
    hold_back "$unit" || return 1
  done
  systemctl daemon-reload
}

take() {
  if [ -e "$RUN/lease" ] && valid && [ "$(token "$RUN/lease")" != "$TOKEN" ]; then
    show_lease; tell status held; exit 0
  fi
  if ours && [ "$(token "$LIB/record")" = "$TOKEN" ]; then
    renew && show_lease && tell status taken
    return
  fi
  carried=
  if [ -e "$RUN/lease" ] || [ -e "$LIB/record" ]; then
    file="$LIB/record"; [ -e "$file" ] || file="$RUN/lease"
    # What a broken attempt of this very claim left is no news; its owner is then left out.
    [ "$(token "$file")" = "$TOKEN" ] || tell "owner $(value "$file" owner)"
    restore_record || carried=" $(sed -n 's/^unit \([^ ]*\) .*/\1/p' "$LIB/record" | tr '\n' ' ') "
    rm -f "$RUN/lease" "$RUN/retry"
  fi
  choose
  mkdir -p "$RUN" && chmod 755 "$RUN" &&
    write_restore && { [ -z "$all" ] || dead_man; } &&
    write_lease && ln "$RUN/lease.$$" "$RUN/lease" && rm -f "$RUN/lease.$$" &&
    write_record && set_hold || {
      rm -f "$RUN/lease.$$"
      if [ -z "$all" ]; then rm -rf "$RUN"
      elif restore_record; then leave_no_trace; else try_later; fi
      tell status unset
      return
    }
  show_lease
  tell status taken
}
take
"""
"""Take the host: what is left over comes back first, the timer runs before anything is held."""

PROVE = r"""
ours || { show_lease; tell status lost; exit 0; }
broken=
for name in $(sed -n 's/^unit \([^ ]*\) .*/\1/p' "$LIB/record"); do
  # Without dependencies: if it can be started at all, nothing else shall be.
  timeout -k 1 @TRY@ systemctl --no-ask-password start --job-mode=ignore-dependencies -- "$name"
  code=$? active=$(state "$name" ActiveState)
  case "$code/$active" in
    0/* | */active | */activating | */reloading | */)
      broken=1
      tell "broken $name $active"
      timeout -k 1 @LIMIT@ systemctl --no-ask-password stop -- "$name";;
    *) tell "refused $name";;
  esac
done
[ -z "$broken" ] || { tell status broken; exit 0; }
renew && show_lease && tell status taken
"""
"""Try to start everything that is held."""

RENEW = r"""
ours || { show_lease; tell status lost; exit 0; }
renew && show_lease && tell status taken
"""
"""Prolong the lease, if the host is still ours."""

RELEASE = r"""
if [ "$(token "$RUN/lease")" = "$TOKEN" ]; then
  # What an earlier run left and could not be started is tried again by the timer.
  if [ -e "$LIB/record" ]; then let_go; try_later; else rm -rf "$RUN"; fi
fi
tell status taken
"""
"""Give up a lock that held no unit; nothing is started. Neither this nor taking such a lock needs
systemd."""

ONLY_OURS = r"""
(
@PRELUDE@
valid && [ "$(value "$RUN/lease" token)" = @TOKEN@ ]
) || { echo "lease lost"; exit @LOST@; }
"""
"""Ends a script that acts where the host is not ours any more: whoever sent it may have been held
up for longer than its lease, and what it stopped then nobody would put back."""

LOST = 76
"""Exit status of a part that did not act because the host is not ours."""

WHO = r"""
! valid || sed 's/^/lease /' "$RUN/lease"
"""
"""Print the lease, if it is not over; goes on after `lease.PRELUDE` alone."""

READ = r"""
[ ! -e "$RUN/lease" ] || sed 's/^/lease /' "$RUN/lease"
! valid || tell status taken
[ ! -e "$RUN/hold" ] || tell held
[ ! -e "$LIB/record" ] || sed -n 's/^unit /record /p' "$LIB/record"
"""
"""Print lease and record; touches nothing."""
