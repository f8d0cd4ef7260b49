"""Mixtures of experts: config, forward pass, model files and their export."""

import json

import numpy as np
import pytest

from formats.checkpoint import DENSE, SPARSE, Checkpoint, ModelError, read_config, tensor_shapes
from golden.forward import Fp32, forward
from golden.routing import combine
from golden.trace import Recorder, step_order
from tests.hf_fixtures import FOLDER, MOE_FIXTURES

MODEL = FOLDER / "qwen3-moe-2-of-8"


def changed(folder, values):
    """config.json of MODEL with other values; None takes a field out."""
    config = json.loads((MODEL / "config.json").read_text()) | values
    (folder / "config.json").write_text(json.dumps({k: v for k, v in config.items() if v is not None}))
    return read_config(folder, archs=SPARSE)


# ---- config.json


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"num_experts": None}, "num_experts is missing"),
        ({"num_experts": 0}, "num_experts is 0: expected a positive whole number"),
        ({"num_experts": 1025}, "num_experts is 1025: expected 1 to 1024"),
        ({"num_experts_per_tok": 9}, "num_experts_per_tok is 9: there are 8 experts"),
        ({"moe_intermediate_size": 5121}, "moe_intermediate_size is 5121: expected 1 to 5120"),
        ({"mlp_only_layers": [2]}, "mlp_only_layers is [2]: expected a list of layers, 0 to 1"),
        ({"mlp_only_layers": 1}, "mlp_only_layers is 1: expected a list"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step is 0: expected a positive whole number"),
        ({"norm_topk_prob": 1}, "norm_topk_prob is 1: expected true or false"),
    ],
)
def test_a_config_that_no_program_runs_is_refused(tmp_path, values, text):
    with pytest.raises(ModelError) as error:
        changed(tmp_path, values)
    assert text in str(error.value)


def test_which_layers_are_dense(tmp_path):
    def dense(**values):
        return changed(tmp_path, {"num_hidden_layers": 5} | values).moe.dense_layers

    assert dense() == ()
    assert dense(mlp_only_layers=[3, 1]) == (1, 3)
    assert dense(decoder_sparse_step=2) == (0, 2, 4)
    assert dense(decoder_sparse_step=2, mlp_only_layers=[1]) == (0, 1, 2, 4)
    assert dense(mlp_only_layers=None) == ()


def test_heads_are_of_dim_over_heads_unless_said(tmp_path):
    assert changed(tmp_path, {"head_dim": None}).head_dim == 8


def test_who_runs_dense_models_alone_refuses_by_name():
    with pytest.raises(ModelError) as error:
        Checkpoint(MODEL)
    assert str(error.value) == (
        f'{MODEL / "config.json"}: model_type is "qwen3_moe": supported are llama and qwen3; '
        "python -m export moe takes it"
    )
    with pytest.raises(ModelError) as error:
        Checkpoint(FOLDER / "qwen3-mha-tied", archs=SPARSE)
    assert 'model_type is "qwen3": supported is qwen3_moe' in str(error.value)


def test_tensors_of_a_checkpoint():
    config = read_config(FOLDER / "qwen3-moe-listed-dense", archs=SPARSE)
    shapes = tensor_shapes(config)
    assert shapes["model.layers.0.mlp.gate.weight"] == (5, 32)
    assert shapes["model.layers.0.mlp.experts.4.down_proj.weight"] == (32, 16)
    assert shapes["model.layers.1.mlp.gate_proj.weight"] == (64, 32)
    assert "model.layers.1.mlp.gate.weight" not in shapes
    assert "model.layers.0.self_attn.q_norm.weight" in shapes


# ---- the forward pass


@pytest.mark.parametrize("name", MOE_FIXTURES)
def test_tokens_do_not_depend_on_those_behind_them(name):
    checkpoint = Checkpoint(FOLDER / name, archs=(*DENSE, *SPARSE))
    tokens = np.arange(1, 13)
    whole = forward(checkpoint.config, Fp32(checkpoint), tokens)
    part = forward(checkpoint.config, Fp32(checkpoint), tokens[:5])
    assert np.array_equal(whole[:5], part)


def test_steps_stand_in_the_order_of_computation():
    checkpoint, recorder = Checkpoint(FOLDER / "qwen3-moe-listed-dense", archs=SPARSE), Recorder()
    forward(checkpoint.config, Fp32(checkpoint), np.arange(4), recorder)
    names = list(recorder.tensors)
    assert names == sorted(names, key=step_order)
    assert recorder.tensors["layers.0.moe.experts"].shape == (4, 3)
    assert recorder.tensors["layers.0.moe.gate_up_proj"].shape == (12, 32)
    assert "layers.1.moe.router" not in names
    assert "layers.1.ffn.swiglu" in names


def test_experts_are_added_by_index():
    """Whatever order their weights have: the sum is the same to the bit."""
    rng = np.random.default_rng(0)
    outputs, weights = rng.standard_normal((4, 8)).astype(np.float32), rng.random((1, 4)).astype(np.float32)
    chosen = np.array([[6, 1, 7, 3]])
    order = [2, 0, 3, 1]
    assert np.array_equal(
        combine(outputs, chosen, weights), combine(outputs[order], chosen[:, order], weights[:, order])
    )
