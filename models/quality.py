"""How far each scheme's predictions are from the unquantized model's, on a text that calibration has not seen.

A model's figures, over the tokens of a text that have a predecessor in their window (golden/perplexity.py):

    perplexity       exp(mean of -log q), q what the scheme gives the token that follows
    KL divergence    mean over the tokens of sum over the vocabulary of p * (log p - log q), in nats: p is what the
                     unquantized model gives each possible next token, q what the scheme does
    same top token   share of the tokens for which both have the same most probable successor

Perplexity can fall by luck where a model's own mistakes are blurred; KL divergence cannot.

The text's first half is for calibration, its second half for measuring. A scheme first runs over all windows, layer by
layer, as far as the input of the classifier, (tokens, dim). Logits are (tokens, vocab_size), far too many to keep: they
are computed last, a window at a time, the unquantized model's first and then each scheme's.

A folder that is kept holds the model files, those inputs, and the figures. What is there is not computed again, so a
new row costs its own time only, and a run that was interrupted goes on. Names and keys say what a thing was made from:
the model, the text, the exporter's options, and for figures the bytes of the model file. Not the exporter's code: after
a change of it, remove the files that it made.
"""

import json
import math
import re
import statistics
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Protocol

import numpy as np
from tqdm import tqdm

from formats.checkpoint import Config, ModelError, tensor_shapes
from formats.files import replacing
from formats.gguf_model import GGUFModel
from formats.model_file import read_format, read_header
from formats.source import Source, is_gguf, open_model
from formats.tensors import HEADER_SIZE
from golden import q8
from golden.forward import (
    F32,
    F64,
    Fp32,
    Scheme,
    Step,
    attention_fp64,
    embed,
    forward_layer,
    ignore,
    last_norm,
    rope_table,
)
from golden.perplexity import encode, windows
from golden.q8 import Quantized
from golden.schemes import read_file

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 1024  # tokens that are seen at a time, if the model's context has room for as many
ROWS = 128  # of the logits that are turned into probabilities at a time
QUERIES = 256  # whose scores are in memory at a time
BENCH_RUNS = 3  # of which the middle one counts

# In a GGUF file's metadata: bytes of the weights, where those of its tensors are not meant (models/padded.py).
BYTES = "runq.weight_bytes"

# What a GGUF file has to share with the model to be compared with it.
DIMENSIONS = ("arch", "dim", "hidden_dim", "n_layers", "n_heads", "n_kv_heads", "head_dim", "vocab_size", "tied")

