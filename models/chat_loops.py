"""Whether the answers of a chat end: ten questions, three seeds each, in a context of 1,024 tokens.

    python -m models.chat_loops MODEL.bin [OPTION OF runq...]

An answer is a loop if it has the same eight tokens in a row eight times; there it is cut off. docs/real-model.md has
results.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
SEEDS = (1, 2, 3)
LENGTH, TIMES = 8, 8  # of what is repeated, and how often, in a loop
QUESTIONS = (
    "Write a poem about a mother.",
    "What is the capital of France?",
    "Tell me a story about a dog who finds a treasure.",
    "How do I make pancakes?",
    "Explain gravity to a child.",
    "List ten things to do in Paris.",
    "Why is the sky blue?",
    "Write a letter to my landlord about a broken heater.",
    "What is the meaning of life?",
    "Write a Python function that reverses a string.",
)


def until_loop(ids: Iterable[int]) -> tuple[list[int], bool]:
    """The ids up to the one that makes them a loop, and whether there is one."""
    seen, counts = [], Counter()
    for i in ids:
        seen.append(i)
        last = tuple(seen[-LENGTH:])
        counts[last] += len(last) == LENGTH
        if counts[last] == TIMES:
            return seen, True
    return seen, False


def printed_ids(stream: TextIO) -> Iterator[int]:
    """The ids of --print-ids, each as soon as the comma or the line break behind it is there."""
    number = ""
    while character := stream.read(1):
        if character.isdigit():
            number += character
        elif number:
            yield int(number)
            number = ""


def answer(command: list[str], question: str) -> tuple[int, str]:
    """Tokens of the answer, and how it came to its end: "ended", "context is full" or "loop"."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as program:
        program.stdin.write(question + "\n")
        program.stdin.close()
        ids, loops = until_loop(printed_ids(program.stdout))
        if loops:
            program.kill()
            return len(ids), "loop"
        errors = program.stderr.read()
    if program.returncode != 0:
        raise SystemExit(errors.strip())
    return len(ids), "context is full" if "is full" in errors else "ended"


def main() -> int:
    """Prints how each answer ended, and how many ended so."""
    if len(sys.argv) < 2:
        print(__doc__)
        return 2
    model, *options = sys.argv[1:]
    ends, lengths = Counter(), []
    for question in QUESTIONS:
        for seed in SEEDS:
            command = ["./runq", model, "-m", "chat", "-n", "0", "-c", "1024", "-s", str(seed), "--print-ids", *options]
            n, end = answer(command, question)
            print(f"{end:<16}{n:>5} tokens, seed {seed}: {question}", flush=True)
            ends[end] += 1
            lengths.append(n)
    print(*(f"{end}: {n}," for end, n in ends.items()), f"median {sorted(lengths)[len(lengths) // 2]} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
