"""models/quality.py: the figures by hand, the schemes in fp32 against the reference, the command line."""

import json
import sys

import numpy as np
import pytest

from formats.checkpoint import Checkpoint, ModelError
from formats.schemes import AWQ_FILE
from golden.awq import AWQ
from golden.forward import Fp32, attention, forward, ignore
from golden.perplexity import encode, perplexity
from golden.q8 import Q8
from golden.trace import relative_error
from golden.w8a8 import W8A8
from models import compare_schemes, quality
from models.quality import Candidate, InFp32, Row, Totals, candidates, group_fits, halves, log_probabilities, measure
from tests.gguf_fixture import write_gguf
from tests.helpers import CALIBRATION, GOLDEN_FILES, MODELS, ROOT, TINY

LLAMA = MODELS / "tiny-llama"
TEXT = "One day Mia went to the mill.\n\nThere she met Tom.\n\nThey went home together."


# ---- figures


def test_figures_by_hand():
    """Two scored tokens: q is 1/2, 1/4, 1/4 where p is 1/4, 1/4, 1/2; then both are 1/2, 1/4, 1/4."""
    p = np.log(np.array([[0.25, 0.25, 0.5], [0.5, 0.25, 0.25], [0, 0, 0]], np.float32) + 1e-30)
    q = np.log(np.array([[0.5, 0.25, 0.25], [0.5, 0.25, 0.25], [0, 0, 0]], np.float32) + 1e-30) + 3  # any constant
    totals = Totals()
    totals.add(np.array([0, 0, 1]), log_probabilities(p), q)
    found = totals.figures()
    assert found.perplexity == pytest.approx(np.exp((np.log(2) + np.log(4)) / 2), rel=1e-6)
    assert found.kl_divergence == pytest.approx((0.25 * np.log(0.5) + 0.5 * np.log(2)) / 2, rel=1e-5)
    assert found.same_top_token == 0.5


def test_parts_make_no_difference(monkeypatch):
    rng = np.random.default_rng(0)
    ids, p, q = rng.integers(0, 50, 40), *rng.standard_normal((2, 40, 50), np.float32)
    whole, parts = Totals(), Totals()
    whole.add(ids, log_probabilities(p), q)
    monkeypatch.setattr(quality, "ROWS", 7)
    parts.add(ids[:20], log_probabilities(p[:20]), q[:20])
    parts.add(ids[19:], log_probabilities(p[19:]), q[19:])
    assert vars(parts.figures()) == pytest.approx(vars(whole.figures()), rel=1e-12)
    assert 0 < whole.figures().kl_divergence < 2


def test_fp32_has_the_perplexity_of_golden_and_no_divergence(tmp_path):
    checkpoint = Checkpoint(LLAMA)
    text = CALIBRATION.read_text()[:3000]
    samples = quality.pieces(LLAMA, checkpoint.config, text, 64, 300)
    assert [len(ids) for ids in samples] == [64, 64, 64, 64, 49]  # a window scores one token less than it has
    reference = Candidate("fp32", InFp32(Fp32(checkpoint)), checkpoint.config, 32, 4.2, 1)
    again = Candidate("fp32, exactly", Fp32(checkpoint), checkpoint.config, 32, 4.2, 2)
    first, second = measure(reference, [again], samples, tmp_path, progress=False)
    ids, bos = encode(LLAMA, text)
    scored = ids[: 4 * 63 + 48]
    expected, n = perplexity(lambda window: forward(checkpoint.config, Fp32(checkpoint), window), scored, bos, 64)
    assert n == 300
    assert first.perplexity == pytest.approx(expected, rel=1e-5)
    assert second.perplexity == pytest.approx(expected, rel=1e-6)
    assert abs(first.kl_divergence) < 1e-7
    assert abs(second.kl_divergence) < 1e-6
    assert first.same_top_token == 1


