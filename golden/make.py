"""Writes the golden vectors: `golden make`.

golden/data/ops.safetensors                each operation alone, with inputs that probe its edges
golden/data/<model>.q8.trace.safetensors   every step of the Q8 forward pass over a prompt
golden/data/<model>.q8.json                greedy generations, and perplexities of the held-out text
golden/data/<model>.w8a8[...]              the same for each of W8A8_VARIANTS, calibrated on models/calibration.txt
golden/data/<model>.awq[...]               and of AWQ_VARIANTS

Running it twice changes no byte.
"""

import json
import tempfile
import zlib
from dataclasses import dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from export.awq import export_awq
from export.w8a8 import export_w8a8
from golden.awq import AWQ, F16, Packed, pack
from golden.awq import dequantize as dequantize_awq
from golden.awq import matmul as matmul_awq
from golden.checkpoint import Checkpoint, Config, RopeScaling
from golden.forward import (
    F32,
    Fp32,
    Scheme,
    Step,
    attention_mix,
    attention_scores,
    forward,
    rmsnorm,
    rope,
    rope_frequencies,
    rope_table,
    softmax,
    swiglu,
)
from golden.perplexity import Logits, encode, perplexity
from golden.q8 import Q8, accumulators, dequantize, matmul, quantize
from golden.trace import Recorder, write_trace
from golden.w8a8 import W8A8, quantize_static

MODELS = ("tiny-llama", "tiny-qwen3")
W8A8_VARIANTS = {  # name -> options of the export
    "w8a8": {},
    "w8a8-block32": {"block": 32},
    "w8a8-static": {"static": True},
}
AWQ_VARIANTS = {
    "awq": {},
    "awq-g64": {"group_size": 64},
}
SCHEMES = {"q8": ("q8",), "w8a8": tuple(W8A8_VARIANTS), "awq": tuple(AWQ_VARIANTS)}
CALIBRATION_SAMPLES, CALIBRATION_SEQ_LEN = 16, 256
PROMPT = "Once"
NEW_TOKENS = 64
TRACE_TOKENS = 6
TRACE_CANDIDATES = 400
CLEAR_PROMPT_WORDS = (12,)
AWQ_CLEAR_PROMPT_WORDS = (12, 24, 32)  # logits in fp16 vary more, so more prompts are tried for a clearer one
CLEAR_PROMPT_CANDIDATES = 60
NOISY_RUNS = 8
ROPE_POSITIONS = np.array([0, 1, 2, 127, 128, 511, 4095, 131071])
TINY_SCALING = RopeScaling(8.0, 1.0, 4.0, 128)  # tiny-llama's
NOISE = 1e-6  # of fp32 results: a few times what another order of additions makes
HALF_PROBS_NOISE = 3e-4  # of probabilities that may be rounded to fp16: 2^-11 at most, evenly spread


# ----------------------------------------------------------------------------
# Each operation alone


