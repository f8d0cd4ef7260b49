"""models/padded.py: rows get zeros for llama-quantize, and lose them again; importances are mean squares."""

import struct
import subprocess
import sys

import numpy as np
import pytest
from gguf import GGUFReader

from formats.errors import ModelError
from formats.gguf_model import GGUFModel
from golden.calibration import read_samples
from golden.forward import Fp32, rmsnorm
from models.padded import BLOCK, EMBEDDING, cut, importance, pad
from models.quality import BYTES, gguf_candidates
from tests.gguf_fixture import write_gguf
from tests.helpers import CALIBRATION, MODELS, ROOT

LLAMA = MODELS / "tiny-llama"


@pytest.fixture
def model(tmp_path):
    write_gguf(LLAMA, tmp_path / "model.gguf", "F32")
    return tmp_path / "model.gguf"


def test_padded_and_cut(tmp_path, model):
    """A quantizer that halves the matrices' bytes and all their values."""
    wide, small, out = tmp_path / "wide.gguf", tmp_path / "small.gguf", tmp_path / "out.gguf"
    pad(model, wide)
    before, padded = ({t.name: t.data for t in GGUFReader(path).tensors} for path in (model, wide))
    weights, room = 0, 0
    for name, data in before.items():
        if data.ndim == 1 or name == EMBEDDING:
            assert np.array_equal(padded[name], data)
            continue
        assert padded[name].shape[1] == -(-data.shape[1] // BLOCK) * BLOCK
        assert np.array_equal(padded[name][:, : data.shape[1]], data)
        assert not padded[name][:, data.shape[1] :].any()
        weights, room = weights + data.size, room + padded[name].size
    assert room > weights
    small.write_bytes(bytes(wide.stat().st_size - 2 * room))  # as large as with two bytes for each padded weight
    cut(model, wide, small, wide, out)
    after = {t.name: t.data for t in GGUFReader(out).tensors}
    for name, data in before.items():
        assert after[name].shape == data.shape
        assert np.array_equal(after[name], data) == (name != EMBEDDING)
    assert np.abs(after[EMBEDDING] - before[EMBEDDING]).max() <= np.abs(before[EMBEDDING]).max() / 254
    norms = sum(data.size for data in before.values() if data.ndim == 1)
    n_bytes = 2 * weights + before[EMBEDDING].size * 34 // 32 + 4 * norms
    assert GGUFModel(out).metadata.integer(BYTES) == n_bytes
    assert next(gguf_candidates(GGUFModel(model), [out])).megabytes == n_bytes / 1e6


def test_importances(tmp_path, model):
    out = tmp_path / "im.dat"
    importance(model, CALIBRATION, out, 2)
    data, at, found = out.read_bytes(), 4, {}
    for _ in range(struct.unpack_from("<i", data)[0]):
        (n,) = struct.unpack_from("<i", data, at)
        name = data[at + 4 : at + 4 + n].decode()
        calls, size = struct.unpack_from("<ii", data, at + 4 + n)
        found[name] = np.frombuffer(data, "<f4", size, at + 12 + n)
        at += 12 + n + 4 * size
        assert (calls, size % BLOCK) == (1, 0)
    assert at == len(data)
    source = GGUFModel(model)
    assert len(found) == 7 * source.config.n_layers
    weights = Fp32(source)
    embedded = [weights.embedding(ids) for ids in read_samples(source, CALIBRATION, 2, None)]
    read = np.concatenate([rmsnorm(x, weights.vector("layers.0.attn.norm"), source.config.norm_eps) for x in embedded])
    dim = source.config.dim
    assert found["blk.0.attn_q.weight"][:dim] == pytest.approx(np.square(read).mean(axis=0), rel=1e-4)
    assert not found["blk.0.attn_q.weight"][dim:].any()
    assert found["blk.0.ffn_down.weight"][: source.config.hidden_dim].all()


def test_what_cannot_be_padded_or_cut(tmp_path, model):
    wide, q8 = tmp_path / "wide.gguf", tmp_path / "q8.gguf"
    write_gguf(LLAMA, q8, "Q8_0")
    with pytest.raises(ModelError, match=r"tensor token_embd\.weight has type Q8_0, expected F32"):
        pad(q8, wide)
    assert not wide.exists()
    pad(model, wide)
    with pytest.raises(ModelError, match=r"its size is not that of .*wide\.gguf after quantization"):
        cut(model, wide, wide, wide, tmp_path / "out.gguf")
    done = subprocess.run([sys.executable, "-m", "models.padded", "pad", tmp_path / "absent", wide], cwd=ROOT,
                          capture_output=True, text=True, check=False)  # fmt: skip
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("padded: ")
