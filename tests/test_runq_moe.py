"""runq_moe on small models with random weights, one for each format of experts, against the reference."""

import re
import shutil
import subprocess
from functools import partial

import numpy as np
import pytest

from formats.model_file import read_header
from formats.moe import MoeLayout, moe_tensors
from formats.schemes import MOE_FILE
from formats.tensors import with_offsets
from golden.forward import forward
from golden.moe import MoE
from golden.trace import Recorder, compare, read_trace, replay
from tests.helpers import ROOT
from tests.ladder_cases import CASES, TOKENS, write_case
from tests.test_moe import LAYOUTS, exported, layout_name, small_model, with_header
from tests.test_moe_ladder import LADDERS, WIDE
from tests.test_moe_ladder import exported as ladder

PROGRAM = ROOT / "runq_moe"
IDS = [3, 17, 40, 8, 90, 11, 5, 60, 33, 2]
TYPES = {"<f4": "F32", "<f2": "F16", "|i1": "I8", "|u1": "U8"}


def run(file, *options):
    return subprocess.run([PROGRAM, file, *map(str, options)], capture_output=True, text=True, check=False)


FILES = [*map(layout_name, LAYOUTS), *(f"ladder-{name}" for name in LADDERS)]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A file of each layout, by name, of one model; one of its three layers is dense. Of ladders it is wider."""
    folder = tmp_path_factory.mktemp("runq_moe")
    model, wide = small_model(folder / "model"), small_model(folder / "wide", **WIDE)
    found = [exported(model, folder / f"{layout_name(layout)}.bin", layout) for layout in LAYOUTS]
    found += [ladder(wide, folder / f"ladder-{name}.bin", **options) for name, options in LADDERS.items()]
    return dict(zip(FILES, found, strict=True))


@pytest.mark.parametrize("which", FILES)
def test_every_step_is_within_the_contract(files, tmp_path, which):
    """Each from the program's own inputs, and the whole pass; nothing is missing."""
    done = run(files[which], "--ids", ",".join(map(str, IDS)), "-n", 1, "--trace", tmp_path / "trace")
    assert done.returncode == 0, done.stderr
    scheme, found, recorder = MoE(files[which]), read_trace(tmp_path / "trace"), Recorder()
    reports = replay(partial(forward, scheme.config, scheme), found)
    assert len(reports) > 90
    assert [r for r in reports if not r.ok] == []
    recorder("tokens", np.array(IDS, np.int32))
    forward(scheme.config, scheme, np.array(IDS), recorder)
    assert [r for r in compare(recorder.tensors, found) if not r.ok] == []


@pytest.mark.parametrize("which", FILES)
def test_threads_and_chunks_change_nothing(files, which):
    """A prompt in one go, and the same ids one by one behind its first token."""
    prompt = ",".join(map(str, IDS))
    one, two = (
        run(files[which], "--ids", prompt, "-n", 12, "-t", 0, "--print-ids", "-j", j).stdout.strip() for j in (1, 2)
    )
    assert one == two
    fused_not = run(files[which], "--ids", prompt, "-n", 12, "-t", 0, "--print-ids", "--no-fuse").stdout.strip()
    assert fused_not == one
    new = [int(i) for i in one.split(",")]
    longer = run(files[which], "--ids", f"{prompt},{','.join(map(str, new[:5]))}", "-n", 7, "-t", 0, "--print-ids")
    assert [int(i) for i in longer.stdout.strip().split(",")] == new[5:]


@pytest.mark.parametrize("which", FILES)
def test_it_lists_the_tensors_of_formats_moe(files, which):
    head = read_header(files[which], MOE_FILE)
    lines = [
        line.split(None, 1)[1] for line in run(files[which], "--info").stdout.splitlines() if line[:7] == "tensor "
    ]
    assert lines == [
        f"{t.name} {TYPES[t.dtype]} [{','.join(map(str, t.shape))}] {t.offset}"
        for t in with_offsets(moe_tensors(head.config, head.layout), alignment=MOE_FILE.alignment)
    ]


def test_it_names_the_kernel_of_all_but_the_experts(files):
    def kernel(layout):
        done = run(files[layout_name(layout)], "--ids", "1", "-n", 1)
        return re.search(r"^run +([^,]+),", done.stderr, re.M)[1]

    assert kernel(MoeLayout("mxfp8", 32)) == kernel(MoeLayout("a8w8", 0))
    for layout in (MoeLayout("mxfp8", 32, pure=True), MoeLayout("a8w4", 0, pure=True)):  # plain loops
        assert kernel(layout) == "portable"


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0x44, 2, "arch is 2, expected 3 to 3"),
        (0x4C, 4, "group_size is 0 in the header and 4 at 0x4c"),
        (0xC0, 4, "format is 4, expected 0 to 3"),
        (0xC4, 0, "n_experts is 0, expected 1 to 1024"),
        (0xC8, 6, "n_active is 6, expected 1 to 5"),
        (0xCC, 5121, "moe_hidden_dim is 5121, expected 1 to 5120"),
        (0xD0, 2, "norm_topk_prob is 2, expected 0 to 1"),
        (0xD4, 32, "group is 32, which the experts' format has not"),
        (0xD8, 2, "pure is 2, expected 0 to 1"),
        (0xD8, 1, "pure is 1, but all of A8W8 is int8: expected 0"),
        (0xDC, 1, "reserved byte at 220 is not 0"),
        (0xC4, 4, "but the header implies"),
    ],
)
def test_headers_that_it_cannot_run_are_refused_in_one_line(files, tmp_path, offset, value, text):
    refused(files["a8w8-0"], tmp_path, offset, value, text)


