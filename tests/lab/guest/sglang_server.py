"""A stand-in for an SGLang server that generates: the real flags, routes, processes and rules.

It holds the GPUs as launch_server.py does, and can be driven by SGLang's own benchmark. How quick
it is, how many draft tokens it accepts and what goes wrong depends on its flags: sglang_speed.py
and sglang_state.py; and on the files of MoE kernel parameters that it finds: sglang_lookup.py and
sglang_moe.py. SIGTERM ends it and its workers once all requests are answered; SIGKILL leaves
the workers behind.
"""

import asyncio
import contextlib
import os
import shlex
import signal
import sys
import time

TYPE_CHECKING = False
if TYPE_CHECKING:
    from lab.guest import sglang_workers as workers
    from lab.guest.sglang_engine import Engine
    from lab.guest.sglang_flags import parse
    from lab.guest.sglang_http import serve
    from lab.guest.sglang_lookup import look_up
    from lab.guest.sglang_state import Faults, note_start
else:
    import sglang_workers as workers
    from sglang_engine import Engine
    from sglang_flags import parse
    from sglang_http import serve
    from sglang_lookup import look_up
    from sglang_state import Faults, note_start

START_S = 0.3
"""From the first line to serving; connections are refused in the first half of it."""
DRAIN_S = 0.1
"""So often a server that was told to end looks whether there are requests left."""
OUT_OF_MEMORY = """\
[TP0] Scheduler hit an exception: Traceback (most recent call last):
  File "sglang/srt/managers/scheduler.py", line 3130, in run_scheduler_process
    scheduler = Scheduler(
  File "sglang/srt/mem_cache/memory_pool.py", line 742, in _create_buffers
    torch.zeros(
torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.50 GiB. GPU 0 has a total capacity \
of 94.97 GiB of which 1.12 GiB is free. Process {pid} has 93.83 GiB memory in use.

Received sigquit from a child process. It usually means the child failed."""


def die_at_start(faults: Faults) -> None:
    """Ends the server where it is one that does not start."""
    if faults.has("out of memory"):
        sys.exit(OUT_OF_MEMORY.format(pid=os.getpid()))
    if faults.has("dies at start"):
        raise RuntimeError("Initialization failed. warmup error: the draft model has no layers")


async def run(engine: Engine, faults: Faults, reading: int, pids: list[int]) -> int:
    """Serves until it is told to end, or all workers are gone; returns its exit status."""
    began = time.monotonic()
    over: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    _listen_to_signals(engine, pids, over, faults)
    delay = faults.number("slow start N") or START_S
    await asyncio.sleep(delay / 2)
    resolved = engine.setting.resolved
    await serve(engine.answer, str(resolved["host"]), int(str(resolved["port"])))
    workers.wait_ready(reading, pids)
    await asyncio.sleep(max(0.0, began + delay - time.monotonic()))
    if not faults.has("never ready"):
        engine.open(time.monotonic() - began)
        print("The server is fired up and ready to roll!", flush=True)
        workers.say_ready()
    return await over


def _listen_to_signals(
    engine: Engine, pids: list[int], over: "asyncio.Future[int]", faults: Faults
) -> None:
    loop = asyncio.get_running_loop()
    left = set(pids)
    endings = []

    def reap() -> None:
        for pid in tuple(left):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                left.discard(pid)
                workers.report(pid, status)
        if not left and not over.done():
            over.set_result(1)

    async def drain() -> None:
        engine.close()
        while engine.busy:
            await asyncio.sleep(DRAIN_S)
        if not over.done():
            over.set_result(0)
        for pid in left if not faults.has("leaves workers") else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    loop.add_signal_handler(signal.SIGCHLD, reap)
    loop.add_signal_handler(signal.SIGTERM, lambda: endings.append(loop.create_task(drain())))


def main() -> None:
    """Starts the workers, serves, and ends with SIGTERM."""
    workers.READY.unlink(missing_ok=True)
    setting = parse(sys.argv[1:])
    starts = note_start(workers.STATE, setting.name)
    faults = Faults(workers.STATE, setting.name)
    command = shlex.join([sys.executable, "-m", "sglang.launch_server", *sys.argv[1:]])
    print(f"server_args={setting.resolved}", flush=True)
    die_at_start(faults)
    rows = look_up(setting)
    # Before the event loop: the workers must inherit nothing of it.
    reading, pids = workers.start_workers(int(str(setting.resolved["tp_size"])))
    engine = Engine(setting, faults, starts, command, rows)
    status = asyncio.run(run(engine, faults, reading, pids))
    # Open connections do not keep it.
    os._exit(status)


if __name__ == "__main__":
    main()
