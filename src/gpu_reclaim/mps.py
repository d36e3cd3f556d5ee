"""MPS, the CUDA multi-process service: asking it to quit, its own way.

NVIDIA calls it unsafe to signal the server while clients have work in flight, and the control
daemon's `quit` is the documented end (Multi-Process Service guide, "nvidia-cuda-mps-control").
So it is asked only when it has no client left, and only from the place where its daemon listens.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from gpu_reclaim.commands import Section
from gpu_reclaim.models import Ended, Spared

TIME_LIMIT_S = 10
"""For each answer of the control daemon, and for its end, in seconds."""

QUIT = r"""
command -v nvidia-cuda-mps-control >/dev/null || { echo 'mps no-control'; exit 0; }
fields() { stat=; while IFS= read -r part || [ -n "$part" ]; do stat="$stat $part"; done < "$1"; }
for server in @SERVERS@; do
  [ -r "/proc/$server/stat" ] || { echo "mps gone $server"; continue; }
  fields "/proc/$server/stat"
  set -- ${stat##*) }
  control=$2
  case $(readlink "/proc/$control/exe") in
    */nvidia-cuda-mps-control | */'nvidia-cuda-mps-control (deleted)') ;;
    *) echo "mps orphan $server"; continue;;
  esac
  pipe=$(tr '\0' '\n' < "/proc/$control/environ" | sed -n 's/^CUDA_MPS_PIPE_DIRECTORY=//p')
  CUDA_MPS_PIPE_DIRECTORY=${pipe:-/tmp/nvidia-mps}; export CUDA_MPS_PIPE_DIRECTORY
  ask() { printf '%s\n' "$1" | timeout -k 1 @LIMIT@ nvidia-cuda-mps-control; }
  clients=; failed=
  servers=$(ask get_server_list) || failed=1
  for one in $servers; do
    listed=$(ask "get_client_list $one") || failed=1
    clients="$clients $listed"
  done
  clients=$(printf '%s' "$clients" | tr -s '[:space:]' ' ')
  [ -z "$failed" ] || { echo "mps silent $server"; continue; }
  [ -z "${clients# }" ] || { echo "mps clients $server ${clients# }"; continue; }
  ask quit || { echo "mps silent $server"; continue; }
  tries=0
  while [ -d "/proc/$server" ] && [ $tries -lt @TRIES@ ]; do
    sleep 0.1 || sleep 1
    tries=$((tries + 1))
  done
  [ -d "/proc/$server" ] && echo "mps left $server" || echo "mps ended $server"
done
exit 0
"""

WORDS = {
    "no-control": "there is no nvidia-cuda-mps-control to ask",
    "orphan": "its control daemon is gone",
    "silent": "its control daemon does not answer",
    "clients": "it still has clients",
    "left": "it was asked to quit and is still there",
}


def quit_servers(servers: Sequence[Spared]) -> str:
    """Shell text that asks the control daemon of each MPS server to quit, if nobody uses it."""
    return (
        QUIT.replace("@SERVERS@", " ".join(str(row.pid) for row in servers))
        .replace("@LIMIT@", str(TIME_LIMIT_S))
        .replace("@TRIES@", str(TIME_LIMIT_S * 10))
    )


def time_limit_s(servers: Sequence[Spared]) -> float:
    """Limit for the script of `quit_servers`, in seconds."""
    return 30 + 4 * TIME_LIMIT_S * len(servers)


def parse_quit(
    section: Section, servers: Sequence[Spared], starts: dict[int, int], via: str
) -> tuple[list[Ended], dict[int, str]]:
    """Servers that ended, and pid to why another did not."""
    ended: list[Ended] = []
    left: dict[int, str] = {}
    said = section.lines("mps")
    for row in servers:
        line = next((x for x in said if re.match(rf"[a-z]+ {row.pid}\b", x)), "no-control")
        word = line.split()[0]
        # One daemon ends all its servers, so another may be gone when its turn comes.
        if word == "ended" or (word == "gone" and ended):
            ended.append(
                Ended(
                    pid=row.pid,
                    start_time=starts.get(row.pid, 0),
                    name=row.name,
                    owner=row.owner,
                    signal="quit",
                    via=via,
                    devices=row.devices,
                )
            )
        elif word in WORDS:
            left[row.pid] = f"{WORDS[word]} ({line.partition(' ')[2].partition(' ')[2]})".replace(
                " ()", ""
            )
    return ended, left
