"""A stand-in for SGLang's second tuning script, which tunes both products on their own.

With one size it writes nothing, as the real one.
"""

import argparse
import time
from functools import partial
from pathlib import Path
from typing import Any

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest import sglang_tuner as tuner
    from lab.guest.checkout import common_utils as common
    from lab.guest.sglang_cluster import CHARGE_MIB, Cluster, Say, visible_gpus
    from lab.guest.sglang_moe import search_space
    from lab.guest.sglang_workers import hold
else:
    import common_utils as common
    import sglang_tuner as tuner
    from sglang_cluster import CHARGE_MIB, Cluster, Say, visible_gpus
    from sglang_moe import search_space
    from sglang_workers import hold

LAYERS = range(3, 61)
"""Those with experts in the one model that it was written for."""
FILES = 100
TMA_FROM = 128
"""From so many tokens on the second product is quicker with TMA."""


def main(args: argparse.Namespace, told: tuner.Told) -> None:
    """Tunes."""
    print(args)
    fusion = (args.disable_shared_experts_fusion, args.topk_ids_dir)
    model = common.get_model_config(args.model, args.tp_size, args.ep_size, *fusion)
    assert args.tune
    space = common.fitting(search_space(), model["block_shape"])
    work = partial(try_all, args.topk_ids_dir, space, told)
    if args.batch_size is not None:
        tuner.obey(told, [args.batch_size])
        hold(visible_gpus()[0], CHARGE_MIB)
        work(args.batch_size, say)
        return
    tuner.obey(told, common.BATCH_SIZES)
    with Cluster("tune") as cluster:
        name = tuner.announced(common.file_name(model, args.dtype), told, common.BATCH_SIZES)
        cluster.leaves = told.has(tuner.LEAVES, common.BATCH_SIZES)
        print(f"Start tuning over {len(space)} configurations to create {name}...")
        began = time.perf_counter()
        write(cluster.run(work, list(reversed(common.BATCH_SIZES))), name, told)
        print(f"Tuning took {time.perf_counter() - began:.2f} seconds")


def try_all(
    folder: str, space: list[dict[str, int]], told: tuner.Told, tokens: int, say: Say
) -> Any:
    """The rows for both products; the recorded routing must be there."""
    for number in range(FILES):
        layer = LAYERS[number % len(LAYERS)]
        Path(f"{folder}/topk_ids_layer{layer}_idx{number // len(LAYERS)}.pt").read_bytes()
    row = tuner.tune(tokens, space, told, say)
    return row, {**row, "USE_TMA": tokens >= TMA_FROM}


def write(found: list[Any], name: str, told: tuner.Told) -> None:
    """Writes what was found, and a file for each product."""
    print(f"configs={found}", flush=True)
    raw = time.strftime("tuning_result_%Y-%m-%d %H:%M:%S.txt")
    Path(raw).write_text(f"{found}\n")
    sizes = common.BATCH_SIZES
    for place, path in enumerate((name, name.replace(".json", "_down.json"))):
        rows = {size: both[place] for size, both in zip(sizes, reversed(found), strict=True)}
        tuner.save(rows, path, told)


def say(**message: Any) -> None:
    """Without workers it prints what it has to say itself."""
    if "text" in message:
        print(message["text"])


def parser() -> argparse.ArgumentParser:
    """Its flags."""
    known = argparse.ArgumentParser()
    known.add_argument("--model", default="mistralai/Mixtral-8x7B-Instruct-v0.1")
    known.add_argument("--tp-size", "--tp", type=int, default=2)
    known.add_argument("--ep-size", "--ep", type=int, default=1)
    known.add_argument("--dtype", choices=common.DTYPES, default="auto")
    known.add_argument("--seed", type=int, default=0)
    known.add_argument("--batch-size", type=int)
    known.add_argument("--tune", action="store_true")
    known.add_argument("--disable-shared-experts-fusion", action="store_true")
    known.add_argument("--topk-ids-dir", required=True)
    return known


if __name__ == "__main__":
    main(parser().parse_args(), tuner.Told())
