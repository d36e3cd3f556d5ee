"""Prefect flows: the order of things."""

from gpu_reclaim.flows.reclaim import reclaim_gpus

__all__ = ["reclaim_gpus"]
