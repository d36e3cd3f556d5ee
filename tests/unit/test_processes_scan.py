"""The look through /proc of this very machine, with GNU tools and with busybox alone."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpu_reclaim.commands import Script
from gpu_reclaim.models import Process, ProcessTable
from gpu_reclaim.processes import DeviceSet, parse_scan, scan
from gpu_reclaim.transport.local import LocalTransport
from unit.actors import MAP_ONLY, OPEN, Stage, identity, wait_for
from unit.shells import need

MEMORY = DeviceSet(majors=(1,), driver_names=())
"""Character devices 1:*; this machine's stand-in for a GPU is a node 1:5 (/dev/zero)."""

NOTHING = DeviceSet(majors=(), driver_names=("no such driver",))


def look(
    devices: DeviceSet,
    *,
    units: tuple[str, ...] = (),
    everybody: bool = False,
    wide: bool = False,
    before: str = "",
    after: str = "",
    transport: LocalTransport | None = None,
) -> ProcessTable:
    body = f"{before}\n{scan(devices, units=units, everybody=everybody, wide=wide)}"
    # The scan ends with exit; what cleans up after it stands in a trap.
    script = Script("look", {"processes": f"trap '{after}' EXIT\n{body}" if after else body})
    result = (transport or LocalTransport()).run(script)
    return parse_scan(result, result.section("processes"), devices)


def prefix(stage: Stage) -> DeviceSet:
    """Files of the stage whose names begin with gpu count as devices."""
    return DeviceSet(majors=(), driver_names=("none",), path_prefixes=(f"{stage.folder}/gpu",))


def of(table: ProcessTable, pid: int) -> Process | None:
    return next((process for process in table.processes if process.pid == pid), None)


def devices_of(table: ProcessTable, pid: int) -> list[str]:
    process = of(table, pid)
    return process.devices if process else []


# Who holds what.


def test_a_holder_is_found_by_the_number_of_its_node(tools: str, stage: Stage, root: None) -> None:
    node = stage.node("nvidia0", 1, 5)
    holder, other = stage.start(OPEN.format(path=node)), stage.start()
    table = look(MEMORY)

    assert devices_of(table, holder) == [f"{node} (fd)"]
    assert of(table, other) is None
    assert table.pid_namespace == str(Path("/proc/self/ns/pid").readlink())


def test_another_number_is_another_device(tools: str, stage: Stage, root: None) -> None:
    holder = stage.start(OPEN.format(path=stage.node("nvidia0", 1, 5)))

    assert devices_of(look(NOTHING), holder) == []
    assert devices_of(look(DeviceSet(majors=(195, 5))), holder) == []


@pytest.mark.parametrize("name", ["gpu", "odd name", "a -> b", "-> '", "x\ny"])
def test_a_node_made_anywhere_is_found_by_a_wide_look(
    tools: str, stage: Stage, root: None, name: str
) -> None:
    """A container may have its device nodes outside /dev, and under any name."""
    holder = stage.start(OPEN.format(path=stage.node(name, 1, 5)))
    other = stage.start(OPEN.format(path=stage.file("plain")))

    assert devices_of(look(MEMORY), holder) == []
    assert len(devices_of(look(MEMORY, wide=True), holder)) == 1
    assert devices_of(look(MEMORY, wide=True), other) == []


def test_a_wide_look_sees_what_a_narrow_one_does(tools: str, stage: Stage, root: None) -> None:
    node = stage.node("nvidia0", 1, 5)
    holder = stage.start(OPEN.format(path=node))

    assert devices_of(look(MEMORY, wide=True), holder) == [f"{node} (fd)"]


def test_a_dynamic_number_is_known_by_its_drivers_name(
    tools: str, stage: Stage, root: None
) -> None:
    holder = stage.start(OPEN.format(path=stage.node("nvidia-uvm", 1, 5)))
    table = look(DeviceSet(majors=(), driver_names=("mem",)))

    assert len(devices_of(table, holder)) == 1


def test_a_file_that_only_bears_a_gpus_name_is_none(tools: str, stage: Stage) -> None:
    holder = stage.start(OPEN.format(path=stage.file("nvidia0")))

    assert devices_of(look(DeviceSet(majors=tuple(range(1, 512)))), holder) == []


def test_a_holder_by_mapping_alone_is_found(tools: str, stage: Stage, root: None) -> None:
    node = stage.node("nvidia0", 1, 5)
    holder = stage.start(MAP_ONLY.format(path=node))
    assert node not in [str(x.readlink()) for x in Path(f"/proc/{holder}/fd").iterdir()]

    assert devices_of(look(MEMORY), holder) == [f"{node} (map)"]


