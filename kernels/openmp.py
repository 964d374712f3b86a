"""Run a compiled function on the threads that torch already has.

vLLM pins the threads of torch's OpenMP runtime to cores and leaves the main thread one. A thread
started from Python would share that core, and those of a second runtime would fight with torch's,
which spin while they wait. So the function runs in a parallel region of the runtime that is loaded.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch


def _scopes() -> list[str | None]:
    """Where to look for the runtime's symbols: the process itself, which has those of a library
    that was preloaded, then torch with what it depends on.

    Other packages bring runtimes of their own, whose threads are others.
    """
    library = Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"
    return [None, str(library)] if library.exists() else [None]


@functools.cache
def _parallel() -> Callable[..., None] | None:
    """``GOMP_parallel`` of the loaded runtime (libgomp, and LLVM's and Intel's have it too)."""
    torch.get_num_threads()
    for name in _scopes():
        try:
            parallel = ctypes.CDLL(name).GOMP_parallel
        except (OSError, AttributeError):
            continue
        parallel.argtypes = (ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)
        parallel.restype = None
        return parallel
    return None


@functools.cache
def _function(address: int) -> Callable[[int], None]:
    return ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address)


def run(address: int, data: int, tasks: int) -> None:
    """Call the C function ``void (*)(void *data)`` on so many threads as torch uses, or ``tasks``.

    The function finds its share itself. Without the interpreter lock.
    """
    threads = torch.get_num_threads()
    parallel = _parallel() if threads > 1 and tasks > 1 else None
    if parallel is None:
        _function(address)(data)
    else:
        # Always torch's own number: another one makes the runtime start its threads anew.
        parallel(address, data, threads, 0)


@functools.cache
def _runtime() -> ctypes.CDLL | None:
    """The loaded runtime, by the library that gives its symbols."""
    for name in _scopes():
        try:
            library = ctypes.CDLL(name)
            _ = library.omp_get_max_threads, library.omp_set_num_threads
        except (OSError, AttributeError):
            continue
        return library
    return None


@contextmanager
def torch_on_this_thread() -> Iterator[None]:
    """Let torch's own operations that the calling thread starts meanwhile stay on it.

    The number is a thread's own in OpenMP; ``torch.set_num_threads`` would change the model's too.
    """
    runtime = _runtime()
    if runtime is None:
        yield
        return
    before = runtime.omp_get_max_threads()
    runtime.omp_set_num_threads(1)
    try:
        yield
    finally:
        runtime.omp_set_num_threads(before)
