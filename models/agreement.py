"""Reads stories and finds people whose gender changes: a girl with a boy's name, "Tom lost her kite".

    ./runq model.bin -i "Once" | python -m models.agreement

Which person a pronoun is about follows from the sentence. The sentences of stories.py are turned into patterns, by a
`Writer` that collects the templates with a gendered word; a sentence that fits says who is who. A pronoun without a
name in its template is the main character's, whom the story names first. Sentences that fit none, which a model made
up, count only if nobody named so far has the pronoun's gender.

Stories are separated by blank lines. The exit status is 1 if something disagrees.
"""

from __future__ import annotations

import random
import re
import sys
from dataclasses import dataclass, field
from functools import cache

from models.stories import BOYS, GENDERED, GIRLS, MANNERS, PLOTS, Writer

FEMALE = dict.fromkeys(GIRLS, True) | dict.fromkeys(BOYS, False)
FEMALE_WORDS = {"she": True, "her": True, "girl": True, "he": False, "his": False, "him": False, "boy": False}
NAME = "|".join(sorted(FEMALE, key=len, reverse=True))
SLOT = re.compile(r"\{(\w+)(?:\.(\w+))?!?\}")
MAIN = "a"  # the slot of the main character


@dataclass
class Collector(Writer):
    """A writer that notes the templates it is offered, with the slots that are people."""

    templates: dict[str, set[str]] = field(default_factory=dict)

    def say(self, *templates: str) -> None:
        people = {key for key, slot in self.slots.items() if "girl" in slot}
        for template in (t for option in templates for t in alternatives(option)):
            if any(form in GENDERED for _, form in SLOT.findall(template)):
                self.templates[template] = people
        super().say(*templates)


def alternatives(template: str) -> list[str]:
    """The template for every choice of a bracket with slots in it; other brackets stay."""
    m = re.search(r"\[([^\]]*\{[^\]]*)\]", template)
    if not m:
        return [template]
    return [t for c in m[1].split("|") for t in alternatives(template[: m.start()] + c + template[m.end() :])]


def pattern(template: str, people: set[str]) -> re.Pattern[str]:
    """The sentences that `template` can become. A group's name is the slot, what it is, and a running number."""
    text, end = "", 0
    for i, m in enumerate(SLOT.finditer(template)):
        text += literal(template[end : m.start()])
        slot, form = m[1], m[2] or ""
        if slot in people and not form:
            text += f"(?P<{slot}_name_{i}>{NAME})"
        elif form in GENDERED:
            text += f"(?P<{slot}_word_{i}>{'|'.join(FEMALE_WORDS)})"
        else:
            text += r"[\w ]+?"
        end = m.end()
    text += literal(template[end:])
    return re.compile(rf"(?<!\w)(?i:{text})")


def literal(template: str) -> str:
    """A pattern for a piece of template without slots. What ends a sentence may have a manner before it ("softly")."""
    pieces = re.split(r"(\[[^\]]*\])", template)
    text = "".join(
        "(?:" + "|".join(map(re.escape, p[1:-1].split("|"))) + ")" if p.startswith("[") else re.escape(p)
        for p in pieces
    )
    return re.sub(r"^\\\.", rf"(?: (?:{'|'.join(MANNERS)}))?\\.", text)


@cache
def patterns() -> list[re.Pattern[str]]:
    """The patterns of all templates with a gendered word."""
    found: dict[str, set[str]] = {}
    for plot in PLOTS:
        rng = random.Random(0)
        for _ in range(40):  # takes every branch
            writer = Collector(rng)
            plot(writer)
            found |= writer.templates
    return [pattern(template, people) for template, people in found.items()]


def sentence(story: str, at: int) -> str:
    """The sentence around a position."""
    before, after = re.search(r"[^.!?]*$", story[:at]), re.match(r"[^.!?]*[.!?]?", story[at:])
    return (before[0] + after[0]).strip()


def disagreements(story: str) -> list[str]:
    """The places in one story where a gendered word does not fit its person, as they stand in the text."""
    first = re.search(rf"\b(?:{NAME})\b", story)
    if not first:
        return []
    found: dict[int, str] = {}
    explained: set[int] = set()
    for p in patterns():
        for m in p.finditer(story):
            groups = [(key.rsplit("_", 2), value, m.start(key)) for key, value in m.groupdict().items()]
            named = {slot: FEMALE.get(value.capitalize()) for (slot, what, _), value, _ in groups if what == "name"}
            named.setdefault(MAIN, FEMALE[first[0]])
            for (slot, what, _), value, at in groups:
                if what == "word" and slot in named:
                    explained.add(at)
                    if FEMALE_WORDS[value.lower()] != named[slot]:
                        found[at] = m[0]
    for m in re.finditer(rf"\b(?i:{'|'.join(FEMALE_WORDS)})\b", story):
        if m.start() not in explained:
            announced = re.match(rf" (?:named|called|whose name was) ({NAME})\b", story[m.end() :])
            people = [announced[1]] if announced else re.findall(rf"\b(?:{NAME})\b", story[: m.start()])
            if FEMALE_WORDS[m[0].lower()] not in {FEMALE[name] for name in people}:
                found[m.start()] = sentence(story, m.start())
    return [found[at] for at in sorted(found)]


def main() -> int:
    """Reads standard input and prints what disagrees."""
    texts = [t for t in sys.stdin.read().split("\n\n") if t.strip()]
    wrong = 0
    for text in texts:
        found = disagreements(text.strip())
        wrong += bool(found)
        for place in found:
            print(place)
    print(f"{wrong} of {len(texts)} stories disagree")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
