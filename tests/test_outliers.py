"""Outlier channels that change no result, the comparison of schemes on them, and the text to calibrate on."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from formats.checkpoint import Checkpoint, ModelError
from golden.forward import F32, Fp32, forward, load_weight
from models import compare_schemes
from models.outliers import add_outliers, copy_with_outliers, factors
from tests.helpers import run_here

ROOT = Path(__file__).resolve().parent.parent
TINY = [ROOT / "models" / "tiny-llama", ROOT / "models" / "tiny-qwen3"]
NORMS = ("attn.norm", "ffn.norm")
OTHERS = ("attn.mix", "ffn.swiglu")


def run(*arguments):
    return run_here("models.outliers", *arguments)


def ids_of(hf_dir, text, n=None):
    return np.array(Tokenizer.from_file(str(hf_dir / "tokenizer.json")).encode(text, add_special_tokens=False).ids[:n])


def logits_and_steps(hf_dir, ids):
    """Logits and, by step name, the largest absolute value of each channel."""
    steps = {}

    def step(name, value):
        steps[name] = np.abs(value).max(axis=0)
        return value

    checkpoint = Checkpoint(hf_dir)
    return forward(checkpoint.config, Fp32(checkpoint), ids, step), steps


def share(channels):
    """The largest over the median."""
    return float(channels.max() / np.median(channels))


def outlying(source, out, part, layer):
    """Which channels of a norm's weight are no longer what they were, and by how much."""
    name = f"layers.{layer}.{part}"
    ratio = load_weight(Checkpoint(out), name, interleaved=False) / load_weight(Checkpoint(source), name, False)
    return {int(i): float(ratio[i]) for i in np.flatnonzero(ratio != 1)}


@pytest.fixture(scope="module", params=[(d, p) for d in TINY for p in ([], ["--all-places"])],
                ids=lambda p: "-".join([p[0].name, *p[1]]))  # fmt: skip
def made(request, tmp_path_factory):
    """(source, directory with outliers, whether in all places)"""
    source, options = request.param
    out = tmp_path_factory.mktemp("outliers") / "model"
    done = run(source, out, *options)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    return source, out, bool(options)


def test_the_model_computes_the_same_with_outliers_inside(made):
    source, out, all_places = made
    ids = ids_of(source, (ROOT / "models" / "held_out.txt").read_text(), 128)
    before, steps_before = logits_and_steps(source, ids)
    after, steps_after = logits_and_steps(out, ids)
    assert np.abs(after - before).max() <= 1e-4 * np.abs(before).max()
    for i in range(Checkpoint(source).config.n_layers):
        for part in NORMS + OTHERS:
            name = f"layers.{i}.{part}"
            assert share(steps_before[name]) < 20
            assert (share(steps_after[name]) > 30) == (part in NORMS or all_places), name
    for name in ("embed", "layers.0.attn.residual", "layers.3.ffn.residual", "norm"):
        assert np.allclose(steps_after[name], steps_before[name], rtol=1e-4, atol=1e-4)


def test_the_same_channels_in_every_layer(made):
    source, out, _ = made
    found = [outlying(source, out, part, i) for i in range(4) for part in NORMS]
    assert len(found[0]) == 4
    assert all(f.keys() == found[0].keys() for f in found)
    values = [v for f in found for v in f.values()]
    assert all(30 <= v <= 100 and v == round(v) for v in values)
    assert len(set(values)) > 10  # drawn for each norm


def test_files(made):
    source, out, _ = made
    assert {p.name for p in out.iterdir()} == {p.name for p in source.iterdir()}
    for file in source.iterdir():
        if file.name not in ("config.json", "model.safetensors"):
            assert (out / file.name).read_bytes() == file.read_bytes()
    before, after = (json.loads((d / "config.json").read_text()) for d in (source, out))
    assert before | {"torch_dtype": "float32"} == after
    assert not list(out.parent.glob(".*"))