@pytest.mark.parametrize("name", TINY)
def test_products_in_fp32_are_the_schemes(name):
    """Until the first code that rounds the other way: layer 0's first product, and the logits within the contract."""
    checkpoint, tokens = Checkpoint(MODELS / name), np.arange(100, 108)
    schemes = [Q8(checkpoint, 32)]
    for variant, reader in (("w8a8-static", W8A8), ("w8a8-block32", W8A8), ("awq-g64", AWQ)):
        schemes.append(reader(GOLDEN_FILES / f"{name}.{variant}.bin"))
    for scheme in schemes:
        seen = [], []
        for steps, each in zip(seen, (scheme, InFp32(scheme)), strict=True):
            logits = forward(checkpoint.config, each, tokens, lambda step, v, s=steps: s.append((step, v)) or v)
            steps.append(logits)
        first, second = (dict(s[:-1]) for s in seen)
        assert relative_error(first["layers.0.attn.v_proj"], second["layers.0.attn.v_proj"]) < 1e-5
        assert relative_error(seen[0][-1], seen[1][-1]) < 0.02
        assert [step for step in first if not step.endswith(".acc")] == list(second)  # fp32 has no accumulators


# ---- the text, and which variants there are


def test_halves():
    assert halves(TEXT) == (TEXT[:51], "They went home together.")
    assert halves("ab") == ("a", "b")
    assert halves("no paragraph in this one") == ("no paragraph", " in this one")
    assert halves("a\n\nb") == ("a\n", "\nb")  # never an empty half


def test_pieces_end_with_the_text_and_are_checked():
    config = Checkpoint(LLAMA).config
    ids, bos = encode(LLAMA, TEXT)
    (piece,) = quality.pieces(LLAMA, config, TEXT, 512, 10**6)
    assert piece.tolist() == [bos, *ids]
    for window, n_tokens, complaint in (
        (1, 10, "--window is 1, expected 2 to the model's 512"),
        (513, 10, "--window is 513, expected 2 to the model's 512"),
        (64, 0, "--tokens is 0, expected 1 or more"),
    ):
        with pytest.raises(ModelError) as error:
            quality.pieces(LLAMA, config, TEXT, window, n_tokens)
        assert str(error.value) == complaint
    with pytest.raises(ModelError, match="no token to score"):
        quality.pieces(MODELS / "tiny-qwen3", config, "a", 64, 10)


def test_groups_that_do_not_divide_are_left_out():
    config = Checkpoint(LLAMA).config  # 128, 384
    assert group_fits(config, ("q8", "--group-size", "128"))
    assert not group_fits(config, ("q8", "--group-size", "256"))
    assert not group_fits(config, ("w8a8", "--block", "96"))
    assert group_fits(config, ("w8a8", "--no-smooth"))
    assert group_fits(config, ("awq", "--rtn", "--group-size", "128"))
    narrow = Checkpoint(MODELS.parent / "tests" / "hf" / "llama-gqa-tied").config  # 64
    assert not group_fits(narrow, ("awq", "--rtn", "--group-size", "128"))
    assert group_fits(narrow, ("awq", "--rtn", "--group-size", "64"))


def test_sizes_of_files(tmp_path):
    (tmp_path / "text").write_text(TEXT)
    variants = {"Q8": ("q8", "--group-size", "64"), "none": ("q8", "--group-size", "256"), "AWQ": ("awq", "--rtn")}
    source = Checkpoint(MODELS / "tiny-qwen3")
    found = list(candidates(source, variants, tmp_path / "text", tmp_path, progress=False))
    assert [c.name for c in found] == ["Q8", "AWQ"]
    assert [c.megabytes for c in found] == [c.file.stat().st_size / 1e6 for c in found]
    n = quality.n_parameters(Checkpoint(MODELS / "tiny-qwen3").config)
    assert n == 2 * 2048 * 128 + 4 * (2 * 128 * 256 + 2 * 128 * 128 + 3 * 128 * 384 + 2 * 128 + 2 * 64) + 128
    norms = 4 * (2 * 128 + 2 * 64) + 128
    assert found[0].bits == pytest.approx(((n - norms) * (8 + 32 / 64) + norms * 32) / n)
    tables = 2 * 2048 * 128 + norms
    assert found[1].bits == pytest.approx(((n - tables) * (4 + 20 / 128) + tables * 16) / n)


def test_an_export_that_fails_says_why(tmp_path):
    with pytest.raises(ModelError) as error:
        list(candidates(Checkpoint(LLAMA), {"W8A8": ("w8a8", "--alpha", "2")}, tmp_path, tmp_path, progress=False))
    assert str(error.value) == "--alpha is 2, expected 0 to 1, or auto"


# ---- weights alone


