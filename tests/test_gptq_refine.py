"""golden/gptq_refine.py, gptq_matching.py and gptq_budget.py: each step lowers the cost that it says it lowers."""

import subprocess
import sys
from dataclasses import replace

import numpy as np
import pytest

from export.gptq import Options, export_gptq
from export.gptq_layout import budget_forms
from formats.checkpoint import Checkpoint, ModelError
from formats.gptq import MatrixFormat
from golden.calibration import calibration_samples
from golden.forward import Fp32, embed, forward_layer, ignore, last_norm, rope_table
from golden.gptq import GPTQ, pack_matrix, stands_for, unpack_matrix
from golden.gptq_budget import choose, divergences, kind_of, kinds_of, measure_losses
from golden.gptq_matching import InSinglePrecision, blocks, classifier_hessian, quantize_matching
from golden.gptq_quantize import column_order, curvature, damped, quantize_matrix, round_matrix
from golden.gptq_refine import improve_codes, refine, refit_scales, units
from golden.rotation import Rotated
from tests.helpers import CALIBRATION, MODELS, ROOT

LLAMA = MODELS / "tiny-llama"
FORMS = (
    MatrixFormat(4, 64),
    MatrixFormat(4, 32),
    MatrixFormat(8),
    MatrixFormat(8, 64),
    MatrixFormat(2, 64, two_level=True),
    MatrixFormat(4, 64, sparse=True),
    MatrixFormat(4, 32, int8_scales=True),
    MatrixFormat(5, 64, int8_scales=True),
)


def problem(n_out=24, n_in=128, seed=0):
    """A weight and the H of correlated inputs."""
    rng = np.random.default_rng(seed)
    mix = rng.standard_normal((n_in, n_in)) / np.sqrt(n_in) * np.exp(rng.standard_normal(n_in)) + np.eye(n_in)
    x = rng.standard_normal((4 * n_in, n_in)) @ mix
    return (0.05 * rng.standard_normal((n_out, n_in))).astype(np.float32), x.T @ x


def costs(weight, matrix, hessian):
    """d H d^T of each row."""
    d = weight.astype(float) - stands_for(matrix)
    return np.einsum("ij,jk,ik->i", d, hessian, d)


# ---- scales and codes


@pytest.mark.parametrize("form", FORMS, ids=str)
def test_no_row_gets_worse_and_the_whole_gets_better(form):
    weight, h = problem()
    found = quantize_matrix(weight, curvature(h, column_order(np.diag(h), form)), form)
    h = damped(h)
    seen = [costs(weight, found, h)]
    for step in (refit_scales, improve_codes, refit_scales, improve_codes):
        found = step(weight.astype(float), found, h)
        seen.append(costs(weight, found, h))
        assert (seen[-1] <= seen[-2] * (1 + 1e-5)).all()
    assert seen[-1].sum() < 0.99 * seen[0].sum()
    again = unpack_matrix(pack_matrix(found), form)  # still what a file can hold
    assert np.array_equal(stands_for(again), stands_for(found))


def test_scales_by_hand():
    """One row, two groups, H diagonal: each scale is <b, w> / <b, b> of its group, weighted by H."""
    form = MatrixFormat(4, 32)
    weight = np.linspace(-1, 1, 64, dtype=np.float32)[None]
    found = round_matrix(weight, form)
    h = np.diag(np.linspace(1, 3, 64))
    b = units(found)[0][0]
    expected = [
        (b * np.diag(h) * weight[0])[g].sum() / (b * b * np.diag(h))[g].sum() for g in (slice(32), slice(32, 64))
    ]
    assert refit_scales(weight.astype(float), found, h).scales[0] == pytest.approx(expected, rel=1e-3)


def test_int8_scales_by_hand():
    """H diagonal: the scale of a group is <b, w> / <b, b> in units of the row's, rounded; never 0, at most 127."""
    form = MatrixFormat(6, 32, int8_scales=True)
    weight = np.tile(np.linspace(-1, 1, 32, dtype=np.float32), 3)[None]
    found = round_matrix(weight, form)
    found = found._replace(row_scales=np.array([1 / 160, 0], np.float32)[:1], scales=np.array([[3, -7, 50]], np.int8))
    b = found.codes[0].astype(float) - 32
    expected = [np.rint((b * weight[0])[at].sum() / (b * b)[at].sum() * 160) for at in np.split(np.arange(96), 3)]
    assert refit_scales(weight.astype(float), found, np.eye(96)).scales[0].tolist() == expected
    far = refit_scales(100 * weight.astype(float), found, np.eye(96)).scales[0]
    near = refit_scales(0.001 * weight.astype(float), found, np.eye(96)).scales[0]
    assert set(np.abs(far)) == {127} and near.tolist() == [3, -7, 50]


