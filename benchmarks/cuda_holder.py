"""A process that holds GPU memory by CUDA, as servers do; gpu_check.py starts it.

It speaks to the driver alone (ctypes over libcuda.so.1), so it needs no toolkit and no package.
One line of JSON says that it is ready. It ends when its standard input does, so none outlives the
check, however that ends.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import os
import signal
import sys
import time
from pathlib import Path

PR_SET_NAME = 15
MIB = 1 << 20


def allocate(gpu: int, mib: int) -> None:
    """Take memory of a GPU (CUDA driver API; the names are those of the library's symbols)."""
    cuda = ctypes.CDLL("libcuda.so.1")
    device, context, address = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_uint64()
    cuda.cuCtxSetCurrent.argtypes = [ctypes.c_void_p]
    cuda.cuMemAlloc_v2.argtypes = [ctypes.POINTER(ctypes.c_uint64), ctypes.c_size_t]
    check("cuInit", cuda.cuInit(0))
    check("cuDeviceGet", cuda.cuDeviceGet(ctypes.byref(device), gpu))
    retained = cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), device)
    check("cuDevicePrimaryCtxRetain", retained)
    check("cuCtxSetCurrent", cuda.cuCtxSetCurrent(context))
    check("cuMemAlloc_v2", cuda.cuMemAlloc_v2(ctypes.byref(address), mib * MIB))


def check(call: str, code: int) -> None:
    """Give up if a call failed; cuda.h says what the number means (2: out of memory)."""
    if code != 0:
        sys.exit(f"cuda holder: {call} failed with {code}")


def set_title(title: str) -> None:
    """Show another command line, as setproctitle does, with the standard library alone."""
    libc = ctypes.CDLL(None)
    first = ctypes.c_void_p.in_dll(libc, "program_invocation_name").value
    shown = Path("/proc/self/cmdline").read_bytes()
    # What is overwritten must be the very words that the kernel shows.
    if first is None or ctypes.string_at(first, len(shown)) != shown:
        sys.exit("cuda holder: its command line was not found in memory")
    words = title.encode()
    if len(words) >= len(shown):
        sys.exit("cuda holder: the command line is too short for the title")
    ctypes.memmove(first, words.ljust(len(shown), b"\0"), len(shown))
    libc.prctl(PR_SET_NAME, words[:15], 0, 0, 0)


def leave_parent() -> None:
    """Go on as the child of a parent that has ended."""
    parent = os.getpid()
    if os.fork():
        os._exit(0)
    while os.getppid() == parent:
        time.sleep(0.01)


def options() -> argparse.Namespace:
    """What kind of holder to be."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=int, default=0, help="memory to take; 0: use no GPU at all")
    parser.add_argument("--gpu", type=int, default=0, help="which GPU")
    parser.add_argument("--title", default="", help="what ps is to show")
    parser.add_argument("--orphan", action="store_true", help="let the parent end")
    parser.add_argument("--ignore-term", action="store_true", help="end by KILL only")
    parser.add_argument("--open", nargs="*", default=[], help="device nodes to open as well")
    return parser.parse_args()


def main() -> None:
    """Become what was asked for, say so, and wait."""
    asked = options()
    if asked.orphan:
        leave_parent()
    if asked.ignore_term:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    if asked.title:
        set_title(asked.title)
    if asked.mib:
        allocate(asked.gpu, asked.mib)
    for node in asked.open:
        os.open(node, os.O_RDWR)
    print(json.dumps({"pid": os.getpid()}), flush=True)
    os.read(0, 1)


if __name__ == "__main__":
    main()
