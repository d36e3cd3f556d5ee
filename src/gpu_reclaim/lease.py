"""Who works at a host: places, lease and lock, as shell functions that every script of a hold has.

The lock is a link to `PID:START` of the script that works, made in one step with its content. A
script that died leaves it, and is known to be dead by its start time.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Places:
    """Where things are on the host; tests put them elsewhere."""

    run: str = "/run"
    lib: str = "/var/lib"
    etc: str = "/etc"


HOST = Places()


def places_in(folder: str) -> Places:
    """Those below a folder that stands in for /run, /var/lib and /etc; the host's own for none."""
    return Places(folder, f"{folder}/lib", f"{folder}/etc") if folder else HOST


PRELUDE = r"""
set -f
umask 022
# Whoever asked may be gone before the end; what is begun here is finished all the same.
trap '' PIPE HUP
RUN=@RUN@/gpu-reclaim LOCK=@RUN@/gpu-reclaim-lock UNITS=@RUN@/systemd/system
LIB=@LIB@/gpu-reclaim HOLD=50-gpu-reclaim-hold.conf NOTE=
ETC=@ETC@/systemd/system TRIAL=@TRIAL@ TUNED='zz-gpu-reclaim[-a-z]*[.]conf'
now() { read -r up rest </proc/uptime; printf '%s\n' "${up%%.*}"; }
started() { sed 's/.*) //' "/proc/$1/stat" | cut -d ' ' -f 20; }
# A container that starts anew keeps the machine's boot id, but its first process is another.
boot() { printf '%s-%s\n' "$(cat /proc/sys/kernel/random/boot_id)" "$(started 1)"; }
value() { [ ! -e "$1" ] || sed -n "s/^$2 //p" "$1"; }
state() { systemctl show --no-pager -p "$2" -- "$1" | sed -n "s/^$2=//p"; }
quoted() { printf '%s' "$1" | sed 's/[.\\]/\\&/g'; }
# A record without its last line was cut: a full disk, or a tool that hides it.
whole() { [ "$(tail -n 1 "$1")" = end ]; }
# Files of ours are no edit of others; nor are empty lines. (The hold space has the file's name.)
print_of() {
  systemctl --no-pager cat -- "$1" |
    sed -e '/^# \//h' -e x -e "/^# \\/.*\\/$TUNED\$/{" -e x -e d -e '}' -e x -e '/^$/d' | cksum
}
tell() { printf '%s%s\n' "$NOTE" "$*"; }

lock() {
  mine="$$:$(started $$)"; tries=0
  while :; do
    holder=$(readlink "$LOCK"); pid=${holder%%:*}
    if [ -z "$holder" ]; then
      ! ln -s "$mine" "$LOCK" || return 0
    elif [ "$holder" = "$mine" ]; then
      return 0
    elif [ ! -e "/proc/$pid/stat" ] || [ "$(started "$pid")" != "${holder#*:}" ]; then
      # Its holder is dead; of those who see that, one alone can move it away.
      if mv "$LOCK" "$LOCK.$$"; then
        moved=$(readlink "$LOCK.$$")
        [ "$moved" = "$holder" ] || ln -s "$moved" "$LOCK"
        rm -f "$LOCK.$$"
        continue
      fi
    fi
    tries=$((tries + 1))
    [ "$tries" -le "$1" ] || return 1
    sleep 0.2 || sleep 1
  done
}
unlock() { [ "$(readlink "$LOCK")" != "$mine" ] || rm -f "$LOCK"; }

# The lease is there, of this boot, and not over.
valid() {
  [ -e "$RUN/lease" ] && [ "$(value "$RUN/lease" boot)" = "$(boot)" ] || return 1
  until=$(value "$RUN/lease" expires_uptime)
  [ "$(now)" -lt "${until:-0}" ]
}
"""
"""Settings and functions; the words between two `@` are filled in."""

TRIAL_FILE = "zzz-gpu-reclaim-trial.conf"
"""Drop-in of a trial, in /run. systemd applies drop-ins by name: this one comes after that of
`systemctl edit` (override.conf) and after `TUNED_FILE`."""

TUNED_FILE = "zz-gpu-reclaim.conf"
"""Drop-in of a setting of speculative decoding that won."""

MOE_FILE = "zz-gpu-reclaim-moe.conf"
"""Drop-in of MoE kernel configs that won: apart from the former, for both may be in force."""
