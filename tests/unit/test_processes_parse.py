"""What the look through /proc printed, made into values."""

from __future__ import annotations

import pytest

from gpu_reclaim.commands import Result, Script, Section
from gpu_reclaim.errors import BadAnswer, BadInput
from gpu_reclaim.models import Process, ProcessTable
from gpu_reclaim.processes import NVIDIA, DeviceSet, parse_scan, scan

HEAD = (
    "ns pid:[4026531836]\nmajor 1 mem\nmajor 195 nvidia\nmajor 236 nvidia-caps\n"
    "self 900\nself 1\nsession 899\nsees fds\nsees nodes\nsees people\n"
)
STAT = "S 1 7 899 0 -1 4194304 0 0 0 0 0 0 0 0 20 0 1 0 5555 0 0"
CHAR = "character special file"


def described(
    pid: int, *words: str, exe: str = "/usr/bin/python3.11", comm: str = "python3"
) -> str:
    lines = [f"{pid}/comm:{comm}\x01"]
    lines += [f"{pid}/cmdline:{word}" for word in words or ("python3", "x.py")]
    lines += [f"{pid}/stat:{pid} ({comm}) {STAT}\x01", f"{pid}/cgroup:0::/a\x011:pids:/b\x01"]
    lines += [f"exe '{pid}/exe' -> '{exe}'"] if exe else []
    return "\n".join(lines) + "\n"


def parse(
    text: str, stderr: str = "", devices: DeviceSet = NVIDIA, head: str = HEAD
) -> ProcessTable:
    result = Result(Script("look", {}), "a host", text, stderr, 0)
    return parse_scan(result, Section(head + text, 0), devices)


def one(text: str) -> Process:
    (process,) = parse(text).processes
    return process


def named(*words: str, **more: str) -> str:
    return one(described(50, *words, **more)).name


# Holders.


@pytest.mark.parametrize(
    ("number", "kind", "held"),
    [
        ("c3 0", CHAR, True),
        ("c3 ff", CHAR, True),
        ("ec 1", CHAR, True),
        ("1 5", CHAR, False),
        ("c3 0", "block special file", False),
        ("c3 0", "regular file", False),
        ("195 0", CHAR, False),
    ],
)
def test_a_holder_is_one_whose_file_has_a_devices_number(
    number: str, kind: str, held: bool
) -> None:
    text = f"link '50/fd/7' -> '/dev/nvidia0'\nnode {number} {kind}|50/fd/7\n" + described(50)

    assert one(text).devices == (["/dev/nvidia0 (fd)"] if held else [])


def test_busybox_and_old_stat_print_links_without_quotes() -> None:
    text = f"link 50/fd/7 -> /dev/nvidia0\nnode c3 0 {CHAR}|50/fd/7\n"

    assert one(text + described(50).replace("'", "")).devices == ["/dev/nvidia0 (fd)"]


def test_each_device_is_told_once_and_in_order() -> None:
    text = (
        "link '50/fd/9' -> '/dev/nvidiactl'\nlink '50/fd/7' -> '/dev/nvidia0'\n"
        "link '50/fd/8' -> '/dev/nvidia0'\nmap 50 /dev/nvidia-uvm 7f00-7f10\n"
        f"node c3 ff {CHAR}|50/fd/9\nnode c3 0 {CHAR}|50/fd/7\nnode c3 0 {CHAR}|50/fd/8\n"
        f"node ec 0 {CHAR}|50/map_files/7f00-7f10\n"
    )

    assert one(text + described(50)).devices == [
        "/dev/nvidia-uvm (map)",
        "/dev/nvidia0 (fd)",
        "/dev/nvidiactl (fd)",
    ]


def test_a_mapping_is_known_by_its_path_where_map_files_may_not_be_read() -> None:
    text = f"map 50 /dev/nvidia0 7f00-7f10\nnode c3 0 {CHAR}|50/root/dev/nvidia0\n" + described(50)
    found = parse(text, "stat: cannot statx '50/map_files/7f00-7f10': Operation not permitted\n")

    assert found.processes[0].devices == ["/dev/nvidia0 (map)"]
    assert found.uninspected == []


