"""A folder with all configs that the server finds now and one of ours: made by real shells."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from gpu_reclaim import overlays
from gpu_reclaim.lease import TRIAL_FILE, Places
from gpu_reclaim.moeconfigs import ConfigName, chosen, parse_table, text_of
from gpu_reclaim.moelog import lookups
from lab.bench_site import bench_site
from lab.moe_site import MOE_CONFIGS
from unit.moe_host import BLOCKS, GOOD, NAME
from unit.shells import here
from unit.test_moe_loader import ASKED, load, shipped_file

UNIT = "sglang.service"
OTHER = "E=8,N=7168,device_name=NVIDIA_H200.json"
OURS = text_of(GOOD)


@dataclass
class Host:
    """A server's folder of configs, and the place of overlays."""

    home: Path

    @property
    def base(self) -> Path:
        return self.home / "it's installed here"

    @property
    def places(self) -> Places:
        return Places(str(self.home / "run"), str(self.home / "var lib"), str(self.home / "etc"))

    @property
    def root(self) -> Path:
        return Path(overlays.root(UNIT, self.places))

    @property
    def target(self) -> Path:
        return self.root / "0123abc"

    def put(self, path: str, text: str = "{}", base: Path | None = None) -> Path:
        file = (base or self.base) / "configs" / path
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
        return file

    def build(self, name: ConfigName = NAME, text: str = OURS, triton: str = "3.6.0") -> bool:
        body = overlays.build(str(self.target), str(self.base), triton, name, text)
        return here({"made": body}).section("made").value("built") == "yes"

    @property
    def made(self) -> dict[str, str]:
        """Files of the overlay, by path below its `configs`."""
        top = self.target / "configs"
        files = (x for x in top.rglob("*") if x.is_file())
        return {str(x.relative_to(top)): x.read_text() for x in files}

    def tidy(self, *kept: str) -> None:
        here({"tidy": overlays.tidy(UNIT, list(kept), self.places)})


@pytest.fixture
def host(tmp_path: Path, shell: str) -> Host:
    made = Host(tmp_path)
    made.put(f"triton_3_4_0/{OTHER}", "older")
    made.put(f"triton_3_6_0/{OTHER}", "newer")
    return made


OLD = {f"triton_3_4_0/{OTHER}": "older", f"triton_3_6_0/{OTHER}": "newer"}


def test_all_that_is_there_and_our_file(host: Host) -> None:
    assert host.build()
    assert host.made == {**OLD, f"triton_3_6_0/{NAME}": OURS}
    assert list(host.root.iterdir()) == [host.target]


def test_our_file_takes_the_place_of_one_of_its_name(host: Host) -> None:
    theirs = host.put(f"triton_3_6_0/{NAME}", "theirs")

    assert host.build()
    assert host.made[f"triton_3_6_0/{NAME}"] == OURS
    assert theirs.read_text() == "theirs"


def test_a_triton_that_has_none_yet(host: Host) -> None:
    assert host.build(triton="3.7.1")
    assert host.made == {**OLD, f"triton_3_7_1/{NAME}": OURS}


def test_names_with_blanks_and_brackets(host: Host) -> None:
    theirs = str(BLOCKS).replace("E=256", "E=64")
    host.put(f"triton_3_4_0/{theirs}", "blocks")

    assert host.build(BLOCKS, "it's 100 % \\n `ours`\n")
    assert host.made[f"triton_3_4_0/{theirs}"] == "blocks"
    assert host.made[f"triton_3_6_0/{BLOCKS}"] == "it's 100 % \\n `ours`\n"


@pytest.mark.parametrize(
    "path",
    [
        f"triton_3_6_0.bak/{OTHER}",
        f"triton_x/{OTHER}",
        f"triton_/{OTHER}",
        f"triton_3_/{OTHER}",
        f"triton__3/{OTHER}",
        f"triton_3 6/{OTHER}",
        f"other/{OTHER}",
        "triton_3_5_0",
        "README.md",
        "triton_3_6_0/README.md",
        f"triton_3_6_0/{OTHER}.bak",
        "triton_3_6_0/e=1.json",
        f"triton_3_6_0/old/{OTHER}",
        "triton_3_6_0/E=folder.json/x",
    ],
)
def test_what_is_not_copied(host: Host, path: str) -> None:
    """A backup beside the others ends a server from 0.5.13 on."""
    host.put(path)

    assert host.build()
    assert host.made == {**OLD, f"triton_3_6_0/{NAME}": OURS}
    folders = sorted(x.name for x in (host.target / "configs").iterdir())
    assert folders == ["triton_3_4_0", "triton_3_6_0"]


