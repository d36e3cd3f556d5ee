"""A stand-in Proxmox VE API, and what is tested against it."""
