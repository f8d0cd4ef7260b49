"""How far each scheme's predictions are from the unquantized model's, on a text that calibration has not seen.

A model's figures, over the tokens of a text that have a predecessor in their window (golden/perplexity.py):

    perplexity       exp(mean of -log q), q what the scheme gives the token that follows
    KL divergence    mean over the tokens of sum over the vocabulary of p * (log p - log q), in nats: p is what the
                     unquantized model gives each possible next token, q what the scheme does
    same top token   share of the tokens for which both have the same most probable successor

Perplexity can fall by luck where a model's own mistakes are blurred; KL divergence cannot.

The text's first half is for calibration, its second half for measuring. All schemes run on one window before the next
begins, so that the logits of two models are in memory, and no more.
"""

import math
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from tqdm import tqdm

from formats.checkpoint import Checkpoint, Config, ModelError, tensor_shapes
from formats.model_file import read_format, read_header
from formats.tensors import HEADER_SIZE
from golden import awq, q8
from golden.awq import AWQ
from golden.forward import F32, F64, Fp32, Scheme, Step, forward
from golden.perplexity import encode, windows
from golden.q8 import Q8, Quantized
from golden.schemes import read_file

ROOT = Path(__file__).resolve().parent.parent
WINDOW = 1024  # tokens that are seen at a time, if the model's context has room for as many
ROWS = 128  # of the logits that are turned into probabilities at a time

# Name in the table -> the exporter's sub-command and options; TEXT stands for the text to calibrate with.
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
    "AWQ, plain rounding": ("awq", "--rtn"),
    "AWQ": ("awq", *CALIB),
    "AWQ, plain rounding, groups of 64": ("awq", "--rtn", "--group-size", "64"),
    "AWQ, groups of 64": ("awq", *CALIB, "--group-size", "64"),
}


# ----------------------------------------------------------------------------
# Schemes


class InFp32:
    """A scheme whose products are fp32 products of what codes and scales stand for.

    The reference's own are in fp64 and one for each group. These differ by about 1e-6, far less than the figures
    here, and take a fraction of the time. Codes are the scheme's own.
    """

    def __init__(self, scheme: Scheme):
        self._scheme = scheme
        self.interleaved = scheme.interleaved

    def steps(self, step: Step) -> Step:
        return self._scheme.steps(step)

    def vector(self, name: str) -> np.ndarray:
        return self._scheme.vector(name)

    def embedding(self, tokens: np.ndarray) -> np.ndarray:
        return self._scheme.embedding(tokens)

    def activation(self, step: Step, name: str, x: np.ndarray) -> np.ndarray:
        prepared = self._scheme.activation(step, name, x)
        return q8.dequantize(prepared) if isinstance(prepared, Quantized) else prepared

    def linear(self, x: np.ndarray, name: str, _step: Step) -> np.ndarray:
        return x @ self._weight(name).T

    def _weight(self, name: str) -> np.ndarray:
        """(n_out, n_in) fp32."""
        scheme = self._scheme
        if isinstance(scheme, Fp32):
            return scheme.vector(name)
        if isinstance(scheme, AWQ):  # its own `weight` would keep every matrix
            plain = name == "classifier"
            return (scheme.weight(name) if plain else awq.dequantize(scheme.matrix(name))).astype(F32).T
        return q8.dequantize(scheme.matrix(name))


@dataclass
class Candidate:
    """A scheme in the table."""

    name: str
    scheme: Scheme
    bits: float  # of the file, for each parameter: scales and norms included, header and tokenizer not
    megabytes: float  # of the file


def n_parameters(config: Config) -> int:
    """Weights of the model; a classifier that is the embedding counts once."""
    return sum(math.prod(shape) for shape in tensor_shapes(config).values())