def test_a_folder_without_a_config_is_a_folder_all_the_same(host: Host) -> None:
    (host.base / "configs/triton_3_5_0").mkdir()

    assert host.build()
    assert (host.target / "configs/triton_3_5_0").is_dir()


def test_links_are_followed(host: Host) -> None:
    elsewhere = host.put(f"triton_1/{OTHER}", "linked", host.home / "store")
    (host.base / "configs/triton_3_5_0").symlink_to(elsewhere.parent)
    link = host.base / "configs/triton_3_4_0/E=1,N=1,device_name=x.json"
    link.symlink_to(elsewhere)
    (host.base / "configs/triton_3_4_0/E=2,N=1,device_name=x.json").symlink_to("/nowhere")

    assert host.build()
    elsewhere.unlink()
    assert host.made[f"triton_3_5_0/{OTHER}"] == "linked"
    assert host.made[f"triton_3_4_0/{link.name}"] == "linked"
    assert len(host.made) == 5


def test_one_that_is_there_stays(host: Host) -> None:
    assert host.build()
    before = host.target.stat().st_ino
    host.put(f"triton_3_6_0/{OTHER}", "changed")

    assert host.build(text="others")
    assert (host.target.stat().st_ino, host.made[f"triton_3_6_0/{NAME}"]) == (before, OURS)


def test_one_that_was_cut_is_made_anew(host: Host) -> None:
    cut = Path(f"{host.target}.new/configs/triton_3_3_1")
    cut.mkdir(parents=True)
    (cut / OTHER).write_text("ha")

    assert host.build()
    assert host.made == {**OLD, f"triton_3_6_0/{NAME}": OURS}
    assert list(host.root.iterdir()) == [host.target]


def test_everybody_can_read_it(host: Host) -> None:
    for file in host.base.rglob("*.json"):
        file.chmod(0o600)
    (host.base / "configs/triton_3_4_0").chmod(0o700)
    old = os.umask(0o077)
    try:
        assert host.build()
    finally:
        os.umask(old)

    for path in (host.root.parent, host.root, host.target, *host.target.rglob("*")):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path


@pytest.mark.parametrize("there", [True, False])
def test_no_folder_to_copy(tmp_path: Path, shell: str, there: bool) -> None:
    """A server that has its `configs` elsewhere would lose all of them."""
    host = Host(tmp_path)
    if there:
        host.base.mkdir()

    assert not host.build()
    assert not host.target.exists()


def test_an_empty_folder_is_one_to_copy(tmp_path: Path, shell: str) -> None:
    host = Host(tmp_path)
    (host.base / "configs").mkdir(parents=True)

    assert host.build()
    assert host.made == {f"triton_3_6_0/{NAME}": OURS}


def test_a_place_that_cannot_be_written_to(host: Host) -> None:
    host.root.parent.parent.mkdir(parents=True)
    host.root.parent.write_text("a file")

    assert not host.build()


def test_the_real_loader_reads_it(tmp_path: Path) -> None:
    site = bench_site(f"{sys.version_info.major}.{sys.version_info.minor}")
    target, base = tmp_path / "made", (site / MOE_CONFIGS).parent
    table = parse_table(OURS, NAME)
    for _ in range(2):
        body = overlays.build(str(target), str(base), "3.6.0", NAME, OURS)
        assert here({"made": body}).section("made").value("built") == "yes"

    found = load(site, NAME, target)
    file = f"{target}/configs/triton_3_6_0/{NAME}"
    assert found["said"] == [f"INFO Using MoE kernel config from {file}."]
    assert found["rows"] == [chosen(table, tokens) for tokens in ASKED]
    assert lookups(found["said"])[0].folder == str(target)
    shipped = {x.relative_to(base) for x in base.glob("configs/triton_*/E=*.json")}
    assert {x.relative_to(target) for x in target.rglob("*.json")} - shipped == {
        Path(file).relative_to(target)
    }
    assert (
        shipped_file(target / "configs").read_text() == shipped_file(base / "configs").read_text()
    )


