"""Where the lab keeps its files. Every path the lab writes to on the host is named here."""

import os
from pathlib import Path

SOURCE = Path(__file__).parent
"""The lab's own folder in the checkout."""

CACHE = Path(os.environ.get("GPU_RECLAIM_LAB_CACHE", "/var/cache/gpu-reclaim-lab"))
"""Root filesystems, kept between runs."""

_HOME = Path("/var/cache") if os.geteuid() == 0 else Path.home() / ".cache"

PYTHONS = Path(os.environ.get("GPU_RECLAIM_LAB_PYTHONS", _HOME / "gpu-reclaim-lab-python"))
"""What SGLang's benchmark needs, kept between runs; used without root too."""

RUN = Path(os.environ.get("GPU_RECLAIM_LAB_RUN", "/var/lib/gpu-reclaim-lab"))
"""Everything of the running lab. Not under /run: that is often mounted without device nodes."""

LOCK = RUN.with_name(RUN.name + ".lock")
"""Held by the process that uses the lab."""

RECORD = RUN / "record.json"
"""What was started, so that a later run can end what a killed one left."""

LXC = RUN / "lxc"
STATE = RUN / "state"
KEYS = RUN / "keys"
NODE = RUN / "node"
NODE_BIN = NODE / "bin"
PVE = NODE / "lxc"
"""Container configurations as the stand-in `pct` reads them."""

GUEST_STATE = "/run/gpu-lab"
"""The state folder as seen inside a guest."""
