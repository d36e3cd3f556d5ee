"""The flags of SGLang that the stand-in server knows, and what SGLang makes of them.

As in 0.5.9: an unknown flag ends the server, and speculative decoding changes other settings.
"""

import argparse
from dataclasses import dataclass

ALGORITHMS = ("EAGLE", "EAGLE3", "NEXTN", "STANDALONE", "NGRAM")
RESOLVED = {"NEXTN": "EAGLE"}
SPECULATIVE_REQUESTS = 48
"""What --max-running-requests becomes with any algorithm, where nobody said otherwise."""
PREFILL_TOKENS = 8192
MOE_RUNNER = "triton"
_TEXTS = (
    "tokenizer-path",
    "dtype",
    "quantization",
    "kv-cache-dtype",
    "attention-backend",
    "moe-runner-backend",
    "mamba-scheduler-strategy",
    "reasoning-parser",
    "tool-call-parser",
    "log-level",
    "chat-template",
    "speculative-draft-model-path",
    "speculative-draft-model-revision",
    "speculative-attention-mode",
    "speculative-draft-attention-backend",
    "speculative-token-map",
    "speculative-moe-runner-backend",
    "speculative-adaptive-config",
)
_NUMBERS = (
    "context-length",
    "chunked-prefill-size",
    "max-prefill-tokens",
    "max-total-tokens",
    "cuda-graph-max-bs",
    "page-size",
    "random-seed",
    "ep-size",
    "dp-size",
    "decode-log-interval",
)
_FRACTIONS = (
    "mem-fraction-static",
    "schedule-conservativeness",
    "speculative-accept-threshold-single",
    "speculative-accept-threshold-acc",
)
_SWITCHES = (
    "trust-remote-code",
    "disable-radix-cache",
    "disable-cuda-graph",
    "disable-shared-experts-fusion",
    "enable-deterministic-inference",
    "enable-metrics",
    "enable-multi-layer-eagle",
    "skip-server-warmup",
    "speculative-adaptive",
)


@dataclass(frozen=True)
class Setting:
    """What a server was started with.

    Attributes:
        name: As in tables and in the lab's state files: `off`, or `NEXTN 2/1/3`.
        steps: Draft steps; 0 without speculative decoding.
        topk: Branches of a step.
        limit: Most requests that run at the same time; 0: no limit.
        resolved: All arguments, as SGLang resolved them.
    """

    name: str
    steps: int
    topk: int
    limit: int
    resolved: dict[str, object]

    @property
    def draft_tokens(self) -> int:
        """Tokens of a request that are worked at together."""
        return int(str(self.resolved["speculative_num_draft_tokens"] or 1)) if self.steps else 1


def parse(arguments: list[str]) -> Setting:
    """Reads a command line.

    Raises:
        SystemExit: It has an unknown flag, or a value that is none.
        AssertionError: As SGLang: draft tokens or top k without steps.
    """
    args = _parser().parse_args(arguments)
    _choose_defaults(args)
    asked = args.speculative_algorithm
    if asked is None:
        return Setting("off", 0, 0, args.max_running_requests or 0, vars(args))
    _choose_numbers(args)
    args.speculative_algorithm = RESOLVED.get(asked, asked)
    if args.max_running_requests is None:
        args.max_running_requests = SPECULATIVE_REQUESTS
    steps, topk = args.speculative_num_steps, args.speculative_eagle_topk
    name = f"{asked} {steps}/{topk}/{args.speculative_num_draft_tokens}"
    if args.speculative_adaptive:
        name += " adaptive"
    return Setting(name, steps, topk, args.max_running_requests, vars(args))


def _choose_defaults(args: argparse.Namespace) -> None:
    args.ep_size = args.ep_size or 1
    args.chunked_prefill_size = args.chunked_prefill_size or PREFILL_TOKENS
    if args.moe_runner_backend in (None, "auto"):
        args.moe_runner_backend = MOE_RUNNER


def _choose_numbers(args: argparse.Namespace) -> None:
    """All three are the server's choice, or none; a chain has one token more than steps.

    Asserted, as in SGLang: that is how it ends.
    """
    if args.speculative_num_steps is None:
        assert args.speculative_eagle_topk is None
        assert args.speculative_num_draft_tokens is None
        args.speculative_num_steps, args.speculative_eagle_topk = 3, 1
    args.speculative_eagle_topk = args.speculative_eagle_topk or 1
    chain = args.speculative_num_steps + 1
    if args.speculative_eagle_topk == 1 and args.speculative_num_draft_tokens != chain:
        print("speculative_num_draft_tokens is adjusted to speculative_num_steps + 1")
        args.speculative_num_draft_tokens = chain
    if args.speculative_num_draft_tokens is None:
        args.speculative_num_draft_tokens = chain * args.speculative_eagle_topk


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="launch_server.py")
    parser.add_argument("--model-path", "--model", required=True)
    parser.add_argument("--served-model-name")
    parser.add_argument("--tensor-parallel-size", "--tp-size", "--tp", dest="tp_size", default=1,
                        type=int)  # fmt: skip
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=30000)
    parser.add_argument("--api-key")
    parser.add_argument("--max-running-requests", type=int)
    parser.add_argument("--speculative-algorithm", type=str.upper, choices=ALGORITHMS)
    for name in ("num-steps", "eagle-topk", "num-draft-tokens"):
        parser.add_argument(f"--speculative-{name}", type=int)
    for name in _TEXTS:
        parser.add_argument(f"--{name}")
    for name in _NUMBERS:
        parser.add_argument(f"--{name}", type=int)
    for name in _FRACTIONS:
        parser.add_argument(f"--{name}", type=float)
    for name in _SWITCHES:
        parser.add_argument(f"--{name}", action="store_true")
    return parser
