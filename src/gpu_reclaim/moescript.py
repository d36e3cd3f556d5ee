"""SGLang's tuning script for the MoE kernel in a checkout: what is there, and its command.

The script is in no package, so it comes from a checkout of SGLang's repository, which should be of
the installed package's version: a newer one imports modules that an older package lacks (SGLang
issue #23251).
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass

from gpu_reclaim.benching import HELP_S, OFFLINE
from gpu_reclaim.commands import Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.sglang import by_python

FOLDER = "benchmark/kernels/fused_moe_triton"
"""In a checkout; `common_utils.py` beside the script reads a model's shape."""

SCRIPT = f"{FOLDER}/tuning_fused_moe_triton.py"
"""Tries rows and writes the best for each size; without `--tune` it times the rows in use."""

NEEDED = ("--model", "--tp-size", "--ep-size", "--dtype", "--batch-size", "--tune")
"""Flags without which it would tune something else."""

UNSEEN = f"{OFFLINE} CUDA_VISIBLE_DEVICES= PYTHONDONTWRITEBYTECODE=1"
"""What a question runs with: it reaches no GPU that serves, fetches nothing, and leaves nothing in
the checkout."""

CONFIGS = (
    "srt/layers/moe/moe_runner/triton_utils/configs",
    "srt/layers/moe/fused_moe_triton/configs",
)
"""Where the package has its files: from 0.5.13 on, and before (0.5.5 to 0.5.9 were read)."""

_PROBE = """
import importlib.metadata, importlib.util, os, sys
sys.path[:] = [x for x in sys.path if x]
for name in ("sglang", "triton"):
    try:
        print(name, importlib.metadata.version(name))
    except importlib.metadata.PackageNotFoundError:
        pass
spec = importlib.util.find_spec("sglang")
for home in spec.submodule_search_locations or () if spec else ():
    if os.path.realpath(home).startswith(os.path.realpath(sys.argv[1]) + os.sep):
        print("own yes")
    for path in (os.path.join(home, x) for x in sys.argv[2:]):
        if os.path.isdir(path):
            print("configs", os.path.realpath(path))
"""


@dataclass(frozen=True)
class Facts:
    """What is known of the script and of the package that serves.

    Attributes:
        found: The script is there.
        script: Its path.
        flags: The flags it knows; none where it could not be run.
        code: Exit status of its `--help`; -1 where it was not run.
        said: Its last lines where that failed.
        source_version: Of the checkout, for example `0.5.9`; empty: unknown.
        exact: The checkout is that version; else that and some commits more.
        commit: The checkout's; empty: unknown.
        own: The package that serves is the checkout itself.
        sglang: The installed package's version; empty: unknown.
        triton: The installed Triton's.
        configs: Folder of the package's own files of configs.
    """

    found: bool = False
    script: str = ""
    flags: frozenset[str] = frozenset()
    code: int = -1
    said: str = ""
    source_version: str = ""
    exact: bool = False
    commit: str = ""
    own: bool = False
    sglang: str = ""
    triton: str = ""
    configs: str = ""

    @property
    def missing(self) -> list[str]:
        """Needed flags that the script does not know."""
        return [flag for flag in NEEDED if flag not in self.flags]

    @property
    def skewed(self) -> str:
        """Why checkout and package do not fit together; empty where nothing is known of that."""
        imports = re.findall(r"^(?:ModuleNotFoundError|ImportError): .*", self.said, re.M)
        if imports and self.code != 0:
            return f"the tuning script does not run by the server's interpreter: {imports[-1]}"
        if not self.source_version or not self.sglang or self._same():
            return ""
        some = "" if self.exact else " with commits after it"
        return (
            f"the checkout is of SGLang {self.source_version}{some}, and the package that serves "
            f"is {self.sglang}"
        )

    def _same(self) -> bool:
        # setuptools-scm puts the commit in the version of a package built between two releases.
        built = re.search(r"\+g([0-9a-f]{7,40})\b", self.sglang)
        if self.own or (built and self.commit.startswith(built[1])):
            return True
        return self.source_version == self.sglang.partition("+")[0]


