"""Calls that do not depend on each other, in as many processes as there are processors."""

from collections.abc import Sequence
from functools import partial


def in_parallel(calls: Sequence[partial]) -> list:
    """The results of all calls, in their order; a single one is made here.

    Raises what a call raises, and MemoryError if the system ends a process, as it does where memory runs out.
    Each process computes with one thread, so results do not depend on how many there are. Large arrays that a call gets
    are read-only.
    """
    if len(calls) == 1:
        return [calls[0]()]
    from joblib import Parallel, delayed, parallel_config  # a sixth of a command's start, and few need it
    from joblib.externals.loky.process_executor import TerminatedWorkerError

    try:
        with parallel_config(backend="loky", inner_max_num_threads=1):
            return Parallel(n_jobs=-1)(delayed(call.func)(*call.args, **call.keywords) for call in calls)
    except TerminatedWorkerError:
        raise MemoryError("the system has ended a process") from None