def test_codes_by_hand():
    """Two correlated inputs: when the first weight is rounded down by 0.4, the second is asked for 0.4 * 1 / 1 more."""
    form = MatrixFormat(8)
    weight = np.zeros((1, 64))
    weight[0, :2] = 1.4, 0.3
    found = round_matrix(weight.astype(np.float32), form)._replace(scales=np.ones((1, 1), np.float32))
    found = found._replace(codes=np.array([[1, 0] + [0] * 62], np.int8))
    h = np.eye(64)
    h[0, 1] = h[1, 0] = 0.9
    # column 0: 1 + (0.4 + 0.9 * 0.3) / 1 = 1.67 -> 2; column 1: 0.3 - 0.9 * 0.6 = -0.24 -> 0
    assert improve_codes(weight, found, h).codes[0, :2].tolist() == [2, 0]


def test_groups_of_zeros_keep_their_scales():
    weight, h = problem()
    weight[:, 64:] = 0
    weight[3] = 0
    for form in FORMS:
        found = refine(weight, quantize_matrix(weight, curvature(h), form), damped(h), 2)
        assert np.isfinite(stands_for(found)).all()
        assert (stands_for(found)[3] == 0).all()


def test_no_rounds_change_nothing():
    weight, h = problem()
    found = quantize_matrix(weight, curvature(h), FORMS[0])
    assert refine(weight, found, damped(h), 0) is found


# ---- outputs of the unquantized model


@pytest.fixture(scope="module")
def samples():
    checkpoint = Checkpoint(LLAMA)
    return calibration_samples(LLAMA, checkpoint.config, CALIBRATION.read_text(), 8, 96)


def stream_error(checkpoint, config, samples, share):
    """How far the sum after all layers is from the unquantized model's, on the last two samples."""
    form, replaced = MatrixFormat(2, 64, two_level=True), InSinglePrecision(checkpoint, interleaved=True)

    def quantize(_name, weight, hessian):
        return quantize_matrix(weight, curvature(hessian, column_order(np.diag(hessian), form)), form)

    for name, found in quantize_matching(checkpoint, config, samples[:-2], quantize, share=share):
        if name != "norm":
            replaced.replace(name, stands_for(found))
    exact = InSinglePrecision(checkpoint, interleaved=True)
    squares = 0.0
    for ids in samples[-2:]:
        x = y = exact.embedding(ids)
        for i in range(config.n_layers):
            for block, _ in blocks(config, f"layers.{i}."):
                x, y = block(exact, x, ignore), block(replaced, y, ignore)
        squares += np.square(x - y, dtype=float).sum() / np.square(x, dtype=float).sum()
    return squares


def test_matching_brings_the_stream_nearer(samples):
    checkpoint = Checkpoint(LLAMA)
    plain, matched = (stream_error(checkpoint, checkpoint.config, samples, share) for share in (0, 1))
    assert matched < 0.95 * plain


def final_inputs(checkpoint, samples, replaced):
    """The classifier's inputs in all samples, some matrices replaced."""
    config, weights = checkpoint.config, InSinglePrecision(checkpoint, interleaved=True)
    for name, weight in replaced.items():
        weights.replace(name, weight)
    found = []
    for ids in samples:
        x = embed(config, weights, ids)
        for i in range(config.n_layers):
            x = forward_layer(config, weights, i, x, rope_table(config, np.arange(len(x))), ignore)
        found.append(last_norm(config, weights, x))
    return np.concatenate(found)


def test_hessian_of_the_classifier(samples):
    checkpoint = Checkpoint(LLAMA)
    x = final_inputs(checkpoint, samples, {}).astype(float)
    assert classifier_hessian(checkpoint, checkpoint.config, samples) == pytest.approx(x.T @ x, rel=1e-4, abs=1e-3)


# ---- a budget


def test_divergence_by_hand():
    x, p, q = np.eye(1, dtype=np.float32), np.log([[0.25], [0.75]]), np.log([[0.5], [0.5]])
    assert divergences([x], q, x, p) == pytest.approx([0.25 * np.log(0.5) + 0.75 * np.log(1.5)])
    assert divergences([x, 0 * x], p, x, p) == pytest.approx([0, 0.25 * np.log(0.5) + 0.75 * np.log(1.5)])


def test_the_best_combination_within_the_budget():
    config = Checkpoint(LLAMA).config
    kinds = kinds_of(config)
    eight, four = MatrixFormat(8), MatrixFormat(4, 64)
    losses = {kind: {eight: 0.0, four: 1.0} for kind in kinds}
    losses["down_proj"][four] = 9.0
    assert set(choose(config, losses, 9).formats) == {eight}
    assert set(choose(config, losses, 4.36).formats) == {four}
    chosen = choose(config, losses, 6).of
    assert chosen("down_proj") == eight
    assert four in {chosen(kind) for kind in kinds}
    with pytest.raises(ModelError, match=r"--budget is 3, the smallest file has 4\.[0-9]+ bits per weight"):
        choose(config, losses, 3)


