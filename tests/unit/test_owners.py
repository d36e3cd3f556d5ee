"""What a process belongs to, by its control groups."""

from __future__ import annotations

import pytest

from gpu_reclaim.models import Owner
from gpu_reclaim.owners import guest_prefix, in_unit, owner, stop_command

ID = "3f4e5a6b7c8d9e0f1a2b3c4d5e6f708192a3b4c5d6e7f8091a2b3c4d5e6f7081"
SHORT = ID[:12]
USER = "/user.slice/user-1000.slice/user@1000.service"
POD = "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod12_34.slice"


def v1(path: str) -> list[str]:
    """The paths of a ten-line control group file of version 1."""
    lines = [
        f"12:cpuset:{path}",
        f"11:devices:{path}",
        "10:freezer:/",
        f"9:memory:{path}",
        "8:hugetlb:/",
        f"7:pids:{path}",
        "6:cpu,cpuacct:/",
        "5:blkio:/",
        f"1:name=systemd:{path}",
        "0::/",
    ]
    return sorted({line.split(":", 2)[2] for line in lines})


@pytest.mark.parametrize(
    ("path", "kind", "name"),
    [
        ("/system.slice/sglang.service", "unit", "sglang.service"),
        ("/system.slice/sglang.service/worker", "unit", "sglang.service"),
        ("/system.slice/system-sglang.slice/sglang@q.service", "unit", "sglang@q.service"),
        (r"/system.slice/sglang@q\x2d72b.service", "unit", r"sglang@q\x2d72b.service"),
        ("/system.slice/docker.service", "unit", "docker.service"),
        ("/llm.slice/llm-gpu.slice/vllm.service", "unit", "vllm.service"),
        (f"/system.slice/docker-{ID}.scope", "container", f"docker {SHORT}"),
        (f"/docker/{ID}", "container", f"docker {SHORT}"),
        (f"/docker/{ID}/nested", "container", f"docker {SHORT}"),
        (f"/machine.slice/libpod-{ID}.scope", "container", f"libpod {SHORT}"),
        (f"/machine.slice/libpod-{ID}.scope/container", "container", f"libpod {SHORT}"),
        (f"{USER}/user.slice/libpod-{ID}.scope", "container", f"libpod {SHORT} of uid 1000"),
        (f"/system.slice/nerdctl-{ID}.scope", "container", f"nerdctl {SHORT}"),
        (f"/actions_job/{ID}", "container", f"actions_job {SHORT}"),
        (f"/system.slice/llm.service/libpod-payload-{ID}", "unit", "llm.service"),
        ("/system.slice/slurmstepd.scope/job_7/step_0/user/task_0", "Slurm step", "7.0"),
        ("/system.slice/n1_slurmstepd.scope/job_7/step_batch/user", "Slurm step", "7.batch"),
        ("/slurm/uid_1000/job_7/step_extern/task_0", "Slurm step", "7.extern"),
        ("/slurm_n1/uid_1000/job_7", "Slurm step", "7"),
        ("/system.slice/slurmd.service", "unit", "slurmd.service"),
        (f"{POD}/cri-containerd-{ID}.scope", "container", f"cri-containerd {SHORT}"),
        (f"{POD}/crio-{ID}.scope", "container", f"crio {SHORT}"),
        (f"/kubepods/besteffort/pod12/{ID}", "container", ID),
        (
            f"/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{ID}",
            "container",
            f"kubepods-pod1.slice:cri-containerd:{ID}"[:64],
        ),
        (f"{USER}/app.slice/ollama.service", "user unit", "ollama.service of uid 1000"),
        (f"{USER}/app.slice/app-x.slice/x@1.service", "user unit", "x@1.service of uid 1000"),
        (f"{USER}/app.slice/run-r1.scope", "user unit", "run-r1.scope of uid 1000"),
        (f"{USER}/init.scope", "user unit", "init.scope of uid 1000"),
        ("/user.slice/user-0.slice/session-3.scope", "session", "session-3"),
        ("/user.slice/user-0.slice/session-c1.scope", "session", "session-c1"),
        ("/system.slice/run-r12.scope", "scope", "run-r12.scope"),
        ("/machine.slice/machine-vm.scope", "guest", "vm"),
        ("/init.scope", "scope", "init.scope"),
        ("/", "none", ""),
        ("/user.slice", "none", ""),
        ("/system.slice", "none", ""),
        ("/system.slice/x.serviceable", "none", ""),
        ("", "none", ""),
    ],
)
def test_owner_by_path(path: str, kind: str, name: str) -> None:
    expected = Owner.model_validate({"kind": kind, "name": name})

    assert owner([path]) == expected
    assert owner(v1(path)) == expected
    assert owner(["/", path, "/user.slice"] if kind == "unit" else [path]) == expected