def test_a_holder_of_a_node_that_was_removed_is_found(tools: str, stage: Stage, root: None) -> None:
    node = stage.node("nvidia0", 1, 5)
    by_descriptor = stage.start(OPEN.format(path=node))
    by_mapping = stage.start(MAP_ONLY.format(path=node))
    Path(node).unlink()
    table = look(MEMORY)

    assert devices_of(table, by_descriptor) == [f"{node} (deleted) (fd)"]
    assert devices_of(table, by_mapping) == [f"{node} (deleted) (map)"]
    assert by_mapping not in table.uninspected


def test_another_node_put_in_the_place_of_the_held_one_changes_nothing(
    tools: str, stage: Stage, root: None
) -> None:
    node = stage.node("nvidia0", 1, 5)
    holder = stage.start(MAP_ONLY.format(path=node))
    bystander = stage.start(MAP_ONLY.format(path=stage.file("nvidia1")))
    Path(node).unlink()
    stage.file("nvidia0")
    Path(stage.folder, "nvidia1").unlink()
    stage.node("nvidia1", 1, 5)
    table = look(MEMORY)

    assert devices_of(table, holder) == [f"{node} (deleted) (map)"]
    assert devices_of(table, bystander) == []


@pytest.mark.parametrize("way", [OPEN, MAP_ONLY])
def test_private_files_count_by_prefix_on_test_machines(tools: str, stage: Stage, way: str) -> None:
    holder = stage.start(way.format(path=stage.file("gpu0")))
    other = stage.start(way.format(path=stage.file("xgpu0")))
    table = look(prefix(stage))

    assert len(devices_of(table, holder)) == 1
    assert devices_of(table, other) == []


def test_the_characters_of_a_prefix_mean_themselves(tools: str, stage: Stage) -> None:
    holder = stage.start(OPEN.format(path=stage.file("g.(p)+0")))
    other = stage.start(OPEN.format(path=stage.file("gxp0")))
    table = look(DeviceSet(majors=(), path_prefixes=(f"{stage.folder}/g.(p)+",)))

    assert len(devices_of(table, holder)) == 1
    assert devices_of(table, other) == []


def test_a_prefix_below_dev_counts_character_devices_only(tools: str, stage: Stage) -> None:
    path = Path(f"/dev/shm/gpu-reclaim-test-{os.getpid()}")
    path.write_bytes(b"\0" * 4096)
    try:
        holder = stage.start(OPEN.format(path=str(path)))
        table = look(DeviceSet(majors=(), path_prefixes=("/dev/shm/gpu-reclaim-test-",)))
    finally:
        path.unlink()

    assert devices_of(table, holder) == []


LEADERLESS = """
import threading
{hold}
threading.Thread(target=lambda: time.sleep(600)).start()
sys.stdout.write("ready\\n"); sys.stdout.flush()
ctypes.CDLL(None).syscall({exit}, 0)
"""


@pytest.mark.skipif(os.uname().machine not in ("x86_64", "aarch64"), reason="number of exit(2)")
@pytest.mark.parametrize("way", [OPEN, MAP_ONLY])
def test_one_whose_first_thread_is_dead_still_holds(
    tools: str, stage: Stage, root: None, way: str
) -> None:
    number = {"x86_64": 60, "aarch64": 93}[os.uname().machine]
    hold = way.format(path=stage.node("nvidia0", 1, 5))
    pid = stage.start(LEADERLESS.format(hold=hold, exit=number))
    wait_for(lambda: identity(pid).state == "Z", "leader dead")

    assert len(devices_of(look(MEMORY), pid)) == 1


# Who they are.


AWKWARD = [
    "two\nlines",
    "13/stat:13 (forged) S 1 1 1",
    "self 1\nmajor 1 nvidia",
    'it\'s "quoted" `id` $(touch forged) ${HOME} \\n',
    "Grüße 日本 \u202e",
    "\udcff\udcfe",
    "",
    "x" * 4096,
    "*",
    "-n",
    "\x01\x7f\t.",
]


def test_arguments_arrive_whole_whatever_stands_in_them(tools: str, stage: Stage) -> None:
    holder = stage.start(OPEN.format(path=stage.file("gpu0")), argv=tuple(AWKWARD))
    process = of(look(prefix(stage)), holder)

    assert process is not None
    for text in AWKWARD:
        shown = text.encode(errors="surrogateescape").decode(errors="backslashreplace")
        # Byte 1 stands for newline on the way.
        assert shown.replace("\x01", "\n") in process.command_line
    assert process.name == Path(process.exe).name or process.name.startswith("python")
    assert not (stage.folder / "forged").exists()


