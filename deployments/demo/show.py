"""What the demo prints: headings, tables of plain text, and the words around them."""

from __future__ import annotations

import shutil
import textwrap
from collections.abc import Iterable, Sequence

INTRO = """
One reclaim from beginning to end, on a pretend guest on this machine.

  Real:     {count} processes, their open files and mappings, and the signals that end some of them;
            two SSH servers on loopback, with keys made for this run; the flow reclaim_gpus with
            its tasks and artifacts, on a Prefect server of its own.
  Pretend:  the GPUs (plain files in {folder}/dev), and the
            programs systemctl, nvidia-smi and pct, which only know those files and processes.
            Guest and Proxmox node are both this machine.
  Safe:     nobody but these processes is ended: the plan is compared with them first. Your GPUs,
            services, containers and your own Prefect are not touched, and all of this is removed
            at the end.
"""

NEXT = """
  1. A Prefect server, if you have none: in a terminal of its own

       .venv/bin/prefect server start

     and then, once:

       .venv/bin/prefect config set PREFECT_API_URL=http://127.0.0.1:4200/api

  2. Say once what your host is. Its host key: cat /etc/ssh/ssh_host_ed25519_key.pub there.

{save}
  3. Plan first: this reads, and touches nothing.

{plan}
  4. Reclaim: the same without mode="plan". It returns only if the GPUs are free, and raises
     GpusNotReclaimed, with what to do, if they are not. What it stopped stays down; to have it
     put back afterwards, whatever happens, put your work into a block:

       with exclusive_gpus("gpu-box"): ...    # from gpu_reclaim.flows; see README.md
"""

SAVE = """
.venv/bin/python - <<'END'
from gpu_reclaim.blocks import GpuHost, ProxmoxGuest, SshAccess

key = {"private_key_path": "~/.ssh/id_ed25519"}
ssh = SshAccess(address="GUEST", host_key="ssh-ed25519 AAAA...", **key)
ssh.save("gpu-box-ssh", overwrite=True)

# Only for a Proxmox container: the second way in, when the guest's own SSH is down.
node = SshAccess(address="NODE", host_key="ssh-ed25519 AAAA...", **key)
node.save("pve-ssh", overwrite=True)
guest = ProxmoxGuest(vmid=129, hostname="GUEST-HOSTNAME", node_ssh=node)
guest.save("gpu-box-guest", overwrite=True)

host = GpuHost(ssh=ssh, guest=guest, units=["sglang.service"], expected_gpus=4)
host.save("gpu-box", overwrite=True)
END
"""

PLAN = """
.venv/bin/python - <<'END'
from gpu_reclaim.flows import reclaim_gpus
from gpu_reclaim.models import ReclaimPolicy

report = reclaim_gpus("gpu-box", ReclaimPolicy(mode="plan"))
print(report.summary, *report.ended, *report.spared, sep="\\n")
END
"""


def say(text: str = "") -> None:
    """Print at once, so that lines of several processes keep their order."""
    print(text, flush=True)


def heading(text: str) -> None:
    """Begin a part."""
    say(f"\n{text}\n{'-' * len(text)}")


def field(name: str, text: str) -> None:
    """A name and a text, which is wrapped beside it."""
    width = min(shutil.get_terminal_size((100, 24)).columns, 100)
    lines = textwrap.wrap(text, max(width - 12, 40), break_long_words=False) or [""]
    say(f"  {name:<9} " + ("\n" + " " * 12).join(lines))


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> None:
    """Columns as wide as what is in them; those whose head ends in a blank stand right."""
    lines = [[head.strip() for head in heads], *map(list, rows)]
    widths = [max(len(line[column]) for line in lines) for column in range(len(heads))]
    lines.insert(1, ["-" * width for width in widths])
    for line in lines:
        cells = [
            cell.rjust(width) if head.endswith(" ") else cell.ljust(width)
            for head, cell, width in zip(heads, line, widths, strict=True)
        ]
        say("  " + "  ".join(cells).rstrip())


def next_steps() -> str:
    """What to type for a real host."""
    save, plan = (textwrap.indent(text.lstrip(), " " * 7) for text in (SAVE, PLAN))
    return NEXT.format(save=save, plan=plan)
