"""The cycle model of bench/systolic.py against its simulator, and its counts against what files have."""

import numpy as np
import pytest

from bench.systolic import Array, cycles, layer_shapes, other_work, row_cycles, simulate, traffic
from formats.checkpoint import Checkpoint, read_config
from golden.q8 import Q8, quantize
from tests.helpers import ROOT, run_here

# rows, cols, row_cycles, tokens, tiles of inputs, tiles of outputs
SHAPES = [
    (4, 4, 1, 1, 1, 1),
    (4, 4, 1, 1, 3, 2),
    (4, 4, 1, 9, 2, 3),
    (8, 4, 1, 3, 2, 2),
    (4, 8, 1, 4, 3, 1),
    (4, 4, 3, 1, 3, 3),
    (4, 4, 3, 12, 2, 3),
    (5, 3, 2, 11, 2, 2),
    (2, 7, 1, 1, 4, 3),
    (2, 1, 1, 5, 3, 2),
    (16, 16, 4, 20, 2, 2),
    (8, 8, 1, 8, 3, 3),
]


@pytest.mark.parametrize(("rows", "cols", "every", "n", "down", "across"), SHAPES)
def test_the_formula_is_what_the_array_takes(rows, cols, every, n, down, across):
    rng = np.random.default_rng(rows)
    x, w = rng.integers(-127, 128, (n, rows * down)), rng.integers(-128, 128, (rows * down, cols * across))
    array = Array(rows, cols, every)
    sums, took = simulate(array, x, w)
    assert took == cycles(array, n, rows * down, cols * across)
    whole = sums.reshape(across, down, n, cols).sum(axis=1).transpose(1, 0, 2).reshape(n, -1)
    assert np.array_equal(whole, x @ w)


@pytest.mark.parametrize("shape", [SHAPES[1], SHAPES[5], SHAPES[10]])
def test_a_cycle_earlier_is_too_early(shape):
    rows, cols, every, n, down, across = shape
    x, w = np.ones((n, rows * down), int), np.ones((rows * down, cols * across), int)
    with pytest.raises(RuntimeError, match="no weight of tile"):
        simulate(Array(rows, cols, every), x, w, hurry=1)


def test_memory_sets_how_fast_rows_come():
    assert [row_cycles(64, 1.0625, b) for b in (1000, 68, 67, 34, 8.5)] == [1, 1, 2, 2, 8]


def test_traffic_is_the_bytes_of_codes_and_scales():
    checkpoint = Checkpoint(ROOT / "models" / "tiny-llama")
    scheme = Q8(checkpoint)
    for name, (n_outputs, n_inputs) in layer_shapes(checkpoint.config).items():
        full = name if name == "classifier" else f"layers.0.{'attn' if name[0] in 'qkvo' else 'ffn'}.{name}"
        matrix = scheme.matrix("embed" if name == "classifier" else full)
        assert matrix.codes.shape == (n_outputs, n_inputs)
        moved = traffic(5, n_outputs, n_inputs, 64)
        assert moved.weights == matrix.codes.nbytes + matrix.scales.nbytes
        x = quantize(np.ones((5, n_inputs), np.float32), 64)
        assert moved.activations == x.codes.nbytes + x.scales.nbytes + 5 * n_outputs * 4


def test_other_work_by_hand():
    config = read_config(ROOT / "models" / "tiny-llama")  # 4 layers, 4 heads, dim 128, hidden_dim 384
    work = other_work(config, 10, 64)
    assert work.roots == 4 * 2 + 1
    assert work.exponentials == 4 * (4 * 10 + 384)
    assert work.divisions == 4 * (2 + 4 + 384 + 2 * (2 + 2 + 2 + 6)) + 1 + 2 * 2
    assert other_work(config, 10, 0).divisions == 4 * (2 + 4 + 384 + 2 * 4) + 1 + 2


def test_the_command():
    done = run_here("bench.systolic", ROOT / "models" / "tiny-llama", "--rows", "32", "--cols", "32")
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout.splitlines()) == 2 + 2 * 8
    done = run_here("bench.systolic", ROOT / "models" / "tiny-llama", "--rows", "1")
    assert done.returncode == 2