def test_options_and_seed(tmp_path):
    source = TINY[0]
    for name, options in (("a", []), ("b", []), ("c", ["--seed", 1]), ("d", ["--all-places"])):
        assert (
            run(source, tmp_path / name, "--channels", 2, "--factor-low", 7, "--factor-high", 9, *options).stderr == ""
        )
    weights = {n: (tmp_path / n / "model.safetensors").read_bytes() for n in "abcd"}
    assert weights["a"] == weights["b"] != weights["c"]
    a, c, d = (outlying(source, tmp_path / n, "attn.norm", 0) for n in "acd")
    assert a == d != c
    assert len(a) == len(c) == 2
    assert all(7 <= v <= 9 for v in (a | c).values())


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        (["--channels", 0], "outliers: --channels is 0, expected 1 to 128"),
        (["--channels", 129], "outliers: --channels is 129, expected 1 to 128"),
        (["--channels", 65, "--all-places"], "outliers: --channels is 65, expected 1 to 64"),
        (["--factor-low", 0], "outliers: --factor-low 0 and --factor-high 100: expected 1 <= low <= high <= 65536"),
        (["--factor-high", 29], "outliers: --factor-low 30 and --factor-high 29: expected 1 <= low <= high <= 65536"),
        (["--seed", -1], "outliers: --seed is -1, expected 0 or more"),
    ],
)
def test_refuses_in_one_line(tmp_path, options, complaint):
    done = run(TINY[0], tmp_path / "out", *options)
    assert (done.returncode, done.stderr) == (1, complaint + "\n")
    assert not list(tmp_path.iterdir())


def test_leaves_what_is_there_alone(tmp_path):
    (tmp_path / "file").write_text("x")
    (tmp_path / "folder").mkdir()
    for name in ("file", "folder"):
        done = run(TINY[0], tmp_path / name)
        assert (done.returncode, done.stderr) == (1, f"outliers: {tmp_path / name}: exists already\n")
    assert (tmp_path / "file").read_text() == "x"
    assert not list((tmp_path / "folder").iterdir())
    done = run(TINY[0], tmp_path / "none" / "out")
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.endswith("cannot write: No such file or directory\n")
    done = run(tmp_path / "none", tmp_path / "out")
    assert (done.returncode, done.stderr) == (1, f"outliers: {tmp_path / 'none'}: no such directory\n")