@pytest.mark.parametrize(
    ("path", "guest"),
    [
        ("/lxc/129/ns/system.slice/sglang.service", "129"),
        (f"/lxc/129/ns/system.slice/docker-{ID}.scope", "129"),
        ("/lxc/129/ns", "129"),
        ("/lxc/129", "129"),
        ("/lxc/web/ns/system.slice/x.service", "web"),
        ("/lxc.payload.web/system.slice/x.service", "web"),
        ("/lxc.payload/web/system.slice/x.service", "web"),
        ("/qemu.slice/200.scope", "200"),
        ("/machine.slice/machine-vm.scope/x", "vm"),
    ],
)
def test_path_of_a_guest_names_the_guest(path: str, guest: str) -> None:
    assert str(owner([path])) == f"guest {guest}"
    assert str(owner(v1(path))) == f"guest {guest}"


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/lxc.monitor/129", "none"),
        ("/system.slice/lxc/129/x.service", "unit x.service"),
        ("/system.slice/pve-container@129.service", "unit pve-container@129.service"),
        ("/system.slice/nvidia-persistenced.service", "unit nvidia-persistenced.service"),
    ],
)
def test_on_the_node_what_is_no_guest_is_itself(path: str, expected: str) -> None:
    assert str(owner([path])) == expected


@pytest.mark.parametrize(
    ("path", "prefix"),
    [
        ("/lxc/129/ns/.lxc", "/lxc/129/ns"),
        ("/lxc.payload.web/init.scope", "/lxc.payload.web"),
        (f"/docker/{ID}", f"/docker/{ID}"),
        (f"/docker/{ID}/init.scope", f"/docker/{ID}"),
        (f"{POD}/cri-containerd-{ID}.scope", f"{POD}/cri-containerd-{ID}.scope"),
        (f"/kubepods/besteffort/pod12/{ID}", f"/kubepods/besteffort/pod12/{ID}"),
        ("/system.slice/ssh.service", ""),
        ("/", ""),
    ],
)
def test_prefix_of_the_guest_we_are_in(path: str, prefix: str) -> None:
    assert guest_prefix(["/", path]) == prefix


def test_the_path_that_says_most_decides() -> None:
    assert str(owner(["/", "/user.slice", "/system.slice/a.service"])) == "unit a.service"
    assert str(owner(["/init.scope", "/system.slice/a.service"])) == "unit a.service"
    assert owner([]) == Owner(kind="none")


@pytest.mark.parametrize(
    ("of", "command"),
    [
        (Owner(kind="unit", name="a.service"), "systemctl stop a.service"),
        (
            Owner(kind="user unit", name="ollama.service of uid 1000"),
            "systemctl --user --machine=1000@ stop ollama.service",
        ),
        (Owner(kind="container", name=f"docker {SHORT}"), f"docker stop {SHORT}"),
        (Owner(kind="container", name=f"libpod {SHORT}"), f"podman stop {SHORT}"),
        (Owner(kind="container", name=f"cri-containerd {SHORT}"), f"crictl stop {SHORT}"),
        (
            Owner(kind="container", name=f"libpod {SHORT} of uid 1000"),
            f"sudo -u '#1000' XDG_RUNTIME_DIR=/run/user/1000 podman stop {SHORT}",
        ),
        (Owner(kind="container", name=f"nerdctl {SHORT}"), f"nerdctl stop {SHORT}"),
        (Owner(kind="container", name=f"crio {SHORT}"), f"crictl stop {SHORT}"),
        (Owner(kind="container", name=f"actions_job {SHORT}"), ""),
        (Owner(kind="container", name=ID), ""),
        (Owner(kind="Slurm step", name="7.batch"), "scancel 7"),
        (Owner(kind="Slurm step", name="7"), "scancel 7"),
        (Owner(kind="scope", name="run-r1.scope"), "systemctl stop run-r1.scope"),
        (Owner(kind="session", name="session-3"), "loginctl terminate-session 3"),
        (Owner(kind="guest", name="129"), ""),
        (Owner(kind="none"), ""),
    ],
)
def test_the_command_that_stops_it(of: Owner, command: str) -> None:
    assert stop_command(of) == command


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("/system.slice/a.service", True),
        ("/system.slice/a.service/sub", True),
        ("/system.slice/aa.service", False),
        ("/system.slice/a.service.d", False),
        ("/system.slice/b.service", False),
        (f"{USER}/app.slice/a.service", False),
        ("/user.slice/user-0.slice/session-3.scope", False),
    ],
)
def test_membership_of_a_unit(path: str, expected: bool) -> None:
    assert in_unit([path], "a.service") is expected
    assert in_unit(v1(path), "a.service") is expected


def test_a_name_that_systemd_escaped_is_the_units_own() -> None:
    assert str(owner(["/system.slice/__llm.service"])) == "unit _llm.service"
    assert str(owner(["/system.slice/_memory.service"])) == "unit memory.service"
    assert in_unit(["/system.slice/__llm.service"], "_llm.service")


def test_a_container_of_nspawn_is_another_machine() -> None:
    assert str(owner(["/machine.slice/systemd-nspawn@box.service/payload"])) == "guest box"