@pytest.mark.parametrize(
    ("given", "comm"),
    [
        (") R 1 1", ") R 1 1"),
        ("a) S 1 (b", "a) S 1 (b"),
        ("two\nlines", "two\\nlines"),
        ("q'\"`$x\\", "q'\"`$x\\"),
        ("Grün", "Grün"),
        ("self 1", "self 1"),
        (" ", " "),
    ],
)
def test_names_that_look_like_something_else_are_only_names(
    tools: str, stage: Stage, given: str, comm: str
) -> None:
    setup = f"{OPEN.format(path=stage.file('gpu0'))}\nopen('/proc/self/comm', 'w').write({given!r})"
    holder = stage.start(setup)
    process, seen = of(look(prefix(stage)), holder), identity(holder)

    assert process is not None
    assert process.comm == comm
    assert (process.start_time, process.state) == (seen.start_time, seen.state)
    assert process.ppid == os.getpid()
    assert process.session == os.getsid(0)
    assert process.exe == str(Path(f"/proc/{holder}/exe").readlink())


def test_a_set_title_is_the_name(tools: str, stage: Stage) -> None:
    holder = titled(stage, "sglang::scheduler_TP0")
    process = of(look(prefix(stage)), holder)

    assert process is not None
    assert process.name == "sglang::scheduler_TP0"
    assert process.exe == str(Path(need("sleep")).resolve())


def titled(stage: Stage, title: str, program: str = "sleep") -> int:
    """A holder of gpu0 with another title."""
    held = stage.file("gpu0")
    line = f'exec 7<>"{held}"; echo ready; exec -a "$1" {need(program)} 600'
    pid = stage.run([need("bash"), "-c", line, "bash", title])
    wait_for(lambda: title in Path(f"/proc/{pid}/cmdline").read_text(), "title")
    return pid


def test_control_groups_are_read_without_the_hierarchys_name(tools: str, stage: Stage) -> None:
    holder = stage.start(OPEN.format(path=stage.file("gpu0")))
    lines = Path(f"/proc/{holder}/cgroup").read_text().splitlines()
    process = of(look(prefix(stage)), holder)

    assert process is not None
    assert process.cgroups == sorted({line.split(":", 2)[2] for line in lines})


@contextlib.contextmanager
def control_group(name: str) -> Iterator[Path]:
    """A control group in whichever hierarchy lets us make one."""
    for base in ("pids", "systemd", "unified", ""):
        group = Path("/sys/fs/cgroup", base, name)
        try:
            group.mkdir()
        except OSError:
            continue
        try:
            yield group
        finally:
            group.rmdir()
        return
    pytest.skip("no control group can be made here")


def test_members_of_a_units_control_group_are_described_though_they_hold_nothing(
    tools: str, stage: Stage, root: None
) -> None:
    unit, other = f"gr-{os.getpid()}.service", f"gr-{os.getpid()}.serviceable"
    with control_group(unit) as group, control_group(other) as near:
        inside, beside = stage.start(), stage.start()
        (group / "cgroup.procs").write_text(str(inside))
        (near / "cgroup.procs").write_text(str(beside))
        table, without = look(NOTHING, units=(unit,)), look(NOTHING)
        stage.close()

    assert of(table, inside) is not None
    assert of(without, inside) is None


def test_busybox_and_gnu_tools_see_the_same(
    stage: Stage, tool_paths: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    pids = [
        stage.start(OPEN.format(path=stage.file("gpu0")), argv=tuple(AWKWARD)),
        stage.start(MAP_ONLY.format(path=stage.file("gpu1"))),
        stage.start(OPEN.format(path=stage.file("gpu 2 $x"))),
        stage.start("open('/proc/self/comm', 'w').write(') R 1 1')"),
        titled(stage, "sglang::scheduler_TP0"),
    ]
    Path(stage.folder, "gpu1").unlink()
    seen = {}
    for name, path in tool_paths.items():
        monkeypatch.setenv("PATH", path)
        table = look(prefix(stage), everybody=True)
        seen[name] = [of(table, pid) for pid in pids]

    assert None not in seen["dash"]
    assert seen["dash"] == seen["bash"]
    assert seen["dash"] == seen["busybox"]
    assert [bool(x and x.devices) for x in seen["dash"]] == [True, True, True, False, True]


# Forgeries.


@pytest.mark.parametrize(
    "stem", ["x\n{pid}", "x\nlink '{pid}", "x\nlink {pid}", "x' -> 'y\n{pid}", "x\n'{pid}"]
)
def test_a_file_name_forges_no_holder(tools: str, stage: Stage, root: None, stem: str) -> None:
    innocent = stage.start(OPEN.format(path=stage.file("plain")))
    path = stage.folder / stem.format(pid=innocent) / "fd" / "3' -> '" / "dev" / "nvidia0"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"\0" * 4096)
    forger = stage.start(OPEN.format(path=str(path)))
    table = look(MEMORY)

    assert devices_of(table, innocent) == []
    assert devices_of(table, forger) == []