@pytest.mark.parametrize(
    ("offset", "value", "text"),
    [
        (0xC0, 0, "reserved byte at 220 is not 0"),  # where other formats have none of their own
        (0xCC, 96, "down_proj has 96 columns, not a multiple of 64"),
        (0xD4, 64, "group is 64, expected 0 to 0"),
        (0xD8, 1, "pure is 1, expected 0 to 0"),
        (0xDC, 3 | 64 << 16, "the format of embed is bits 3, flags 0, group 64, which is none"),
        (0xE0, 4 | 32 << 16, "group_size is 64, expected 32, the activations'"),
        (0xE4, 4 | 128 << 16, "ffn has 192 columns, not a multiple of 128"),
        (0xE8, 2 | 1 << 8 | 64 << 16, "the format of gate_up_proj is bits 2, flags 1, group 64, which is none"),
        (0xEC, 2 | 4 << 8 | 64 << 16, "the format of down_proj is bits 2, flags 4, group 64, which is none"),
        (0xF0, 8, "but the header implies"),
        (0xF4, 1, "reserved byte at 244 is not 0"),
    ],
)
def test_headers_of_ladders(files, tmp_path, offset, value, text):
    refused(files["ladder-ladder"], tmp_path, offset, value, text)


def refused(file, tmp_path, offset, value, text):
    path = with_header(shutil.copy(file, tmp_path / "m.bin"), offset, value)
    done = run(path, "--ids", "1", "-n", 1)
    assert (done.returncode, done.stdout) == (1, "")
    assert text in done.stderr
    assert str(path) in done.stderr
    assert done.stderr.count("\n") == 1


def test_other_programs_refuse_its_files_and_it_theirs(files):
    done = run(ROOT / "build" / "models" / "tiny-llama.w8a8.bin", "--ids", "1", "-n", 1)
    assert done.returncode == 1
    assert "a W8A8 file" in done.stderr
    done = subprocess.run([ROOT / "runq_w8a8", files["a8w8-0"]], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "runq_moe" in done.stderr


@pytest.mark.parametrize("program", [PROGRAM, ROOT / "build" / "plain" / "runq_moe"])
def test_a_mask_that_is_not_two_of_four_is_refused(files, tmp_path, program):
    """Of all experts' rows together the first."""
    head, data = read_header(files["ladder-sparse"], MOE_FILE), bytearray(files["ladder-sparse"].read_bytes())
    places = with_offsets(moe_tensors(head.config, head.layout), alignment=MOE_FILE.alignment)
    (place,) = (t for t in places if t.name == "layers.2.moe.gate_up_proj.mask")
    data[place.offset + 16 * (3 * 128 + 7)] = 0b0111_0011  # row 7 of expert 3
    (tmp_path / "m.bin").write_bytes(data)
    done = subprocess.run([program, tmp_path / "m.bin", "--ids", "1"], capture_output=True, text=True, check=False)
    why = "layers.2.moe.gate_up_proj.mask: row 391 keeps 3 of columns 4 to 7, expected 2 of each 4"
    assert (done.returncode, done.stdout, done.stderr) == (1, "", f"runq_moe: {tmp_path / 'm.bin'}: {why}\n")


@pytest.mark.parametrize("which", range(len(CASES)))
def test_random_configurations_of_ladders(tmp_path, which):
    """Every step within the contract; packed, mapped, and without the fused operator to the bit the same."""
    n_experts, _, routing, options = CASES[which]
    model = write_case(tmp_path / "model", which)
    file = ladder(model, tmp_path / "m.bin", **options)
    ids = ",".join(str(i + 2) for i in range(TOKENS))
    traces = {}
    for name, more in {"packed": (), "mapped": ("--mmap",)}.items():
        done = run(file, "--ids", ids, "-n", 2, "-t", 0, "--trace", tmp_path / name, "--trace-from", 0, *more)
        assert done.returncode == 0, done.stderr
        traces[name] = read_trace(tmp_path / name)
    packed, mapped = traces.values()
    assert not [key for key in packed if not np.array_equal(packed[key], mapped[key])]
    used = [np.unique(x) for key, x in packed.items() if key.endswith("moe.experts")]
    assert all({"all": 0 in x, "empty": x.max() < n_experts // 2, "even": True}[routing] for x in used)
    scheme = MoE(file)
    reports = replay(partial(forward, scheme.config, scheme), packed)
    assert [r for r in reports if not r.ok] == []
    printed = {run(file, "--ids", ids, "-n", 9, "-t", 0, "--print-ids", *more).stdout
               for more in ((), ("--no-fuse",), ("--mmap",), ("-j", 1))}  # fmt: skip
    assert len(printed) == 1
