"""The text of PTX: kernels, their registers, shared memory and instructions (PTX ISA, "Syntax").

A file has entries; the body of an entry is a list of statements that end in semicolons. Braces open a scope, which
inline assembly uses for registers of its own, or hold the parts of a vector operand.
"""

import re
import subprocess
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

# A register's storage by its declared type; predicates are bool.
STORAGE = {"pred": "?", "b16": "u2", "u16": "u2", "s16": "u2", "f16": "u2", "b32": "u4", "u32": "u4", "s32": "u4"}
STORAGE |= {"f32": "u4", "b64": "u8", "u64": "u8", "s64": "u8", "f64": "u8"}
SIZE = {"b8": 1, "u8": 1, "s8": 1, "b16": 2, "u16": 2, "b32": 4, "u32": 4, "s32": 4, "f32": 4, "b64": 8, "u64": 8}


class PtxError(Exception):
    """What nvcc wrote is not known here, or a kernel broke a rule of the machine."""


@dataclass
class Operand:
    """`kind` is register, number, special, vector or address; an address is `base` (an Operand or None) + `offset`."""

    kind: str
    text: str
    parts: list["Operand"] = field(default_factory=list)
    base: "Operand | None" = None
    offset: int = 0
    storage: np.dtype | None = None
    cache: dict = field(default_factory=dict)


@dataclass
class Instruction:
    """One statement. `guard`: the predicate that it depends on, or None; run(machine, operands) executes it."""

    text: str
    guard: Operand | None
    negated: bool
    opcode: str
    operands: list[Operand]
    run: Callable | None = None


class Kernel:
    """An .entry of a PTX file.

    name: demangled, without parameters and namespaces; `parameters`: bytes of all of them; `static_shared`: bytes of
    shared memory that the kernel declares; dynamic shared memory begins behind it, at a multiple of 128.
    """

    def __init__(self, mangled: str, name: str, parameters: str, body: str, module_shared: list, implement: Callable):
        self.mangled, self.name = mangled, name
        self.text = _text(body)
        self.symbols: dict[str, int] = {}  # address of a parameter, or of a variable in shared memory
        self.registers: dict[str, np.dtype] = {}
        self.labels: dict[str, int] = {}
        self.code: list[Instruction] = []
        self.parameters = 0
        for align, kind, symbol, n in re.findall(r"\.param (?:\.align (\d+) )?\.(\w+) (\w+)(?:\[(\d+)\])?", parameters):
            size = SIZE[kind] * int(n or 1)
            self.parameters = _aligned(self.parameters, int(align or size))
            self.symbols[symbol] = self.parameters
            self.parameters += size
        self.static_shared = 0
        for align, kind, symbol, n in module_shared:
            if re.search(rf"\b{re.escape(symbol)}\b", body):
                self._declare_shared(align, kind, symbol, n)
        for statement in body.split(";"):
            self._statement(statement)
        self.static_shared = _aligned(self.static_shared, 128)
        for i in self.code:
            i.run = implement(i)
        self.targets = set(self.labels.values())

    def _declare_shared(self, align: str, kind: str, symbol: str, n: str) -> None:
        # At multiples of 4 at least: races are looked for in words.
        self.static_shared = _aligned(self.static_shared, max(4, int(align)))
        self.symbols[symbol] = self.static_shared
        self.static_shared += SIZE[kind] * int(n or 1)

    def _statement(self, text: str) -> None:
        while True:  # braces of scopes, and labels
            text = re.sub(r"^[{}\s]+", "", text)
            label = re.match(r"(\$\w+):", text)
            if not label:
                break
            self.labels[label[1]] = len(self.code)
            text = text[label.end() :]
        text = " ".join(text.split())
        if not text or text.startswith(".pragma"):
            return
        if m := re.match(r"\.reg \.(\w+) (.*)", text):
            for name in m[2].split(","):
                name = re.sub(r"<\d+>", "", name.strip())
                if self.registers.setdefault(name, np.dtype(STORAGE[m[1]])) != np.dtype(STORAGE[m[1]]):
                    raise PtxError(f"{self.name}: {name} is declared twice")
            return
        if m := re.match(r"\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?", text):
            return self._declare_shared(*m.groups())
        m = re.match(r"(?:@(!?)(%p\d+) )?([a-z][\w.:]*) ?(.*)", text)
        if not m:
            raise PtxError(f"{self.name}: unknown statement: {text}")
        operands = [
            self._operand(o.strip()) for o in re.findall(r"\{[^}]*\}|\[[^\]]*\]|[^,{}\[\]]+", m[4]) if o.strip()
        ]
        guard = self._operand(m[2]) if m[2] else None
        self.code.append(Instruction(text, guard, m[1] == "!", m[3], operands))

    def _operand(self, text: str) -> Operand:
        if text[0] == "{":
            return Operand("vector", text, parts=[self._operand(t.strip()) for t in text[1:-1].split(",")])
        if text[0] == "[":
            base, _, offset = text[1:-1].partition("+")
            o = self._operand(base.strip())
            is_symbol = o.kind == "number"
            at = int(offset or 0) + (int(o.text) if is_symbol else 0)
            return Operand("address", text, base=None if is_symbol else o, offset=at)
        name = text.split("|")[0]  # shfl's second result, a predicate, is not kept
        prefix = re.sub(r"\d+$", "", name)
        if name in self.registers or (name[0] == "%" and prefix in self.registers):
            return Operand("register", name, storage=self.registers.get(name, self.registers.get(prefix)))
        if name[0] == "%":
            return Operand("special", name)
        if name in self.symbols:
            return Operand("number", str(self.symbols[name]))
        if name == "dynamic_shared_memory":  # behind all static variables, which are declared first
            return Operand("number", str(_aligned(self.static_shared, 128)))
        return Operand("number", name)


def _text(body: str) -> str:
    """A kernel's body without its number in the file."""
    return re.sub(r"\$L__BB\d+_", "$L_", body)


def _aligned(n: int, align: int) -> int:
    return -(-n // align) * align


def simple_name(demangled: str) -> str:
    """`awq_gemm<16>` of `void awq_gemm<16>(__half const*, int, ...)`, whatever compiler demangled it."""
    name = demangled.replace("(anonymous namespace)::", "").replace("void ", "")
    return re.sub(r"\s+", "", name.partition("(")[0])


def kernels_of(text: str, implement: Callable, known: dict[str, Kernel] | None = None) -> dict[str, Kernel]:
    """Every kernel of a PTX file, by simple name; implement(instruction) is what executes it, or raises PtxError.
    Without those that `known` has with the same text."""
    text = re.sub(r"//[^\n]*", "", text)
    module_shared = re.findall(r"^\.shared \.align (\d+) \.(\w+) (\w+)(?:\[(\d+)\])?;", text, re.M)
    entries = list(re.finditer(r"\.entry (\w+)\(([^)]*)\)[^{]*\{", text))
    names = subprocess.run(
        ["c++filt"], input="\n".join(m[1] for m in entries), capture_output=True, text=True, check=True
    )
    found = {}
    for m, demangled in zip(entries, names.stdout.splitlines(), strict=True):
        name, body = simple_name(demangled), _body(text, m.end())
        if not known or known[name].text != _text(body):
            found[name] = Kernel(m[1], name, m[2], body, module_shared, implement)
    return found


def _body(text: str, begin: int) -> str:
    """From behind an opening brace to the one that closes it."""
    depth = 1
    for brace in re.compile(r"[{}]").finditer(text, begin):
        depth += 1 if brace[0] == "{" else -1
        if depth == 0:
            return text[begin : brace.start()]
    raise PtxError("a kernel without an end")
