"""Goldens of a real model, small: what every program has to say about SmolLM2. `python -m golden real`.

golden/real/smollm2.VARIANT.json   of the model file build/models/smollm2.VARIANT.bin (`make smollm2`), and `fp32`:
    file_crc32    of that file, fp32 apart
    generations   for each of PROMPTS its ids, the greedy continuation (to the end of the text or NEW_TOKENS ids), and
                  the lead of each id (golden/make.py)
    norms         of every step that is not int8, over the first prompt: its L2 norm

The reference has no KV cache, so a continuation token by token would take hours. Instead a program guesses a
continuation (the scheme's own; runq where that is emulated on the CPU and slow), one forward pass over all of it gives
the reference's choice behind every prefix, and the guess is kept up to the first id that the reference would not have
chosen. Every id is the reference's own.
"""

import json
import subprocess
import zlib
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np

from formats.checkpoint import Config, ModelError
from formats.files import replacing
from formats.source import open_gguf
from golden.forward import Fp32, Scheme, forward
from golden.make import lead
from golden.perplexity import Logits, load_tokenizer
from golden.q8 import Q8
from golden.schemes import SCHEMES, Reference, read_file
from golden.trace import Recorder

ROOT = Path(__file__).resolve().parent.parent
MODEL = "smollm2"
NEW_TOKENS = 48
# As a user of the model: three turns of a chat, by its template, and two texts to go on with.
CHAT = "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n" \
       "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"  # fmt: skip
QUESTIONS = ("What is the capital of France?", "Explain what a prime number is.", "Write a short poem about the sea.")
TEXTS = ("Once upon a time, in a small village by the river,", "def fibonacci(n):\n")
PROMPTS = (*(CHAT.format(question) for question in QUESTIONS), *TEXTS)

Guess = Callable[[list[int], int], list[int]]  # ids, n -> up to n more


def greedy_by_guess(
    logits: Logits, prompt: list[int], n_new: int, eos_ids: list[int], guess: Guess
) -> tuple[list[int], list[float]]:
    """The prompt's greedy continuation, to an end of the text or n_new ids, and the lead of each id.

    What golden.make.greedy computes, in a few forward passes.
    """
    ids, leads = list(prompt), []
    while len(leads) < n_new and (not leads or ids[-1] not in eos_ids):
        tail = guess(ids, n_new - len(leads))
        rows = logits(np.array(ids + tail[:-1]))[len(ids) - 1 :]
        for guessed, row in zip(tail, rows, strict=True):
            leads.append(lead(row))
            ids.append(int(row.argmax()))
            if ids[-1] != guessed:
                break
    return ids[len(prompt) :], leads


def program_guess(reference: Reference, file: Path) -> Guess:
    """Continuations by the program of a scheme. Raises ModelError if it fails."""
    program = ROOT / reference.format.program

    def guess(ids: list[int], n: int) -> list[int]:
        command = [program, file, "--ids", ",".join(map(str, ids)), "-n", n, "-t", "0", "--print-ids"]
        done = subprocess.run(list(map(str, command)), capture_output=True, text=True, check=False)
        if done.returncode:
            raise ModelError(f"{program.name}: {done.stderr.strip()}")
        return [int(i) for i in done.stdout.split(",")]

    return guess


def norms(config: Config, scheme: Scheme, tokens: list[int]) -> dict[str, float]:
    """The L2 norm of every step that is fp32 or fp16, by name, to six digits."""
    recorder = Recorder()
    forward(config, scheme, np.array(tokens), recorder)
    return {
        name: float(f"{np.linalg.norm(value.astype(np.float64)):.6g}")
        for name, value in recorder.tensors.items()
        if value.dtype.kind == "f" and not name.endswith(".s")
    }


def schemes(files: Path) -> Iterator[tuple[str, Scheme, Guess, dict]]:
    """Each variant that there is a file of, with its guess and what identifies it."""
    gguf = open_gguf(files / f"{MODEL}.gguf")
    q8 = files / f"{MODEL}.q8.bin"
    yield "fp32", Fp32(gguf), program_guess(SCHEMES["q8"], q8), {}
    for reference in SCHEMES.values():
        for variant in reference.variants:
            file = files / f"{MODEL}.{variant}.bin"
            if file.is_file():  # a group size may not divide the model's rows
                scheme = Q8(gguf) if reference.read is None else read_file(file)
                fast = (ROOT / f"{reference.format.program}.cpp").is_file()
                guess = program_guess(reference, file) if fast else program_guess(SCHEMES["q8"], q8)
                yield variant, scheme, guess, {"file_crc32": zlib.crc32(file.read_bytes())}


def make_real(files: Path, out: Path, only: str | None = None) -> None:
    """Writes golden/real. files: the folder of `make smollm2`. only: one variant. Raises ModelError."""
    gguf = open_gguf(files / f"{MODEL}.gguf")
    config, eos_ids = gguf.config, gguf.generation.eos_ids
    tokenizer = load_tokenizer(gguf.path)
    out.mkdir(parents=True, exist_ok=True)
    for variant, scheme, guess, identity in schemes(files):
        if only not in (None, variant):
            continue
        logits = partial(forward, config, scheme)
        generations = []
        for prompt in PROMPTS:
            ids = tokenizer.encode(prompt).ids
            new_ids, leads = greedy_by_guess(logits, ids, NEW_TOKENS, eos_ids, guess)
            generations.append(
                {"prompt": prompt, "prompt_ids": ids, "new_ids": new_ids, "leads": [round(value, 5) for value in leads]}
            )
        found = norms(config, scheme, generations[0]["prompt_ids"])
        lines = [f' "{key}": {json.dumps(value)}' for key, value in identity.items()]
        lines.append(' "generations": [\n  ' + ",\n  ".join(map(json.dumps, generations)) + "\n ]")
        lines.append(f' "norms": {json.dumps(found)}')
        path = out / f"{MODEL}.{variant}.json"
        with replacing(path) as f:
            f.write(("{\n" + ",\n".join(lines) + "\n}\n").encode())
        print(f"{path.name}: smallest leads {[min(g['leads']) for g in generations]}", flush=True)
