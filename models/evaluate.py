"""Held-out perplexity, recall and agreement of a model, whatever computes its logits.

    .venv-torch/bin/python -m models.evaluate models/tiny-llama --torch      (models/README.md)

*Perplexity*, as `runq --ppl` measures it: the whole file is tokenized as one text without BOS and
cut into consecutive windows; a window is the context C long, or C - 1 ids behind a BOS where the
model has one. Every token with a predecessor in its window is scored: exp(mean of -log p).

*Recall* asks whether the model reads: held_out.json lists the references, words that refer back to a
name, a thing or a place named earlier, where the text before determines which. It is the share of these
references whose first token, and of all their tokens, that the model's most probable token gets
right, in the same windows. Where the introduction lies in the window before, the model cannot
know: `reachable` is the share of references that repeat something in their own window, and
`recall_reachable` the share of first tokens that is right among those.

*Agreement* asks whether the model knows whom it writes about. For a pronoun (or "girl", "boy") about
somebody named before, in the same window: whether it is more probable than its counterpart, "he"
where the text has "she". Whether a pronoun comes at all is not asked. For the names that a gendered
word announces ("a girl named"): the probability that the name is one of that gender, given that it
is one of the names of models/stories.py.

`forward` is any function from token ids (n,) to logits (n, vocab): the reference in fp32, a
quantized one, a program's output. This module needs numpy and tokenizers; torch only for --torch.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Callable, Collection, Iterator
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

from formats.interpreter import need
from models import stories

HERE = Path(__file__).parent
Forward = Callable[[np.ndarray], np.ndarray]


def tokenize(directory: Path, text: str) -> tuple[np.ndarray, list[tuple[int, int]]]:
    """Tokenize without BOS: ids (n,), and for every id its span of characters in `text`."""
    encoding = Tokenizer.from_file(str(directory / "tokenizer.json")).encode(text, add_special_tokens=False)
    return np.array(encoding.ids), encoding.offsets


def windows(n: int, context: int, bos: int | None) -> Iterator[tuple[int, int]]:
    """Cut n ids into windows: [start, end) of each."""
    size = context - (bos is not None)
    for start in range(0, n, size):
        yield start, min(start + size, n)


def score(
    forward: Forward, ids: np.ndarray, context: int, bos: int | None, keep: Collection[int] = ()
) -> tuple[np.ndarray, np.ndarray, dict[int, np.ndarray]]:
    """Run all windows.

    For every id: -log p, NaN where it is not scored; the model's most probable id, or -1. For those of the positions
    in `keep` that are scored, log p of the whole vocabulary.
    """
    nll = np.full(len(ids), np.nan)
    top = np.full(len(ids), -1)
    kept = {}
    for start, end in windows(len(ids), context, bos):
        fed = ids[start:end] if bos is None else np.concatenate([[bos], ids[start:end]])
        if len(fed) < 2:
            continue
        logits = np.asarray(forward(fed), dtype=np.float64)[:-1]  # (n - 1, vocab), row i predicts fed[i + 1]
        logits = logits - logits.max(axis=1, keepdims=True)
        log_p = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
        first = start + (bos is None)  # the first id of the window that has a predecessor
        nll[first:end] = -log_p[np.arange(len(fed) - 1), fed[1:]]
        top[first:end] = logits.argmax(axis=1)
        kept |= {i: log_p[i - first].copy() for i in keep if first <= i < end}
    return nll, top, kept


def recall(
    text: str,
    references: list[tuple[int, int]],
    ids: np.ndarray,
    offsets: list[tuple[int, int]],
    top: np.ndarray,
    window_starts: list[int],
) -> dict:
    """Count right tokens over the references; see the module's docstring."""
    starts, ends = np.array(offsets).T
    first_right = all_right = tokens = reachable = reachable_right = 0
    for start, end in references:
        covered = range(np.searchsorted(ends, start, side="right"), np.searchsorted(starts, end, side="left"))
        right = [top[i] == ids[i] for i in covered]
        first_right += right[0]
        all_right += sum(right)
        tokens += len(right)
        seen_from = starts[max(s for s in window_starts if s <= covered[0])]
        story_from = text.rfind("\n\n", 0, start) + 1
        if text.find(text[start:end], max(seen_from, story_from), start) >= 0:
            reachable += 1
            reachable_right += right[0]
    n = len(references)
    return {
        "references": n,
        "recall_first_token": round(first_right / n, 4),
        "recall_all_tokens": round(all_right / tokens, 4),
        "reachable": round(reachable / n, 4),
        "recall_reachable": round(reachable_right / reachable, 4),
    }