def test_activations_stay_in_fp32_where_weights_are_compared():
    checkpoint, x = Checkpoint(LLAMA), np.linspace(-1, 1, 128, dtype=np.float32)[None]
    scheme = Q8(checkpoint, 64)
    rounded, whole = (InFp32(scheme, weights_only).activation(ignore, "attn.norm", x) for weights_only in (False, True))
    assert np.array_equal(whole, x)
    assert 0 < np.abs(rounded - x).max() < 0.01


def test_gguf_files_are_measured_by_what_they_stand_for(tmp_path):
    """F32 loses nothing, Q8_0 a little; sizes are those of the tensors."""
    for kind in ("F32", "Q8_0"):
        write_gguf(LLAMA, tmp_path / f"{kind}.gguf", kind)
    text, files = (MODELS / "held_out.txt").read_text()[:6000], [tmp_path / f"{kind}.gguf" for kind in ("F32", "Q8_0")]
    names = ("Q8, groups of 64",)
    found = quality.compare(LLAMA, text, tmp_path / "kept", 200, 100, progress=False, names=names, gguf=files,
                            weights_only=True)  # fmt: skip
    fp32, q8, same, peer = found.rows
    assert [row.name for row in found.rows] == ["fp32", "Q8, groups of 64", "GGUF F32", "GGUF Q8_0"]
    assert abs(same.kl_divergence) < 1e-7
    assert same.bits_per_weight == pytest.approx(32, rel=1e-4)  # RoPE's divisors are a tensor, too
    assert same.megabytes == pytest.approx(fp32.megabytes, rel=1e-4)
    assert 0 < peer.kl_divergence < 0.01
    assert 0 < peer.kl_standard_error < peer.kl_divergence
    n = quality.n_parameters(Checkpoint(LLAMA).config)
    norms = 128 * (2 * Checkpoint(LLAMA).config.n_layers + 1)
    assert peer.megabytes == pytest.approx(((n - norms) * 34 / 32 + 4 * norms) / 1e6, rel=1e-4)
    assert q8.megabytes == pytest.approx(((n - norms) * (1 + 4 / 64) + 4 * norms) / 1e6)
    both = quality.compare(LLAMA, text, tmp_path / "kept", 200, 100, progress=False, names=names)
    assert both.rows[1].kl_divergence > q8.kl_divergence  # activations lose, too, and what is kept is told apart


def test_a_gguf_of_another_model_is_refused(tmp_path):
    write_gguf(MODELS / "tiny-qwen3", tmp_path / "other.gguf")
    with pytest.raises(ModelError, match=r"other\.gguf: arch is qwen3, .*tiny-llama has llama"):
        quality.compare(LLAMA, TEXT, tmp_path / "kept", 5, 16, progress=False, gguf=[tmp_path / "other.gguf"])


def test_rows_and_samples_that_are_asked_for(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(quality, "candidates", lambda _model, variants, *_: seen.append(variants) or [])
    quality.compare(LLAMA, TEXT, tmp_path, 5, 16, progress=False, names=["GPTQ, [48] bits*"], calibration_samples=3)
    (variants,) = seen
    assert "GPTQ, 8 bits" in variants
    assert all(name.startswith("GPTQ, ") for name in variants)
    assert all(options[-2:] == ("--samples", "3") for options in variants.values())


# ---- what is kept


def test_attention_in_fp32_is_attention(monkeypatch):
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal((70, heads, 16), np.float32) for heads in (6, 2, 2))
    exact = attention(ignore, "", q, k, v)
    for queries in (1, 32, 256):
        monkeypatch.setattr(quality, "QUERIES", queries)
        assert relative_error(exact, quality.attention_in_fp32(ignore, "", q, k, v)) < 1e-6


