"""The script that looks through /proc: who holds NVIDIA devices, who belongs to a control group.

Holders are found by device number, through descriptors and mappings. Link texts only choose what is
worth a `stat`: following every descriptor would hang on a dead network file system. Needs a POSIX
shell, find, stat, grep, sed, sort, xargs and tr, of GNU or busybox; no awk, no ps, no python.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from dataclasses import dataclass

from gpu_reclaim.errors import BadInput

NVIDIA_MAJOR = 195
"""Character major of nvidia0.., nvidiactl and nvidia-modeset (Linux, devices.txt)."""


@dataclass(frozen=True)
class DeviceSet:
    """Which files count as GPU devices.

    Attributes:
        majors: Character device majors that always count.
        driver_names: A major that /proc/devices lists under a name beginning so counts too
            (nvidia-uvm and nvidia-caps have dynamic majors).
        path_prefixes: Files whose path begins so count whatever their number: for test machines
            without a driver. Under /dev only character devices do.
        nodes: Beginning of the nodes' usual paths, for fuser.
    """

    majors: tuple[int, ...] = (NVIDIA_MAJOR,)
    driver_names: tuple[str, ...] = ("nvidia",)
    path_prefixes: tuple[str, ...] = ()
    nodes: tuple[str, ...] = ("/dev/nvidia",)


NVIDIA = DeviceSet()

# Every process has these open; a GPU device is none of them.
_FD = r"^'?[0-9/task]+/fd/[0-9]+'? -> '?"
_COMMON = _FD + r"/dev/(null|zero|full|u?random|ptmx|pts/[0-9]+|tty[0-9]*|console)'?$"
_COMMON_MAPS = r" /dev/(zero|shm/)"

LONG_LIST = 60_000
"""Characters of arguments given to one program; Linux takes at least 128 KiB (execve(2))."""

SCAN = r"""
cd /proc || exit 1
echo "ns $(readlink self/ns/pid)"
while read -r number name; do
  case $number in Block*) break;; [0-9]*) echo "major $number $name";; esac
done < devices
read -r id < sys/kernel/random/boot_id
echo "boot $id"
echo "uid $(id -u)"
while IFS= read -r group; do echo "own $group"; done < self/cgroup
p=$$; selves=
while [ "${p:-0}" -gt 1 ]; do
  echo "self $p"; selves="$selves $p"
  stat=
  while IFS= read -r part || [ -n "$part" ]; do stat="$stat $part"; done < "$p/stat"
  set -- ${stat##*) }
  [ "$p" != $$ ] || echo "session $4"
  p=$2
done
# Starts a program on the words of a list; xargs is a process more, so only for long lists.
on() {
  list=$1; shift
  [ -n "$list" ] || return 0
  if [ ${#list} -lt @LONG@ ]; then "$@" $list; else printf '%s\n' $list | xargs "$@"; fi
}
# Of a process whose leader has ended, only its other threads show what it still holds.
fd_dirs=; map_files=
for status in $(grep -l '^State:.Z' [0-9]*/status); do
  pid=${status%/status}
  for thread in "$pid"/task/[0-9]*; do
    [ "${thread##*/}" != "$pid" ] || continue
    fd_dirs="$fd_dirs $thread/fd"; map_files="$map_files $thread/maps"
  done
done
fds=$(find [0-9]*/fd $fd_dirs -type l -exec stat -c '%N' {} + | sed -E "\,@COMMON@,d")
links=$(printf '%s\n' "$fds" | sed -n -E "\,-> '?/dev/|nvidia@PREFIXES@,s/^/link /p")
@WIDE@
maps=$(grep -E -H -e ' /dev/|nvidia@PREFIXES@' [0-9]*/maps $map_files |
  sed -n -E -e '\,@COMMON_MAPS@,d' \
    -e 's,^([0-9/task]+)/maps:0*([0-9a-f]+-)0*([0-9a-f]+) [^/]*(/.*)$,map \1 \4 \2\3,p')
[ -z "$maps" ] || maps=$(printf '%s\n' "$maps" | sort -u -k2,3)
printf '%s\n' "$links" "$maps"
# What is known of this very shell has to be seen by every tool, or nothing is believed.
! printf '%s\n' "$fds" | grep -q -E "^'?$$/fd/1'? -> '?[^'\"]" || echo 'sees fds'
files=$(printf '%s\n' "$links" "$maps" | sed -n -E \
  -e "s,^link '*([0-9/task]+/fd/[0-9]+)'* -> .*,\1,p" \
  -e '/^map /{' -e h -e 's,^map ([0-9/task]+) .* ([0-9a-f-]+)$,\1/map_files/\2,p' -e g \
  -e 's,^map ([0-9/task]+) (/[A-Za-z0-9_./:-]*) [0-9a-f-]+$,\1/root\2,p' -e '}')
nodes=$(on "$files $$/fd/1" stat -L -c 'node %t %T %F|%n')
printf '%s\n' "$nodes"
case $nodes in *"|$$/fd/1"*) echo 'sees nodes';; esac
pids=$(for file in $files $selves $(@MEMBERS@); do echo "${file%%/*}"; done | sort -u -n)
@EVERYBODY@
files=; exes=
for p in $pids; do
  files="$files $p/comm $p/cmdline $p/stat $p/cgroup"; exes="$exes $p/exe"
done
case $(stat -c '%N' $$/exe | sed -n -E "s,^'?[0-9]+/exe'? -> '?/,seen ,p") in
  seen*) case " $(printf '%s ' $pids)$(grep -azH '' $$/comm | tr '\n\0' '\1\n')" in
    *" $$ "*"$$/comm:"*) echo 'sees people';;
  esac;;
