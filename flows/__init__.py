"""Prefect flows: the order of things."""

from gpu_reclaim.flows.exclusive import exclusive_gpus
from gpu_reclaim.flows.moe import moe_autotune
from gpu_reclaim.flows.reclaim import reclaim_gpus
from gpu_reclaim.flows.restore import restore_services
from gpu_reclaim.flows.spec_decode import spec_decode_retune
from gpu_reclaim.tasks.restoring import put_back_after

__all__ = [
    "exclusive_gpus",
    "moe_autotune",
    "put_back_after",
    "reclaim_gpus",
    "restore_services",
    "spec_decode_retune",
]
