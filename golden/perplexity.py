"""Perplexity of a text, defined once: the same windows here and in the programs' --ppl.

The text is tokenized whole, without a beginning-of-sequence token, and cut into consecutive windows that fill the
context; if the model has such a token, each window begins with it (and holds one id of the text fewer). Every
token that has a predecessor in its window is scored. Perplexity is exp(mean negative log-likelihood).
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from formats.errors import ModelError
from formats.files import check_file
from formats.source import is_gguf, open_gguf

Logits = Callable[[np.ndarray], np.ndarray]  # token ids (n,) -> logits (n, vocab_size)


@contextmanager
def _errors_of_tokenizers(path: Path) -> Iterator[None]:
    """Whatever goes wrong in this block as a ModelError about the file.

    `tokenizers` raises plain Exceptions, and on some files it panics: a BaseException, after a report of many lines on
    the standard error, which goes nowhere here.
    """
    sys.stderr.flush()
    stderr, nowhere = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 2)
        yield
    except BaseException as error:
        if isinstance(error, Exception) or type(error).__name__ == "PanicException":
            raise ModelError(f"{path}: {error}") from None
        raise
    finally:
        os.dup2(stderr, 2)
        os.close(stderr)
        os.close(nowhere)


def load_tokenizer(source: Path) -> Tokenizer:
    """The tokenizer of a Hugging Face directory or a GGUF file. Raises ModelError if it cannot be read."""
    if is_gguf(source):
        files = open_gguf(source).tokenizer_files()
        with _errors_of_tokenizers(files.path):
            return Tokenizer.from_str(json.dumps(files.tokenizer))
    path = Path(source) / "tokenizer.json"
    check_file(path)
    with _errors_of_tokenizers(path):
        return Tokenizer.from_file(str(path))


def encode(hf_dir: Path, text: str) -> tuple[list[int], int | None]:
    """Ids of the text without special tokens added, and the id that the tokenizer puts in front of a text.

    Raises ModelError if the tokenizer cannot be read.
    """
    tokenizer = load_tokenizer(hf_dir)
    with _errors_of_tokenizers(Path(hf_dir)):
        in_front = tokenizer.encode("", add_special_tokens=True).ids
        return tokenizer.encode(text, add_special_tokens=False).ids, in_front[0] if in_front else None


def windows(ids: list[int], bos: int | None, context: int) -> Iterator[np.ndarray]:
    """The windows that are fed to the model, each of at most `context` ids, `bos` in front."""
    size = context if bos is None else context - 1
    for start in range(0, len(ids), size):
        head = [] if bos is None else [bos]
        yield np.array(head + ids[start : start + size])


def negative_log_likelihoods(logits: np.ndarray, ids: np.ndarray) -> np.ndarray:
    """-log p of ids[1:], (n - 1,) fp64, under the logits (n, vocab_size) of the tokens before each."""
    z = logits[:-1].astype(np.float64)
    z -= z.max(axis=-1, keepdims=True)
    return np.log(np.exp(z).sum(axis=-1)) - z[np.arange(len(z)), ids[1:]]


def perplexity(logits: Logits, ids: list[int], bos: int | None, context: int) -> tuple[float, int]:
    """Perplexity of the ids and the number of tokens scored. Raises ValueError if there are none."""
    parts = [negative_log_likelihoods(logits(w), w) for w in windows(ids, bos, context) if len(w) > 1]
    if not parts:
        raise ValueError("the text has no token to score")
    nll = np.concatenate(parts)
    return float(np.exp(nll.mean())), len(nll)