def test_what_is_mapped_decides_and_not_what_is_at_its_path_now() -> None:
    text = (
        "map 50 /opt/nvidia.bin 7f00-7f10\nnode 0 0 regular file|50/map_files/7f00-7f10\n"
        f"node c3 0 {CHAR}|50/root/opt/nvidia.bin\n"
    )

    assert one(text + described(50)).devices == []


# Those that could not be looked into.


@pytest.mark.parametrize(
    "stderr",
    [
        "find: '50/fd': Permission denied",
        "find: \u201850/fd\u2019: Permission denied",
        "find: 50/fd: Permission denied",
        "find: /proc/50/fd: Permission denied",
        "grep: 50/maps: Permission denied",
        "grep: 50/cmdline: Operation not permitted",
        "stat: cannot read symbolic link '50/exe': Permission denied",
        "stat: cannot statx '50/fd/3': Permission denied",
        "stat: cannot stat '50/fd/3': Permission denied",
        "stat: cannot stat \u201850/fd/3\u2019: Permission denied",
        "stat: 50/fd/3: cannot read link: Permission denied",
        "stat: can't stat '50/fd/3': Permission denied",
        "Cannot stat file /proc/50/fd/3: Permission denied",
        "noise\nfind: '50/fd': Permission denied\nmore",
    ],
)
def test_a_refused_look_is_counted(stderr: str) -> None:
    assert parse("", stderr).uninspected == [50]


@pytest.mark.parametrize(
    "stderr",
    [
        "find: '50/fd': No such file or directory",
        "stat: cannot statx '50/fd/3': No such file or directory",
        "grep: 50/maps: No such process",
        "cat: /etc/machine-id: Permission denied",
        "nvidia-smi: Permission denied",
        "find: '50/task/51/fd': No such process",
        "",
    ],
)
def test_a_process_that_ended_meanwhile_is_not_counted(stderr: str) -> None:
    assert parse("", stderr).uninspected == []


def test_several_refusals_are_counted_once_each_by_pid() -> None:
    denied = "Permission denied"
    stderr = f"find: '9/fd': {denied}\ngrep: 9/maps: {denied}\nfind: '10/fd': {denied}\n"

    assert parse("", stderr).uninspected == [9, 10]


def test_a_holder_that_could_not_be_described_is_counted() -> None:
    text = f"link '50/fd/7' -> '/dev/nvidia0'\nnode c3 0 {CHAR}|50/fd/7\n"

    assert parse(text).processes == []
    assert parse(text).uninspected == [50]


def test_a_mapping_of_a_device_whose_number_is_unknown_is_counted() -> None:
    found = parse("map 50 /dev/nvidia0 (deleted) 7f00-7f10\n" + described(50))

    assert found.uninspected == [50]
    assert parse("map 50 /usr/lib/libnvidia.so 7f00-7f10\n" + described(50)).uninspected == []


def test_a_process_with_two_executables_is_not_believed() -> None:
    text = described(50, exe="/usr/bin/nvidia-persistenced") + "exe '50/exe' -> '/tmp/llm'\n"

    assert parse(text).processes == []
    assert parse(text).uninspected == [50]


# Whole tables.


@pytest.mark.parametrize(
    "head", ["", "ns \nself 900\n", "ns pid:[1]\n", "self 900\n", "ns ipc:[1]\nself 1\n"]
)
def test_without_proc_nothing_is_known(head: str) -> None:
    with pytest.raises(BadAnswer, match="processes are unknown"):
        parse(described(50), head=head)


def test_ourselves_and_namespace() -> None:
    found = parse("")

    assert found.ourselves == [900, 1]
    assert found.pid_namespace == "pid:[4026531836]"
    assert found.holders == []


def test_our_own_nvidia_smi_is_left_out_but_nobody_elses() -> None:
    smi = "/usr/bin/nvidia-smi"
    other = described(51, exe=smi).replace(" 899 ", " 898 ")
    found = parse(described(50, exe=smi) + other + described(52))

    assert [process.pid for process in found.processes] == [51, 52]


