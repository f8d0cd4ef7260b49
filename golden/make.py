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
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import groupby, product
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from formats.checkpoint import DENSE, SPARSE, Checkpoint, Config, ModelError
from formats.files import replacing
from golden.attention_int8 import attention_int8
from golden.awq import AWQ
from golden.forward import F32, Fp32, Past, Scheme, Step, forward
from golden.op_vectors import op_vectors
from golden.perplexity import encode, perplexity
from golden.q8 import Q8
from golden.schemes import Reference, goldens, random_goldens
from golden.trace import Recorder, at_positions, write_trace
from golden.w8a8 import W8A8

PROMPT = "Once"
NEW_TOKENS = 64
TRACE_TOKENS, SHORT_TRACE_TOKENS = 6, 2
RANDOM_IDS = 2000  # the text of a random model
# A decode step far into a text: beyond a page of the KV cache (256), two chunks of a prompt (128) and, in tiny-llama,
# the context from before RoPE's scaling (128). And the tokens on both sides of where chunks and pages begin.
LATE_TRACES = {
    "tiny-llama.q8": {"decode": (300,), "boundary": (255, 256, 257)},
    "tiny-llama.awq": {"decode": (300,)},
    "tiny-llama.gptq-ladder": {"boundary": (255, 256, 257)},
    "tiny-qwen3-moe.moe-a8w8": {"boundary": (127, 128, 129)},
}
INT8_ATTENTION = "w8a8-attn8"  # the file of w8a8, with attention in int8
PROMPT_WORDS = 12
CLEAR_PROMPT_WORDS = (12, 24, 32)
CLEAR_PROMPT_CANDIDATES = 60
NOISY_RUNS = 8
NOISE = 1e-6  # of fp32 results: a few times what another order of additions makes
HALF_PROBS_NOISE = 3e-4  # of probabilities that may be rounded to fp16: 2^-11 at most, evenly spread


def lead(logits: np.ndarray) -> float:
    """The gap between the two largest of a token's logits, (vocab_size,), over the largest absolute one.

    Where it is well above the tolerance of AWQ's logits (docs/numerics.md), the winner is the same in every
    implementation.
    """
    second, first = np.sort(logits)[-2:]
    return float((first - second) / np.abs(logits).max())


def greedy(
    config: Config, scheme: Scheme, prompt: list[int], n_new: int, give_up: float = -1.0
) -> tuple[list[int], list[float]]:
    """The prompt's greedy continuation, n_new ids whatever they are, and the lead of each winner.

    Stops early at a lead of `give_up` or below.
    """
    past, tokens = Past(), list(prompt)
    ids: list[int] = []
    leads: list[float] = []
    while len(leads) < n_new and (not leads or leads[-1] > give_up):
        last = forward(config, scheme, np.array(tokens), past=past)[-1]
        leads.append(lead(last))
        tokens = [int(last.argmax())]
        ids += tokens
    return ids, leads


def generation(config: Config, scheme: Scheme, tokenizer: Tokenizer, prompt: str) -> dict:
    """What a golden file says about one prompt."""
    ids = tokenizer.encode(prompt).ids
    new_ids, leads = greedy(config, scheme, ids, NEW_TOKENS)
    return {"prompt": prompt, "prompt_ids": ids, "new_ids": new_ids, "leads": [round(value, 5) for value in leads]}


class Noisy:
    """AWQ, each of whose fp32 results is off by a little, before anything is rounded."""

    def __init__(self, scheme: Scheme, seed: int):
        self._scheme, self._rng = scheme, np.random.default_rng(seed)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._scheme, name)

    def steps(self, step: Step) -> Step:
        inner = self._scheme.steps(step)

        def noisy(name: str, value: np.ndarray) -> np.ndarray:
            if value.dtype == F32 and not name.endswith(".s"):
                size = HALF_PROBS_NOISE if name.endswith("probs") else NOISE
                value = value * (1 + size * self._rng.standard_normal(value.shape)).astype(F32)
            return inner(name, value)

        return noisy


def clear_prompt(config: Config, scheme: Scheme, tokenizer: Tokenizer, held_out: str) -> str:
    """The first words of the held-out story whose continuation is clearest: whose smallest lead is the largest.

    For AWQ, whose sums may be taken in any order. The continuation also has to be the same in a few runs with noise.
    """
    best, best_lead = "", 0.0
    for length, story in product(CLEAR_PROMPT_WORDS, held_out.split("\n\n")[:CLEAR_PROMPT_CANDIDATES]):
        prompt = " ".join(story.split()[:length])
        ids = tokenizer.encode(prompt).ids
        new_ids, leads = greedy(config, scheme, ids, NEW_TOKENS, give_up=best_lead)
        if len(leads) < NEW_TOKENS or min(leads) <= best_lead:
            continue
        noisy = (greedy(config, Noisy(scheme, seed), ids, NEW_TOKENS) for seed in range(NOISY_RUNS))
        if all(found == new_ids for found, _ in noisy):
            best, best_lead = prompt, min(leads)
    return best


def traced(config: Config, scheme: Scheme, ids: list[int]) -> dict[str, np.ndarray]:
    """Every step over these tokens, which come first."""
    recorder = Recorder()
    forward(config, scheme, recorder("tokens", np.array(ids, np.int32)), recorder)
    return recorder.tensors


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
) -> dict[str, np.ndarray]:
    """Writes the trace of the first few tokens, which is returned, and those of LATE_TRACES."""
    trace = traced(config, scheme, ids[:n_tokens])
    write_trace(out / f"{name}.trace.safetensors", trace)
    for which, positions in LATE_TRACES.get(name, {}).items():
        late = at_positions(traced(config, scheme, ids[: positions[-1] + 1]), positions)
        write_trace(out / f"{name}.{which}.trace.safetensors", late)
    return trace


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
    beginning = " ".join(held_out.text.split()[:PROMPT_WORDS])
    second = clear_prompt(config, scheme, tokenizer, held_out.text) if isinstance(scheme, AWQ) else beginning
    generations = [generation(config, scheme, tokenizer, prompt) for prompt in (PROMPT, second)]
    trace = make_traces(config, scheme, name, held_out.ids, out, trace_tokens)
    value, _ = perplexity(logits, held_out.ids, held_out.bos, held_out.context)
    goldens = {
        "generations": generations,
        "trace_ids": trace["tokens"].tolist(),
        "held_out": {"tokens": held_out.n_scored, "fp32": round(held_out.fp32, 5), variant: round(value, 5)},
    } | (more or {})
    lines = ",\n".join(f" {json.dumps(key)}: {json.dumps(value)}" for key, value in goldens.items())
    with replacing(out / f"{name}.json") as f:
        f.write(("{\n" + lines + "\n}\n").encode())
    print(f"{name}: perplexity {held_out.fp32:.4f} in fp32, {value:.4f} quantized")


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