def test_an_interrupted_write_leaves_nothing(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("models.outliers.save_file", fail)
    with pytest.raises(KeyboardInterrupt):
        copy_with_outliers(TINY[0], tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_factors():
    s = factors(np.random.default_rng(0), 1000, np.arange(10, 900), 30, 100)
    assert s.dtype == F32
    assert np.array_equal(np.flatnonzero(s == 1), [*range(10), *range(900, 1000)])
    drawn = s[10:900]
    assert drawn.min() >= 30 and drawn.max() <= 100
    assert np.median(drawn) == pytest.approx(np.sqrt(30 * 100), rel=0.1)  # log-uniform


def test_every_factor_comes_out_again():
    """Of any model: what a producer's channel was multiplied by, its consumers' columns are divided by."""
    c = replace(Checkpoint(TINY[0]).config, n_layers=2, dim=8, hidden_dim=12, n_heads=6, n_kv_heads=2, head_dim=4)
    shapes = {"input_layernorm": (8,), "post_attention_layernorm": (8,)}
    shapes |= {"self_attn.q_proj": (24, 8), "self_attn.k_proj": (8, 8), "self_attn.v_proj": (8, 8)}
    shapes |= {"self_attn.o_proj": (8, 24), "mlp.gate_proj": (12, 8), "mlp.up_proj": (12, 8), "mlp.down_proj": (8, 12)}
    names = {f"model.layers.{i}.{n}.weight": s for i in range(2) for n, s in shapes.items()}
    weights = {n: np.ones(s, F32) for n, s in names.items()}
    add_outliers(weights, c, 3, 30, 100, seed=5, all_places=True)
    for i in range(2):
        w = {n: weights[f"model.layers.{i}.{n}.weight"] for n in shapes}
        s = w["input_layernorm"]
        assert (s > 1).sum() == 3
        assert np.allclose(w["self_attn.q_proj"] * s, 1) and np.allclose(w["self_attn.k_proj"] * s, 1)
        v = w["self_attn.v_proj"] * s  # rows scaled, columns back to 1
        assert (v[:, 0] > 2).sum() == 3 and np.allclose(v, v[:, :1])
        # Query heads 0, 1, 2 read the values of head 0; 3, 4, 5 those of head 1.
        seen = np.concatenate([v[:4, 0]] * 3 + [v[4:, 0]] * 3)
        assert np.allclose(w["self_attn.o_proj"] * seen, 1)
        s = w["post_attention_layernorm"]
        assert np.allclose(w["mlp.gate_proj"] * s, 1)
        up = w["mlp.up_proj"] * s
        assert (up[:, 0] > 2).sum() == 3 and np.allclose(w["mlp.down_proj"] * up[:, 0], 1)


def test_the_library_refuses_as_the_command_does(tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        copy_with_outliers(TINY[0], tmp_path)


# ----------------------------------------------------------------------------
# Comparing schemes


def test_schemes_compute_almost_the_same(tmp_path, monkeypatch):
    """Of a model as it is, where not even W8A8 needs smoothing."""
    unsmoothed = {k: v for k, v in compare_schemes.VARIANTS.items() if "--no-smooth" in v}
    monkeypatch.setattr(compare_schemes, "VARIANTS", unsmoothed)
    ids = ids_of(TINY[0], "Once upon a time there was a girl named Mia.")
    logits = {name: forward(config, scheme, ids) for name, config, scheme in compare_schemes.schemes(TINY[0], tmp_path)}
    assert list(logits) == ["fp32", "Q8, groups of 64", "W8A8, no smoothing"]
    for found in logits.values():
        assert np.abs(found - logits["fp32"]).max() < 0.05 * np.abs(logits["fp32"]).max()


def test_the_table_of_schemes():
    figures = {"perplexity": 2.0, "recall_first_token": 0.9, "recall_all_tokens": 0.8, "recall_reachable": 1.0}
    text = compare_schemes.table("m", {"fp32": figures, "worse": figures | {"perplexity": 2.5}})
    assert text.splitlines() == [
        "| m | perplexity | | recall, first token | all tokens | of the reachable |",
        "|---|---|---|---|---|---|",
        "| fp32 | 2.0000 |  | 90.0 % | 80.0 % | 100.0 % |",
        "| worse | 2.5000 | +25.00 % | 90.0 % | 80.0 % | 100.0 % |",
    ]


def test_comparing_what_is_no_model(tmp_path):
    done = run_here("models.compare_schemes", tmp_path)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith(f"compare_schemes: {tmp_path / 'config.json'}: ")
    assert done.stderr.count("\n") == 1


# ----------------------------------------------------------------------------
# calibration.txt


def test_calibration_text_comes_from_the_generator():
    command = next(
        line.split()
        for line in (ROOT / "models" / "README.md").read_text().splitlines()
        if line.endswith("> models/calibration.txt")
    )
    assert command[:3] == [".venv/bin/python", "-m", "models.stories"]
    done = run_here("models.stories", *command[3:-2], text=False)
    assert done.returncode == 0
    assert done.stdout == (ROOT / "models" / "calibration.txt").read_bytes()


def test_calibration_text_is_not_held_out():
    calibration, held_out = (
        (ROOT / "models" / f).read_text().strip().split("\n\n") for f in ("calibration.txt", "held_out.txt")
    )
    assert len(calibration) == len(set(calibration)) == 28
    assert not set(calibration) & set(held_out)
    text = "\n\n".join(held_out)
    assert not any(story in text for story in calibration)


@pytest.mark.parametrize("hf_dir", TINY, ids=lambda p: p.name)
def test_calibration_text_is_long_enough(hf_dir):
    """For the 16 samples of 256 tokens that `export w8a8` is run with here."""
    assert len(ids_of(hf_dir, (ROOT / "models" / "calibration.txt").read_text())) >= 16 * 256 + 512