COUNTERPARTS = {
    "he": ["she"], "she": ["he"], "his": ["her"], "him": ["her"], "her": ["his", "him"],
    "boy": ["girl"], "girl": ["boy"],
}  # fmt: skip


def agreement(
    text: str,
    marks: stories.Marks,
    offsets: list[tuple[int, int]],
    window_starts: list[int],
    tokenizer: Tokenizer,
    kept: dict[int, np.ndarray],
) -> dict:
    """Count pronouns that agree, and average the probability that names do; see the module's docstring.

    `kept` has log p of the vocabulary at the token where each pronoun and each introduction begins.
    """
    starts, ends = np.array(offsets).T

    def token(word: str) -> int:
        return tokenizer.encode(word, add_special_tokens=False).ids[0]

    def name_tokens(names: list[str]) -> list[int]:
        return sorted({token(f" {name}") for name in names})

    reachable = right = 0
    for start, end, name in marks.pronouns:
        at = int(np.searchsorted(ends, start, side="right"))
        seen_from = starts[max(s for s in window_starts if s <= at)]
        story_from = text.rfind("\n\n", 0, start) + 1
        if at not in kept or not re.search(rf"\b{name}\b", text[max(seen_from, story_from) : start]):
            continue
        reachable += 1
        before, word = text[starts[at] : start], text[start:end]
        others = COUNTERPARTS[word.lower()]
        others = [o.capitalize() for o in others] if word[0].isupper() else others
        right += kept[at][token(before + word)] > max(kept[at][token(before + o)] for o in others)
    genders = {True: name_tokens(stories.GIRLS), False: name_tokens(stories.BOYS)}
    share = []
    for start, end in marks.introductions:
        at = int(np.searchsorted(ends, start, side="right"))
        if at in kept:
            mass = {female: np.exp(kept[at][ids]).sum() for female, ids in genders.items()}
            share.append(mass[text[start:end] in stories.GIRLS] / (mass[True] + mass[False]))
    return {
        "pronouns": reachable,
        "agreement": round(right / reachable, 4),
        "introductions": len(share),
        "names_agree": round(float(np.mean(share)), 4),
    }


def read_marks() -> stories.Marks:
    """Read held_out.json."""
    kinds = json.loads((HERE / "held_out.json").read_text())
    return stories.Marks(**{kind: tuple(tuple(mark) for mark in marks) for kind, marks in kinds.items()})


def evaluate_directory(
    directory: Path, forward: Forward, text: str | None = None, marks: stories.Marks | None = None
) -> dict:
    """Measure `forward` on the held-out stories, or on `text`; the directory gives tokenizer and context."""
    if text is None or marks is None:
        text, marks = (HERE / "held_out.txt").read_text(), read_marks()
    config = json.loads((directory / "config.json").read_text())
    context, bos = config["max_position_embeddings"], config.get("bos_token_id")
    ids, offsets = tokenize(directory, text)
    ends = [end for _, end in offsets]
    announced = [start for start, _ in marks.introductions]
    keep = {int(np.searchsorted(ends, s, side="right")) for s in [*(p[0] for p in marks.pronouns), *announced]}
    nll, top, kept = score(forward, ids, context, bos, keep)
    window_starts = [s for s, _ in windows(len(ids), context, bos)]
    scored = nll[~np.isnan(nll)]
    figures = {"tokens": len(ids), "scored": len(scored), "perplexity": round(float(np.exp(scored.mean())), 4)}
    figures |= recall(text, list(marks.references), ids, offsets, top, window_starts)
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    return figures | agreement(text, marks, offsets, window_starts, tokenizer, kept)


def torch_forward(directory: Path) -> Forward:
    """Load the stored weights into the fp32 forward pass of transformers."""
    need("torch", "transformers")
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager").eval()

    def forward(ids: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            return model(torch.from_numpy(np.asarray(ids))[None]).logits[0].numpy()

    return forward


def main() -> None:
    """Read the command line and print the figures."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="a model in Hugging Face format")
    parser.add_argument("--torch", action="store_true", help="compute the logits with transformers")
    a = parser.parse_args()
    if not a.torch:
        parser.error("--torch is the only forward pass here; others call evaluate_directory")
    print(json.dumps(evaluate_directory(a.directory, torch_forward(a.directory)), indent=2))


if __name__ == "__main__":
    main()
