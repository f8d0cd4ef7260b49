"""Whether a port's logits are good enough: its perplexity of a text beside the reference's.

A trace of a port that approximates (tables for exp, bf16, an int8 KV cache) parts from the reference step by step. What
counts then is how well it predicts. `golden accept` takes the tokens and logits of a port, which a trace has under
these names, and runs the reference on the same tokens.
"""

from dataclasses import dataclass

import numpy as np

from golden.perplexity import Logits, negative_log_likelihoods

MIN_SCORED = 100  # tokens: the perplexity of fewer says little


@dataclass(frozen=True)
class Verdict:
    """How a port's logits compare with the reference's, over all tokens that have a predecessor in their window."""

    n_scored: int
    perplexity: float
    reference: float
    kl: float  # mean Kullback-Leibler divergence of the port from the reference, per token, in nats
    same_top: float  # share of tokens whose most probable successor is the same

    @property
    def loss(self) -> float:
        """By which share the port's perplexity is above the reference's."""
        return self.perplexity / self.reference - 1


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Logarithms of probabilities over the last axis, fp64."""
    z = logits.astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return z - np.log(np.exp(z).sum(axis=-1, keepdims=True))


def judge_logits(reference: Logits, tokens: np.ndarray, logits: np.ndarray) -> Verdict:
    """tokens: (n,) or windows (w, n) of ids; logits: the same with vocab_size behind.

    Raises ValueError if they are not, or too few.
    """
    windows, found = np.atleast_2d(tokens), logits if logits.ndim == 3 else logits[None]
    if tokens.dtype.kind not in "iu" or found.ndim != 3 or found.shape[:2] != windows.shape:
        raise ValueError(f"tokens {tokens.dtype} {tokens.shape} do not go with logits {logits.dtype} {logits.shape}")
    if not np.isfinite(found).all():
        raise ValueError("logits has values that are not finite")
    mine, theirs, kl, same = [], [], [], []
    for ids, own in zip(windows, found, strict=True):
        expected = reference(ids)
        if expected.shape != own.shape:
            raise ValueError(f"logits have a vocabulary of {own.shape[-1]}, the model has {expected.shape[-1]}")
        mine.append(negative_log_likelihoods(own, ids))
        theirs.append(negative_log_likelihoods(expected, ids))
        p, q = log_softmax(expected), log_softmax(own)
        kl.append((np.exp(p) * (p - q)).sum(axis=-1))
        same.append(expected.argmax(axis=-1) == own.argmax(axis=-1))
    n = sum(map(len, mine))
    if n < MIN_SCORED:
        raise ValueError(f"tokens: {n} to score, at least {MIN_SCORED} are needed")
    means = [float(np.concatenate(parts).mean()) for parts in (mine, theirs, kl, same)]
    return Verdict(n, float(np.exp(means[0])), float(np.exp(means[1])), means[2], means[3])