# The rows of the table; a new scheme adds its own. Name -> the exporter's sub-command and options. TEXT stands for the
# text to calibrate with.
CALIB = ("--calib", "TEXT")
VARIANTS: dict[str, tuple[str, ...]] = {
    "Q8, groups of 32": ("q8", "--group-size", "32"),
    "Q8, groups of 64": ("q8", "--group-size", "64"),
    "Q8, groups of 128": ("q8", "--group-size", "128"),
    "W8A8, no smoothing": ("w8a8", "--no-smooth"),
    "W8A8, alpha 0.5": ("w8a8", *CALIB),
    "W8A8, alpha auto": ("w8a8", *CALIB, "--alpha", "auto"),
    "W8A8, static": ("w8a8", *CALIB, "--act", "static"),
    "W8A8, blocks of 32": ("w8a8", *CALIB, "--block", "32"),
    "AWQ, plain rounding, groups of 128": ("awq", "--rtn", "--group-size", "128"),
    "AWQ, groups of 128": ("awq", *CALIB, "--group-size", "128"),
    "AWQ, plain rounding, groups of 64": ("awq", "--rtn", "--group-size", "64"),
    "AWQ, groups of 64": ("awq", *CALIB, "--group-size", "64"),
}
GPTQ_VARIANTS = {
    "8 bits": ("--bits", "8"),
    "8 bits, groups of 32": ("--bits", "8", "--group", "32"),
    "4 bits, groups of 64": ("--bits", "4", "--group", "64"),
    "4 bits, embedding 8": ("--bits", "embed=8,attn=4,ffn=4", "--group", "64"),
    "4 bits in feed-forward, 8 elsewhere": ("--bits", "embed=8,attn=8,ffn=4", "--group", "64"),
    "4 bits and 2:4, embedding 8": ("--bits", "embed=8,attn=4,ffn=4", "--group", "64", "--sparse", "2:4"),
    "ladder of 8, 4 and 2 bits": (),
    "2 bits": ("--bits", "2"),
    "2 bits, embedding 8": ("--bits", "embed=8,attn=2,ffn=2"),
    "nl4, embedding 8": ("--bits", "embed=8,attn=nl4,ffn=nl4", "--group", "32"),
    "nl4 (64), embedding 8": ("--bits", "embed=8,attn=nl4,ffn=nl4", "--group", "64"),
    "5 bits, embedding 8": ("--bits", "embed=8,attn=5,ffn=5", "--group", "32"),
    "6 bits, embedding 8": ("--bits", "embed=8,attn=6,ffn=6", "--group", "32"),
}
ROTATED = (
    "Q8, groups of 64",
    "W8A8, no smoothing",
    "W8A8, alpha 0.5",
    "W8A8, static",
    "W8A8, blocks of 32",
    "GPTQ, 8 bits",
    "GPTQ, 4 bits, groups of 64",
    "GPTQ, 4 bits, embedding 8",
    "GPTQ, ladder of 8, 4 and 2 bits",
    "GPTQ, 2 bits",
    "GPTQ matched, 4 bits, embedding 8",
    "GPTQ matched and refined, nl4, embedding 8",
)
for what, options in GPTQ_VARIANTS.items():
    VARIANTS[f"Plain rounding, {what}"] = ("gptq", "--rtn", *options)
    VARIANTS[f"GPTQ, {what}"] = ("gptq", *CALIB, *options)
MATCHED = (
    "4 bits, groups of 64",
    "4 bits in feed-forward, 8 elsewhere",
    *(what for what in GPTQ_VARIANTS if what.endswith("bits, embedding 8") or what.startswith("nl4")),
)
for what in MATCHED:
    VARIANTS[f"GPTQ matched, {what}"] = ("gptq", *CALIB, *GPTQ_VARIANTS[what], "--match")
    VARIANTS[f"GPTQ matched and refined, {what}"] = ("gptq", *CALIB, *GPTQ_VARIANTS[what], "--match", "--refine", "1")
BUDGET = ("--budget", "5.5", "--match", "--refine", "1")
VARIANTS["GPTQ matched and refined, budget of 5.5 bits"] = ("gptq", *CALIB, *BUDGET)
for what in ROTATED:
    VARIANTS[f"{what}, rotated"] = (*VARIANTS[what], "--rotate")


# ----------------------------------------------------------------------------
# Schemes


class DenseScheme(Scheme, Protocol):
    """A scheme that can say what its weights stand for."""

    def dense(self, name: str) -> np.ndarray: ...


class InFp32:
    """A scheme whose products are fp32 products of what codes and scales stand for.

    The reference's own are in fp64 and one for each group. These differ by about 1e-6, far less than the figures
    here, and take a fraction of the time. Codes are the scheme's own. The matrices of one layer are kept, `layers.N` or
    `classifier`, until another is asked for.

    weights_only: activations are not quantized, so that what is lost is lost by the weights.
    """

    def __init__(self, scheme: DenseScheme, weights_only: bool = False):
        self._scheme, self._weights_only = scheme, weights_only
        self.interleaved, self.attend = scheme.interleaved, attention_fp64
        self._layer, self._matrices = "", {}

    def steps(self, step: Step) -> Step:
        return self._scheme.steps(step)

    def vector(self, name: str) -> np.ndarray:
        return self._scheme.vector(name)

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return self._scheme.embedding(tokens)

    def activation(self, step: Step, name: str, x: np.ndarray) -> np.ndarray:
        if self._weights_only:
            return x
        prepared = self._scheme.activation(step, name, x)
        return q8.dequantize(prepared) if isinstance(prepared, Quantized) else prepared

    def linear(self, x: np.ndarray, name: str, _step: Step) -> np.ndarray:
        layer = ".".join(name.split(".")[:2])
        if layer != self._layer:
            self._layer, self._matrices = layer, {}
        if name not in self._matrices:
            self._matrices[name] = self._scheme.dense(name)
        return x @ self._matrices[name].T


