"""What lies on what, the registries, and each scheme's list of tensors against the files and the programs."""

import ast
import re
import struct
import subprocess
from dataclasses import replace

import numpy as np
import pytest

from bench.random_checkpoint import config_of
from export.__main__ import EXPORTERS
from formats.checkpoint import DENSE, SPARSE, Checkpoint
from formats.limits import LIMITS
from formats.model_file import read_format, read_header
from formats.schemes import FORMATS, format_of
from formats.tensors import Tensor, norm_shapes, weights_end, with_offsets
from golden.schemes import SCHEMES, goldens, random_goldens
from models.by_rule import SCHEMES as MADE
from models.by_rule import write_model
from tests.helpers import MODELS, ROOT, run_golden, seal

VARIANTS = [variant for reference in SCHEMES.values() for variant in reference.variants]
FILES = [ROOT / "build" / "models" / f"{name}.{variant}.bin" for name, variant, _ in goldens()]
RANDOM_FILES = [ROOT / "build" / "models" / f"{name}.{variant}.bin" for name, variant, _ in random_goldens()]
TYPES = {"<f4": "F32", "<f2": "F16", "<i4": "I32", "|i1": "I8", "|u1": "U8"}


# ---- what lies on what


def imported(path):
    """The packages that a module imports, inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name.split(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield path.parent.name if node.level else node.module.split(".")[0]


@pytest.mark.parametrize(
    ("package", "below"), [("formats", set()), ("golden", {"formats"}), ("export", {"formats", "golden"})]
)
def test_packages_import_what_lies_below(package, below):
    ours = {p.parent.name for p in ROOT.glob("*/__init__.py")}
    modules = list((ROOT / package).rglob("*.py"))
    assert len(modules) >= 5
    for path in modules:
        assert set(imported(path)) & ours <= below | {package}, path


def modules_imported(path, modules):
    """The modules, of a list by dotted names, that one of them imports, inside functions, too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: a relative import"
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        yield from (name for name in names if name in modules)


def test_no_module_imports_one_that_imports_it():
    paths = [path for package in ("formats", "golden", "export") for path in (ROOT / package).rglob("*.py")]
    modules = {".".join(path.relative_to(ROOT).with_suffix("").parts): path for path in paths}
    imports = {name: set(modules_imported(path, modules)) for name, path in modules.items()}
    assert "golden.forward" in imports["golden.q8"]
    while free := [name for name, others in imports.items() if not others & imports.keys()]:
        for name in free:  # it imports none of those that are left
            del imports[name]
    assert not sorted(imports)  # those in a cycle, and those above one


def test_every_scheme_has_its_rows():
    assert list(FORMATS) == list(SCHEMES) == [exporter.FORMAT.scheme for exporter in EXPORTERS]
    assert len({f.magic for f in FORMATS.values()}) == len(FORMATS)
    for scheme, file_format in FORMATS.items():
        assert format_of(file_format.magic) is file_format is SCHEMES[scheme].format
        assert list(ROOT.glob(f"{file_format.program}.c*"))
    assert format_of(0) is None
    exported = re.findall(r"^EXPORT_([\w-]+) *:= *(\w+)", (ROOT / "Makefile").read_text(encoding="utf-8"), re.M)
    assert {variant for variant, _ in exported} == set(VARIANTS)
    for scheme, reference in SCHEMES.items():
        assert {exporter for variant, exporter in exported if variant in reference.variants} == {scheme}


def test_golden_make_says_which_file_is_missing(tmp_path):
    done = run_golden("make", "--files", tmp_path, "--out", tmp_path / "out", "--only", "awq")
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr == f"golden: {tmp_path / 'tiny-llama.awq.bin'}: no such file; `make golden` makes it\n"
    assert not (tmp_path / "out").exists()


# ---- ranges

# Where the header has them (docs/model-files.md).
OFFSETS = {
    "dim": 0x08, "hidden_dim": 0x0C, "n_layers": 0x10, "n_heads": 0x14, "n_kv_heads": 0x18, "vocab_size": 0x1C,
    "max_seq_len": 0x20, "head_dim": 0x48, "norm_eps": 0x50, "rope_theta": 0x54, "rope_scaling factor": 0x5C,
    "low_freq_factor": 0x60, "high_freq_factor": 0x64, "original_max_position_embeddings": 0x68,
    "attention_factor": 0x30, "n_eos": 0x70,
    "temperature": 0x94, "top_p": 0x98, "top_k": 0x9C, "min_p": 0xB8, "repetition_penalty": 0xBC,
    "n_experts": 0xC4, "n_active": 0xC8, "moe_hidden_dim": 0xCC,
}  # fmt: skip


