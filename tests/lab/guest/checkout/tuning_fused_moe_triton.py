"""A stand-in for SGLang's tuning script: its flags, output, files, processes and failures.

What goes wrong is told through `moe.json`: see sglang_tuner.py.
"""

import argparse
import json
import time
from functools import partial
from pathlib import Path
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest import sglang_tuner as tuner
    from lab.guest.checkout import common_utils as common
    from lab.guest.sglang_cluster import Cluster, Say
    from lab.guest.sglang_lookup import Rows
    from lab.guest.sglang_moe import Shape, kernel_us, search_space
else:
    import common_utils as common
    import sglang_tuner as tuner
    from sglang_cluster import Cluster, Say
    from sglang_lookup import Rows
    from sglang_moe import Shape, kernel_us, search_space


def main(args: argparse.Namespace, told: tuner.Told) -> None:
    """Tunes, or says how quick the kernel is now."""
    model = common.get_model_config(
        args.model, args.tp_size, args.ep_size, args.disable_shared_experts_fusion
    )
    sizes = list(common.BATCH_SIZES)
    if args.batch_size is not None:
        sizes = [args.batch_size]
    if vars(args).get("batch_sizes") is not None:
        sizes = args.batch_sizes
    if args.tune:
        tune(args, told, model, sizes)
    else:
        benchmark(args, told, model, sizes)


def tune(
    args: argparse.Namespace, told: tuner.Told, model: dict[str, Any], sizes: list[int]
) -> None:
    """Writes one file, at the end."""
    space = candidates(args, model["block_shape"])
    tuner.obey(told, sizes)
    with Cluster("tune") as cluster:
        name = common.file_name(model, args.dtype, per_channel_quant=args.per_channel_quant)
        name = tuner.announced(name, told, sizes)
        cluster.leaves = told.has(tuner.LEAVES, sizes)
        print(f"Start tuning over {len(space)} configurations to create {name}...")
        began = time.perf_counter()
        rows = cluster.run(partial(try_all, space, told), sizes)
        tuner.save(dict(zip(sizes, rows, strict=True)), name, told)
        print(f"Tuning took {time.perf_counter() - began:.2f} seconds")


def try_all(space: list[dict[str, int]], told: tuner.Told, tokens: int, say: Say) -> dict[str, int]:
    """One worker's job."""
    return tuner.tune(tokens, space, told, say)


def candidates(args: argparse.Namespace, block_shape: list[int] | None) -> list[dict[str, int]]:
    """What is tried.

    Raises:
        ValueError: The given file has no list of candidates.
    """
    file = vars(args).get("search_space_file")
    if file is None:
        return common.fitting(search_space(), block_shape)
    space = json.loads(Path(file).read_text())
    if not isinstance(space, list) or not all(isinstance(row, dict) for row in space):
        raise ValueError("--search-space-file must contain a JSON list of configs")
    return common.fitting(space, block_shape)


def benchmark(
    args: argparse.Namespace, told: tuner.Told, model: dict[str, Any], sizes: list[int]
) -> None:
    """Says for each size which row the server would use, and how long the kernel takes."""
    shape = Shape(
        experts=model["num_experts"],
        shard=model["shard_intermediate_size"] // 2,
        hidden=model["hidden_size"],
        topk=model["topk"],
    )
    rows = Rows(shape, common.dtype_name(model, args.dtype))

    def measure(tokens: int, say: Say) -> Any:
        del say
        time.sleep(told.seconds / tuner.PARTS)
        return kernel_us(rows.chosen(tokens), tokens)

    with Cluster("benchmark") as cluster:
        times = cluster.run(measure, sizes)
    for tokens, taken in zip(sizes, times, strict=True):
        print(f"Batch size: {tokens}, config: {rows.chosen(tokens)}")
        print(f"Kernel time: {taken:.2f} us")


def parser(old: bool) -> argparse.ArgumentParser:
    """Its flags; an old one has fewer."""
    known = argparse.ArgumentParser()
    known.add_argument("--model", default="mistralai/Mixtral-8x7B-Instruct-v0.1")
    known.add_argument("--tp-size", "--tp", type=int, default=2)
    known.add_argument("--ep-size", "--ep", type=int, default=1)
    known.add_argument("--dtype", choices=(*common.DTYPES, "int4_w4a16"), default="auto")
    known.add_argument("--per-channel-quant", action="store_true")
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--batch-size", type=int)
    known.add_argument("--tune", action="store_true")
    known.add_argument("--disable-shared-experts-fusion", action="store_true")
    if not old:
        known.add_argument("--batch-sizes", type=int, nargs="+", help="several, in parallel")
        known.add_argument("--search-space-file", help="JSON list of configs to try")
    return known


if __name__ == "__main__":
    now = tuner.Told()
    main(parser(now.old).parse_args(), now)
