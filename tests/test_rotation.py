"""Rotated models: exactness of the reference, both forms of the programs against it, options and damaged headers."""

import json
import shutil
import struct
import subprocess

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from export.gptq import Options, export_gptq
from export.moe import export_moe
from export.q8 import export_q8
from export.w8a8 import export_w8a8
from formats.checkpoint import DENSE, SPARSE
from formats.model_file import ModelError, read_header
from formats.moe import MoeLayout
from formats.schemes import FORMATS, Q8_FILE
from formats.source import open_model
from golden import forward, fp32, rotation, routing
from golden.rotation import Rotated, best_seed, hadamard, random_signs, rotate, rotate_back
from golden.schemes import read_file
from golden.trace import Recorder, compare, read_trace
from tests.gguf_fixture import write_gguf
from tests.helpers import F32, F64, MODELS, ROOT, run_export

IDS = [1, 5, 77, 300, 21, 9]
EXPORTS = {
    "q8": export_q8,
    "w8a8": lambda *paths, **o: export_w8a8(*paths, alpha=None, **o),
    "gptq": lambda *paths, **o: export_gptq(*paths, options=Options(rtn=True), **o),
    "moe": lambda *paths, **o: export_moe(*paths, MoeLayout("a8w4", 64), alpha=None, **o),
}


def tied(name, out):
    """A tiny model whose classifier is its embedding: a copy, without lm_head unless it is so already."""
    shutil.copytree(MODELS / name, out)
    tensors = load_file(out / "model.safetensors")
    tensors.pop("lm_head.weight", None)
    save_file(tensors, out / "model.safetensors", {"format": "pt"})
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    return out


def export_rotated(scheme, folder):
    """A rotated file of a tied model, which a program of the scheme has to rotate."""
    model = tied("tiny-qwen3-moe" if scheme == "moe" else "tiny-llama", folder / "hf")
    EXPORTS[scheme](model, folder / "m.bin", progress=False, rotate=1)
    return folder / "m.bin"


def logits(source, dtype):
    return forward.forward(source.config, forward.Fp32(source), np.array(IDS)).astype(dtype)


@pytest.mark.parametrize("untie", [False, True])
@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3", "tiny-qwen3-moe"])
def test_a_rotated_model_is_the_same(monkeypatch, tmp_path, name, untie):
    """In fp64 but for 1e-9 of the largest logit, in fp32 for 1e-4: tied, and with a classifier of its own."""
    source = open_model(MODELS / name if untie else tied(name, tmp_path / "hf"), (*DENSE, *SPARSE))
    for dtype, limit in ((F32, 1e-4), (F64, 1e-9)):
        monkeypatch.setattr(forward, "F32", dtype)
        monkeypatch.setattr(routing, "F32", dtype)
        monkeypatch.setattr(fp32, "F32", dtype)
        expected, found = logits(source, dtype), logits(Rotated(source, 5, untie, dtype), dtype)
        assert np.abs(found - expected).max() <= limit * np.abs(expected).max()
    assert Rotated(source, 5, untie).config.rotation_block == (0 if untie else 128)


def test_no_channel_of_a_rotated_stream_is_left_as_it_was():
    source = open_model(MODELS / "tiny-llama")
    name = "model.layers.1.mlp.gate_proj.weight"
    weight, found = source.tensor(name), Rotated(source, 5).tensor(name)
    assert np.abs(found - weight).max() > 0.1 * np.abs(weight).max()
    assert np.all(Rotated(source, 5).tensor("model.layers.1.input_layernorm.weight") == 1)


def test_the_transform_is_a_matrix_and_its_own_inverse():
    x = np.random.default_rng(0).standard_normal((3, 24))
    h = np.array([[1, 1], [1, -1]])
    expected = x.reshape(3, 3, 8) @ np.kron(h, np.kron(h, h))
    assert np.allclose(hadamard(x, 8), expected.reshape(3, 24))
    s = random_signs(7, 24, 8)
    assert np.allclose(rotate_back(rotate(x, s, 8), s, 8), x)
    assert np.allclose(np.linalg.norm(rotate(x, s, 8), axis=-1), np.linalg.norm(x, axis=-1))
    assert {*np.sign(s)} == {-1, 1}


def test_the_best_seed_has_the_smallest_fourth_powers(monkeypatch):
    """Among two, of which one leaves a matrix as it was."""
    source = open_model(MODELS / "tiny-llama")
    found = best_seed(source)
    assert 0 <= found < rotation.N_SEEDS
    monkeypatch.setattr(
        rotation, "random_signs", lambda seed, n, block: random_signs(found if seed == 7 else 0, n, block)
    )
    assert best_seed(source) == (0 if found == 0 else 7)


