"""Calls that do not depend on each other, in as many processes as there are processors."""

import mmap
import os
import pickle
import signal
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from functools import cache, lru_cache, partial
from multiprocessing import active_children, get_context, parent_process
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Thread

# What the libraries behind numpy read when they are loaded.
ONE_THREAD = dict.fromkeys(
    ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS"), "1"
)
ALIGNED = 64  # bytes, for arrays in a file


def in_parallel(calls: Sequence[partial]) -> list:
    """The results of all calls, in their order; a single one is made here.

    Calls are pickled. Raises what a call raises, and MemoryError if the system ends a process, for lack of memory.
    Each process computes with one thread, so results do not depend on how many there are. Arrays that a call gets are
    read-only: processes share them by a file that is mapped into memory, each array once, however many calls have it.
    """
    if len(calls) == 1:
        return [calls[0]()]
    with TemporaryDirectory(prefix="runq-", ignore_cleanup_errors=True) as folder:
        path = Path(folder, "calls")
        spans = _write(path, calls)
        try:
            with _environment(ONE_THREAD):  # of the processes that this starts
                results = _workers().map(partial(_call, path, spans), range(len(calls)))
            return list(results)
        except BaseException as error:
            _workers.cache_clear()
            for worker in active_children():
                worker.kill()
            if isinstance(error, BrokenProcessPool):
                raise MemoryError("the system has ended a process") from None
            raise


@contextmanager
def _environment(changes: dict[str, str]) -> Iterator[None]:
    before = os.environ.copy()
    os.environ.update(changes)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@cache
def _workers() -> ProcessPoolExecutor:
    n = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return ProcessPoolExecutor(n, get_context("spawn"), _begin)


def _begin() -> None:
    """In a new process: it ends without a word on Ctrl-C, and with the process that started it."""
    if signal.getsignal(signal.SIGINT) == signal.default_int_handler:
        signal.signal(signal.SIGINT, signal.SIG_DFL)

    def follow() -> None:
        parent_process().join()
        os._exit(1)

    Thread(target=follow, daemon=True).start()


def _write(path: Path, calls: Sequence[partial]) -> tuple[tuple[int, int], ...]:
    """Writes calls to a file: the pickle of all, then the arrays that it names. Returns where each begins and ends."""
    arrays: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(list(calls), protocol=5, buffer_callback=arrays.append)
    spans = []
    with path.open("wb") as file:
        for part in (pickled, *(array.raw() for array in arrays)):
            file.seek(-file.tell() % ALIGNED, os.SEEK_CUR)
            begin = file.tell()
            spans.append((begin, begin + file.write(part)))
    return tuple(spans)


@lru_cache(maxsize=1)
def _read(path: Path, spans: tuple[tuple[int, int], ...]) -> list[partial]:
    """What _write has written, without a copy of the arrays."""
    with path.open("rb") as file:
        mapped = memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
    pickled, *arrays = (mapped[begin:end] for begin, end in spans)
    return pickle.loads(pickled, buffers=arrays)


def _call(path: Path, spans: tuple[tuple[int, int], ...], i: int) -> object:
    return _read(path, spans)[i]()