@pytest.mark.parametrize("untie", [False, True])
def test_losses_are_those_of_a_model_with_one_kind_replaced(samples, untie):
    checkpoint = Rotated(Checkpoint(LLAMA), 0, untie)
    config, samples = checkpoint.config, [*samples[:2], *samples[-1:]]
    forms = {kind: [MatrixFormat(8), MatrixFormat(2, 64, two_level=True)] for kind in kinds_of(config)}
    matrices, seen = {}, {}

    def quantize(weights, hessian, forms):
        found = [(name, round_matrix(weight, form)) for name, weight in weights.items() for form in forms[name]]
        for name, matrix in found:
            matrices.setdefault((kind_of(name), matrix.form), {})[name] = stands_for(matrix)
            seen[name] = hessian
        return found

    losses = measure_losses(checkpoint, config, samples, forms, quantize)
    exact, own = final_inputs(checkpoint, samples[-1:], {}), Fp32(checkpoint).vector("classifier")
    for kind in forms:
        fine, coarse = losses[kind].values()
        assert 0 <= fine < coarse
        for form, loss in losses[kind].items():
            replaced = matrices[kind, form]
            x = final_inputs(checkpoint, samples[-1:], replaced)
            classifier = replaced.get("embed" if config.tied else "classifier", own)
            assert loss == pytest.approx(divergences([x], classifier, exact, own)[0], rel=1e-2)
    of_classifier = classifier_hessian(checkpoint, config, samples[:-1])
    assert seen["classifier" if untie else "embed"] == pytest.approx(of_classifier)
    assert not untie or np.array_equal(seen["embed"], np.eye(config.dim))
    with pytest.raises(ModelError, match="--samples 2 and up"):
        measure_losses(checkpoint, config, samples[:1], forms, quantize)


def test_formats_to_choose_from():
    config = replace(Checkpoint(LLAMA).config, dim=192)
    assert [f.group for f in budget_forms(config, "q_proj", None) if f.bits == 4] == [32, 64]
    assert [f.group for f in budget_forms(config, "q_proj", 64) if f.bits == 4] == [64]


# ---- the exporter


def test_a_file_with_all_of_it(tmp_path):
    given = {"calibration": CALIBRATION, "n_samples": 12, "seq_len": 128, "progress": False}
    checkpoint = Checkpoint(LLAMA)
    _, layout = export_gptq(LLAMA, tmp_path / "m.bin", options=Options(refine=1, match=True), budget=6, **given)
    export_gptq(LLAMA, tmp_path / "plain.bin", bits={"embed": 4, "attn": 4, "ffn": 4}, **given)
    export_gptq(LLAMA, tmp_path / "r.bin", bits={"embed": 4, "attn": 4, "ffn": 4}, options=Options(refine=2), **given)
    found = GPTQ(tmp_path / "m.bin")
    assert found.layout == layout
    assert (tmp_path / "m.bin").stat().st_size < 6.1 / 8 * sum(np.prod(s) for s in shapes(checkpoint)) + 60000
    ids = calibration_samples(LLAMA, checkpoint.config, (MODELS / "held_out.txt").read_text(), 4, 128)
    exact = final_inputs(checkpoint, ids, {})
    own = Fp32(checkpoint).vector("classifier")
    losses = []
    for name in ("plain.bin", "r.bin"):
        scheme = GPTQ(tmp_path / name)
        dense = {n: scheme.dense(n) for n, _ in scheme._shapes.items()}
        x = final_inputs(checkpoint, ids, dense)
        losses.append(divergences([x], dense["embed"], exact, own)[0])
    assert losses[1] < losses[0]


def shapes(checkpoint):
    from formats.checkpoint import tensor_shapes

    return tensor_shapes(checkpoint.config).values()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (("--rtn", "--refine", "2"), "--refine and --rtn exclude each other"),
        (("--rtn", "--match"), "--match and --rtn exclude each other"),
        (("--rtn", "--budget", "5"), "--budget and --rtn exclude each other"),
        (("--calib", str(CALIBRATION), "--refine", "-1"), "--refine is -1, expected 0 to 100"),
        (("--calib", str(CALIBRATION), "--budget", "0"), "--budget is 0, expected a positive number of bits"),
        (("--calib", str(CALIBRATION), "--budget", "nan"), "--budget is nan, expected a positive number of bits"),
        (("--calib", str(CALIBRATION), "--budget", "5", "--bits", "4"), "--bits and --budget exclude each other"),
        (("--calib", str(CALIBRATION), "--budget", "5", "--sparse", "2:4"), "--sparse and --budget exclude each other"),
    ],
)
def test_what_does_not_go_together(tmp_path, options, complaint):
    command = [sys.executable, "-m", "export", "gptq", LLAMA, tmp_path / "m.bin", *options, "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, f"export: {complaint}\n")
    assert not list(tmp_path.iterdir())
