"""Writes the golden vectors: `make golden`, which makes the model files first, then `python -m golden make`.

golden/data/ops.safetensors                each operation alone (golden/op_vectors.py)
golden/data/<model>.q8.trace.safetensors   every step of the Q8 forward pass over a prompt
golden/data/tiny-llama.q8.decode.trace.safetensors   one late token of a text, behind keys and values of the others
golden/data/tiny-llama.q8.boundary.trace.safetensors   likewise three tokens around the beginning of a chunk
golden/data/<model>.q8.json                greedy generations, and perplexities of the held-out text
golden/data/<model>.w8a8[...]              the same for each variant of W8A8, from build/models/<model>.w8a8[...].bin
golden/data/<model>.w8a8-attn8             that of w8a8 with attention in int8, with shorter traces
golden/data/<model>.awq[...]               and of AWQ; with groups of 64 shorter traces
golden/data/<model>.gptq-...               and of GPTQ, with shorter traces
golden/data/tiny-qwen3-moe.moe-...         and of MoE, with shorter traces
golden/data/random-<...>.trace.safetensors traces alone, of small random models

The files are calibrated on models/calibration.txt: the Makefile has the options. Running it twice changes no byte.
"""

import json
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from formats.checkpoint import DENSE, SPARSE, Checkpoint, Config, ModelError
from formats.files import replacing
from golden.attention_int8 import attention_int8
from golden.awq import AWQ
from golden.forward import F32, Fp32, Scheme, Step, forward
from golden.mx import E4M3, SCALE_BIAS, element_values
from golden.op_vectors import op_vectors
from golden.perplexity import Logits, encode, perplexity
from golden.q8 import Q8
from golden.schemes import Reference, goldens, random_goldens
from golden.trace import Recorder, at_positions, write_trace
from golden.w8a8 import W8A8

PROMPT = "Once"
NEW_TOKENS = 64
TRACE_TOKENS, SHORT_TRACE_TOKENS = 6, 2
TRACE_CANDIDATES = 400
RANDOM_IDS = 2000  # the text of a random model
# A decode step far into a text: beyond a page of the KV cache (256), two chunks of a prompt (128) and, in tiny-llama,
# the context from before RoPE's scaling (128). And the tokens on both sides of where chunks and pages begin.
LATE_TRACES = {
    "tiny-llama.q8": {"decode": (300,), "boundary": (255, 256, 257)},
    "tiny-llama.awq": {"decode": (300,)},
    "tiny-llama.gptq-ladder": {"boundary": (255, 256, 257)},
    "tiny-qwen3-moe.moe-a8w8": {"boundary": (127, 128, 129)},
}
LATE_CANDIDATES = 24
INT8_ATTENTION = "w8a8-attn8"  # the file of w8a8, with attention in int8
CLEAR_PROMPT_WORDS = (12,)
AWQ_CLEAR_PROMPT_WORDS = (12, 24, 32)  # logits in fp16 vary more, so more prompts are tried for a clearer one
CLEAR_PROMPT_CANDIDATES = 60
NOISY_RUNS = 8
NOISE = 1e-6  # of fp32 results: a few times what another order of additions makes
HALF_PROBS_NOISE = 3e-4  # of probabilities that may be rounded to fp16: 2^-11 at most, evenly spread


def lead(logits: np.ndarray) -> float:
    """The gap between the two largest of a token's logits, (vocab_size,), over the largest absolute one.

    Where it is well above the tolerance of the logits (docs/numerics.md), the winner is the same in every
    implementation.
    """
    second, first = np.sort(logits)[-2:]
    return float((first - second) / np.abs(logits).max())


def greedy(logits: Logits, prompt: list[int], n_new: int, give_up: float = -1.0) -> tuple[list[int], list[float]]:
    """The prompt's greedy continuation, n_new ids whatever they are, and the lead of each winner.

    Stops early at a lead of `give_up` or below.
    """
    ids, leads = list(prompt), []
    while len(leads) < n_new and (not leads or leads[-1] > give_up):
        last = logits(np.array(ids))[-1]
        leads.append(lead(last))
        ids.append(int(last.argmax()))
    return ids[len(prompt) :], leads


