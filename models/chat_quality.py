"""Whether the answers of a chat are right, and whether they end.

    python -m models.chat_quality choose MODEL.bin [OPTION OF runq...]
    python -m models.chat_quality report MODEL.bin [OPTION OF runq...]

First questions that have one right answer, twenty seeds each: how often its word is among the first 40 tokens. Then ten
open questions, three seeds each, in a context of 1,024 tokens: an answer is a loop if it has the same eight tokens in a
row eight times; there it is cut off. What is chosen by the questions and seeds of `choose` is to be reported by those
of `report`, which are others. docs/real-model.md has results.
"""

import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple, TextIO

ROOT = Path(__file__).resolve().parent.parent
LENGTH, TIMES = 8, 8  # of what is repeated, and how often, in a loop
N_FACT = 40  # tokens


class Purpose(NamedTuple):
    """What is measured to choose by, or to report."""

    facts: dict[str, str]  # question -> a regular expression of its answer, which SmolLM2 in Q8 gives at temperature 0
    fact_seeds: range
    open_seeds: range


PURPOSES = {
    "choose": Purpose(
        {
            "What is the capital of Italy?": r"\bRome\b",
            "What is the capital of Germany?": r"\bBerlin\b",
            "What is the chemical symbol for gold?": r"\bAu\b",
            "What is the first month of the year?": r"\bJanuary\b",
            "What language is spoken in Brazil?": r"\bPortuguese\b",
        },
        range(1, 21),
        range(1, 4),
    ),
    "report": Purpose(
        {
            "What is the capital of France?": r"\bParis\b",  # README's own, and five others
            "What is the capital of Japan?": r"\bTokyo\b",
            "What is the capital of Egypt?": r"\bCairo\b",
            "What is the chemical formula of water?": r"\bH2O\b",
            "How many days are in a week?": r"\b(7|[Ss]even)\b",
            "What is the largest ocean on Earth?": r"\bPacific\b",
        },
        range(101, 121),
        range(101, 104),
    ),
}
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


def chat(*args: str | int) -> list[str]:
    """The command of a chat; its options begin with the model's file."""
    return ["./runq", *map(str, args), "-m", "chat"]


def says(command: list[str], question: str, word: str) -> bool:
    """Whether a word is in the answer's beginning."""
    command = [*command, "-n", str(N_FACT)]
    done = subprocess.run(command, cwd=ROOT, input=question + "\n", capture_output=True, encoding="utf-8")
    if done.returncode != 0:
        raise SystemExit(done.stderr.strip())
    return re.search(word, done.stdout) is not None


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
    command = [*command, "-n", "0", "-c", "1024", "--print-ids"]
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
    """Prints how often each question is answered right, how each open answer ended, and how many ended so."""
    if len(sys.argv) < 3 or sys.argv[1] not in PURPOSES:
        print(__doc__)
        return 2
    purpose, options = PURPOSES[sys.argv[1]], sys.argv[2:]
    for question, word in purpose.facts.items():
        n_right = sum(says(chat(*options, "-s", seed), question, word) for seed in purpose.fact_seeds)
        print(f"{n_right:>3} of {len(purpose.fact_seeds)} right: {question}", flush=True)
    ends, lengths = Counter(), []
    for question in QUESTIONS:
        for seed in purpose.open_seeds:
            n, end = answer(chat(*options, "-s", seed), question)
            print(f"{end:<16}{n:>5} tokens, seed {seed}: {question}", flush=True)
            ends[end] += 1
            lengths.append(n)
    print(*(f"{end}: {n}," for end, n in ends.items()), f"median {sorted(lengths)[len(lengths) // 2]} tokens")
    return 0


if __name__ == "__main__":
    sys.exit(main())
