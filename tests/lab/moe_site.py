"""SGLang's loader of MoE kernel configs in the stand-in's package, and a checkout that tunes them.

The loader and the files that it ships with are SGLang's own. What the loader imports stands in.
"""

import shutil
from pathlib import Path

from lab.paths import SOURCE

CHECKOUT = "/opt/sglang-source"
"""Where the checkout is inside a guest."""
SCRIPTS = "benchmark/kernels/fused_moe_triton"
"""The tuning scripts' folder in a checkout."""
SGLANG_VERSION = "0.5.9"
TRITON_VERSION = "3.6.0"
TOPK_LAYERS = range(3, 61)
TOPK_FILES = 100
MOE = "sglang/srt/layers/moe"
MOE_LOADER = f"{MOE}/fused_moe_triton/fused_moe_triton_config.py"
MOE_CONFIGS = f"{MOE}/fused_moe_triton/configs"
_STAND_INS = {
    "torch.py": "torch.py",
    "triton.py": "triton.py",
    "server_args.py": "sglang/srt/server_args.py",
    "utils.py": "sglang/srt/utils/__init__.py",
    "override.py": f"{MOE}/fused_moe_triton/__init__.py",
}
# In 0.5.9 the last of them is a package without `triton_utils`: newer checkouts import that.
_EMPTY = ("sglang/srt", "sglang/srt/layers", MOE, f"{MOE}/moe_runner")
_DISTRIBUTIONS = {"sglang": SGLANG_VERSION, "triton": TRITON_VERSION}
_VERSION = f'"""Its version."""\n\n__version__ = "{SGLANG_VERSION}"\n'


def install_moe(libraries: Path, site: Path) -> None:
    """Puts the loader, its files and what it imports into a folder of packages.

    Args:
        libraries: The folder that has the stand-in's `sglang`.
        site: As returned by `bench_site`.
    """
    for folder in _EMPTY:
        (libraries / folder).mkdir(parents=True, exist_ok=True)
        (libraries / folder / "__init__.py").touch()
    for name, target in _STAND_INS.items():
        (libraries / target).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(SOURCE / "guest/package" / name, libraries / target)
    shutil.copyfile(site / MOE_LOADER, libraries / MOE_LOADER)
    for configs in sorted((site / MOE_CONFIGS).glob("triton_*")):
        shutil.copytree(configs, libraries / MOE_CONFIGS / configs.name)
    (libraries / "sglang/version.py").write_text(_VERSION)
    for name, version in _DISTRIBUTIONS.items():
        metadata = libraries / f"{name}-{version}.dist-info/METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def install_checkout(folder: Path) -> Path:
    """Lays out a checkout of SGLang with the stand-in tuning scripts; returns their folder."""
    scripts = folder / SCRIPTS
    scripts.mkdir(parents=True)
    for source in sorted((SOURCE / "guest/checkout").glob("*.py")):
        shutil.copyfile(source, scripts / source.name)
    version = folder / "python/sglang/version.py"
    version.parent.mkdir(parents=True)
    version.write_text(_VERSION)
    return scripts


def write_topk_ids(folder: Path) -> None:
    """Writes what the second tuning script wants recorded: empty files, by the names it asks."""
    folder.mkdir(parents=True, exist_ok=True)
    layers = len(TOPK_LAYERS)
    for number in range(TOPK_FILES):
        name = f"topk_ids_layer{TOPK_LAYERS[number % layers]}_idx{number // layers}.pt"
        (folder / name).touch()
