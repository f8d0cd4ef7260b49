"""The quantizer: GPTQ against its definition, grids against trying everything, and models against plain rounding."""

import os
import re
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from export.gptq import ROWS, Options, by_rows, export_gptq
from formats.checkpoint import Checkpoint, ModelError
from formats.gptq import FORMATS, MatrixFormat
from golden.channel_scaling import CONSUMERS
from golden.forward import forward
from golden.gptq import GPTQ, expand, stands_for
from golden.gptq_grid import Grid, best_codes, best_grid, row_scales, to_codes, to_values
from golden.gptq_quantize import (
    DAMPING,
    column_order,
    curvature,
    largest_two,
    quantize_matrix,
    round_best,
    round_matrix,
)
from golden.parallel import in_parallel
from golden.perplexity import encode, perplexity
from models import gptq_errors
from tests.helpers import F32, F64, MODELS, calibration

ALL = sorted(FORMATS)
HELD_OUT = MODELS / "held_out.txt"


def correlated(n_out, n_in, seed=0):
    """Weights and the H of inputs whose channels are correlated and of very different sizes."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((n_in, n_in)) / np.sqrt(n_in) + np.diag(np.exp(rng.standard_normal(n_in)))
    x = rng.standard_normal((1000, n_in)) @ mix
    return rng.standard_normal((n_out, n_in)).astype(F32), x.T @ x


def cost(m, weight, hessian):
    """What quantizing costs the outputs, |X (Q - W)^T|^2."""
    d = stands_for(m).astype(F64) - weight
    return np.einsum("ij,jk,ik->", d, hessian, d)


def grid_of(m, group):
    return Grid(m.scales[:, group].astype(F32), m.zeros[:, group].astype(F32))


def by_definition(m, weight, hessian, order, sparse=False):
    """Optimal brain surgery, column by column: each removes itself from the inverse of H. The grids are m's."""
    h = hessian + DAMPING * np.diag(hessian).mean() * np.eye(len(hessian))
    inverse, w = np.linalg.inv(h), weight.astype(F64).copy()
    codes, size = np.zeros(w.shape), w.shape[1] // m.scales.shape[1]
    kept = np.ones(w.shape, bool)
    for i in order:
        if sparse and i % 4 == 0:  # fours are neighbours, whatever the order of the groups
            # of the four: each is judged when those before it are gone from the inverse
            behind, score = inverse.copy(), np.zeros((len(w), 4))
            for j in range(4):
                score[:, j] = w[:, i + j] ** 2 / behind[i + j, i + j]
                behind -= np.outer(behind[:, i + j], behind[i + j]) / behind[i + j, i + j]
            kept[:, i : i + 4] = np.argsort(np.argsort(-score, axis=1), axis=1) < 2
        codes[:, i] = to_codes(w[:, i], grid_of(m, i // size), m.form)
        value = np.where(kept[:, i], to_values(codes[:, i], grid_of(m, i // size), m.form), 0)
        w -= np.outer((w[:, i] - value) / inverse[i, i], inverse[i])
        inverse -= np.outer(inverse[:, i], inverse[i]) / inverse[i, i]
    return np.where(kept, codes, 0), kept


def test_four_by_four_by_hand():
    """The example of docs/gptq.md."""
    hessian = np.array([[4, 2, 0, 0], [2, 4, 2, 0], [0, 2, 4, 2], [0, 0, 2, 4]], F64)
    weight = np.array(
        [[1.4, 0.4, -1.5, 0.3], [0.6, 0.6, 0.6, 0.6], [2.4, -1.4, 0.4, 0.4], [-0.4, 1.4, -0.6, -1.4]], F32
    )
    inputs = curvature(hessian)
    assert np.allclose(inputs.factor.T @ inputs.factor, np.linalg.inv(hessian + 0.2 * np.eye(4)))
    m = quantize_matrix(weight, inputs, MatrixFormat(2))
    codes, _ = by_definition(m, weight, hessian, range(4))
    assert np.array_equal(m.codes, codes)
    assert not np.array_equal(m.codes, to_codes(weight, grid_of(m, 0), m.form))  # rounding alone gives others
    assert cost(m, weight, hessian) < cost(round_best(weight, MatrixFormat(2)), weight, hessian)


@pytest.mark.parametrize("ordered", [False, True])
@pytest.mark.parametrize("form", [MatrixFormat(4, 64), MatrixFormat(4), MatrixFormat(2, 32)], ids=str)
def test_gptq_is_optimal_brain_surgery_column_by_column(form, ordered):
    weight, hessian = correlated(16, 192)
    inputs = curvature(hessian, column_order(np.diag(hessian), form) if ordered else None)
    assert np.array_equal(inputs.order, np.arange(192)) != ordered
    m = quantize_matrix(weight, inputs, form)
    codes, _ = by_definition(m, weight, hessian, inputs.order)
    assert np.array_equal(m.codes, codes)


def test_the_order_of_columns():
    diagonal = np.array([1, 2, 3, 4, 9, 7, 8, 6])
    assert column_order(diagonal, MatrixFormat(4, 4)).tolist() == [4, 6, 5, 7, 3, 2, 1, 0]
    assert column_order(diagonal, MatrixFormat(4)).tolist() == [4, 6, 5, 7, 3, 2, 1, 0]
    assert column_order(diagonal, MatrixFormat(4, 4, sparse=True)).tolist() == [4, 5, 6, 7, 0, 1, 2, 3]


@pytest.mark.parametrize("ordered", [False, True])
def test_sparse_gptq_is_sparsegpt_column_by_column(ordered):
    weight, hessian = correlated(16, 128)
    form = MatrixFormat(4, 64, sparse=True)
    inputs = curvature(hessian, column_order(np.diag(hessian), form) if ordered else None)
    m = quantize_matrix(weight, inputs, form)
    codes, kept = by_definition(m, weight, hessian, inputs.order, sparse=True)
    assert np.array_equal(m.kept, kept)
    assert np.array_equal(m.codes, codes)
    assert (m.kept.reshape(16, -1, 4).sum(axis=2) == 2).all()
    assert not np.array_equal(m.kept, largest_two(np.abs(weight)))


@pytest.mark.parametrize("form", ALL, ids=str)
def test_gptq_costs_less_than_rounding(form):
    weight, hessian = correlated(16, 256)
    plain = cost(round_matrix(weight, form), weight, hessian)
    searched = cost(round_best(weight, form, np.diag(hessian)), weight, hessian)
    by_gptq = cost(quantize_matrix(weight, curvature(hessian), form), weight, hessian)
    assert by_gptq < 0.9 * searched < plain
    ordered = quantize_matrix(weight, curvature(hessian, column_order(np.diag(hessian), form)), form)
    assert cost(ordered, weight, hessian) < by_gptq


def test_all_pairs_of_two_level_codes_are_tried():
    form, rng = MatrixFormat(2, 64, two_level=True), np.random.default_rng(1)
    weight = (rng.standard_normal((3, 64)) * [[0.2], [0.5], [1.0]]).astype(F32)
    importance = rng.uniform(0.5, 2, 64)
    scale = row_scales(weight, form)
    assert np.allclose(scale * 15 * 15, np.ptp(weight, axis=1))
    errors = np.empty((16, 16, 3))
    for s in range(16):
        for z in range(16):
            grid = Grid((F32(s) * scale).astype(F32), np.full(3, z, F32))
            d = to_values(to_codes(weight, grid, form), grid, form) - weight
            errors[s, z] = (d.astype(F64) ** 2 * importance).sum(axis=1)
    s, z = best_codes(weight, importance, scale, form)
    for row in range(3):
        assert errors[int(s[row]), int(z[row]), row] == pytest.approx(errors[..., row].min(), rel=1e-5)


def test_grids_are_searched_for_what_matters():
    weight = np.array([[0.1, 0.2, -0.1, 5.0]], F32)
    form = MatrixFormat(4, 4)  # a group of four, for this test
    alike = best_grid(weight, np.ones(4), form, symmetric=False)
    first = best_grid(weight, np.array([1, 1, 1, 1e-6]), form, symmetric=False)
    assert first.scale < alike.scale  # the large weight is clipped where it does not matter
    assert best_grid(weight, np.ones(4), form, symmetric=True).zero == 8
    assert best_grid(np.abs(weight), np.ones(4), form, symmetric=False).zero == 0
    assert best_grid(np.abs(weight), np.ones(4), form, symmetric=False, first_zero=1).zero == 1


@pytest.mark.parametrize("form", ALL, ids=str)
def test_rows_of_zeros_and_unused_channels(form):
    weight, hessian = correlated(4, 128)
    weight[1] = 0
    hessian[5], hessian[:, 5] = 0, 0
    for m in (quantize_matrix(weight, curvature(hessian), form), round_matrix(weight, form)):
        values = stands_for(m)
        assert np.isfinite(values).all()
        assert not values[1].any()
    expanded = expand(quantize_matrix(weight, curvature(0 * hessian), form), 32)  # nothing was seen at all
    assert np.isfinite(expanded.scales).all()


def test_scales_beyond_fp16_are_refused():
    weight = np.full((2, 64), 1e7, F32)
    with pytest.raises(OverflowError, match="a scale of 666667, fp16 ends at 65504"):
        round_matrix(weight, MatrixFormat(4, 64))
    with np.errstate(over="raise"):
        round_matrix(weight, MatrixFormat(8))


def test_plain_rounding_keeps_what_is_on_the_grid():
    rng = np.random.default_rng(2)
    codes = rng.integers(0, 16, (8, 128))
    codes[:, ::64], codes[:, 1::64] = 0, 15
    weight = ((codes - 7) * 0.125).astype(F32)
    m = round_matrix(weight, MatrixFormat(4, 64))
    assert np.array_equal(m.codes, codes)
    assert np.array_equal(stands_for(m), weight)


@pytest.mark.parametrize("name", ["tiny-llama", "tiny-qwen3"])
def test_models_lose_less_than_by_rounding(tmp_path, name):
    ids, bos = encode(MODELS / name, HELD_OUT.read_text(encoding="utf-8")[:1500])

    def measured(options, **more):
        path = tmp_path / "m.bin"
        export_gptq(MODELS / name, path, options=options, bits={"attn": 4, "ffn": 2}, progress=False, **more)
        model = GPTQ(path)
        return perplexity(lambda tokens: forward(model.config, model, tokens), ids, bos, 256)[0]

    assert measured(Options(), **calibration(4, 128)) < 0.75 * measured(Options(rtn=True))


# ---- models/gptq_errors.py


def test_the_error_of_outputs_by_hand():
    rng = np.random.default_rng(3)
    x, w, rounded = rng.standard_normal((50, 8)), rng.standard_normal((3, 8)), rng.integers(-2, 3, (3, 8))
    expected = np.sum((x @ (w - rounded).T) ** 2) / np.sum((x @ w.T) ** 2)
    assert gptq_errors.relative_error(w, rounded, x.T @ x) == pytest.approx(expected)


def test_what_each_part_of_gptq_is_worth(monkeypatch, capsys):
    monkeypatch.setattr(gptq_errors, "FORMS", {"4 bits": MatrixFormat(4, 64)})
    arguments = [str(MODELS / "tiny-llama"), str(HELD_OUT), "--tokens", "1024"]
    monkeypatch.setattr("sys.argv", ["gptq_errors", *arguments])
    assert gptq_errors.main() == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert re.split(r"  +", head) == ["percent", *gptq_errors.WAYS]
    expected = [f"4 bits {name.split('.')[1]}" for names in CONSUMERS.values() for name in names]
    assert [re.split(r"  +", line)[0] for line in lines] == expected
    nearest, searched, in_order, by_size, refined = np.array([line.split()[3:] for line in lines], float).T
    assert (searched < nearest).all()
    assert (in_order < searched).all()
    assert refined.sum() < by_size.sum() < in_order.sum()
    assert (by_size > 0.1).all()  # of text that it has not seen; percent
    assert (nearest < 3).all()


def test_the_halves_are_not_one(monkeypatch):
    """What is measured on is not what was calibrated on, and damping comes through."""
    checkpoint = Checkpoint(MODELS / "tiny-llama")
    monkeypatch.setattr(gptq_errors, "FORMS", {"4 bits": MatrixFormat(4, 64)})
    monkeypatch.setattr(gptq_errors, "CONSUMERS", {"attn.mix": ("attn.o_proj",)})
    ids = np.array(encode(checkpoint.path, HELD_OUT.read_text(encoding="utf-8")[:6000])[0])
    one, other = [ids[:200]], [ids[200:400]]
    way = "GPTQ in order"
    seen, unseen, stiff = (
        gptq_errors.errors(checkpoint, halves, 1, damping)["4 bits", "attn.o_proj"][way]
        for halves, damping in (([one, one], 0.01), ([one, other], 0.01), ([one, one], 10.0))
    )
    assert seen < 0.8 * unseen
    assert seen < 0.8 * stiff


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["nowhere", str(HELD_OUT)], 1, "gptq_errors: nowhere: "),
        ([str(MODELS / "tiny-llama"), "nowhere"], 1, "gptq_errors: nowhere: no such file"),
        ([str(MODELS / "tiny-llama"), str(HELD_OUT), "--layer", "4"], 1, "--layer 4: "),
        ([str(MODELS / "tiny-llama"), str(HELD_OUT), "--damping", "0"], 2, "--damping above 0"),
    ],
)
def test_errors_that_cannot_be_measured(monkeypatch, capsys, arguments, code, complaint):
    monkeypatch.setattr("sys.argv", ["gptq_errors", *arguments])
    try:
        found = gptq_errors.main()
    except SystemExit as error:
        found = error.code
    err = capsys.readouterr().err
    assert found == code
    assert complaint in err


def in_a_process(array, i):
    return array[i], array.flags.writeable, os.environ.get("OMP_NUM_THREADS")


def test_processes_share_what_they_read(monkeypatch):
    """Each has one thread; this process keeps its own."""
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    array = np.arange(7.0)
    assert in_parallel([partial(in_a_process, array, i) for i in range(7)]) == [(i, False, "1") for i in range(7)]
    assert in_parallel([partial(in_a_process, array, 5)]) == [(5, True, "3")]  # here


def test_rows_that_several_processes_round():
    rng, form = np.random.default_rng(0), MatrixFormat(4, 64)
    weights = [rng.standard_normal((n, 64)).astype(F32) for n in (2 * ROWS + 1, 5, ROWS + 1)]
    jobs = [(str(i), weight, partial(round_matrix, form=form)) for i, weight in enumerate(weights)]
    for weight, found in zip(weights, by_rows(Path("m"), jobs), strict=True):
        assert np.array_equal(stands_for(found), stands_for(round_matrix(weight, form)))
    weights[2][-1] = 1e9
    with pytest.raises(ModelError, match=r"^m: 2 has a scale of "):
        by_rows(Path("m"), jobs)
    with pytest.raises(MemoryError, match=r"^the system has ended a process$"):
        in_parallel([partial(os._exit, 1), partial(os._exit, 1)])
