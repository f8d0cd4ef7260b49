"""Reads the launches that simt/launches.h wrote."""

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from ptx.parse import simple_name


@dataclass
class Launch:
    """A launch: `before` and `after` are the allocations that its arguments point into, {address: bytes}; `fresh` the
    words of them that the eight launches before changed, {address: indices}."""

    kernel: str
    grid: tuple[int, int, int]
    block: tuple[int, int, int]
    shared: int  # bytes of dynamic shared memory
    arguments: bytes
    before: dict[int, np.ndarray]
    after: dict[int, np.ndarray]
    fresh: dict[int, np.ndarray] = field(default_factory=dict)

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
    changed: deque[dict[int, np.ndarray]] = deque(maxlen=8)  # by a launch each, and not by the host since
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
                    for words in changed:
                        words.pop(address, None)
                used[address] = memory[address]
            elif word == b"bytes":
                at, n = int(rest[0]), int(rest[1])
                if not memory[address].flags.writeable:
                    memory[address] = used[address] = memory[address].copy()
                memory[address][at : at + n] = np.frombuffer(file.read(n), "u1")
                if used is launch.before:
                    for words in changed:
                        if (w := words.get(address)) is not None:
                            words[address] = w[(w < at // 4) | (w >= (at + n + 3) // 4)]
            elif word in (b"ran", b"end"):
                for b in used.values():  # later launches change copies
                    b.flags.writeable = False
                if word == b"end":
                    pairs = ((a, launch.before[a], b) for a, b in used.items() if b is not launch.before[a])
                    changed.append({a: np.unique(np.flatnonzero(x != y) // 4) for a, x, y in pairs})
                    yield launch
                else:
                    for a in used:
                        launch.fresh[a] = np.concatenate([np.zeros(0, "i8"), *(x[a] for x in changed if a in x)])
                    used = launch.after
            else:
                raise ValueError(f"{path}: {line[:40]!r} is no record of simt/launches.h")