def test_other_configs_for_the_second_product_of_the_same_shape_are_left_out(host: Host) -> None:
    """Of another block size of M they end SGLang 0.5.9 at start; other shapes keep theirs."""
    other = OTHER.replace(".json", "_down.json")
    for version in ("3_4_0", "3_6_0"):
        host.put(f"triton_{version}/{str(NAME).replace('.json', '_down.json')}")
        host.put(f"triton_{version}/{other}")
    assert host.build()
    assert set(host.made) == {
        *(*OLD, f"triton_3_6_0/{NAME}"),
        *(f"triton_{version}/{other}" for version in ("3_4_0", "3_6_0")),
    }


# Tidying.


def test_what_is_named_stays(host: Host) -> None:
    for name in ("aaa", "aa", "bbb", "ccc.new"):
        (host.root / name / "configs").mkdir(parents=True)
    (host.root / "stray file").write_text("x")
    beside = host.root.parent / "other.service/aaa"
    beside.mkdir(parents=True)
    host.tidy(f"{host.root}/aaa", str(host.base))

    assert [x.name for x in host.root.iterdir()] == ["aaa"]
    assert (beside.is_dir(), host.base.is_dir()) == (True, True)


@pytest.mark.parametrize("where", ["etc", "run"])
@pytest.mark.parametrize("name", ["zz-gpu-reclaim-moe.conf", "10-own.conf", "old.conf.bak"])
def test_what_a_drop_in_names_stays(host: Host, where: str, name: str) -> None:
    """One of the same name hides it now, and may be gone tomorrow."""
    for entry in ("aaa", "bbb"):
        (host.root / entry / "configs").mkdir(parents=True)
    file = host.home / where / f"systemd/system/{UNIT}.d" / name
    file.parent.mkdir(parents=True)
    file.write_text(overlays.drop_in(UNIT, f"{host.root}/aaa"))
    host.tidy()
    assert [x.name for x in host.root.iterdir()] == ["aaa"]

    file.unlink()
    host.tidy()
    assert not host.root.exists()


def test_what_only_a_trial_names_goes(host: Host) -> None:
    (host.root / "aaa/configs").mkdir(parents=True)
    file = host.home / f"run/systemd/system/{UNIT}.d" / TRIAL_FILE
    file.parent.mkdir(parents=True)
    file.write_text(overlays.drop_in(UNIT, f"{host.root}/aaa"))
    host.tidy()
    assert not host.root.exists()


def test_another_units_drop_in_is_not_asked(host: Host) -> None:
    (host.root / "aaa/configs").mkdir(parents=True)
    file = host.home / "etc/systemd/system/other.service.d/x.conf"
    file.parent.mkdir(parents=True)
    file.write_text(overlays.drop_in(UNIT, f"{host.root}/aaa"))
    host.tidy()

    assert not host.root.exists()


def test_an_empty_folder_goes(host: Host) -> None:
    (host.root / "aaa/configs").mkdir(parents=True)
    (host.root / "linked").symlink_to(host.base)
    host.tidy(str(host.base))

    assert (host.root.exists(), host.root.parent.exists()) == (False, False)
    # What a link leads to is not ours.
    assert (host.base / "configs/triton_3_4_0" / OTHER).exists()


def test_nothing_is_there(host: Host) -> None:
    host.tidy()
    host.tidy("/opt/x")

    assert not host.root.exists()


def test_a_drop_in_says_how_to_undo_it() -> None:
    text = overlays.drop_in(UNIT, "/var/lib/x/y")

    assert text.endswith('\n[Service]\nEnvironment="SGLANG_MOE_CONFIG_DIR=/var/lib/x/y"\n')
    assert all(x.startswith("#") for x in text.partition("\n[Service]")[0].split("\n"))
