"""A server whose MoE kernels can be tuned, and what for: a value."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import moescript, moespace
from gpu_reclaim.finding import Found, text
from gpu_reclaim.moeconfigs import ConfigName, Row, Table, chosen
from gpu_reclaim.moelog import Lookup
from gpu_reclaim.moelooks import Device, Environment, ranks
from gpu_reclaim.moescript import Facts
from gpu_reclaim.moespace import SPACE, Shape

SPACE_FLAG = "--search-space-file"

PRESENT, TUNED = "present", "tuned"
"""Names of the configs in use, and of those that the script makes."""


@dataclass(frozen=True)
class MoeFound:
    """A server whose MoE kernels can be tuned, and what for.

    Attributes:
        found: The server.
        name: Of the file that it wants.
        triton: Version of its Triton.
        base: Folder whose `configs/` it looks in now.
        lookups: What its ranks have said of that file, once each.
        facts: The tuning script.
        shape: The model's.
        no_fusion: Shared experts are not fused with the others.
        devices: GPUs that the file is for.
        env: The server's environment.
        sizes: Token numbers to tune for.
        rows: Search space, where the script takes one; empty: its own.
        before: What the server uses now, by token number.
        candidates: Tables to try as they are, by arm.
        refused: Candidates that are not tried, and why.
        place: Where the tuned sizes are kept on the host.
        overlays: Folder of the unit's overlays there.
        files: Checksum of the unit's files.
    """

    found: Found
    name: ConfigName
    triton: str
    base: str
    lookups: tuple[Lookup, ...]
    facts: Facts
    shape: Shape
    no_fusion: bool
    devices: tuple[Device, ...]
    env: Environment = field(repr=False)
    sizes: tuple[int, ...]
    rows: Sequence[Row] = field(repr=False)
    before: Table = field(repr=False)
    candidates: Mapping[str, Table] = field(repr=False)
    refused: Mapping[str, str]
    place: str
    overlays: str
    files: str

    @property
    def tried(self) -> int:
        """How many rows are tried for each size."""
        return len(self.rows or SPACE)

    @property
    def model(self) -> str:
        """The model's folder or name, as the server has it."""
        return model_of(self.found)

    @property
    def space_text(self) -> str:
        """The search space as the script reads it."""
        return json.dumps([dict(row) for row in self.rows])

    def script(self, tokens: int, *, tune: bool, space_file: str = "") -> list[str]:
        """The tuning script's command.

        Args:
            tokens: The batch size.
            tune: Try rows; else the row in use is timed.
            space_file: Rows to try; empty: the script's own.

        Raises:
            BadInput: The script lacks a flag without which it would do something else.
        """
        info, dtype = self.found.info, self.name.dtype
        asked = moescript.Job(
            model=self.model,
            tp=ranks(info, "tp_size"),
            ep=ranks(info, "ep_size"),
            tokens=tokens,
            tune=tune,
            # Its word for all that it makes out itself.
            dtype="auto" if dtype in ("", "float32") else dtype,
            per_channel=self.name.per_channel,
            no_fusion=self.no_fusion,
            space_file=space_file,
        )
        return moescript.argv(self.found.server.python, self.facts, asked)

    @property
    def expectation(self) -> str:
        """Whether the kernel is bound by memory, for people."""
        return moespace.expectation(self.shape, self.sizes, self.name.dtype)

    @property
    def space(self) -> str:
        """What is tried for each size, for people."""
        whole = f"all {len(SPACE)} rows of SGLang's search space"
        if self.rows:
            return (
                f"{len(self.rows)} of {len(SPACE)} rows: those that fit into the GPU's shared "
                f"memory"
            )
        if SPACE_FLAG not in self.facts.flags:
            return f"{whole}: this script takes no other one"
        return whole

    def row_before(self, tokens: int) -> Row:
        """The row that the server uses now for so many tokens."""
        return chosen(self.before, tokens)


def model_of(found: Found) -> str:
    """The model's folder or name, as the server has it."""
    return text(found.info.get("model_path")) or found.model