class Dequantized(Fp32):
    """The weights of a GGUF file. Matrices are dequantized when they are asked for, and not kept."""

    def dense(self, name: str) -> np.ndarray:
        return self.load(name)

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return self.load("embed")[tokens]


def attention_in_fp32(_step: Step, _layer: str, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """`golden.forward.attention` in fp32, without what lies in the future and without recording steps."""
    n, n_heads, head_dim = q.shape
    out = np.empty(q.shape, F32)
    for h in range(n_heads):
        keys, values = (np.ascontiguousarray(t[:, h // (n_heads // t.shape[1])]) for t in (k, v))
        queries = q[:, h] * F32(head_dim**-0.5)
        for start in range(0, n, QUERIES):
            end = min(start + QUERIES, n)
            scores = queries[start:end] @ keys[:end].T
            scores[:, start:][np.triu(np.ones((end - start, end - start), bool), k=1)] = -np.inf
            scores -= scores.max(axis=-1, keepdims=True)
            np.exp(scores, out=scores)
            out[start:end, h] = scores @ values[:end] / scores.sum(axis=-1, keepdims=True)
    return out


def classifier_inputs(
    config: Config, scheme: Scheme, samples: Sequence[np.ndarray], advance: Callable[[int], object]
) -> np.ndarray:
    """What the last norm gives, of all samples, (tokens, dim) fp32. advance: told of tokens that went through a layer.

    The weights of a layer serve all samples, one after another.
    """
    step = scheme.steps(ignore)
    states = [embed(config, scheme, ids, step) for ids in samples]
    for i in range(config.n_layers):
        for j, x in enumerate(states):
            rotation = rope_table(config, np.arange(len(x)))
            states[j] = forward_layer(config, scheme, i, x, rotation, step, attention_in_fp32)
            advance(len(x))
    return np.concatenate([last_norm(config, scheme, x, step) for x in states])


def logits_of(scheme: Scheme, normed: np.ndarray) -> np.ndarray:
    """The classifier's, (n, vocab_size) fp32, of some rows of `classifier_inputs`."""
    return scheme.linear(scheme.activation(ignore, "norm", normed), "classifier", ignore)


def n_parameters(config: Config) -> int:
    """Weights of the model; a classifier that is the embedding counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def group_fits(config: Config, options: Sequence[str]) -> bool:
    """Whether the groups of a variant divide the rows of the model."""
    size = 1
    for option in ("--group-size", "--group", "--block"):
        if option in options:
            size = int(options[options.index(option) + 1])
    return all(n % size == 0 for n in (config.dim, config.hidden_dim, config.q_dim))


# ----------------------------------------------------------------------------
# Model files


@dataclass
class Candidate:
    """A scheme in the table."""

    name: str
    scheme: Scheme
    config: Config
    bits: float  # of the file, for each parameter: scales and norms included, header and tokenizer not
    megabytes: float  # of the file; of its weights, scales and norms alone where only weights are compared
    crc32: int  # of the file's bytes; of the model's, unquantized
    file: Path | None = None  # None: the unquantized model


def crc32_of(*things: object) -> int:
    """CRC-32 of the bytes of files, and of what other things print."""
    crc = 0
    for thing in things:
        if isinstance(thing, Path):
            with thing.open("rb") as f:
                while block := f.read(1 << 24):
                    crc = zlib.crc32(block, crc)
        else:
            crc = zlib.crc32(repr(thing).encode(), crc)
    return crc


def crc32_of_model(model: Path) -> int:
    """CRC-32 of a GGUF file, or of the files of a directory that have to do with the model."""
    if is_gguf(model):
        return crc32_of(model)
    return crc32_of(*sorted(p for p in model.iterdir() if p.suffix in (".json", ".safetensors")))


def slug(name: str) -> str:
    """A row's name as the beginning of a file's: `AWQ, groups of 64` -> `awq-groups-of-64`."""
    return re.sub("[^a-z0-9.]+", "-", name.lower())


def export(model: Path, out: Path, options: Sequence[str]) -> None:
    """Runs the exporter with a sub-command and its options. Raises ModelError with what it said if it fails."""
    command = [sys.executable, "-m", "export", options[0], model.resolve(), out, *options[1:], "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(done.stderr.strip().removeprefix("export: "))


def candidates(
    model: Source,
    variants: dict[str, tuple[str, ...]],
    text: Path,
    folder: Path,
    progress: bool,
    weights_only: bool = False,
) -> Iterator[Candidate]:
    """Exports each variant whose groups fit to `folder`, unless it is there, and reads it back."""
    config, n, crc = model.config, n_parameters(model.config), crc32_of_model(model.path)
    chosen = {name: options for name, options in variants.items() if group_fits(config, options)}
    with tqdm(chosen.items(), desc="exporting", unit="scheme", disable=not progress) as bar:
        for name, options in bar:
            bar.set_postfix_str(name)
            key = crc32_of(crc, options, *([text] if "TEXT" in options else []))
            out = folder / f"{slug(name)}.{key:08x}.bin"
            if not out.exists():
                export(model.path, out, [str(text.resolve()) if option == "TEXT" else option for option in options])
            head = read_header(out, read_format(out))
            n_bytes = head.weights_end - HEADER_SIZE
            megabytes = (n_bytes if weights_only else out.stat().st_size) / 1e6
            scheme = InFp32(read_file(out), weights_only)
            yield Candidate(name, scheme, head.config, 8 * n_bytes / n, megabytes, crc32_of(out), out)


def gguf_candidates(model: Source, files: Sequence[Path]) -> Iterator[Candidate]:
    """Each GGUF file, named by its own name, as what its weights stand for; sizes are those of its tensors.

    Raises ModelError for a file that is none, or of a model with other dimensions.
    """
    for path in files:
        other = GGUFModel(path)
        for field in DIMENSIONS:
            value = getattr(model.config, field)
            if getattr(other.config, field) != value:
                raise ModelError(f"{path}: {field} is {getattr(other.config, field)}, {model.path} has {value}")
        n_bytes, crc = other.metadata.integer(BYTES, other.n_bytes), crc32_of(path)
        scheme = InFp32(Dequantized(other), weights_only=True)
        bits = 8 * n_bytes / n_parameters(model.config)
        yield Candidate(f"GGUF {path.stem}", scheme, other.config, bits, n_bytes / 1e6, crc)


# ----------------------------------------------------------------------------
# Figures


def halves(text: str) -> tuple[str, str]:
    """The text, cut at the first paragraph behind its middle, or else at the middle."""
    middle = len(text) // 2
    cut = text.find("\n\n", middle)
    cut = cut + 2 if 0 < cut < len(text) - 2 else middle
    return text[:cut], text[cut:]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """log of the probabilities, (n, vocab_size) fp64."""
    z = logits.astype(F64)
    z -= z.max(axis=-1, keepdims=True)
    z -= np.log(np.exp(z).sum(axis=-1, keepdims=True))
    return z


def in_parts(n: int) -> Iterator[slice]:
    """Slices of ROWS rows, up to n."""
    yield from (slice(start, min(start + ROWS, n)) for start in range(0, n, ROWS))


def log_probabilities(logits: np.ndarray) -> np.ndarray:
    """What a model predicts at all tokens but the last, (n - 1, vocab_size) fp32."""
    out = np.empty((len(logits) - 1, logits.shape[1]), F32)
    for part in in_parts(len(out)):
        out[part] = log_softmax(logits[part])
    return out


@dataclass
class Figures:
    """What is in the table of a scheme's predictions."""

    perplexity: float
    kl_divergence: float
    same_top_token: float
    kl_standard_error: float | None = None  # of the mean over tokens, as if these were independent


class Totals:
    """What is known of each scored token so far."""

    def __init__(self) -> None:
        self._tokens: list[np.ndarray] = []  # of each part: (3, n), -log q, KL divergence, whether the top is the same

    def add(self, ids: np.ndarray, log_p: np.ndarray, logits: np.ndarray) -> None:
        """One window, ids (n,). log_p: `log_probabilities` of the unquantized model; logits: the scheme's."""
        for part in in_parts(len(log_p)):
            p, q = log_p[part].astype(F64), log_softmax(logits[part])
            nll = -q[np.arange(len(q)), ids[1:][part]]
            kl = (np.exp(p) * (p - q)).sum(axis=-1)
            self._tokens.append(np.array([nll, kl, p.argmax(axis=-1) == q.argmax(axis=-1)]))

    def figures(self) -> Figures:
        """Means over all tokens."""
        tokens = np.concatenate(self._tokens, axis=1)
        nll, kl, same = tokens.mean(axis=1)
        error = tokens[1].std() / math.sqrt(tokens.shape[1])
        return Figures(float(np.exp(nll)), float(kl), float(same), float(error))


def pieces(model: Path, config: Config, text: str, window: int, n_tokens: int) -> list[np.ndarray]:
    """Windows of the text with n_tokens scored tokens in all, or as many as there are. Raises ModelError."""
    if not 2 <= window <= config.max_seq_len:
        raise ModelError(f"--window is {window}, expected 2 to the model's {config.max_seq_len}")
    if n_tokens < 1:
        raise ModelError(f"--tokens is {n_tokens}, expected 1 or more")
    ids, bos = encode(model, text)
    found, scored = [], 0
    for piece in windows(ids, bos, window):
        piece = piece[: n_tokens - scored + 1]
        if len(piece) > 1:
            found.append(piece)
            scored += len(piece) - 1
        if scored == n_tokens:
            break
    if not found:
        raise ModelError("the second half of the text has no token to score")
    return found


class Kept:
    """Figures in a folder, `figures.json`. Written anew with every figure that is added."""

    def __init__(self, folder: Path):
        self._path = folder / "figures.json"
        self._found = {}
        if self._path.exists():
            try:
                self._found = json.loads(self._path.read_text(encoding="utf-8"))
            except ValueError as error:
                raise ModelError(f"{self._path}: {error}; remove it to measure again") from None

    def get(self, what: str, key: int) -> dict | None:
        return self._found.get(f"{what} {key:08x}")

    def put(self, what: str, key: int, value: dict) -> None:
        self._found[f"{what} {key:08x}"] = value
        with replacing(self._path) as f:
            f.write((json.dumps(self._found, indent=1) + "\n").encode())


def measure(
    reference: Candidate,
    others: Sequence[Candidate],
    samples: Sequence[np.ndarray],
    folder: Path,
    progress: bool,
    weights_only: bool = False,
) -> list[Figures]:
    """The figures of each candidate, the unquantized model first. What the folder has is not measured again."""
    kept, text = Kept(folder), crc32_of([ids.tolist() for ids in samples])
    every = [reference, *others]
    how = ["weights only"] if weights_only else []
    keys = [crc32_of(candidate.crc32, reference.crc32, text, *how) for candidate in every]
    missing = [i for i, key in enumerate(keys) if kept.get("quality", key) is None]
    needed = sorted({0, *missing}) if missing else []
    n_tokens = sum(len(ids) for ids in samples)
    inputs: dict[int, np.ndarray] = {}
    with tqdm(total=n_tokens * len(needed), unit="token", unit_scale=True, desc="layers", disable=not progress) as bar:
        for i in needed:
            bar.set_postfix_str(every[i].name)
            path = folder / f"{slug(every[i].name)}.{keys[i]:08x}.npy"
            if path.exists():
                inputs[i] = np.load(path)
                bar.update(n_tokens)
                continue
            config = every[i].config
            inputs[i] = classifier_inputs(
                config, every[i].scheme, samples, lambda n, of=config.n_layers: bar.update(n / of)
            )
            with replacing(path) as f:
                np.save(f, inputs[i])
    totals = {i: Totals() for i in missing}
    start = 0
    for ids in tqdm(samples, unit="window", desc="logits", disable=not progress or not missing):
        rows = slice(start, start + len(ids))
        start = rows.stop
        log_p = log_probabilities(logits_of(reference.scheme, inputs[0][rows])) if missing else None
        for i in missing:
            totals[i].add(ids, log_p, logits_of(every[i].scheme, inputs[i][rows]))
    for i in missing:
        kept.put("quality", keys[i], vars(totals[i].figures()))
    return [Figures(**kept.get("quality", key)) for key in keys]


def bench(file: Path, sizes: str) -> dict[str, float]:
    """Tokens/s of prefill and decode, by `--bench` of the file's program: the median of some runs.

    Empty if that program is emulated here. Raises ModelError if it is not built.
    """
    program = ROOT / read_format(file).program
    if not program.with_suffix(".cpp").is_file():
        return {}
    found: dict[str, list[float]] = {"prefill": [], "decode": []}
    for _ in range(BENCH_RUNS):
        try:
            done = subprocess.run([program, file, "--bench", sizes], capture_output=True, text=True, check=False)
        except OSError as error:
            raise ModelError(f"{program}: {error.strerror} (make {program.name})") from None
        if done.returncode:
            raise ModelError(f"{program.name}: {done.stderr.strip()}")
        for phase, rates in found.items():
            rates.extend(map(float, re.findall(rf"^{phase} \d+ tokens: ([\d.]+) tokens/s", done.stdout, re.M)))
    return {phase: statistics.median(rates) for phase, rates in found.items() if rates}


# ----------------------------------------------------------------------------
# The table


@dataclass
class Row:
    """A line of the table. Speed is None where it was not measured."""

    name: str
    bits_per_weight: float
    megabytes: float
    perplexity: float
    kl_divergence: float
    same_top_token: float
    prefill: float | None = None  # tokens/s
    decode: float | None = None
    kl_standard_error: float | None = None


@dataclass
class Comparison:
    """All that was measured."""

    model: str
    tokens: int  # scored
    window: int
    left_out: list[str]  # variants whose groups do not divide the model's rows
    rows: list[Row]


def compare(
    model: Path,
    text: str,
    folder: Path,
    n_tokens: int = 20000,
    window: int | None = None,
    bench_sizes: str | None = None,
    progress: bool = True,
    names: Sequence[str] = ("*",),
    weights_only: bool = False,
    gguf: Sequence[Path] = (),
    calibration_samples: int | None = None,
) -> Comparison:
    """Every variant on a model. window: tokens that are seen at a time; None: 1024, or the context if that is less.

    folder: holds the model files and what was measured before; see the module's docstring. bench_sizes: `P,N`, to
    measure speed; without it, speed is what the folder has. names: patterns of the variants to take. weights_only:
    activations stay in fp32, and sizes are those of the weights. gguf: files of the same model, which are compared by
    their weights, too. calibration_samples: of 512 tokens; None: the exporter's 16. Raises ModelError.
    """
    source = open_model(model)
    config = source.config
    first, second = halves(text)
    window = min(WINDOW, config.max_seq_len) if window is None else window
    samples = pieces(model, config, second, window, n_tokens)
    folder.mkdir(parents=True, exist_ok=True)
    calibration = folder / "calibration.txt"
    calibration.write_text(first, encoding="utf-8")
    size = n_parameters(config)
    reference = Candidate("fp32", InFp32(Fp32(source)), config, 32, 4 * size / 1e6, crc32_of_model(model))
    for pattern in names:
        if not any(fnmatchcase(name, pattern) for name in VARIANTS):
            raise ModelError(f"--rows: no scheme is named {pattern}")
    variants = {name: VARIANTS[name] for name in VARIANTS if any(fnmatchcase(name, pattern) for pattern in names)}
    if calibration_samples is not None:
        more = ("--samples", str(calibration_samples))
        variants = {name: (*given, *more) if "TEXT" in given else given for name, given in variants.items()}
    peers = list(gguf_candidates(source, gguf))
    others = [*candidates(source, variants, calibration, folder, progress, weights_only), *peers]
    figures = measure(reference, others, samples, folder, progress, weights_only)
    kept, rows = Kept(folder), []
    for candidate, found in zip([reference, *others], figures, strict=True):
        if bench_sizes and candidate.file and not weights_only:
            kept.put("speed", candidate.crc32, bench(candidate.file, bench_sizes))
        speed = {} if weights_only else kept.get("speed", candidate.crc32) or {}
        rows.append(Row(candidate.name, candidate.bits, candidate.megabytes, **vars(found), **speed))
    left_out = [name for name, options in variants.items() if not group_fits(config, options)]
    return Comparison(model.resolve().name, sum(len(ids) - 1 for ids in samples), window, left_out, rows)


def table(rows: Sequence[Row], heading: str = "scheme") -> str:
    """The rows as Markdown. The columns are those of `Row`, and how much larger the perplexity is than the first's."""
    speeds = any(row.prefill or row.decode for row in rows)
    lines = [
        f"| {heading} | bits per weight | MB | perplexity | | KL divergence, nats | same top token |"
        + " prefill, tokens/s | decode, tokens/s |" * speeds,
        "|---|---|---|---|---|---|---|" + "---|---|" * speeds,
    ]
    for row in rows:
        times = row.perplexity / rows[0].perplexity
        more = "" if row is rows[0] else f"{100 * (times - 1):+.2f} %" if times < 10 else f"{times:,.0f} times"
        kl = f"{row.kl_divergence:.5f}" if row is not rows[0] else ""
        if kl and row.kl_standard_error is not None:
            kl += f" ± {row.kl_standard_error:.5f}"
        same = f"{100 * row.same_top_token:.2f} %" if row is not rows[0] else ""
        size = f"{row.bits_per_weight:.2f} | {row.megabytes:.1f}"
        line = f"| {row.name} | {size} | {row.perplexity:{'.3f' if times < 10 else ',.0f'}} | {more} | {kl} | {same} |"
        if speeds:
            line += "".join(f" {speed:.0f} |" if speed else "  |" for speed in (row.prefill, row.decode))
        lines.append(line)
    return "\n".join(lines)


def put_table(page: str, rows: Sequence[Row], heading: str = "scheme") -> str:
    """A page of Markdown with `table(rows)` for its first with this heading. Raises ValueError if there is none."""
    found = re.search(rf"^\| {heading} \|.*\n(?:\|.*\n)*", page, re.M)
    if not found:
        raise ValueError(f"no table that begins with `| {heading} |`")
    return page[: found.start()] + table(rows, heading) + "\n" + page[found.end() :]


def read_comparison(path: Path) -> Comparison:
    """What `compare_schemes --json` wrote."""
    found = json.loads(path.read_text(encoding="utf-8"))
    return Comparison(**found | {"rows": [Row(**row) for row in found["rows"]]})
