"""The session a task works in, and the log lines that reach its run.

A flow opens the host once; the tasks it calls directly find that session by a context variable.
Called alone, each opens its own. A session is never used by another thread than the one that
opened it.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, ParamSpec, TypeVar, cast

from prefect import Task, get_client, task
from prefect.blocks.core import Block
from prefect.cache_policies import NO_CACHE
from prefect.client.schemas.objects import State, TaskRun
from prefect.exceptions import MissingContextError, PrefectHTTPStatusError
from prefect.logging import get_run_logger
from prefect.runtime import task_run

from gpu_reclaim.blocks import GpuHost, LlmServer
from gpu_reclaim.commands import printable
from gpu_reclaim.errors import AccessRefused, BadInput, HostKeyRefused, TransportError, UnknownHost
from gpu_reclaim.models import ReclaimPolicy, Step, Via
from gpu_reclaim.serving import Server
from gpu_reclaim.session import Session
from gpu_reclaim.settings import load as load_settings

P = ParamSpec("P")
R = TypeVar("R")
B = TypeVar("B", bound=Block)

DEFAULT_HOST = load_settings().host
DEFAULT_POLICY = load_settings().policy
"""Read when the module is imported, so that forms and deployments show them."""


def with_defaults(policy: ReclaimPolicy) -> ReclaimPolicy:
    """The policy, and what it leaves unset as the settings have it."""
    given = {name: getattr(policy, name) for name in policy.model_fields_set}
    return DEFAULT_POLICY.model_copy(update=given)


RETRIES = 2
RETRY_DELAYS_S = [1.0, 3.0]
"""A dropped connection or a busy sshd is over within seconds; what lasts longer is a verdict."""


@dataclass(frozen=True)
class _Open:
    session: Session
    host: str
    via: Via
    thread: int
    closed: threading.Event = field(default_factory=threading.Event)


_open: ContextVar[tuple[_Open, ...]] = ContextVar("gpu_reclaim_open_hosts", default=())
"""The innermost last. A context is copied into tasks and threads, which may outlive what it names:
so whatever is closed says so itself."""


class _RunLogHandler(logging.Handler):
    """Hands the library's log lines to the run they were written in, else to the root logger."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            get_run_logger().log(record.levelno, record.getMessage())
        except MissingContextError:
            logging.getLogger().callHandlers(record)
        except SystemExit:
            # rich, on which Prefect writes, ends the program when nobody reads its output any more:
            # the worker was killed. The line is in Prefect's log; the work goes on.
            pass


def _route_logs() -> None:
    logger = logging.getLogger("gpu_reclaim")
    if not any(isinstance(handler, _RunLogHandler) for handler in logger.handlers):
        logger.addHandler(_RunLogHandler())
        logger.propagate = False
        logger.setLevel(load_settings().log_level)


_route_logs()


def load_host(name: str) -> GpuHost:
    """Load a GpuHost block by name.

    Raises:
        UnknownHost: There is no such block document, or no name and no default.
    """
    wanted = name or load_settings().host
    if not wanted:
        raise UnknownHost(
            "no host was named", remedy="give the name of a GpuHost block, or set GPU_RECLAIM_HOST"
        )
    return _load(GpuHost, wanted, 'GpuHost(ssh=SshAccess.load("..."), units=["..."]).save("NAME")')


def load_server(name: str) -> Server:
    """The server that an LlmServer block describes.

    Raises:
        UnknownHost: There is no such block document.
    """
    return load_llm(name).server()


def load_llm(name: str) -> LlmServer:
    """Load an LlmServer block by name.

    Raises:
        UnknownHost: There is no such block document.
    """
    example = 'LlmServer(host=GpuHost.load("..."), unit="...", python="...").save("NAME")'
    return _load(LlmServer, name, example)


def host_of(server: str) -> str:
    """Name of the GpuHost block that an LlmServer block is on.

    Raises:
        UnknownHost: There is no such LlmServer block.
        BadInput: Its host has no name of its own.
    """
    name = load_llm(server).host._block_document_name
    if not name:
        raise BadInput(
            f"{server}: its host was never saved under a name of its own",
            remedy='save the host first, then LlmServer(host=GpuHost.load("NAME"), ...)',
        )
    return name


def _load(kind: type[B], name: str, example: str) -> B:
    try:
        # Called from an async pipeline, `load` would return a coroutine.
        found = cast("Any", kind.load)(name, _sync=True)
    except ValueError as error:
        raise UnknownHost(
            f"{name!r}: the {kind.__name__} block cannot be loaded: {short(error)}",
            remedy=f"{_known(kind)}, or save one: {example}",
        ) from None
    if not isinstance(found, kind):
        what = kind.__name__
        raise UnknownHost(f"{name!r} is no {what} block", remedy=f"give the name of a {what}")
    return found


def _known(kind: type[Block]) -> str:
    """The blocks of a kind there are, for a name that is none of them."""
    what = kind.__name__
    try:
        with get_client(sync_client=True) as client:
            found = client.read_block_documents_by_type(kind.get_block_type_slug())
    except PrefectHTTPStatusError:
        return f"no {what} block was ever registered"
    names = [document.name for document in found if document.name]
    return f"name one of {', '.join(names)}" if names else f"there is no {what} block yet"


def short(error: BaseException) -> str:
    """The first line of an error's text."""
    return printable(str(error).strip().split("\n")[0])


@contextmanager
def open_host(host: str, via: Via | None = None) -> Iterator[Session]:
    """A session on a host: the one this thread already has open, or a new one, closed afterwards.

    Args:
        host: Name of the GpuHost block.
        via: The way to it; None: as it is open already, else whichever answers.

    Raises:
        UnknownHost: There is no such block.
        BadInput: The block gives no way to the host.
    """
    there = [x for x in reversed(_open.get()) if x.host == host and not x.closed.is_set()]
    mine = [x for x in there if x.thread == threading.get_ident()]
    same = [x for x in mine if via in (None, x.via)]
    if same:
        yield same[0].session
        return
    session = load_host(host).session(host, via=via or "auto")
    if there:
        # Another thread or way of the same run: what that has taken, it has taken too.
        other = there[0].session
        session.token, session.locked, session.held = other.token, other.locked, other.held
        session.on_trial = other.on_trial
    this = _Open(session, host, via or "auto", threading.get_ident())
    token = _open.set((*_open.get(), this))
    try:
        yield session
    finally:
        this.closed.set()
        with suppress(ValueError):  # closed in another context than it was opened in
            _open.reset(token)
        session.links.close()


def transport_failed(_task: Any, _run: TaskRun, state: State[Any]) -> bool:
    """Only what is between here and there is tried again; every attempt looks before it acts."""
    try:
        state.result()
    except (HostKeyRefused, AccessRefused):
        return False
    except TransportError:
        return True
    except BaseException:
        return False
    return False


def ops_task(verb: str) -> Callable[[Callable[P, R]], Task[P, R]]:
    """How every task here is made: never cached, tried again only when the transport failed."""
    return task(
        name=verb,
        task_run_name=f"{verb}-{{host}}".replace("_", "-"),
        cache_policy=NO_CACHE,
        persist_result=False,
        retries=RETRIES,
        retry_delay_seconds=RETRY_DELAYS_S,
        retry_jitter_factor=0.5,
        retry_condition_fn=transport_failed,
    )


def count_attempts(step: Step) -> None:
    """Note in a step how often its task was tried."""
    step.attempts = int(getattr(task_run, "run_count", 1) or 1)