def test_only_what_is_missing_is_measured(tmp_path, monkeypatch):
    """A new row costs its own export and forward pass; other tokens, another text or another file cost everything."""
    text, ran = (MODELS / "held_out.txt").read_text()[:6000], []

    def count(config, scheme, samples, advance, original=quality.classifier_inputs):
        ran.append("forward")
        return original(config, scheme, samples, advance)

    def count_export(model, out, options, original=quality.export):
        ran.append("export")
        original(model, out, options)

    monkeypatch.setattr(quality, "classifier_inputs", count)
    monkeypatch.setattr(quality, "export", count_export)
    variants = {"Q8": ("q8", "--group-size", "64"), "AWQ": ("awq", *quality.CALIB, "--samples", "2", "--seq-len", "64")}

    def compare(names, n_tokens=200, text=text):
        ran.clear()
        monkeypatch.setattr(quality, "VARIANTS", {name: variants[name] for name in names})
        return quality.compare(LLAMA, text, tmp_path, n_tokens, 100, progress=False).rows

    first = compare(["Q8"])
    assert ran == ["export", "forward", "forward"]
    assert compare(["Q8"]) == first
    assert ran == []
    second = compare(["Q8", "AWQ"])
    assert ran == ["export", "forward"]
    assert second[:2] == first
    assert second[2].kl_divergence > 0
    compare(["Q8", "AWQ"], n_tokens=201)
    assert ran == ["forward"] * 3
    calibration, measured = halves(text)
    compare(["Q8", "AWQ"], text=calibration + "#" + measured[1:])
    assert ran == ["forward"] * 3
    compare(["Q8", "AWQ"], text="A" + text)
    assert ran == ["export", "forward"]  # the calibration text is another, which Q8 does not see
    (file,) = tmp_path.glob("q8.*.bin")
    file.unlink()
    assert compare(["Q8"]) == first
    assert ran == ["export"]


def test_figures_that_cannot_be_read(tmp_path, monkeypatch):
    monkeypatch.setattr(quality, "VARIANTS", {"Q8": ("q8", "--group-size", "64")})
    (tmp_path / "figures.json").write_text("{")
    with pytest.raises(ModelError, match=r"figures\.json: .*; remove it to measure again"):
        quality.compare(LLAMA, TEXT, tmp_path, 5, 16, progress=False)


def test_speed_is_the_median_of_the_programs_own(tmp_path, monkeypatch):
    file = tmp_path / "m.bin"
    quality.export(LLAMA, file, ("q8", "--group-size", "64"))
    for name in ("runq", "runq_awq"):
        program = tmp_path / name
        program.write_text(
            '#!/bin/sh\necho x >> "$0.n"; n=$(wc -l < "$0.n")\n[ "$2 $3" = "--bench 8,4" ] || exit 2\n'
            'echo "prefill 8 tokens: ${n}00.50 tokens/s, 3 GMAC/s"; echo "decode 4 tokens: ${n}0.25 tokens/s"\n'
        )
        program.chmod(0o755)
    (tmp_path / "runq.cpp").touch()
    monkeypatch.setattr(quality, "ROOT", tmp_path)
    assert quality.bench(file, "8,4") == {"prefill": 200.5, "decode": 20.25}
    with pytest.raises(ModelError, match="runq: "):
        quality.bench(file, "8,5")
    (tmp_path / "runq").unlink()
    with pytest.raises(ModelError, match=r"No such file or directory \(make runq\)"):
        quality.bench(file, "8,4")
    monkeypatch.setattr(quality, "read_format", lambda _: AWQ_FILE)
    assert quality.bench(file, "8,4") == {}


# ---- the command line


def run(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["compare_schemes", *map(str, arguments)])
    try:
        code = compare_schemes.main()
    except SystemExit as stopped:
        code = stopped.code
    done = capsys.readouterr()
    return code, done.out, done.err


def test_command_line(tmp_path, monkeypatch, capsys):
    variants = {"Q8": ("q8", "--group-size", "64"), "static": ("w8a8", "--act", "static", *quality.CALIB)}
    monkeypatch.setattr(quality, "VARIANTS", variants)
    code, out, err = run(monkeypatch, capsys, LLAMA, "--text", MODELS / "held_out.txt", "--tokens", 300, "--window",
                         100, "--quiet", "--json", tmp_path / "q.json")  # fmt: skip
    assert (code, err) == (0, "")
    lines = out.splitlines()
    assert [line.split(" | ")[0] for line in lines[2:5]] == ["| fp32", "| Q8", "| static"]
    assert lines[-1] == "tiny-llama: 300 tokens in windows of 100"
    found = json.loads((tmp_path / "q.json").read_text())
    assert (found["model"], found["tokens"], found["window"]) == ("tiny-llama", 300, 100)
    fp32, q8, static = (Row(**row) for row in found["rows"])
    assert (fp32.bits_per_weight, fp32.same_top_token) == (32, 1)
    assert 1.2 < fp32.perplexity < 2
    assert 1e-5 < q8.kl_divergence < static.kl_divergence < 0.05
    assert 0.9 < static.same_top_token <= 1


