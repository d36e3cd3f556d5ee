"""Tuning the lab's server: its block, a short plan, and what must be so afterwards."""

from __future__ import annotations

import json
from typing import Any, cast

from gpu_reclaim.blocks import GpuHost, LlmServer
from gpu_reclaim.models import ReclaimPolicy
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from guest import holds, ways
from lab.lab import Lab
from lab.waiting import wait_until

TUNED = "sglang-tuned.service"
ENV = "sglang-env.service"
BASE = "http://127.0.0.1:30000"
POLICY = ReclaimPolicy(**holds.QUICK)
NOW = "NEXTN 1/1/2"
"""What both units run with."""

GET = """
get() {
  /opt/sglang/bin/python - "$1" <<'END'
import sys, urllib.request
print(urllib.request.urlopen(sys.argv[1], timeout=5).read().decode())
END
}
"""


def steps(*numbers: int) -> list[SpecSetting]:
    """Settings that differ in their steps."""
    return [SpecSetting(num_steps=number) for number in numbers]


def plan(*numbers: int, **changes: Any) -> SpecDecodePlan:
    """A tuning as short as one can be: two concurrencies, few requests."""
    values: dict[str, Any] = {
        "settings": steps(*numbers),
        "levels": [1, 8],
        "requests_per_stream": 2,
        "least_requests": 8,
        # It ends after 4 where nothing disturbs; with 4 at most one bad visit decided it all.
        "rounds": 6,
        "measure_timeout_s": 60,
    }
    return SpecDecodePlan(**(values | changes))


def save(lab: Lab, unit: str = TUNED, /, **changes: Any) -> None:
    """The host "tuned" and the server "llm" on it, as a user would save them."""
    ways.save_host(lab, "tuned", units=[unit])
    values: dict[str, Any] = {
        "host": cast("Any", GpuHost.load)("tuned", _sync=True),
        "unit": unit,
        "base_url": BASE,
        "python": "/opt/sglang/bin/python",
        "dataset_path": "/opt/sglang/prompts.json",
        "ready_timeout_s": 20,
    }
    LlmServer(**(values | changes)).save("llm", overwrite=True)


def serve(lab: Lab, unit: str = TUNED, *, speed: dict[str, Any] | None = None) -> None:
    """Start the server, so quick at each setting."""
    lab.smi("speed.json", json.dumps({"noise_pct": 0.3, "tokens_per_s": 2000} | (speed or {})))
    lab.do(f"systemctl start {unit}")
    wait_served(lab)


def wait_served(lab: Lab) -> None:
    """Wait until it serves."""
    wait_until("it serves", lambda: info(lab) != {}, 30, 0.2)


def info(lab: Lab) -> dict[str, Any]:
    """Its /server_info; empty where it does not serve."""
    done = lab.attach(f"{GET}get {BASE}/health && get {BASE}/server_info")
    if done.returncode != 0:
        return {}
    found = json.loads(done.stdout.strip().split("\n")[-1])
    return cast("dict[str, Any]", found)


def asked_for(lab: Lab) -> tuple[object, ...]:
    """What of /server_info tells its setting."""
    shown = info(lab)
    names = ("algorithm", "num_steps", "eagle_topk", "num_draft_tokens")
    return tuple(shown.get(f"speculative_{name}") for name in names)


def drop_ins(lab: Lab, unit: str = TUNED) -> list[str]:
    """Its drop-ins, by path."""
    return lab.do(f"systemctl show -P DropInPaths {unit}").split()


def forget(lab: Lab, unit: str = TUNED) -> None:
    """Take away what a tuning leaves on purpose."""
    lab.do(
        f"rm -rf /etc/systemd/system/{unit}.d /run/systemd/system/{unit}.d "
        "/var/lib/gpu-reclaim-tuning; systemctl daemon-reload"
    )