@dataclass(frozen=True)
class Job:
    """What the script is to do.

    Attributes:
        model: The model's folder or name.
        tp: Tensor-parallel ranks.
        tokens: The one size to work at.
        tune: Try rows; else the row in use is timed.
        ep: Expert-parallel ranks.
        dtype: The flag's value, for example `auto` or `fp8_w8a8`.
        per_channel: Quantized by channel.
        no_fusion: Shared experts are not fused.
        space_file: JSON list of the rows to try; empty: the script's own.
    """

    model: str
    tp: int
    tokens: int
    tune: bool
    ep: int = 1
    dtype: str = "auto"
    per_channel: bool = False
    no_fusion: bool = False
    space_file: str = ""


def look(python: str, source: str) -> str:
    """Shell text that asks what is there; it imports what the script imports, on no GPU.

    Args:
        python: The server's interpreter.
        source: Folder of the checkout.
    """
    return "\n".join(
        [
            *(UNSEEN, _help(python, source), _version(source)),
            by_python(python, _PROBE, source, *CONFIGS),
        ]
    )


def _help(python: str, source: str) -> str:
    script, folder = shlex.quote(f"{source}/{SCRIPT}"), shlex.quote(f"{source}/{FOLDER}")
    run = shlex.join(["timeout", "-k", "5", str(HELP_S), python, SCRIPT.rpartition("/")[2]])
    return "\n".join(
        [
            f"if [ -f {script} ]; then",
            f"  echo 'script yes'; printf 'at %s\\n' {script}",
            f'  text=$(cd {folder} && {run} --help 2>&1); code=$?; echo "code $code"',
            "  if [ \"$code\" = 0 ]; then printf '%s\\n' \"$text\" | sed 's/^/help /'",
            "  else printf '%s\\n' \"$text\" | tail -n 3 | sed 's/^/said /'; fi",
            "fi",
        ]
    )


def _version(source: str) -> str:
    git = shlex.join(["git", "-C", source, "-c"]) + ' safe.directory="$real"'
    # SGLang's repository has tags of other products too, for example gateway-v0.3.1.
    describe = f"{git} describe --tags --match 'v[0-9]*'"
    files = " ".join(
        shlex.quote(f"{source}/python/sglang/{name}.py") for name in ("version", "_version")
    )
    return "\n".join(
        [
            f"tag=; if [ -e {shlex.quote(f'{source}/.git')} ]; then",
            f"  real=$(cd {shlex.quote(source)} && pwd -P)",
            f'  tag=$({describe} --abbrev=0 2>/dev/null) && echo "version $tag"',
            f"  {describe} --exact-match >/dev/null 2>&1 && echo 'exact yes'",
            f"  {git} rev-parse HEAD 2>/dev/null | sed 's/^/commit /'",
            "fi",
            '[ -n "$tag" ] || sed -n "s/^__version__ *=.*[\\"\']\\([^\\"\']*\\)[\\"\'].*/'
            f'file \\1/p" {files} 2>/dev/null',
        ]
    )


def parse_look(section: Section) -> Facts:
    """What is there."""
    code = section.value("code")
    flags = re.findall(r"--[a-z][a-z0-9-]*", "\n".join(section.lines("help")))
    return Facts(
        found=section.value("script") == "yes",
        script=section.value("at"),
        flags=frozenset(flags),
        code=int(code) if code.isdigit() else -1,
        said="\n".join(section.lines("said")),
        source_version=(section.value("version") or section.value("file")).removeprefix("v"),
        exact=bool(section.value("exact") or section.value("file")),
        commit=section.value("commit"),
        own=section.value("own") == "yes",
        sglang=section.value("sglang"),
        triton=section.value("triton"),
        configs=section.value("configs"),
    )


def argv(python: str, facts: Facts, job: Job) -> list[str]:
    """The script's command; it works, and writes, in the folder it is started in.

    Raises:
        BadInput: The script lacks a flag without which it would do something else.
    """
    given = {
        "--model": [job.model],
        "--tp-size": [str(job.tp)],
        "--ep-size": [str(job.ep)],
        "--dtype": [job.dtype],
        "--batch-size": [str(job.tokens)],
        **({"--tune": []} if job.tune else {}),
        **({"--per-channel-quant": []} if job.per_channel else {}),
        **({"--disable-shared-experts-fusion": []} if job.no_fusion else {}),
        **({"--search-space-file": [job.space_file]} if job.space_file else {}),
    }
    lacking = [flag for flag in given if flag not in facts.flags]
    if lacking:
        raise BadInput(
            f"SGLang's tuning script does not know {', '.join(lacking)}",
            remedy="check out the release of SGLang that is installed, or a newer script",
        )
    return [python, facts.script, *(word for flag in given for word in (flag, *given[flag]))]
