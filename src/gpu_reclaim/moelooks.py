"""What is looked at on a host before MoE kernels are tuned, one thing each; nothing is touched."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from gpu_reclaim import moeasking, moescript, nvidia_smi
from gpu_reclaim.benching import HELP_S, OFFLINE
from gpu_reclaim.commands import Script, Section
from gpu_reclaim.errors import BadInput
from gpu_reclaim.lease import HOST, Places
from gpu_reclaim.moeconfigs import Row
from gpu_reclaim.moelog import Lookup, lookups
from gpu_reclaim.moescript import Facts
from gpu_reclaim.moespace import Shape
from gpu_reclaim.overlays import VARIABLE
from gpu_reclaim.restoring import functions
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session

LOG_S = 120
"""Longest time to search the journal, in seconds: a server that served for weeks has written much.
"""

HELPFUL = (
    *("PATH", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME", "TRITON_PTXAS_PATH"),
    *(
        "HOME",
        "HF_HOME",
        "HF_HUB_CACHE",
        "HUGGINGFACE_HUB_CACHE",
        "HF_MODULES_CACHE",
        "TRANSFORMERS_CACHE",
    ),
)
"""Variables of the server that its tuning script needs too: where code, libraries and models are.
None of them holds a secret."""

MOST_TABLE = 1 << 18
"""Longest config file that is read, in bytes; the longest that SGLang ships has some 5 kB."""

_LOOKUPS = r"""
run=$(state "$UNIT" InvocationID)
[ -n "$run" ] || exit 0
journalctl --no-pager -o cat "_SYSTEMD_INVOCATION_ID=$run" |
  grep -E 'MoE kernel config|MoE config|onfig file not found' | tail -n 500 | sed 's/^/line /'
"""

_ENVIRONMENT = r"""
pid=$(state "$UNIT" MainPID)
case "$pid" in '' | 0) exit 0;; esac
tr '\0\n' '\n ' <"/proc/$pid/environ" | grep -E '^(@NAMES@)=' | sed 's/^/variable /'
state "$UNIT" Environment | tr ' ' '\n' | grep -c '^"\{0,1\}@VARIABLE@=' | sed 's/^/set /'
"""


@dataclass(frozen=True)
class Device:
    """A GPU as CUDA sees it.

    Attributes:
        index: As nvidia-smi counts.
        name: With `_` for blanks, as in the files' names.
        capability: Compute capability; (0, 0): unknown.
    """

    index: int
    name: str
    capability: tuple[int, int] = (0, 0)


@dataclass(frozen=True)
class Environment:
    """What of a server's environment matters here.

    Attributes:
        values: Those of `HELPFUL` that it has.
        folder: Its SGLANG_MOE_CONFIG_DIR; empty: the built-in one.
        of_unit: That stands in an `Environment=` of the unit, so a drop-in can replace it.
    """

    values: Mapping[str, str] = field(default_factory=dict)
    folder: str = ""
    of_unit: bool = False

    @property
    def for_scripts(self) -> dict[str, str]:
        """What SGLang's own code is run with, by root: the server's, and its user's model files.

        Nothing of it may be left among those files, or the package's and the checkout's.
        """
        offline = dict(word.split("=", 1) for word in OFFLINE.split() if "=" in word)
        home = self.values.get("HOME", "/root")
        models = {"HF_HOME": f"{home}/.cache/huggingface"}
        mine = {"HF_MODULES_CACHE": "/root/.cache/huggingface/modules", "HOME": "/root"}
        return {**models, **self.values, **offline, **mine}


def read_lookups(session: Session, unit: str) -> list[Lookup]:
    """What the unit's present run has said of the configs it uses.

    Raises:
        TransportError: As `Transport.run`.
    """
    body = f"{functions(session.places)}\nUNIT={shlex.quote(unit)}\n{_LOOKUPS}"
    # Lines of a log may hold anything, so they are not shown.
    script = Script("read its log", {"log": body}, timeout_s=LOG_S, together=True)
    return lookups(session.links.run(script).section("log").lines("line"))


def read_environment(session: Session, unit: str) -> Environment:
    """The server's environment, as far as it matters.

    Raises:
        TransportError: As `Transport.run`.
    """
    text = environment(unit, session.places)
    script = Script("read a part of its environment", {"env": text}, together=True)
    return parse_environment(session.links.run(script).section("env"))


def environment(unit: str, places: Places = HOST) -> str:
    """Shell text that prints some variables of a unit's main process, and no others."""
    names = "|".join((*HELPFUL, VARIABLE))
    body = _ENVIRONMENT.replace("@NAMES@", names).replace("@VARIABLE@", VARIABLE)
    return f"{functions(places)}\nUNIT={shlex.quote(unit)}\n{body}"


def parse_environment(section: Section) -> Environment:
    """What `environment` printed."""
    pairs = [line.partition("=") for line in section.lines("variable")]
    values = {name: value for name, _, value in pairs}
    folder = values.pop(VARIABLE, "")
    return Environment(values, folder, of_unit=section.value("set") not in ("", "0"))