def test_the_table_has_speeds_where_there_are_any():
    rows = [Row("fp32", 32, 538.06, 10, 0, 1), Row("Q8", 8.5, 143.36, 10.1, 0.0075, 0.97, 812.4, 99.6)]
    head, line, *rest = quality.table(rows).splitlines()
    assert head.endswith("| same top token | prefill, tokens/s | decode, tokens/s |")
    assert line.count("|") == head.count("|") == 10
    assert rest == [
        "| fp32 | 32.00 | 538.1 | 10.000 |  |  |  |  |  |",
        "| Q8 | 8.50 | 143.4 | 10.100 | +1.00 % | 0.00750 | 97.00 % | 812 | 100 |",
    ]


def test_the_table_goes_into_a_page():
    rows = [Row("fp32", 32, 538.06, 10, 0, 1)]
    page = "# Quality\n\n| a |\n|---|\n| b |\n\n| scheme | old |\n|---|---|\n| x | y |\n\nText.\n"
    found = quality.put_table(page, rows)
    assert found == page.replace("| scheme | old |\n|---|---|\n| x | y |", quality.table(rows))
    assert quality.put_table(found, rows) == found
    with pytest.raises(ValueError, match="no table"):
        quality.put_table("Text.\n", rows)


def test_the_page_has_the_measured_table():
    page = (ROOT / "docs" / "quality.md").read_text()
    for measured, heading in (("quality.json", "scheme"), ("quality-weights.json", "weights")):
        rows = quality.read_comparison(ROOT / "docs" / measured).rows
        assert quality.put_table(page, rows, heading) == page


def test_the_table():
    rows = [Row("fp32", 32, 538.06, 10, 0, 1), Row("Q8", 8.5, 143.36, 10.1, 0.0075, 0.97)]
    assert quality.table(rows).splitlines()[2:] == [
        "| fp32 | 32.00 | 538.1 | 10.000 |  |  |  |",
        "| Q8 | 8.50 | 143.4 | 10.100 | +1.00 % | 0.00750 | 97.00 % |",
    ]
    rows[1].kl_standard_error = 0.0002
    assert quality.table(rows, "weights").splitlines()[0].startswith("| weights | bits")
    assert "| 0.00750 ± 0.00020 |" in quality.table(rows).splitlines()[3]


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        ((LLAMA, "--keep", "x"), 2, "--keep and --bench go with --text"),
        ((LLAMA, "--text", CALIBRATION, "--bench", "8"), 2, "argument --bench: 8, expected P,N"),
        (("--text", "x"), 2, "--text goes with one model, and without outliers"),
        ((LLAMA, LLAMA, "--text", "x"), 2, "--text goes with one model, and without outliers"),
        ((LLAMA, "--plain", "--text", "x"), 2, "--text goes with one model, and without outliers"),
        ((LLAMA, "--weights-only"), 2, "--rows, --samples, --weights-only and --gguf go with --text"),
        ((LLAMA, "--gguf", "x"), 2, "--rows, --samples, --weights-only and --gguf go with --text"),
        ((LLAMA, "--text", "x", "--gguf", "x", "--bench", "8,8"), 2, "--bench measures programs"),
        (
            (LLAMA, "--text", CALIBRATION, "--rows", "--gguf", "absent.gguf"),
            1,
            "compare_schemes: absent.gguf: No such",
        ),
        ((LLAMA, "--samples", "4"), 2, "--rows, --samples, --weights-only and --gguf go with --text"),
        ((LLAMA, "--text", CALIBRATION, "--rows", "Q9*"), 1, "compare_schemes: --rows: no scheme is named Q9*\n"),
        ((LLAMA, "--text", "absent.txt"), 1, "compare_schemes: absent.txt: no such file\n"),
        ((LLAMA, "--text", CALIBRATION, "--tokens", "0"), 1, "compare_schemes: --tokens is 0, expected 1 or more\n"),
        ((LLAMA, "--text", CALIBRATION, "--window", "1"), 1, "compare_schemes: --window is 1, expected 2 to"),
        (("absent", "--text", CALIBRATION), 1, "compare_schemes: absent: no such directory\n"),
    ],
)
def test_what_cannot_be_measured(monkeypatch, capsys, arguments, code, complaint):
    found, out, err = run(monkeypatch, capsys, *arguments)
    assert (found, out) == (code, "")
    assert complaint in err
    assert err.count("\n") == 1 or code == 2
