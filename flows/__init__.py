"""Prefect flows: the order of things."""

from gpu_reclaim.flows.reclaim import reclaim_gpus
from gpu_reclaim.flows.restore import restore_services

__all__ = ["reclaim_gpus", "restore_services"]
