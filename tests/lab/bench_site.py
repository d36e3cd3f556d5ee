"""SGLang's own benchmark for the stand-in server, and the interpreter that both run under.

The benchmark is one file of SGLang's wheel; with SGLang's own dependencies it would need torch. So
the file is taken out of the wheel, beside the few packages that it imports. They are fetched once
for each list of versions and kept (`paths.PYTHONS`); nothing of them is in this repository.
"""

import fcntl
import hashlib
import shutil
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lab.moe_site import (
    CHECKOUT,
    MOE_CONFIGS,
    MOE_LOADER,
    SGLANG_VERSION,
    install_checkout,
    install_moe,
)
from lab.paths import PYTHONS, SOURCE
from lab.prompts import write_model, write_prompts
from lab.shell import run

GUEST_VERSION = "3.11"
"""Of Python in Debian 12."""
HOME = "/opt/sglang"
"""Where the interpreter's folder is inside a guest: HOME/bin/python."""
UNITS = ("sglang-tuned.service", "sglang-env.service")
SGLANG = f"sglang=={SGLANG_VERSION}"
PACKAGES = (
    "aiohappyeyeballs==2.6.1",
    "aiohttp==3.13.2",
    "aiosignal==1.4.0",
    "attrs==25.4.0",
    "certifi==2025.10.5",
    "charset-normalizer==3.4.4",
    "filelock==3.20.0",
    "frozenlist==1.8.0",
    "fsspec==2025.9.0",
    "huggingface-hub==0.36.0",
    "idna==3.11",
    "jinja2==3.1.6",
    "markupsafe==3.0.3",
    "multidict==6.7.0",
    "numpy==2.3.4",
    "packaging==25.0",
    "pillow==12.0.0",
    "propcache==0.4.1",
    "pybase64==1.4.2",
    "pyyaml==6.0.3",
    "regex==2025.10.23",
    "requests==2.32.5",
    "safetensors==0.6.2",
    "setproctitle==1.3.7",
    "tokenizers==0.22.1",
    "tqdm==4.67.1",
    "transformers==4.57.1",
    "typing-extensions==4.15.0",
    "urllib3==2.5.0",
    "yarl==1.22.0",
)
PLATFORMS = ("manylinux2014_x86_64", "manylinux_2_28_x86_64")
# The benchmark imports one function for data sets that are fetched, which nobody does here; the
# package behind it brings pyarrow and pandas, three times the size of all others.
_FILES = {
    "datasets.py": '"""Nothing is fetched here."""\n\nload_dataset = None\n',
    "stand_in.pth": "../..\n",
}
_MODELS = {"__init__.py", "auto", "encoder_decoder"}
"""What is kept of transformers.models: it looks through all of them whenever it is imported."""
_LAUNCH = "from sglang_server import main\n\nmain()\n"
_FETCH_S = 900


def bench_site(version: str = GUEST_VERSION) -> Path:
    """Fetches what the benchmark needs unless it is cached; about a minute the first time.

    Args:
        version: Of the Python that will run it, for example "3.11".

    Returns:
        A folder with `site-packages`, `bench_serving.py`, `MOE_LOADER` and `MOE_CONFIGS`, not to
        be changed.

    Raises:
        LabError: A package cannot be had; the end of pip's output is in the message.
    """
    place = PYTHONS / _key(version)
    with _locked():
        if not place.exists():
            _build(place, version)
    return place


def install_python(home: Path, site: Path, python: Path, version: str = GUEST_VERSION) -> None:
    """Lays out an interpreter's folder: stand-in server, benchmark and loader as `sglang`.

    The packages are not in it: `packages_folder` says where they are expected.

    Args:
        home: The new folder; in a guest's upper layer it becomes HOME.
        site: As returned by `bench_site`.
        python: The interpreter, as seen from where it will run.
        version: Its version.
    """
    package = home / "lib/sglang"
    package.mkdir(parents=True)
    packages_folder(home, version).parent.mkdir(parents=True)
    (package / "__init__.py").touch()
    (package / "launch_server.py").write_text(_LAUNCH)
    shutil.copyfile(site / "bench_serving.py", package / "bench_serving.py")
    for source in sorted((SOURCE / "guest").glob("sglang_*.py")):
        shutil.copyfile(source, home / "lib" / source.name)
    install_moe(home / "lib", site)
    _write_interpreter(home, python, version)
    write_model(home / "model")
    write_prompts(home)