def edge_groups(rng: np.random.Generator, group_size: int) -> np.ndarray:
    """Rows that probe the quantizer, (rows, 4 * group_size) fp32: ties, zeros, tiny, huge and one-sided values."""
    n = 4 * group_size
    rows = [
        rng.standard_normal(n),
        rng.standard_normal(n) * 1e-3,
        np.zeros(n),
        np.full(n, -0.0),
        np.where(np.arange(n) % group_size == 3, 127.0, (np.arange(n) % 25) - 12.5),  # scale 1: exact ties, .5
        np.where(np.arange(n) % group_size == 5, -254.0, (np.arange(n) % 63) - 31.0),  # scale 2: exact ties, odd
        np.where(np.arange(n) // group_size == 1, 0.0, rng.standard_normal(n)),  # one group of zeros
        np.full(n, 1e-38),  # 127 / amax overflows: treated as zeros
        rng.standard_normal(n) * 1e-36,
        rng.standard_normal(n) * 1e37,
        np.full(n, -3.0),
        np.where(np.arange(n) % 2, 5.0, -5.0),
    ]
    return np.array(rows, F32)


def op_vectors() -> dict[str, np.ndarray]:
    """Inputs and outputs of every operation, under names `op.case.part`."""
    rng = np.random.default_rng(2)
    out: dict[str, np.ndarray] = {}

    for group_size in (16, 32, 64, 128):
        x = edge_groups(rng, group_size)
        quantized = quantize(x, group_size)
        p = f"quantize.{group_size}."
        out |= {p + "x": x, p + "codes": quantized.codes, p + "scales": quantized.scales}
        out[p + "dequantized"] = dequantize(quantized)

    # Tokens x rows x columns; rows and tokens that are no multiple of anything, one group, many groups.
    for n, m, k, group_size in ((1, 5, 64, 64), (3, 17, 128, 64), (2, 9, 384, 64), (5, 4, 96, 32), (2, 3, 48, 16)):
        xq = quantize(rng.standard_normal((n, k)).astype(F32), group_size)
        wq = quantize(rng.standard_normal((m, k)).astype(F32), group_size)
        p = f"matmul.{n}x{m}x{k}g{group_size}."
        out |= {p + "x.codes": xq.codes, p + "x.scales": xq.scales, p + "w.codes": wq.codes, p + "w.scales": wq.scales}
        out |= {p + "accumulators": accumulators(xq, wq), p + "out": matmul(xq, wq)}

    x, weight = rng.standard_normal((3, 128)).astype(F32), rng.standard_normal(128).astype(F32)
    x[2] *= 1e-4  # so small that eps matters
    out |= {"rmsnorm.x": x, "rmsnorm.weight": weight}
    out |= {f"rmsnorm.out{eps}": rmsnorm(x, weight, eps) for eps in (1e-5, 1e-6)}

    plain = rope_config(head_dim=64, rope_theta=500000.0, scaling=None)
    scaled = rope_config(64, 500000.0, RopeScaling(32.0, 1.0, 4.0, 8192))  # Llama 3.2 1B
    tiny = rope_config(32, 1000000.0, TINY_SCALING)
    for name, config in (("plain", plain), ("llama-3.2-1b", scaled), ("tiny", tiny)):
        cos, sin = rope_table(config, ROPE_POSITIONS)
        x = rng.standard_normal((len(ROPE_POSITIONS), 2, config.head_dim)).astype(F32)
        p = f"rope.{name}."
        out |= {p + "frequencies": rope_frequencies(config), p + "cos": cos, p + "sin": sin, p + "x": x}
        out[p + "out"] = rope(x, cos, sin, interleaved=True)
    out["rope.positions"] = ROPE_POSITIONS.astype(np.int32)

    scores = np.stack([rng.standard_normal(77) * 4, np.full(77, -80.0), np.linspace(-100, 100, 77)]).astype(F32)
    out |= {"softmax.x": scores, "softmax.out": softmax(scores)}

    q, k, v = (rng.standard_normal((9, heads, 32)).astype(F32) for heads in (6, 2, 2))
    future = np.triu(np.ones((9, 9), bool), k=1)[:, None, :]
    scores = np.where(future, F32(0), attention_scores(q, k))
    probs = softmax(np.where(future, F32(-np.inf), scores))
    out |= {"attention.q": q, "attention.k": k, "attention.v": v, "attention.scores": scores}
    out |= {"attention.probs": probs, "attention.out": attention_mix(probs, v)}

    gate = np.concatenate([rng.standard_normal(100) * 3, [0.0, -0.0, 88.0, -88.0, 200.0, -200.0]]).astype(F32)
    up = rng.standard_normal(len(gate)).astype(F32)
    out |= {"swiglu.gate": gate, "swiglu.up": up, "swiglu.out": swiglu(gate, up)}
    return out | w8a8_op_vectors(np.random.default_rng(3)) | awq_op_vectors(np.random.default_rng(4))


def w8a8_op_vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What W8A8 adds: groups as long as a row, and static scales."""
    out: dict[str, np.ndarray] = {}
    for n in (64, 384, 2048):
        x = edge_groups(rng, n)[:, :n].copy()
        x[6, : n // 2] = 0
        quantized = quantize(x, n)
        p = f"quantize.row{n}."
        out |= {p + "x": x, p + "codes": quantized.codes, p + "scales": quantized.scales}
        out[p + "dequantized"] = dequantize(quantized)

    for n, m, k in ((2, 5, 384), (3, 17, 2048)):
        xq = quantize(rng.standard_normal((n, k)).astype(F32), k)
        wq = quantize(rng.standard_normal((m, k)).astype(F32), k)
        p = f"matmul.{n}x{m}x{k}g{k}."
        out |= {p + "x.codes": xq.codes, p + "x.scales": xq.scales, p + "w.codes": wq.codes, p + "w.scales": wq.scales}
        out |= {p + "accumulators": accumulators(xq, wq), p + "out": matmul(xq, wq)}
    k = 2048  # the largest accumulators that there are: all codes 127, and the signs mixed
    signs = np.where(rng.random((2, k)) < 0.5, -1, 1)
    xq, wq = quantize(np.array([np.ones(k), signs[0]], F32), k), quantize(np.array([np.ones(k), *signs], F32), k)
    p = f"matmul.2x3x{k}g{k}."
    out |= {p + "x.codes": xq.codes, p + "x.scales": xq.scales, p + "w.codes": wq.codes, p + "w.scales": wq.scales}
    out |= {p + "accumulators": accumulators(xq, wq), p + "out": matmul(xq, wq)}

    halves = (np.arange(64) % 32) - 15.5  # ties at scale 1
    for case, scale in (("one", 1.0), ("tenth", 0.1), ("zero", 0.0), ("tiny", 1e-38), ("two", 2.0)):
        rows = [
            rng.standard_normal(64) * scale * 40,
            halves * scale,
            np.zeros(64),
            np.full(64, -0.0),
            rng.standard_normal(64) * scale * 1e4,  # nearly all far beyond 127 * scale
            np.where(np.arange(64) % 2, 3e38, -3e38),
            np.where(np.arange(64) % 2, 127.5, -127.5) * scale,
            np.arange(64) * 0.0625 * scale,
        ]
        x, s = np.array(rows).astype(F32), F32(scale)
        quantized = quantize_static(x, s)
        p = f"quantize_static.{case}."
        out |= {p + "x": x, p + "scale": np.array([s]), p + "codes": quantized.codes}
    return out


# M tokens, N outputs, K inputs, group size: one token and many, tiles of 16 just full and just not, narrow outputs,
# and a single group of inputs.
AWQ_MATMULS = (
    (1, 8, 128, 128),
    (1, 136, 256, 64),
    (2, 24, 256, 128),
    (15, 64, 128, 64),
    (16, 72, 128, 128),
    (17, 136, 256, 64),
    (64, 64, 64, 64),
    (100, 104, 256, 128),
)


def awq_op_vectors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """What AWQ adds: packed int4, fp16 inputs, rotation in halves, and where fp32 becomes fp16."""
    out: dict[str, np.ndarray] = {}
    codes = rng.integers(0, 16, (5, 72)).astype(np.int8)
    out |= {"awq_pack.codes": codes, "awq_pack.packed": pack(codes)}

    # Every code with every zero point and eight scales: column 16 j + z has zero point z and scale j.
    scales = np.array([1, 0.1, 2**-14, 2**-14 - 2**-24, 2**-24, 3e-6, 0.0, 4364], F16)
    codes = np.tile(np.arange(64)[:, None] % 16, (1, 128))
    matrix = Packed(pack(codes), pack(np.arange(128)[None] % 16), np.repeat(scales, 16)[None])
    out |= {f"awq_dequantize.{part}": value for part, value in matrix._asdict().items()}
    out["awq_dequantize.w16"] = dequantize_awq(matrix)

    for m, n, k, group_size in AWQ_MATMULS:
        x = rng.standard_normal((m, k)).astype(F16)
        matrix = Packed(
            pack(rng.integers(0, 16, (k, n))),
            pack(rng.integers(0, 16, (k // group_size, n))),
            (rng.uniform(0.5, 2, (k // group_size, n)) / 64).astype(F16),
        )
        p, w16 = f"awq_matmul.{m}x{n}x{k}g{group_size}.", dequantize_awq(matrix)
        out |= {p + "x": x, p + "w16": w16, p + "out": matmul_awq(x, w16)}
        out |= {p + part: value for part, value in matrix._asdict().items()}

    for name, config in (("plain", rope_config(128, 1e6, None)), ("tiny", rope_config(32, 500000.0, TINY_SCALING))):
        cos, sin = rope_table(config, ROPE_POSITIONS)
        x = rng.standard_normal((len(ROPE_POSITIONS), 2, config.head_dim)).astype(F32)
        p = f"rope_halves.{name}."
        out |= {p + "frequencies": rope_frequencies(config), p + "cos": cos, p + "sin": sin, p + "x": x}
        out[p + "out"] = rope(x, cos, sin, interleaved=False)
    out["rope_halves.positions"] = ROPE_POSITIONS.astype(np.int32)

    for n, n_heads, n_kv_heads, head_dim in ((9, 6, 2, 32), (37, 4, 1, 64)):
        q, k, v = (rng.standard_normal((n, heads, head_dim)).astype(F16) for heads in (n_heads, n_kv_heads, n_kv_heads))
        future = np.triu(np.ones((n, n), bool), k=1)[:, None, :]
        probs = softmax(np.where(future, F32(-np.inf), attention_scores(q, k)))
        p = f"attention_half.{n}x{n_heads}x{n_kv_heads}x{head_dim}."
        out |= {p + "q": q, p + "k": k, p + "v": v, p + "out": attention_mix(probs, v).astype(F16)}

    # Between two neighbours of fp16: below, on and above the middle, after even and odd; subnormal, tiny, too large.
    middles = [1 + 2**-11, 1 + 3 * 2**-11, 2048 + 1, 2050 + 1, 2**-14 - 2**-25, 1.5 * 2**-24, 2**-25, 65520.0]
    edges = [v for m in middles for v in (np.nextafter(F32(m), F32(0)), F32(m), np.nextafter(F32(m), F32(np.inf)))]
    edges += [0.0, 65504.0, 65519.0, 1e-10, 1e-40, 1e6, 3e38, *rng.standard_normal(20) * 10.0 ** np.arange(-10, 10)]
    x = np.array([*edges, *(-F32(v) for v in edges)], F32)
    with np.errstate(over="ignore"):
        out |= {"half.x": x, "half.out": x.astype(F16)}
    return out


def rope_config(head_dim: int, rope_theta: float, scaling: RopeScaling | None) -> Config:
    """A config of which only the fields that RoPE reads matter."""
    return Config(
        arch="llama", dim=1, hidden_dim=1, n_layers=1, n_heads=1, n_kv_heads=1, head_dim=head_dim, vocab_size=1,
        max_seq_len=1, tied=True, norm_eps=1e-5, rope_theta=rope_theta, rope_scaling=scaling,
    )  # fmt: skip


# ----------------------------------------------------------------------------
# Whole models


def greedy(logits: Logits, prompt: list[int], n_new: int, give_up: float = -1.0) -> tuple[list[int], list[float]]:
    """The prompt's greedy continuation, n_new ids whatever they are, and the lead of each winner.

    A lead is the gap between the two largest logits over the largest absolute one. Where it is well above the
    tolerance of the logits (docs/numerics.md), the winner is the same in every implementation. Stops early at a lead
    of `give_up` or below.
    """
    ids, leads = list(prompt), []
    while len(leads) < n_new and (not leads or leads[-1] > give_up):
        last = logits(np.array(ids))[-1]
        second, first = np.sort(last)[-2:]
        leads.append(float((first - second) / np.abs(last).max()))
        ids.append(int(last.argmax()))
    return ids[len(prompt) :], leads


def generation(logits: Logits, tokenizer: Tokenizer, prompt: str) -> dict:
    """What a golden file says about one prompt."""
    ids = tokenizer.encode(prompt).ids
    new_ids, leads = greedy(logits, ids, NEW_TOKENS)
    return {"prompt": prompt, "prompt_ids": ids, "new_ids": new_ids, "leads": [round(lead, 5) for lead in leads]}


class Noisy:
    """A scheme each of whose fp32 results is off by a little, before anything is rounded."""

    def __init__(self, scheme: Scheme, seed: int):
        self._scheme, self._rng = scheme, np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def steps(self, step: Step) -> Step:
        inner = self._scheme.steps(step)

        def noisy(name: str, value: np.ndarray) -> np.ndarray:
            if value.dtype == F32 and not name.endswith(".s"):
                size = HALF_PROBS_NOISE if name.endswith("probs") and isinstance(self._scheme, AWQ) else NOISE
                value = value * (1 + size * self._rng.standard_normal(value.shape)).astype(F32)
            return inner(name, value)

        return noisy


def clear_prompt(config: Config, scheme: Scheme, tokenizer: Tokenizer, held_out: str) -> str:
    """Of the first words of many held-out stories, those whose continuation has the largest smallest lead.

    Rounding may turn a code over, and behind it logits part by more than they do otherwise. So the continuation also
    has to be the same in a few runs with noise.
    """

    def logits(scheme: Scheme, tokens: np.ndarray) -> np.ndarray:
        return forward(config, scheme, tokens, interleaved=scheme.interleaved)

    best, best_lead = "", 0.0
    lengths = AWQ_CLEAR_PROMPT_WORDS if isinstance(scheme, AWQ) else CLEAR_PROMPT_WORDS
    for length, story in product(lengths, held_out.split("\n\n")[:CLEAR_PROMPT_CANDIDATES]):
        prompt = " ".join(story.split()[:length])
        ids = tokenizer.encode(prompt).ids
        new_ids, leads = greedy(partial(logits, scheme), ids, NEW_TOKENS, give_up=best_lead)
        if len(leads) < NEW_TOKENS or min(leads) <= best_lead:
            continue
        noisy = (greedy(partial(logits, Noisy(scheme, seed)), ids, NEW_TOKENS) for seed in range(NOISY_RUNS))
        if all(found == new_ids for found, _ in noisy):
            best, best_lead = prompt, min(leads)
    return best


def rounding_margin(tensors: dict[str, np.ndarray]) -> float:
    """How near any activation of a trace comes to where its code changes, in units of a code.

    A correct implementation's fp32 sums differ from the reference's by up to about 3e-5 of a code. In a trace whose
    margin is larger than that, every code comes out the same everywhere. Infinite if there are no codes.
    """
    smallest = np.inf
    for name in tensors:
        if name.endswith(".q"):
            x, scales = tensors[name[:-2]], tensors[name[:-2] + ".s"]
            codes = x.reshape(*scales.shape, -1) / np.where(scales > 0, scales, 1)[..., None].astype(np.float64)
            codes = np.clip(codes, -127, 127)  # beyond a static scale's range nothing changes any more
            smallest = min(smallest, float(np.abs(np.abs(codes - np.floor(codes)) - 0.5).min()))
    return smallest


def best_trace(config: Config, scheme: Scheme, ids: list[int]) -> tuple[dict[str, np.ndarray], float]:
    """The trace of a short piece of the held-out text, and its margin: of many pieces the one with the largest."""
    best: dict[str, np.ndarray] = {}
    margin = -1.0
    for i in range(TRACE_CANDIDATES):
        start = i * (len(ids) - TRACE_TOKENS) // TRACE_CANDIDATES
        recorder = Recorder()
        tokens = recorder("tokens", np.array(ids[start : start + TRACE_TOKENS], np.int32))
        forward(config, scheme, tokens, recorder, interleaved=scheme.interleaved)
        if (found := rounding_margin(recorder.tensors)) > margin:
            best, margin = recorder.tensors, found
        if np.isinf(margin):  # there are no codes: one piece is as good as another
            break
    return best, margin


@dataclass(frozen=True)
class HeldOut:
    """The held-out text, for one model: as text, as tokens, and its perplexity in fp32."""

    hf_dir: Path
    text: str
    ids: list[int]
    bos: int | None
    context: int
    n_scored: int
    fp32: float


def read_held_out(hf_dir: Path, path: Path) -> HeldOut:
    """The text of the file and what the unquantized model makes of it."""
    checkpoint, text = Checkpoint(hf_dir), path.read_text(encoding="utf-8")
    reference = Fp32(checkpoint)
    ids, bos = encode(hf_dir, text)
    context = min(4096, checkpoint.config.max_seq_len)
    value, n = perplexity(lambda tokens: forward(checkpoint.config, reference, tokens), ids, bos, context)
    return HeldOut(hf_dir, text, ids, bos, context, n, value)


def make_scheme_goldens(
    config: Config, scheme: Scheme, variant: str, held_out: HeldOut, out: Path, more: dict | None = None
) -> None:
    """Trace, greedy ids and perplexities of one model in one scheme; `more` goes to the end of the json."""
    name = f"{held_out.hf_dir.name}.{variant}"

    def logits(tokens: np.ndarray) -> np.ndarray:
        return forward(config, scheme, tokens, interleaved=scheme.interleaved)

    tokenizer = Tokenizer.from_file(str(held_out.hf_dir / "tokenizer.json"))
    prompts = (PROMPT, clear_prompt(config, scheme, tokenizer, held_out.text))
    generations = [generation(logits, tokenizer, prompt) for prompt in prompts]
    trace, margin = best_trace(config, scheme, held_out.ids)
    write_trace(out / f"{name}.trace.safetensors", trace)
    value, _ = perplexity(logits, held_out.ids, held_out.bos, held_out.context)
    goldens = {
        "generations": generations,
        "trace_ids": trace["tokens"].tolist(),
        **({"trace_margin": round(margin, 8)} if np.isfinite(margin) else {}),
        "held_out": {"tokens": held_out.n_scored, "fp32": round(held_out.fp32, 5), variant: round(value, 5)},
    } | (more or {})
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in goldens.items())
    (out / f"{name}.json").write_text("{\n" + lines + "\n}\n", encoding="utf-8")
    print(
        f"{name}: perplexity {held_out.fp32:.4f} in fp32, {value:.4f} quantized; "
        f"smallest leads {[min(g['leads']) for g in generations]}"
        + (f"; rounding margin of the trace {margin:.1e}" if np.isfinite(margin) else "")
    )


def export_variant(hf_dir: Path, calibration: Path, variant: str, out: Path) -> None:
    """The W8A8 or AWQ file behind the golden vectors of a variant."""
    export, options = (
        (export_w8a8, W8A8_VARIANTS[variant]) if variant in W8A8_VARIANTS else (export_awq, AWQ_VARIANTS[variant])
    )
    export(
        hf_dir, out, calibration, n_samples=CALIBRATION_SAMPLES, seq_len=CALIBRATION_SEQ_LEN, progress=False, **options
    )  # fmt: skip


def make(models: Path, out: Path, only: str | None = None) -> None:
    """Writes all golden vectors into the folder `out`; with `only`, those of the operations and of one scheme."""
    out.mkdir(parents=True, exist_ok=True)
    save_file({name: np.ascontiguousarray(v) for name, v in op_vectors().items()}, out / "ops.safetensors")
    for name in MODELS:
        hf_dir = models / name
        held_out = read_held_out(hf_dir, models / "held_out.txt")
        for variant in (v for scheme, variants in SCHEMES.items() if only in (None, scheme) for v in variants):
            if variant == "q8":
                checkpoint = Checkpoint(hf_dir)
                make_scheme_goldens(checkpoint.config, Q8(checkpoint), variant, held_out, out)
                continue
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / "model.bin"
                export_variant(hf_dir, models / "calibration.txt", variant, file)
                scheme, crc = (AWQ if variant in AWQ_VARIANTS else W8A8)(file), zlib.crc32(file.read_bytes())
                make_scheme_goldens(scheme.config, scheme, variant, held_out, out, {"file_crc32": crc})