def export(model: Path, out: Path, options: Sequence[str]) -> None:
    """Runs the exporter with a sub-command and its options. Raises ModelError with what it said if it fails."""
    command = [sys.executable, "-m", "export", options[0], model.resolve(), out, *options[1:], "--quiet"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ModelError(done.stderr.strip().removeprefix("export: "))


def group_fits(config: Config, options: Sequence[str]) -> bool:
    """Whether the groups of a variant divide the rows of the model."""
    size = 0
    for option in ("--group-size", "--block"):
        if option in options:
            size = int(options[options.index(option) + 1])
    size = size or (128 if options[0] == "awq" else 1)
    return all(n % size == 0 for n in (config.dim, config.hidden_dim, config.q_dim))


def candidates(
    model: Path, variants: dict[str, tuple[str, ...]], text: Path, folder: Path, progress: bool
) -> Iterator[Candidate]:
    """Exports each variant whose groups fit to `folder`, and reads it back."""
    checkpoint = Checkpoint(model)
    config, n = checkpoint.config, n_parameters(checkpoint.config)
    chosen = {name: options for name, options in variants.items() if group_fits(config, options)}
    with tqdm(chosen.items(), desc="exporting", unit="scheme", disable=not progress) as bar:
        for i, (name, options) in enumerate(bar):
            bar.set_postfix_str(name)
            out = folder / f"{i}.bin"
            export(model, out, [str(text) if option == "TEXT" else option for option in options])
            head = read_header(out, read_format(out))
            scheme = Q8(checkpoint, head.group_size) if options[0] == "q8" else read_file(out)
            bits = 8 * (head.weights_end - HEADER_SIZE) / n
            yield Candidate(name, InFp32(scheme), bits, out.stat().st_size / 1e6)


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

    def figures(self) -> tuple[float, float, float]:
        """Perplexity, mean KL divergence, share of equal top tokens."""
        nll, kl, same = np.concatenate(self._tokens, axis=1).mean(axis=1)
        return float(np.exp(nll)), float(kl), float(same)


@dataclass
class Row:
    """A line of the table."""

    name: str
    bits_per_weight: float
    megabytes: float
    perplexity: float
    kl_divergence: float
    same_top_token: float


@dataclass
class Comparison:
    """All that was measured."""

    model: str
    tokens: int  # scored
    window: int
    rows: list[Row]


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


def measure(
    config: Config, reference: Candidate, others: Sequence[Candidate], samples: Sequence[np.ndarray], progress: bool
) -> list[Row]:
    """The figures of each candidate, the unquantized model first."""
    totals = [Totals() for _ in range(1 + len(others))]
    n_tokens = sum(len(ids) for ids in samples)
    with tqdm(
        total=n_tokens * len(totals), unit="token", unit_scale=True, desc="measuring", disable=not progress
    ) as bar:
        for ids in samples:
            log_p = np.zeros(0)
            for candidate, total in zip([reference, *others], totals, strict=True):
                bar.set_postfix_str(candidate.name)
                logits = forward(config, candidate.scheme, ids)
                if candidate is reference:
                    log_p = log_probabilities(logits)
                total.add(ids, log_p, logits)
                del logits  # before the next scheme's are there
                bar.update(len(ids))
    return [
        Row(candidate.name, candidate.bits, candidate.megabytes, *total.figures())
        for candidate, total in zip([reference, *others], totals, strict=True)
    ]


def compare(
    model: Path, text: str, folder: Path, n_tokens: int = 20000, window: int | None = None, progress: bool = True
) -> Comparison:
    """Every variant on a model. window: tokens that are seen at a time; None: 1024, or the context if that is less.

    The model files of all variants go to `folder`. Raises ModelError.
    """
    checkpoint = Checkpoint(model)
    config = checkpoint.config
    first, second = halves(text)
    window = min(WINDOW, config.max_seq_len) if window is None else window
    samples = pieces(model, config, second, window, n_tokens)
    calibration = folder / "calibration.txt"
    calibration.write_text(first, encoding="utf-8")
    reference = Candidate("fp32", InFp32(Fp32(checkpoint)), 32, 4 * n_parameters(config) / 1e6)
    others = list(candidates(model, VARIANTS, calibration, folder, progress))
    rows = measure(config, reference, others, samples, progress)
    return Comparison(model.resolve().name, sum(len(ids) - 1 for ids in samples), window, rows)


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown. The columns are those of `Row`, and how much larger the perplexity is than the first's."""
    lines = [
        "| scheme | bits per weight | MB | perplexity | | KL divergence, nats | same top token |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        more = f"{100 * (row.perplexity / rows[0].perplexity - 1):+.2f} %" if row is not rows[0] else ""
        kl = f"{row.kl_divergence:.5f}" if row is not rows[0] else ""
        same = f"{100 * row.same_top_token:.2f} %" if row is not rows[0] else ""
        size = f"{row.bits_per_weight:.2f} | {row.megabytes:.1f}"
        lines.append(f"| {row.name} | {size} | {row.perplexity:.3f} | {more} | {kl} | {same} |")
    return "\n".join(lines)