@pytest.mark.parametrize("field", LIMITS)
def test_ranges_are_those_of_the_programs(tmp_path, field):
    """A number beyond each end is refused with the range; at the ends something else may be wrong, but not that."""
    of_experts = OFFSETS[field] >= 0xC0
    good = bytearray((FILES[-1] if of_experts else FILES[0]).read_bytes())
    struct.pack_into("<ifffi", good, 0x58, 3 if field == "attention_factor" else 1, 8, 1, 4, 8192)
    if field == "n_kv_heads":  # which is at most n_heads
        struct.pack_into("<i", good, 0x14, LIMITS["n_heads"].high)
    if field == "n_active":  # and this at most n_experts
        struct.pack_into("<i", good, OFFSETS["n_experts"], LIMITS["n_experts"].high)
    low, high = LIMITS[field]
    whole = isinstance(low, int)
    beyond = (low - 1, high + 1) if whole else (np.nextafter(np.float32(end), np.float32(d)) for end, d in
                                                ((low, -np.inf), (high, np.inf)))  # fmt: skip
    for value, is_out in ((low, False), (high, False), *((v, True) for v in beyond)):
        data = bytearray(good)
        struct.pack_into("<i" if whole else "<f", data, OFFSETS[field], value)
        seal(data)
        path = tmp_path / "model.bin"
        path.write_bytes(data)
        program = ROOT / ("runq_moe" if of_experts else "runq")
        done = subprocess.run([program, path, "--info"], capture_output=True, text=True, check=False)
        is_refused = (
            re.search(rf": {field} is \S+, expected {re.escape(str(LIMITS[field]))}\n", done.stderr) is not None
        )
        assert is_refused == is_out, (value, done.stderr)
        assert LIMITS[field].holds(value) != is_out


# ---- lists of tensors


def listed(path):
    """The tensors of a file with their offsets, and where they end by its header."""
    file_format = read_format(path)
    head = read_header(path, file_format)
    return list(with_offsets(head.tensors(), alignment=file_format.alignment)), head


def test_offsets_follow_each_other():
    tensors = [Tensor("a", "<f2", (3, 5)), Tensor("b", "|i1", (7,)), Tensor("c", "<i4", (2, 2))]
    assert [t.n_bytes for t in tensors] == [30, 7, 16]
    assert [(t.name, t.offset, t.end) for t in with_offsets(tensors)] == [
        ("a", 256, 286),
        ("b", 286, 293),
        ("c", 293, 309),
    ]
    assert weights_end(tensors) == 309
    assert [(t.offset, t.end) for t in with_offsets(tensors, alignment=64)] == [(256, 286), (320, 327), (384, 400)]
    assert weights_end(tensors, 64) == 400


@pytest.mark.parametrize("path", FILES, ids=lambda p: p.stem)
def test_a_list_fills_its_file(path):
    tensors, head = listed(path)
    assert tensors[-1].end == head.weights_end
    assert len({t.name for t in tensors}) == len(tensors)
    checkpoint = Checkpoint(MODELS / path.name.split(".")[0], archs=(*DENSE, *SPARSE))
    assert {name for name, _ in norm_shapes(checkpoint.config)} <= {t.name for t in tensors}
    assert ("act_scales" in {t.name for t in tensors}) == ("static" in path.name)


def printed(program, path):
    """Name, type, shape and offset of every tensor that --info prints."""
    command = [ROOT / program, path, "--info"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    return [
        (name, kind, tuple(map(int, shape.split(","))), int(offset))
        for name, kind, shape, offset in re.findall(r"^tensor +(\S+) +(\w+) +\[([\d,]+)\] +(\d+)$", done.stdout, re.M)
    ]


def check_list(path):
    tensors, _ = listed(path)
    expected = [(t.name, TYPES[t.dtype], t.shape, t.offset) for t in tensors]
    assert printed(read_format(path).program, path) == expected


@pytest.mark.parametrize("path", FILES + RANDOM_FILES, ids=lambda p: p.stem)
def test_programs_list_the_same_tensors(path):
    check_list(path)


@pytest.mark.parametrize("shape", ["llama-3.2-1b", "qwen3-0.6b"])
@pytest.mark.parametrize("scheme", MADE)
def test_programs_list_the_same_tensors_of_an_untied_model(tmp_path, scheme, shape):
    config = replace(
        config_of(shape), dim=128, hidden_dim=256, n_layers=3, n_heads=4, n_kv_heads=2, head_dim=64, vocab_size=320,
        max_seq_len=64, tied=False,
    )  # fmt: skip
    write_model(config, tmp_path / "model.bin", scheme, progress=False)
    check_list(tmp_path / "model.bin")