def read_devices(session: Session) -> list[Device]:
    """The host's GPUs; their capability is unknown where the driver does not tell it.

    Raises:
        TransportError: As `Transport.run`.
    """
    fields = ("index,name,compute_cap", "index,name")
    for asked in fields:
        script = Script("read what GPUs can do", {"gpus": nvidia_smi.query(asked)})
        section = session.links.run(script).section("gpus")
        if section.code in nvidia_smi.WARNING_CODES:
            break
    found = [parse_device(line, asked == fields[0]) for line in section.lines("gpu")]
    return [device for device in found if device]


def parse_device(line: str, with_capability: bool = True) -> Device | None:
    """One row; None where it is none."""
    found = re.fullmatch(r"(\d{1,4}), (.+?)(?:, (\d{1,2})\.(\d{1,2}))?", line.strip())
    if found is None:
        return None
    known = with_capability and found[3]
    capability = (int(found[3]), int(found[4])) if known else (0, 0)
    return Device(int(found[1]), found[2].replace(" ", "_"), capability)


def sees_the_same(session: Session, unit: str, paths: Sequence[str]) -> list[str]:
    """Folders that the unit's main process does not see as we do, as one in a container.

    Raises:
        TransportError: As `Transport.run`.
    """
    lines = [
        f'[ "$(stat -L -c %d:%i "/proc/$pid/root"{shlex.quote(path)})" = '
        f'"$(stat -L -c %d:%i {shlex.quote(path)})" ] || echo other {shlex.quote(path)}'
        for path in paths
    ]
    head = f'{functions(session.places)}\nUNIT={shlex.quote(unit)}\npid=$(state "$UNIT" MainPID)'
    script = Script("look what it sees", {"seen": "\n".join([head, *lines, ":"])})
    return session.links.run(script).section("seen").lines("other")


def read_facts(session: Session, server: Server) -> Facts:
    """The tuning script and the package.

    Raises:
        TransportError: As `Transport.run`.
    """
    text = moescript.look(server.python, server.sglang_source)
    limit = HELP_S * 2 + 30
    script = Script("look for the tuning script", {"script": text}, timeout_s=limit)
    return moescript.parse_look(session.links.run(script).section("script"))


def read_shape(
    session: Session,
    server: Server,
    model: str,
    info: Mapping[str, object],
    env: Environment,
    *,
    no_fusion: bool,
) -> Shape | str:
    """The model's shape as the tuning script sees it; or why that cannot be known.

    Raises:
        TransportError: As `Transport.run`.
    """
    text = moeasking.ask_shape(
        server.python,
        server.sglang_source,
        model,
        tp=ranks(info, "tp_size"),
        ep=ranks(info, "ep_size"),
        no_fusion=no_fusion,
        env=env.for_scripts,
    )
    limit = HELP_S + 30
    script = Script("ask for the model's shape", {"shape": text}, timeout_s=limit)
    return moeasking.parse_shape(session.links.run(script).section("shape"))


def ranks(info: Mapping[str, object], name: str) -> int:
    """A number of ranks; 1 where the server does not say."""
    found = info.get(name)
    return found if isinstance(found, int) and found > 0 else 1


def read_defaults(
    session: Session,
    server: Server,
    shape: Shape,
    dtype: str,
    sizes: Sequence[int],
    *,
    capability: tuple[int, int],
    env: Environment,
) -> Mapping[int, Row] | str:
    """The rows that the server uses without a file; or why they cannot be known.

    Raises:
        TransportError: As `Transport.run`.
    """
    text = moeasking.ask_defaults(
        server.python, shape, dtype, sizes, capability=capability, env=env.for_scripts
    )
    limit = HELP_S + 30
    script = Script("ask for its default rows", {"rows": text}, timeout_s=limit)
    return moeasking.parse_defaults(session.links.run(script).section("rows"))


def read_tables(session: Session, paths: Sequence[str]) -> dict[str, str]:
    """Text of files on the host; without those that cannot be read.

    Raises:
        BadInput: One is far too long for a table of configs.
        TransportError: As `Transport.run`.
    """
    lines = [
        f"[ ! -f {shlex.quote(path)} ] || printf 'file {number} %s\\n' "
        f"\"$(head -c {MOST_TABLE + 1} {shlex.quote(path)} | od -An -v -tx1 | tr -d ' \\n')\""
        for number, path in enumerate(paths)
    ]
    script = Script("read config files", {"files": "\n".join([*lines, ":"])}, together=True)
    found = {}
    for line in session.links.run(script).section("files").lines("file"):
        index, _, raw = line.partition(" ")
        if len(raw) > 2 * MOST_TABLE:
            raise BadInput(
                f"{session.host}: {paths[int(index)]} is too long for a file of configs",
                remedy="give a file that SGLang's tuning script wrote",
            )
        found[paths[int(index)]] = bytes.fromhex(raw).decode("utf-8", "replace")
    return found