def test_whatever_our_own_shell_started_is_left_out() -> None:
    child = described(950).replace(" S 1 7", " S 900 7").replace(") S 1 ", ") S 900 ")
    grandchild = described(951).replace(") S 1 ", ") S 950 ")
    found = parse(child + grandchild + described(900) + described(50))

    assert [process.pid for process in found.processes] == [50, 900]


@pytest.mark.parametrize(
    "line",
    [
        "50/stat:50 (x) S 1 7",
        "50/stat:",
        "50/stat:50 (x S 1",
    ],
)
def test_a_process_whose_state_is_cut_is_left_out(line: str) -> None:
    assert parse(f"50/comm:x\x01\n{line}\n").processes == []


# One process.


def test_all_of_one_process() -> None:
    assert one(described(50, "python3", "-m", "sglang.launch_server", "--api-key=s")) == Process(
        pid=50,
        start_time=5555,
        ppid=1,
        session=899,
        state="S",
        exe="/usr/bin/python3.11",
        comm="python3",
        name="python3 -m sglang.launch_server",
        command_line="python3 -m sglang.launch_server --api-key=s",
        cgroups=["/a", "/b"],
    )


@pytest.mark.parametrize(
    ("words", "name"),
    [
        (("sglang::scheduler_TP0", "", ""), "sglang::scheduler_TP0"),
        (("VLLM::EngineCore",), "VLLM::EngineCore"),
        (("ray::IDLE",), "ray::IDLE"),
        (("/opt/venv/bin/python3.11", "/srv/app/serve.py", "--token", "s3"), "python3.11 serve.py"),
        (
            ("python", "-m", "sglang.launch_server", "--api-key", "s3"),
            "python -m sglang.launch_server",
        ),
        (("python3", "-c", "secret = 's3'"), "python3"),
        (("python3", "-u", "x.py"), "python3"),
        (("python3", "-m"), "python3"),
        (("python3",), "python3"),
        (("bash", "-c", "export TOKEN=s3"), "bash"),
        (("/bin/sh", "/srv/run.sh", "s3"), "sh run.sh"),
        (("sshd: root@pts/0",), "sshd: root@pts/0"),
        (("/usr/local/bin/vllm", "serve", "--api-key", "s3"), "vllm"),
        (("a\x01b",), "a"),
        (("a\x1b[31m",), "a\\x1b[31m"),
        (("x" * 200,), "x" * 80 + "..."),
        (("",), "python3"),
    ],
)
def test_names_for_people_never_show_arguments(words: tuple[str, ...], name: str) -> None:
    assert named(*words) == name


def test_a_kernel_threads_name_is_its_short_one() -> None:
    text = described(2, "", exe="", comm="kthreadd").replace("2/cmdline:\n", "")

    assert one(text).name == "kthreadd"
    assert one(text).exe == ""


def test_the_executable_of_a_program_that_was_replaced_keeps_its_name() -> None:
    assert one(described(50, exe="/opt/llm (deleted)")).exe == "/opt/llm"


def test_command_lines_stay_out_of_dumps_and_representations() -> None:
    process = one(described(50, "x", "--token=s3"))

    assert "s3" in process.command_line
    assert "s3" not in process.model_dump_json()
    assert "s3" not in repr(process)


# Prefixes.


@pytest.mark.parametrize(
    "text", ["/dev/gpu'", "/a,b/c", "/dev/g pu", "/a\\/b", "/a/$x", "/a/`x", '/a/"', "/a/b\n"]
)
def test_a_prefix_that_would_end_the_scripts_quotes_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="a path should not have"):
        scan(DeviceSet(path_prefixes=(text,)))


@pytest.mark.parametrize("text", ["", "/", "/dev", "/dev/", "//", "gpu", "dev/gpu"])
def test_a_prefix_that_covers_whole_folders_is_refused(text: str) -> None:
    with pytest.raises(BadInput, match="beginning of a path"):
        scan(DeviceSet(path_prefixes=(text,)))