@pytest.mark.parametrize(
    "line", ["self {pid}", "major 1 nvidia", "ns pid:[1]", "session 1", "{pid}/stat:1 (x) S 1"]
)
def test_an_executables_path_forges_no_line(
    tools: str, stage: Stage, root: None, line: str
) -> None:
    innocent = stage.start(OPEN.format(path=stage.node("nvidia0", 1, 5)))
    program = stage.folder / f"x\n{line.format(pid=innocent)}"
    program.parent.mkdir(parents=True, exist_ok=True)
    if "/" in line:
        program.parent.mkdir(parents=True, exist_ok=True)
    forger = stage.run(copy_of_sleep(program))
    table = look(DeviceSet(majors=(), driver_names=("nvidia",)), everybody=True)

    assert of(table, forger) is not None
    assert innocent not in table.ourselves
    assert devices_of(table, innocent) == []
    assert table.pid_namespace == str(Path("/proc/self/ns/pid").readlink())


def copy_of_sleep(program: Path) -> list[str]:
    """A command that says it is ready and becomes a program at that path."""
    program.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy(need("sleep"), program)
    return [need("bash"), "-c", 'echo ready; exec "$0" 600', str(program)]


def test_an_executables_path_gives_nobody_another_executable(
    tools: str, stage: Stage, root: None
) -> None:
    before = stage.start(OPEN.format(path=stage.node("nvidia0", 1, 5)))
    node = str(stage.folder / "nvidia0")
    forgers = []
    after = before
    for victim in (before, before + 2):
        program = stage.folder / f"q\n{victim}" / "exe' -> '" / "tmp" / "llm"
        forgers.append(stage.run(copy_of_sleep(program)))
    after = stage.start(OPEN.format(path=node))
    table = look(MEMORY, everybody=True)

    for pid in (before, after):
        seen = of(table, pid)
        assert pid in table.uninspected if seen is None else seen.exe.endswith(real_exe(pid))


def real_exe(pid: int) -> str:
    return str(Path(f"/proc/{pid}/exe").readlink())


# Ourselves, and whom we may not look into.


def test_we_and_our_ancestors_are_ourselves(tools: str, stage: Stage) -> None:
    table = look(NOTHING)

    assert os.getpid() in table.ourselves
    assert os.getppid() in table.ourselves
    assert table.ourselves[0] != os.getpid()  # but the shell
    assert 1 not in table.ourselves


def test_an_ancestor_with_an_odd_name_does_not_hide_those_above_it(tools: str) -> None:
    comm = Path("/proc/self/comm")
    before = comm.read_text()
    try:
        comm.write_text(") R 1 1")
        table = look(NOTHING)
    finally:
        comm.write_text(before)

    assert {os.getpid(), os.getppid()} <= set(table.ourselves)


def test_a_look_at_everybody_sees_everybody_but_its_own_tools(tools: str, stage: Stage) -> None:
    pid = stage.start()
    table = look(NOTHING, everybody=True)
    scanner = of(table, table.ourselves[0])
    assert scanner is not None
    # Whoever keeps the script's time limit: its parent, or a watcher that nobody is parent of.
    own = [x.pid for x in table.processes if x.session == scanner.session and x.comm != "timeout"]

    assert of(table, pid) is not None
    assert of(table, os.getpid()) is not None
    assert own == [scanner.pid]


def test_the_nvidia_smi_of_the_same_script_is_left_out_and_any_other_is_not(
    tools: str, stage: Stage
) -> None:
    held = stage.file("gpu0")
    program = stage.folder / "nvidia-smi"
    shutil.copy(need("sleep"), program)
    line = f'exec 7<>"{held}"; echo ready; exec "$0" 600'
    foreign = stage.run([need("bash"), "-c", line, str(program)])
    wait_for(lambda: real_exe(foreign) == str(program), "exec")
    start = "\n".join(
        [
            f"{program} 600 7<>{held} & own=$!",
            f'until [ "$(readlink /proc/$own/exe)" = {program} ]; do :; done',
            f"echo $own > {stage.folder}/own",
        ]
    )
    table = look(prefix(stage), before=start, after="kill $own")
    own = int((stage.folder / "own").read_text())

    assert len(devices_of(table, foreign)) == 1
    assert of(table, own) is None
    assert own not in table.uninspected


def test_processes_that_may_not_be_looked_into_are_counted(
    tools: str, stage: Stage, nobody: LocalTransport
) -> None:
    holder = stage.start(OPEN.format(path=stage.file("gpu0")))
    table = look(prefix(stage), transport=nobody)

    assert of(table, holder) is None
    assert {1, os.getpid(), holder} <= set(table.uninspected)


def test_a_process_that_hides_even_from_root_is_counted(tools: str, root: None) -> None:
    try:
        Path("/proc/1/fd/0").readlink()
    except PermissionError:
        assert 1 in look(NOTHING).uninspected
    else:
        pytest.skip("here root may look into process 1")
