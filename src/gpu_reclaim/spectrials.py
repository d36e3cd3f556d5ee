"""Which settings of speculative decoding are worth a restart: no doubles, none SGLang would refuse.

Source: sglang 0.5.23: speculative_hook.py, mamba_hook.py, adaptive_spec_params.py.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gpu_reclaim.errors import BadInput
from gpu_reclaim.plans import SpecDecodePlan, SpecSetting
from gpu_reclaim.specflags import value_of
from gpu_reclaim.speculation import EAGLE_FAMILY, RESOLVED, normalised, read_flags, same_server

_ADAPTIVE_STEPS = (1, 3, 5, 7)
"""Steps that the adaptive mode may begin with, where it has no table of its own."""

_TREE_BACKENDS = ("flashinfer", "fa3", "triton")
"""Attention backends that take top k above 1 on pages of more than one token."""

_NO_ADAPTIVE = {
    "enable_dp_attention": "attention DP",
    "enable_multi_layer_eagle": "multi-layer EAGLE",
    "enable_two_batch_overlap": "two-batch overlap",
    "enable_pdmux": "PD multiplexing",
}

_AUTO_DRAFT_TOKENS = 4
"""What the server chooses for most models (3/1/4); only for the order of trials."""


def refusal(setting: SpecSetting, words: Sequence[str], resolved: Mapping[str, Any]) -> str:
    """Why SGLang would not start with a setting, or would run another; empty when it is fine.

    Args:
        setting: The setting; without an algorithm, the unit's own.
        words: The server's flags now.
        resolved: What /server_info answers now.
    """
    current = read_flags(words)
    asked = normalised(setting, current)
    if asked.off:
        return ""
    if not asked.algorithm:
        return "the unit has no algorithm, so the setting must name one, for example NEXTN"
    return (
        _wrong_numbers(asked)
        or (_wrong_adaptive(asked, words, resolved) if asked.adaptive else "")
        or _wrong_draft_model(asked, current, words, resolved)
        or _wrong_tree(asked, resolved)
        or _wrong_server(asked, resolved)
    )


def _wrong_numbers(asked: SpecSetting) -> str:
    steps, topk, draft = asked.num_steps, asked.eagle_topk, asked.num_draft_tokens
    if asked.algorithm not in EAGLE_FAMILY:
        own = steps or topk
        return f"steps and top k do not apply to {asked.algorithm}" if own else ""
    if not steps and (draft or topk) and not (asked.adaptive and topk <= 1 and not draft):
        return "without steps, top k and draft tokens must not be given either"
    if steps and draft > steps * topk + 1:
        return f"{draft} draft tokens are more than steps x top k + 1 = {steps * topk + 1}"
    if steps and draft < 2:  # noqa: PLR2004
        return "one draft token is no speculation"
    return ""


def _wrong_adaptive(asked: SpecSetting, words: Sequence[str], resolved: Mapping[str, Any]) -> str:
    """SGLang would only warn, and go on without it."""
    if asked.algorithm not in ("EAGLE", "EAGLE3", "NEXTN"):
        return f"adaptive works with EAGLE, EAGLE3 and NEXTN, not with {asked.algorithm}"
    if asked.eagle_topk > 1:
        return "adaptive works with top k 1 only"
    for name, what in _NO_ADAPTIVE.items():
        if resolved.get(name):
            return f"adaptive does not work with {what}, which the server uses"
    own_table = value_of(words, "--speculative-adaptive-config")
    if asked.num_steps and not own_table and asked.num_steps not in _ADAPTIVE_STEPS:
        return f"adaptive begins with 1, 3, 5 or 7 steps, not with {asked.num_steps}"
    return ""


def _wrong_draft_model(
    asked: SpecSetting, current: SpecSetting, words: Sequence[str], resolved: Mapping[str, Any]
) -> str:
    own = {_plain(asked.algorithm), _plain(current.algorithm)}
    draft = value_of(words, "--speculative-draft-model-path") or value_of(
        words, "--speculative-draft-model"
    )
    if draft and current.algorithm and len(own) > 1:
        return f"the unit's draft model is for {current.algorithm}, not for {asked.algorithm}"
    # A model's own MTP layers need no draft model; NEXTN is the name that says so.
    needs = asked.algorithm in ("EAGLE3", "STANDALONE", "DFLASH") or (
        asked.algorithm == "EAGLE" and len(own) > 1
    )
    if needs and not draft and not (len(own) == 1 and resolved.get("speculative_draft_model_path")):
        return f"{asked.algorithm} needs a draft model (--speculative-draft-model-path)"
    return ""


def _plain(algorithm: str) -> str:
    return "EAGLE" if algorithm == "NEXTN" else algorithm


def _wrong_tree(asked: SpecSetting, resolved: Mapping[str, Any]) -> str:
    if asked.eagle_topk <= 1:
        return ""
    names = ("attention_backend", "prefill_attention_backend", "decode_attention_backend")
    backends = [str(resolved.get(name)) for name in names if resolved.get(name)]
    if "trtllm_mha" in backends:
        return "top k above 1 does not work with the attention backend trtllm_mha"
    page = resolved.get("page_size")
    if isinstance(page, int) and page > 1 and not set(backends[:1]) <= set(_TREE_BACKENDS):
        return (
            f"top k above 1 on pages of {page} tokens works with flashinfer, fa3 and triton only, "
            f"not with {backends[0]}"
        )
    sampling = ("speculative_use_rejection_sampling", "speculative_use_block_verification")
    if any(resolved.get(name) for name in sampling):
        return "rejection sampling works with top k 1 only"
    return ""


def _wrong_server(asked: SpecSetting, resolved: Mapping[str, Any]) -> str:
    if asked.algorithm in ("STANDALONE", "NGRAM") and resolved.get("enable_dp_attention"):
        return f"{asked.algorithm} does not work with attention DP, which the server uses"
    sampling = resolved.get("speculative_use_rejection_sampling")
    if sampling and asked.algorithm not in ("EAGLE", "EAGLE3", "NEXTN"):
        return f"rejection sampling works with EAGLE, EAGLE3 and NEXTN, not with {asked.algorithm}"
    interval = resolved.get("mamba_track_interval")
    if isinstance(interval, int) and 0 < interval < asked.num_draft_tokens:
        return (
            f"{asked.num_draft_tokens} draft tokens are more than mamba_track_interval = {interval}"
        )
    return ""


def trials(
    plan: SpecDecodePlan, current: SpecSetting, words: Sequence[str], resolved: Mapping[str, Any]
) -> tuple[list[SpecSetting], dict[str, str]]:
    """What is to be tried, and what is not and why.

    Args:
        plan: Names the settings.
        current: What the unit asks for (`read_flags`).
        words: The server's flags.
        resolved: What /server_info answers now.

    Returns:
        The present setting, off, then the others, those with few draft tokens first; of settings
        that give the same server the first. And the name of each refused one with a sentence.

    Raises:
        BadInput: The running server does not do what its flags say.
    """
    wrong = same_server(current, resolved)
    if wrong:
        raise BadInput(
            f"the server does not run as its flags say: {'; '.join(wrong)}",
            remedy="move flags from a --config file into the unit, and take out those that the "
            "server's log says it does not use",
        )
    asked = [normalised(setting, current) for setting in plan.settings]
    refused: dict[str, str] = {}
    chosen = {_same_key(current, current, resolved): normalised(current, current)}
    off = SpecSetting(off=True)
    for setting in (off, *sorted(asked, key=_cost)):
        key = _same_key(setting, current, resolved)
        why = refusal(setting, words, resolved)
        if key not in chosen and why:
            refused[str(setting)] = why
        elif key not in chosen:
            chosen[key] = setting
    return list(chosen.values()), refused


def _cost(setting: SpecSetting) -> tuple[bool, int, int, int]:
    draft = setting.num_draft_tokens or _AUTO_DRAFT_TOKENS
    return setting.adaptive, draft, setting.num_steps, setting.eagle_topk


def _same_key(
    setting: SpecSetting, current: SpecSetting, resolved: Mapping[str, Any]
) -> tuple[object, ...]:
    """Equal for settings that start the same server."""
    asked = normalised(setting, current)
    if asked.off:
        return ("off",)
    numbers = [getattr(asked, field) for field in RESOLVED]
    chosen_by_server = asked == normalised(current, current) and not any(numbers)
    if chosen_by_server and not asked.adaptive:
        numbers = [resolved.get(name) for name in RESOLVED.values()]
    algorithm = "EAGLE" if asked.algorithm == "NEXTN" else asked.algorithm
    return (algorithm, *numbers, asked.adaptive)