def generation(logits: Logits, tokenizer: Tokenizer, prompt: str) -> dict:
    """What a golden file says about one prompt."""
    ids = tokenizer.encode(prompt).ids
    new_ids, leads = greedy(logits, ids, NEW_TOKENS)
    return {"prompt": prompt, "prompt_ids": ids, "new_ids": new_ids, "leads": [round(value, 5) for value in leads]}


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
    """The first words of the held-out story whose continuation is clearest: whose smallest lead is the largest.

    Rounding may turn a code over, and behind it logits part by more than they do otherwise. So the continuation also
    has to be the same in a few runs with noise.
    """

    def logits(scheme: Scheme, tokens: np.ndarray) -> np.ndarray:
        return forward(config, scheme, tokens)

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
            if scales.dtype == np.uint8:
                smallest = min(smallest, mx_margin(x, scales))
                continue
            codes = x.reshape(*scales.shape, -1) / np.where(scales > 0, scales, 1)[..., None].astype(np.float64)
            codes = np.clip(codes, -127, 127)  # beyond a static scale's range nothing changes any more
            smallest = min(smallest, float(np.abs(np.abs(codes - np.floor(codes)) - 0.5).min()))
    return smallest


def mx_margin(x: np.ndarray, scales: np.ndarray) -> float:
    """`rounding_margin` of MXFP8: how near a value comes to where its code or its block's scale changes.

    In units of the block's largest value / 127, so that one of 3e-5 is as safe as with int8. x: (..., n) fp32;
    scales: (..., n / block).
    """
    values = element_values(E4M3)
    finite = np.unique(values[np.isfinite(values)]).astype(np.float64)
    edges = (finite[1:] + finite[:-1]) / 2
    blocks = x.reshape(*scales.shape, -1).astype(np.float64)
    amax = np.abs(blocks).max(axis=-1)
    used = amax > 0
    blocks, amax = blocks[used], amax[used]
    scaled = blocks / np.exp2(scales[used].astype(np.float64) - SCALE_BIAS)[:, None]
    above = np.clip(np.searchsorted(edges, scaled), 1, len(edges) - 1)
    near = np.minimum(np.abs(scaled - edges[above]), np.abs(scaled - edges[above - 1])).min(axis=1)
    top = np.abs(scaled).max(axis=1)  # 2^emax to 2^(emax + 1), where log2 is whole
    to_power = np.minimum(top - 2.0**E4M3.emax, 2.0 ** (E4M3.emax + 1) - top)
    return float((np.minimum(near, to_power) / top * 127).min(initial=np.inf))


def best_trace(
    config: Config, scheme: Scheme, ids: list[int], n_tokens: int = TRACE_TOKENS
) -> tuple[dict[str, np.ndarray], float]:
    """The trace of a short piece of the held-out text, and its margin: of many pieces the one with the largest."""
    best: dict[str, np.ndarray] = {}
    margin = -1.0
    for i in range(TRACE_CANDIDATES):
        start = i * (len(ids) - n_tokens) // TRACE_CANDIDATES
        recorder = Recorder()
        tokens = recorder("tokens", np.array(ids[start : start + n_tokens], np.int32))
        forward(config, scheme, tokens, recorder)
        if (found := rounding_margin(recorder.tensors)) > margin:
            best, margin = recorder.tensors, found
        if np.isinf(margin):  # there are no codes: one piece is as good as another
            break
    return best, margin


def late_trace(config: Config, scheme: Scheme, ids: list[int], positions: Sequence[int]) -> dict[str, np.ndarray]:
    """The trace of the last positions of a piece of the held-out text, with the keys and values before them.

    Some pieces are tried: it is the one whose codes at these positions are farthest from boundaries.
    """
    best: dict[str, np.ndarray] = {}
    margin, n_tokens = -1.0, positions[-1] + 1
    for i in range(LATE_CANDIDATES):
        start = i * (len(ids) - n_tokens) // LATE_CANDIDATES
        recorder = Recorder()
        tokens = recorder("tokens", np.array(ids[start : start + n_tokens], np.int32))
        forward(config, scheme, tokens, recorder)
        trace = at_positions(recorder.tensors, positions)
        if (found := rounding_margin(trace)) > margin:
            best, margin = trace, found
        if np.isinf(margin):  # there are no codes
            break
    return best


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
    checkpoint, text = Checkpoint(hf_dir, archs=(*DENSE, *SPARSE)), path.read_text(encoding="utf-8")
    reference = Fp32(checkpoint)
    ids, bos = encode(hf_dir, text)
    context = min(4096, checkpoint.config.max_seq_len)
    value, n = perplexity(lambda tokens: forward(checkpoint.config, reference, tokens), ids, bos, context)
    return HeldOut(hf_dir, text, ids, bos, context, n, value)


def make_traces(
    config: Config, scheme: Scheme, name: str, ids: list[int], out: Path, n_tokens: int
) -> tuple[dict[str, np.ndarray], float]:
    """Writes the trace of a few tokens, which is returned with its margin, and those of LATE_TRACES."""
    trace, margin = best_trace(config, scheme, ids, n_tokens)
    write_trace(out / f"{name}.trace.safetensors", trace)
    for which, positions in LATE_TRACES.get(name, {}).items():
        write_trace(out / f"{name}.{which}.trace.safetensors", late_trace(config, scheme, ids, positions))
    return trace, margin


