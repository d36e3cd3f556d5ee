"""A running stand-in cluster, and clients of it that never sleep."""

from collections.abc import Callable, Iterator

import pytest

from gpu_reclaim.transport.proxmox_api import ExecStatus, ProxmoxApi, ProxmoxApiOptions
from proxmox.certificates import Certificates, make_certificates
from proxmox.cluster import Guest
from proxmox.pve_server import TOKEN_ID, TOKEN_SECRET, PveServer

MakeApi = Callable[..., ProxmoxApi]


def wait_for(look: Callable[[], ExecStatus]) -> ExecStatus:
    while not (status := look()).exited:
        pass
    return status


@pytest.fixture(autouse=True)
def _no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_PROXY", "*")


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("pki"))


@pytest.fixture
def pve(certificates: Certificates) -> Iterator[PveServer]:
    with PveServer(certificates.server) as server:
        server.guests = [
            Guest(100, name="other"),
            Guest(129, kind="lxc", node="pve2", name="llm-ct"),
            Guest(200, node="pve2", name="llm-vm"),
        ]
        yield server


@pytest.fixture
def sleeps() -> list[float]:
    return []


@pytest.fixture
def make_api(pve: PveServer, certificates: Certificates, sleeps: list[float]) -> Iterator[MakeApi]:
    made: list[ProxmoxApi] = []

    def make(**changes: object) -> ProxmoxApi:
        values: dict[str, object] = {
            "address": "127.0.0.1",
            "port": pve.port,
            "token_id": TOKEN_ID,
            "token_secret": TOKEN_SECRET,
            "ca_path": str(certificates.ca),
        }
        options = ProxmoxApiOptions(**{**values, **changes})  # type: ignore[arg-type]
        made.append(ProxmoxApi(options, sleep=sleeps.append))
        return made[-1]

    yield make
    for api in made:
        api.close()


@pytest.fixture
def api(make_api: MakeApi) -> ProxmoxApi:
    return make_api()
