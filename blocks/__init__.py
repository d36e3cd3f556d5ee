"""Prefect blocks: how hosts are described, and how they are reached."""

from gpu_reclaim.blocks.hosts import GpuHost
from gpu_reclaim.blocks.proxmox import ProxmoxApi, ProxmoxGuest
from gpu_reclaim.blocks.servers import LlmServer
from gpu_reclaim.blocks.ssh import SshAccess, SshJump

__all__ = ["GpuHost", "LlmServer", "ProxmoxApi", "ProxmoxGuest", "SshAccess", "SshJump"]
