"""Reads the launches that simt/launches.h wrote."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from ptx.parse import simple_name


@dataclass
class Launch:
    """A launch: `before` and `after` are the allocations that its arguments point into, {address: bytes}."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # bytes of dynamic shared memory
    arguments: bytes
    before: dict[int, np.ndarray]
    after: dict[int, np.ndarray]

    @property
    def shape(self) -> tuple:
        """What tells launches of a kernel apart, but for the values that they work on."""
        pointers = set()
        for at in range(0, len(self.arguments) - 7, 8):
            p = int.from_bytes(self.arguments[at : at + 8], "little")
            if any(begin <= p < begin + len(b) for begin, b in self.before.items()):
                pointers.update(range(at, at + 8))
        numbers = bytes(0 if i in pointers else b for i, b in enumerate(self.arguments))
        return (self.kernel, self.grid, self.block, self.shared, numbers)


def read_launches(path: Path) -> Iterator[Launch]:
    """Every launch of a file, in order."""
    memory: dict[int, np.ndarray] = {}
    launch, used = None, {}
    with path.open("rb") as file:
        for line in file:
            word, *rest = line.split()
            if word == b"launch":
                x = [int(n) for n in rest[:8]]
                name = simple_name(line.split(maxsplit=9)[9].decode().strip())
                launch = Launch(name, tuple(x[:3]), tuple(x[3:6]), x[6], file.read(x[7]), {}, {})
                used = launch.before
            elif word == b"memory":
                address, size = int(rest[0]), int(rest[1])
                if len(memory.get(address, b"")) != size:
                    memory[address] = np.zeros(size, "u1")
                used[address] = memory[address]
            elif word == b"bytes":
                at, n = int(rest[0]), int(rest[1])
                if not memory[address].flags.writeable:
                    memory[address] = used[address] = memory[address].copy()
                memory[address][at : at + n] = np.frombuffer(file.read(n), "u1")
            elif word in (b"ran", b"end"):
                for b in used.values():  # later launches change copies
                    b.flags.writeable = False
                used = launch.after
                if word == b"end":
                    yield launch
            else:
                raise ValueError(f"{path}: {line[:40]!r} is no record of simt/launches.h")
