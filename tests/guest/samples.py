"""Long rows of cases on the guest: `make test` takes a seeded few, `make test-exhaustive` all."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest

SEED = 4


def sampled(cases: Sequence[Any], keep: int) -> list[Any]:
    """The cases for `parametrize`, all but so many of them for the exhaustive walks only.

    Args:
        cases: Values, or tuples of them.
        keep: How many `make test` takes.
    """
    kept = set(random.Random(SEED).sample(range(len(cases)), keep))
    return [
        pytest.param(
            *(case if isinstance(case, tuple) else (case,)),
            marks=[] if number in kept else pytest.mark.exhaustive,
        )
        for number, case in enumerate(cases)
    ]
