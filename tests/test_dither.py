"""models/dither.py: weights move, each within its cell, and nothing else changes."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFReader, dequantize, quantize

from formats.errors import ModelError
from formats.gguf_model import GGUFModel
from models.dither import GRIDS, cell_widths, dither
from tests.gguf_fixture import write_gguf
from tests.helpers import MODELS, ROOT

LLAMA = MODELS / "tiny-llama"


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"])
def test_weights_stay_in_their_cells(tmp_path, kind):
    """Each moves by at most half a step of its block, both ways, and no other values than these are met again."""
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    write_gguf(LLAMA, source, kind)
    dither(source, out)
    before, after = ({t.name: t for t in GGUFReader(path).tensors} for path in (source, out))
    assert before.keys() == after.keys()
    moved = 0
    for name, tensor in before.items():
        old, new = dequantize(tensor.data, tensor.tensor_type), after[name].data
        assert after[name].tensor_type == GGMLQuantizationType.F32
        assert old.shape == new.shape
        if tensor.tensor_type.name not in GRIDS:
            assert np.array_equal(old, new)
            continue
        moved += 1
        block_bytes = tensor.data.shape[-1] // (old.shape[-1] // 32)
        step = np.repeat(cell_widths(tensor.data.reshape(-1, tensor.data.shape[-1]), block_bytes), 32, axis=1)
        u = ((new - old) / np.where(step > 0, step, 1))[step > 0]
        assert np.abs(u).max() <= 0.5 + 1e-4
        assert abs(u.mean()) < 0.05
        assert u.std() == pytest.approx(1 / np.sqrt(12), rel=0.05)
    assert moved > 10


def test_rounding_gives_the_codes_back(tmp_path):
    """Q8_0 of what Q8_0 was moved to, with the old scale: the old codes."""
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    write_gguf(LLAMA, source, "Q8_0")
    dither(source, out, seed=3)
    before, after = ({t.name: t for t in GGUFReader(path).tensors} for path in (source, out))
    blocks = before["blk.0.attn_q.weight"].data.reshape(-1, 34)
    scales = blocks[:, :2].copy().view("<f2").astype(np.float32)
    codes = np.rint(after["blk.0.attn_q.weight"].data.reshape(-1, 32) / np.where(scales != 0, scales, 1))
    assert (codes == blocks[:, 2:].view(np.int8)).mean() > 0.999  # a move of exactly half a step may round either way


def test_the_model_is_the_same_in_all_else(tmp_path):
    source, out, again, other = (tmp_path / f"{name}.gguf" for name in ("source", "out", "again", "other"))
    write_gguf(LLAMA, source, "Q8_0")
    dither(source, out)
    dither(source, again)
    dither(source, other, seed=1)
    assert out.read_bytes() == again.read_bytes() != other.read_bytes()
    first, second = GGUFModel(source), GGUFModel(out)
    assert first.config == second.config
    assert first.generation == second.generation
    assert replace(second.tokenizer_files(), path=source) == first.tokenizer_files()
    assert sorted(p.name for p in tmp_path.iterdir()) == ["again.gguf", "other.gguf", "out.gguf", "source.gguf"]


def test_what_has_no_cells_is_refused(tmp_path):
    source, out = tmp_path / "source.gguf", tmp_path / "out.gguf"
    write_gguf(LLAMA, source, "IQ4_NL")
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight has type IQ4_NL, expected Q4_0, Q4_1"):
        dither(source, out)
    with pytest.raises(ModelError, match="is the same file as the input"):
        write_gguf(LLAMA, source, "Q8_0")
        dither(source, source)
    command = [sys.executable, "-m", "models.dither", tmp_path / "absent.gguf", out]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("dither: ")
    assert done.stderr.count("\n") == 1
    assert not out.exists()


def test_dequantized_types_are_those_of_the_package():
    """The scale is the first fp16 of a block in every type of GRIDS: values are whole steps apart, some only one."""
    x = np.random.default_rng(0).standard_normal((1, 32 * 64), np.float32)
    for kind in ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"):
        data = quantize(x, GGMLQuantizationType[kind])
        values = dequantize(data, GGMLQuantizationType[kind]).reshape(64, 32)
        steps = np.diff(values, axis=1) / cell_widths(data, data.shape[1] // 64).T
        assert np.abs(steps - np.rint(steps)).max() < 0.01
        assert np.abs(np.rint(steps)).max() > 1
        assert (np.abs(np.rint(steps)) == 1).any()