def _write_interpreter(home: Path, python: Path, version: str) -> None:
    (home / "bin").mkdir()
    (home / "bin/python").symlink_to(python)
    # That makes it a virtual environment: nothing of the system's packages is seen.
    (home / "pyvenv.cfg").write_text(
        f"home = {python.parent}\ninclude-system-site-packages = false\nversion = {version}\n"
    )


def packages_folder(home: Path, version: str = GUEST_VERSION) -> Path:
    """Where a site's `site-packages` must be seen, by a mount or a link."""
    return home / f"lib/python{version}/site-packages"


def install_in_guest(upper: Path, site: Path) -> None:
    """Puts interpreter, stand-in server, its units and a checkout into a guest's upper layer."""
    home = upper / HOME.lstrip("/")
    install_python(home, site, Path("/usr/bin/python3"))
    install_checkout(upper / CHECKOUT.lstrip("/"))
    units = upper / "etc/systemd/system"
    units.mkdir(parents=True, exist_ok=True)
    for unit in UNITS:
        shutil.copyfile(SOURCE / "guest" / unit, units / unit)
    defaults = upper / "etc/default/sglang"
    defaults.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(SOURCE / "guest/sglang.default", defaults)


def guest_mount(site: Path) -> str:
    """The mount that an LXC guest needs for it, as in fstab, without the last two numbers."""
    target = str(packages_folder(Path(HOME))).lstrip("/")
    return f"{site}/site-packages {target} none bind,ro,create=dir"


@contextmanager
def _locked() -> Iterator[None]:
    """Two builds cannot meet."""
    PYTHONS.mkdir(parents=True, exist_ok=True)
    with (PYTHONS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _key(version: str) -> str:
    parts = (version, SGLANG, *PACKAGES, *PLATFORMS, *sorted(_MODELS), *_FILES, *_FILES.values())
    listed = "\n".join((*parts, MOE_LOADER, MOE_CONFIGS))
    return hashlib.sha256(listed.encode()).hexdigest()[:16]


def _build(place: Path, version: str) -> None:
    """Builds beside the final place and renames at the end: a folder of that name is complete."""
    with tempfile.TemporaryDirectory(dir=PYTHONS) as scratch:
        partial = Path(scratch) / "partial"
        packages = partial / "site-packages"
        compatible = ["--python-version", version, "--implementation", "cp"]
        compatible += ["--abi", f"cp{version.replace('.', '')}"]
        compatible += [f"--platform={platform}" for platform in PLATFORMS]
        _pip("install", "--target", str(packages), *compatible, *PACKAGES)
        _trim(packages / "transformers/models")
        for name, text in _FILES.items():
            (packages / name).write_text(text)
        _pip("download", "--dest", scratch, SGLANG)
        (wheel,) = Path(scratch).glob("sglang-*.whl")
        with zipfile.ZipFile(wheel) as opened:
            (partial / "bench_serving.py").write_bytes(opened.read("sglang/bench_serving.py"))
            names = [x for x in opened.namelist() if x.startswith((MOE_LOADER, MOE_CONFIGS))]
            opened.extractall(partial, names)
        partial.rename(place)


def _trim(models: Path) -> None:
    for entry in models.iterdir():
        if entry.name not in _MODELS and entry.is_dir():
            shutil.rmtree(entry)


def _pip(verb: str, *arguments: str) -> None:
    quiet = ["--quiet", "--no-deps", "--only-binary=:all:", "--disable-pip-version-check"]
    run([sys.executable, "-m", "pip", verb, *quiet, *arguments], timeout=_FETCH_S)