@pytest.mark.parametrize("scheme", EXPORTS)
def test_programs_rotate_as_the_reference(tmp_path, scheme):
    """Both forms of each program; what comes of the embedding equals the reference's bit for bit."""
    path = export_rotated(scheme, tmp_path)
    file = read_file(path)
    assert file.config.rotation_block == 128
    recorder = Recorder()
    forward.forward(file.config, file, recorder("tokens", np.array(IDS, np.int32)), recorder)
    program = FORMATS[scheme].program
    for binary in (ROOT / program, ROOT / "build" / "plain" / program):
        command = [binary, path, "--ids", ",".join(map(str, IDS)), "-n", 1, "--trace", tmp_path / "trace"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True)
        trace = read_trace(tmp_path / "trace")
        assert np.array_equal(trace["rotate"], recorder.tensors["rotate"])
        assert [report for report in compare(recorder.tensors, trace) if not report.ok] == []
        back = {"rotate": trace["rotate"], "rotate_back": trace["rotate_back"] * F32(1.0001)}
        assert [report for report in compare(recorder.tensors, trace | back) if not report.ok] != []


def test_an_untied_model_has_nothing_to_rotate(tmp_path):
    export_q8(MODELS / "tiny-qwen3", tmp_path / "m.bin", progress=False, rotate="best")
    head = read_header(tmp_path / "m.bin", Q8_FILE)
    assert head.config.rotation_block == 0
    assert "rotation" not in {tensor.name for tensor in head.tensors()}


def test_the_file_says_how_it_is_rotated(tmp_path):
    path = export_rotated("q8", tmp_path)
    info = subprocess.run([ROOT / "runq", path, "--info"], capture_output=True, text=True, check=True).stdout
    assert "rotation_block          128\n" in info
    assert "rotation F32 [128]" in info
    data = path.read_bytes()
    for block, text in (
        (-1, "expected 0 to 128"),
        (256, "expected 0 to 128"),
        (96, "expected a power of two"),
        (0, ""),
    ):
        bad = bytearray(data)
        struct.pack_into("<i", bad, 0x34, block)
        (tmp_path / "bad.bin").write_bytes(bad)
        for program in (ROOT / "runq", ROOT / "build" / "plain" / "runq"):
            done = subprocess.run(
                [program, tmp_path / "bad.bin", "--ids", "1"], capture_output=True, text=True, check=False
            )
            assert (done.returncode, text in done.stderr) == (1, True), done.stderr
    with pytest.raises(ModelError, match="the checksum does not hold"):
        read_header(tmp_path / "bad.bin", Q8_FILE)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["q8", "--rotate-seed", "3"], "--rotate-seed would change nothing without --rotate: leave it out"),
        (["q8", "--rotate", "--rotate-seed", "-1"], "--rotate-seed is -1, expected 0 or more"),
        (["q8", "--rotate", "--gguf-out", "OUT"], "--gguf-out and --rotate exclude each other"),
        (["w8a8", "--rotate", "--no-smooth", "--hf-out", "OUT"], "--hf-out and --rotate exclude each other"),
        (["awq", "--rotate", "--rtn"], "its embedding is its classifier, --rotate is not possible in AWQ"),
    ],
)
def test_what_cannot_be_rotated_is_refused(tmp_path, arguments, text):
    scheme, *options = (str(tmp_path / "out") if a == "OUT" else a for a in arguments)
    done = run_export(scheme, MODELS / "tiny-llama", tmp_path / "m.bin", *options)
    assert (done.returncode, text in done.stderr) == (1, True), done.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_gguf_file_can_be_rotated(tmp_path):
    """As the directory that it was made from; what a text begins and ends with is its own."""
    write_gguf(MODELS / "tiny-llama", tmp_path / "m.gguf")
    for source, out in ((MODELS / "tiny-llama", "a.bin"), (tmp_path / "m.gguf", "b.bin")):
        export_q8(source, tmp_path / out, with_tokenizer=False, progress=False, rotate=1)
    assert (tmp_path / "a.bin").read_bytes()[0x6C:0x94] == (tmp_path / "b.bin").read_bytes()[0x6C:0x94]
    found, expected = (read_file(tmp_path / name) for name in ("b.bin", "a.bin"))
    assert np.array_equal(found.matrix("layers.0.attn.q_proj").codes, expected.matrix("layers.0.attn.q_proj").codes)
