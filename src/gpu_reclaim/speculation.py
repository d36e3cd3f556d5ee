"""SGLang's speculative decoding: its flags as values, what is in force.

Source: sglang 0.5.23: srt/arg_groups/fields/spec.py and speculative_hook.py.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from pydantic import ValidationError

from gpu_reclaim.errors import BadInput
from gpu_reclaim.plans import SpecSetting
from gpu_reclaim.specflags import Flag, covered, split_flags

EAGLE_FAMILY = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE")
"""Algorithms to which steps, top k and draft tokens apply as described at `SpecSetting`."""

RESOLVED = {
    "num_steps": "speculative_num_steps",
    "eagle_topk": "speculative_eagle_topk",
    "num_draft_tokens": "speculative_num_draft_tokens",
}
"""Field of a setting to its name in /server_info, which is the flag's."""


def read_flags(words: Sequence[str]) -> SpecSetting:
    """What a server's flags ask for; of a repeated flag the last counts, as in argparse.

    Raises:
        BadInput: A flag is cut short so that it may mean several, or its value is none.
    """
    values: dict[str, str] = {}
    for flag in split_flags(words):
        if flag.name in covered():
            values[flag.name] = flag.value
    if "--speculative-algorithm" not in values:
        return SpecSetting(off=True)
    numbers = {
        field: _number(name, values[name])
        for field, name in ((x, _flag(x)) for x in RESOLVED)
        if name in values
    }
    try:
        return SpecSetting(
            algorithm=values["--speculative-algorithm"].upper(),
            adaptive="--speculative-adaptive" in values,
            **numbers,
        )
    except ValidationError:
        raise BadInput(
            "the unit's speculative flags have numbers beyond what is tuned here",
            remedy="at most 64 steps, top k 64 and 1024 draft tokens",
        ) from None


def _flag(field: str) -> str:
    return "--" + RESOLVED[field].replace("_", "-")


def _number(name: str, value: str) -> int:
    if not re.fullmatch(r"[0-9]{1,9}", value):
        raise BadInput(f"{name} has a value that is no number", remedy="correct it in the unit")
    return int(value)


def normalised(setting: SpecSetting, current: SpecSetting) -> SpecSetting:
    """The same setting with all that SGLang fills in.

    Without steps the server chooses all three numbers, and nothing is filled in.
    """
    if setting.off:
        return SpecSetting(off=True)
    algorithm = (setting.algorithm or current.algorithm).upper()
    filled = setting.model_copy(update={"algorithm": algorithm})
    if algorithm not in EAGLE_FAMILY or not setting.num_steps:
        return filled
    topk = setting.eagle_topk or 1
    draft = setting.num_draft_tokens
    if topk == 1 or not draft:
        draft = setting.num_steps * topk + 1
    return filled.model_copy(update={"eagle_topk": topk, "num_draft_tokens": draft})


def with_setting(
    words: Sequence[str],
    setting: SpecSetting,
    *,
    current_algorithm: str,
    max_running_requests: int,
) -> list[str]:
    """A server's flags with this setting instead of their own.

    Flags that no setting covers are kept (draft model, attention mode); `off` keeps none.

    Args:
        words: The server's flags.
        setting: What they should ask for.
        current_algorithm: For a setting without one.
        max_running_requests: Set too: speculative decoding would lower it to 48.

    Raises:
        BadInput: There is no algorithm, or a flag of the words cannot be understood.
    """
    kept = [word for flag in split_flags(words) if not _goes(flag, setting) for word in flag.words]
    asked = normalised(setting, SpecSetting(algorithm=current_algorithm))
    if not asked.off and not asked.algorithm:
        raise BadInput(_NO_ALGORITHM, remedy="give the settings an algorithm, for example NEXTN")
    added = [] if asked.off else ["--speculative-algorithm", asked.algorithm]
    for field in RESOLVED:
        value = getattr(asked, field)
        added += [_flag(field), str(value)] if value else []
    added += ["--speculative-adaptive"] if asked.adaptive else []
    return [*kept, *added, "--max-running-requests", str(max_running_requests)]


def _goes(flag: Flag, setting: SpecSetting) -> bool:
    return flag.name in covered() or (setting.off and flag.speculative)


_NO_ALGORITHM = "no algorithm is known: the server runs without speculative decoding"


def same_server(
    setting: SpecSetting, resolved: Mapping[str, Any], *, max_running_requests: int = 0
) -> list[str]:
    """Where a running server differs from a setting; nothing means that it is proven.

    Args:
        setting: What was asked for.
        resolved: What /server_info answers.
        max_running_requests: What was asked for; 0: not compared.
    """
    asked = normalised(setting, SpecSetting())
    wanted: list[tuple[str, tuple[object, ...]]] = [
        ("speculative_algorithm", _resolved_names(asked))
    ]
    if not asked.off and not asked.adaptive:
        numbers = ((name, getattr(asked, field)) for field, name in RESOLVED.items())
        wanted += [(name, (value,)) for name, value in numbers if value]
    if not asked.off and (asked.adaptive or "speculative_adaptive" in resolved):
        wanted.append(("speculative_adaptive", (asked.adaptive,)))
    if max_running_requests:
        wanted.append(("max_running_requests", (max_running_requests,)))
    return [
        _differs(name, values, resolved)
        for name, values in wanted
        if not _is(name, values, resolved)
    ]


def _resolved_names(setting: SpecSetting) -> tuple[object, ...]:
    """NEXTN is another name for EAGLE, and either becomes FROZEN_KV_MTP for a Gemma 4 assistant."""
    if setting.off:
        return (None,)
    if setting.algorithm in ("EAGLE", "NEXTN"):
        return ("EAGLE", "NEXTN", "FROZEN_KV_MTP")
    return (setting.algorithm,)


def _is(name: str, values: tuple[object, ...], resolved: Mapping[str, Any]) -> bool:
    # True == 1 in Python, and a number is no answer to a question of yes or no.
    found = resolved.get(name, ...)
    return any(found == value and type(found) is type(value) for value in values)


def _differs(name: str, values: tuple[object, ...], resolved: Mapping[str, Any]) -> str:
    wanted = "none" if values[0] is None else values[0]
    if name not in resolved:
        return f"{name} should be {wanted}, and the server does not say what it is"
    return f"{name} should be {wanted}, and is {resolved[name]!r:.100}"
