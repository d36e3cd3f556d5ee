"""SGLang's command line taken apart as argparse does it, for the flags that are tuned.

Source: sglang 0.5.23, srt/arg_groups/fields/spec.py and serving.py; its parser takes any beginning
of a flag that no other flag has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from gpu_reclaim.errors import BadInput

_COVERED = (
    "--speculative-algorithm",
    "--speculative-num-steps",
    "--speculative-eagle-topk",
    "--speculative-num-draft-tokens",
    "--speculative-adaptive",
    "--max-running-requests",
)

_SWITCHES = (
    "--speculative-adaptive",
    "--speculative-use-rejection-sampling",
    "--speculative-use-block-verification",
    "--speculative-dspark-align-verify-tokens-to-graph-tier",
    "--speculative-enable-w4a4-mxfp4-megamoe",
)
"""Flags without a value."""

_OTHERS = tuple(
    f"--speculative-{name}"
    for name in (
        *("draft-model-path", "draft-model", "draft-model-revision", "draft-load-format"),
        *("dflash-block-size", "domino-candidate-pool-size", "dspark-block-size"),
        *("dspark-sps-table-path", "dspark-confidence-sts-path", "accept-threshold-single"),
        *("accept-threshold-acc", "token-map", "attention-mode", "draft-attention-backend"),
        *("dsa-topk-backend", "draft-kv-cache-dtype", "draft-window-size", "draft-sink-size"),
        *("moe-runner-backend", "moe-a2a-backend", "draft-model-quantization"),
        *("adaptive-config", "ngram-min-bfs-breadth", "ngram-max-bfs-breadth"),
        *("ngram-match-type", "ngram-max-trie-depth", "ngram-capacity"),
        *("ngram-external-corpus-path", "ngram-external-sam-budget"),
        "ngram-external-corpus-max-tokens",
    )
)

_PREFIXES = ("--speculative-", "--no-speculative-")
_SHORTEST = "--max-ru"
"""No other flag of SGLang begins so."""


@dataclass(frozen=True)
class Flag:
    """A flag with its value, or a word that belongs to no flag known here.

    Attributes:
        name: In full; empty for a word that is no flag tuned here.
        value: Empty where it has none.
        words: As they stand in the command line.
    """

    name: str
    value: str = field(repr=False)
    words: tuple[str, ...] = field(repr=False)

    @property
    def speculative(self) -> bool:
        """It says something about speculative decoding."""
        return self.name.startswith(_PREFIXES)


def covered() -> tuple[str, ...]:
    """The flags that a setting stands for, `--max-running-requests` among them."""
    return _COVERED


def split_flags(words: Sequence[str]) -> Iterator[Flag]:
    """All words in order, each tuned or speculative flag together with its value.

    Raises:
        BadInput: A flag is cut short so that it may mean several, or lacks its value.
    """
    at = 0
    while at < len(words):
        word = words[at]
        given, equals, value = word.partition("=")
        name = _full(given)
        if not name or equals or name.startswith("--no-") or name in _SWITCHES:
            yield Flag(name, value if name else "", (word,))
            at += 1
        elif at + 1 < len(words) and not _is_flag(words[at + 1]):
            yield Flag(name, words[at + 1], (word, words[at + 1]))
            at += 2
        elif name in (*_COVERED, *_OTHERS):
            raise BadInput(f"{name} has no value", remedy="correct it in the unit")
        else:  # a switch of a newer SGLang
            yield Flag(name, "", (word,))
            at += 1


def value_of(words: Sequence[str], name: str) -> str | None:
    """The last value of a speculative flag, an empty one for a switch; None where it is not set."""
    values = [flag.value for flag in split_flags(words) if flag.name == name]
    return values[-1] if values else None


def _is_flag(word: str) -> bool:
    return word.startswith("-") and not re.fullmatch(r"-\d+|-\d*\.\d+", word) and " " not in word


def _full(given: str) -> str:
    """The flag that is meant; empty for one that is not speculative."""
    if given.startswith(_SHORTEST) and _COVERED[-1].startswith(given):
        return _COVERED[-1]
    known = (*_COVERED[:-1], *_SWITCHES, *_OTHERS)
    if given in known or not given.startswith(("--spec", "--no-spec")):
        return given if given in known else ""
    meant = {name for name in known if name.startswith(given)}
    if len(meant) > 1 or given in ("--spec", "--spec-"):
        raise BadInput(
            f"{given} may mean several flags of SGLang", remedy="write it out in full in the unit"
        )
    if meant:
        return meant.pop()
    return given if given.startswith(_PREFIXES) else ""
