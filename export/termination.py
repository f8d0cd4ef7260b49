"""SIGTERM and SIGHUP end a command of this package as Ctrl-C does."""

import signal
from collections.abc import Iterator
from contextlib import contextmanager


class Terminated(KeyboardInterrupt):
    """SIGTERM or SIGHUP: ends an export as Ctrl-C does."""


def _terminate(_number: int, _frame: object) -> None:
    raise Terminated


@contextmanager
def termination() -> Iterator[None]:
    """In this block SIGTERM and SIGHUP raise Terminated, so that nothing half-written stays; nohup's choice holds."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)}
    before = {number: handler for number, handler in handlers.items() if handler not in (signal.SIG_IGN, None)}
    for number in before:
        signal.signal(number, _terminate)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