def make_scheme_goldens(
    config: Config,
    scheme: Scheme,
    variant: str,
    held_out: HeldOut,
    out: Path,
    more: dict | None = None,
    trace_tokens: int = TRACE_TOKENS,
) -> None:
    """Traces, greedy ids and perplexities of one model in one scheme; `more` goes to the end of the json."""
    name = f"{held_out.hf_dir.name}.{variant}"

    def logits(tokens: np.ndarray) -> np.ndarray:
        return forward(config, scheme, tokens)

    tokenizer = Tokenizer.from_file(str(held_out.hf_dir / "tokenizer.json"))
    prompts = (PROMPT, clear_prompt(config, scheme, tokenizer, held_out.text))
    generations = [generation(logits, tokenizer, prompt) for prompt in prompts]
    trace, margin = make_traces(config, scheme, name, held_out.ids, out, trace_tokens)
    value, _ = perplexity(logits, held_out.ids, held_out.bos, held_out.context)
    goldens = {
        "generations": generations,
        "trace_ids": trace["tokens"].tolist(),
        **({"trace_margin": round(margin, 8)} if np.isfinite(margin) else {}),
        "held_out": {"tokens": held_out.n_scored, "fp32": round(held_out.fp32, 5), variant: round(value, 5)},
    } | (more or {})
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in goldens.items())
    with replacing(out / f"{name}.json") as f:
        f.write(("{\n" + lines + "\n}\n").encode())
    print(
        f"{name}: perplexity {held_out.fp32:.4f} in fp32, {value:.4f} quantized; "
        f"smallest leads {[min(g['leads']) for g in generations]}"
        + (f"; rounding margin of the trace {margin:.1e}" if np.isfinite(margin) else "")
    )


def schemes_of(
    hf_dir: Path, file: Path, variant: str, reference: Reference, tokens: int
) -> Iterator[tuple[str, Config, Scheme, int]]:
    """What golden vectors are made of a model file: their name, config, scheme, and the length of a trace."""
    if reference.read is None:
        checkpoint = Checkpoint(hf_dir)
        yield variant, checkpoint.config, Q8(checkpoint), tokens
        return
    scheme = reference.read(file)
    yield variant, scheme.config, scheme, tokens
    if variant == "w8a8":
        yield INT8_ATTENTION, scheme.config, W8A8(file, attention_int8), SHORT_TRACE_TOKENS


def make(
    models: Path, files: Path, out: Path, only: str | None = None, model: str | None = None, traces: bool = False
) -> None:
    """Writes all golden vectors into the folder `out`; with `only`, those of the operations and of one scheme.

    model: of this one alone. traces: no greedy generations and perplexities, which take most of the time.

    files: the folder of the exported model files. Raises ModelError, before anything is written, if one is missing.
    """
    chosen, random = list(goldens(only, model)), list(random_goldens(only, model))
    for name, variant, reference in chosen + random:
        path = files / f"{name}.{variant}.bin"
        if reference.read is not None and not path.is_file():
            raise ModelError(f"{path}: no such file; `make golden` makes it")
    out.mkdir(parents=True, exist_ok=True)
    op_vectors().save(out / "ops.safetensors")
    for name, of_model in groupby(chosen, key=lambda golden: golden[0]):
        hf_dir, text = models / name, models / "held_out.txt"
        held_out = None if traces else read_held_out(hf_dir, text)
        for _, variant, reference in of_model:
            file = files / f"{name}.{variant}.bin"
            tokens = SHORT_TRACE_TOKENS if variant in reference.short_traces else TRACE_TOKENS
            for part, config, scheme, n_tokens in schemes_of(hf_dir, file, variant, reference, tokens):
                if held_out is None:
                    ids, _ = encode(hf_dir, text.read_text(encoding="utf-8"))
                    make_traces(config, scheme, f"{name}.{part}", ids, out, n_tokens)
                else:
                    print(f"{name}.{part}: this takes a minute or more", flush=True)
                    more = {"file_crc32": zlib.crc32(file.read_bytes())} if reference.read is not None else {}
                    make_scheme_goldens(config, scheme, part, held_out, out, more, n_tokens)
    for name, variant, reference in random:
        assert reference.read is not None
        scheme = reference.read(files / f"{name}.{variant}.bin")
        ids = np.random.default_rng(0).integers(0, scheme.config.vocab_size, RANDOM_IDS).tolist()
        make_traces(scheme.config, scheme, f"{name}.{variant}", ids, out, SHORT_TRACE_TOKENS)