esac
on "$files" grep -azH '' | tr '\n\0' '\1\n'
on "$exes" stat -c '%N' | sed -n -E "s,^'?[0-9]+/exe'? -> ,exe &,p"
exit 0
"""


WIDE_LIMIT_S = 10
"""Limit for following descriptors anywhere: one may lead into a dead network file system."""

CUT = "gpu-reclaim: descriptors could not be followed in time"

WIDE = r"""
odd=$(printf '%s\n' "$fds" | sed -n -E -e "\,@FD@(/dev/|[^/']),d" \
  -e "s,^'?([0-9/task]+/fd/[0-9]+)'? -> .*,\1,p")
odd=$(on "$odd" sh -c 'timeout -s KILL @LIMIT@ stat -L -c "%F|%n" "$@"
  [ $? -lt 124 ] || echo "@CUT@" >&2' sh |
  sed -n -E 's,^character special file\|([0-9/task]+/fd/[0-9]+)$,\1,p')
[ -z "$odd" ] || links="$links
$(on "$odd" stat -c 'link %N')"
"""


def scan(
    devices: DeviceSet = NVIDIA,
    *,
    units: Iterable[str] = (),
    everybody: bool = False,
    wide: bool = False,
) -> str:
    """Shell text of the look through /proc.

    Args:
        devices: What counts as a GPU device.
        units: Units whose control groups' members are wanted too.
        everybody: Describe every process (for `match`), not only those.
        wide: Follow descriptors of files outside /dev too: a device node may be made anywhere.
    """
    # systemd puts a line before a name that begins with one.
    names = [f"{head}{unit}" for unit in units for head in ("/", "/_")]
    groups = " ".join(f"-e {shlex.quote(name)}" for name in names)
    members = f"grep -l -F {groups} [0-9]*/cgroup" if groups else ":"
    prefixes = "".join(f"|{_literal(text)}" for text in devices.path_prefixes)
    fill = {
        "@PREFIXES@": prefixes,
        "@COMMON@": _COMMON,
        "@COMMON_MAPS@": _COMMON_MAPS,
        "@MEMBERS@": members,
        "@LONG@": str(LONG_LIST),
        "@LIMIT@": str(WIDE_LIMIT_S),
        "@CUT@": CUT,
        "@FD@": _FD,
        "@EVERYBODY@": "pids=$(printf '%s\\n' [0-9]*)" if everybody else "",
    }
    # In one go, so that nothing that is filled in is taken for a place to fill.
    places = "|".join(fill)
    return re.sub(
        places, lambda place: fill[place[0]], SCAN.replace("@WIDE@", WIDE if wide else "")
    )


def _literal(text: str) -> str:
    """Text as an extended regular expression, for between quotes and commas in the script.

    Raises:
        BadInput: It has a character that would end those, or covers whole folders such as /dev.
    """
    if re.search(r"[,'\"`$\\\s\0]", text):
        raise BadInput(f"device prefix {text!r} has a character that a path should not have")
    if not re.match(r"/[^/]+/[^/]", text):
        raise BadInput(f"device prefix {text!r} must be the beginning of a path such as /dev/gpu")
    return re.sub(r"([.\[\]()*+?{}|^$\\])", r"\\\1", text)
