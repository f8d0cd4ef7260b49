"""The glossary of docs/README.md as tooltips: each term is marked where a section of a page first has it."""

import re
from dataclasses import dataclass
from html import escape

# Words of the glossary that are also plain English: what they have to look like to be the term.
MEANT = {
    "code": r"(?<!exit )(?<!error )codes",
    "place": r"(?<=per )place|(?<=each )place|(?<=static )places",
    "word": r"(?<=32-bit )words?|(?<=in a )word|(?<=of a )word|words(?= of)",
    "block": r"blocks?(?! RAM)",
    "mix": r"(?<=the )mix",
    "decode": r"[Dd]ecode",
    "scale": r"[Ss]cales?(?! each| by| up)",
    "step": r"steps?(?! by step| \d)",
}
UNTOUCHED = re.compile(r"a|pre|h[1-6]|abbr|math|summary|th|svg|script|style|button|figcaption")


@dataclass(frozen=True)
class Glossary:
    """What each term and each name in code means."""

    terms: dict[str, str]
    names: dict[str, str]
    pattern: re.Pattern[str]  # a group per term, in the order of `terms`


def read_glossary(overview: str) -> Glossary:
    """The three tables of docs/README.md: names of things, of a config's fields, and words."""
    terms: dict[str, str] = {}
    names: dict[str, str] = {}
    section = overview.partition("\n## Glossary\n")[2].partition("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", section, re.M):
        head, _, *rows = [split_row(line) for line in table.splitlines()]
        for cells in rows:
            if head[0] == "word":
                for term in re.split(r"[,;] ", cells[0]):
                    terms.setdefault(term, f"{cells[0]}: {plain(cells[1])}")
                continue
            elsewhere = "; ".join(
                f"{where}: {plain(cell)}" for where, cell in zip(map(plain, head[1:]), cells[1:], strict=True) if cell
            )
            if codes := re.findall(r"`(\w+)`", cells[0]):
                names |= dict.fromkeys(codes, f"{plain(cells[0])}. {elsewhere}")
            else:
                thing, _, meaning = cells[0].partition(": ")
                said = f"{thing}: {meaning}. {elsewhere}" if meaning else f"{thing}. {elsewhere}"
                for term in [*re.sub(r" \(.*\)", "", thing).split(", "), *re.findall(r" \(([A-Za-z]+)\)$", thing)]:
                    if re.fullmatch(r"[\w -]+", term):
                        terms.setdefault(term, said)
    longest_first = sorted(terms, key=len, reverse=True)
    pattern = "|".join(f"({looks(term)})" for term in longest_first)
    return Glossary(
        {term: terms[term] for term in longest_first}, names, re.compile(rf"(?<![\w-])(?:{pattern})(?![\w-])")
    )


def split_row(line: str) -> list[str]:
    """The cells of a table's row."""
    return [cell.strip() for cell in line.strip().strip("|").split("|")]


def plain(text: str) -> str:
    """Markdown of a cell as text."""
    return re.sub(r"`|\*(?=\w)|(?<=\w)\*", "", re.sub(r"\[([^]]+)\]\([^)]*\)", r"\1", text))


def looks(term: str) -> str:
    """The regular expression of a term: singular or plural, and with a capital letter where a sentence begins."""
    if term in MEANT:
        return MEANT[term]
    if term[0].isupper():
        return re.escape(term) + "s?"
    return f"[{term[0]}{term[0].upper()}]{re.escape(term[1:])}s?"


def with_tooltips(html: str, glossary: Glossary, skipped_section: str = "") -> str:
    """A page's HTML in which each section explains its terms once; none in the section with this anchor."""
    terms = list(glossary.terms)
    out, seen, inside, skipped = [], set(), [], False

    def mark(m: re.Match[str]) -> str:
        term = terms[m.lastindex - 1]
        if term in seen:
            return m[0]
        seen.add(term)
        return f'<abbr title="{escape(glossary.terms[term])}">{m[0]}</abbr>'

    for part in re.split(r'(<code>\w+</code>|<span class="filename">.*?</span>|<[^>]+>)', html):
        if m := re.fullmatch(r"<code>(\w+)</code>", part):
            said = glossary.names.get(m[1])
            if said and m[1] not in seen and not inside and not skipped:
                seen.add(m[1])
                part = f'<abbr title="{escape(said)}">{part}</abbr>'
        elif m := re.match(r"<(/?)([a-z][a-z0-9]*)", part):
            if m[2] == "h2" and not m[1]:
                seen, skipped = set(), bool(skipped_section) and f'id="{skipped_section}"' in part
            if (m[2] == "code" or UNTOUCHED.fullmatch(m[2])) and not part.endswith("/>"):
                if not m[1]:
                    inside.append(m[2])
                elif inside:
                    inside.pop()
        elif not inside and not skipped and not part.startswith("<"):
            part = glossary.pattern.sub(mark, part)
        out.append(part)
    return "".join(out)
