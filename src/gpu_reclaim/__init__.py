"""Free the GPUs of a machine that serves large language models, and prove it.

The modules of this package need no Prefect: `gpu_reclaim.reclaim` does the whole work over any
transport. The Prefect layers live beside it: `gpu_reclaim.blocks`, `gpu_reclaim.tasks` and
`gpu_reclaim.flows`.
"""
