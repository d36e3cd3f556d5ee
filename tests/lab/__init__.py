"""A real LXC guest with stand-in GPUs, and a stand-in Proxmox node, on one machine."""
