"""Sets the equations of the pages: from the plain text in which they are typed to MathML, which browsers draw.

In a page an equation is a block of text with a comment in front of it, `<!-- equation -->`. What is in such a block:

    y[t][i] = a[t] * sum over k of p[t][k] * q[i][k]        p: (tokens, dim)

Indices in brackets and a single letter after an underscore are lowered, `^` raises, a slash between spaces makes a
fraction, one without them stays in its line; `a b` and `a @ b` are products; `sum over`, `sqrt` and `|x|` become signs;
several words in a row stay words. Three spaces or more part an equation from what is said about it, in which only what
has an equals sign is set. Every name and number of a line comes out, in the order of the line (tests/test_book.py).
"""

import re
from html import escape

TOKEN = re.compile(
    r"(?P<space>\s*)(?:(?P<number>\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)|(?P<name>[A-Za-z]\w*(?:\.[a-z]\w*)?[~']?)|(?P<sign><=|\.\.\.|\.\.|\S))"
)
NOTE_GAP = re.compile(r" {3,}")
RELATIONS = {"=": "=", "<=": "≤", "..": "…", "...": "…", ",": ",", ":": ":"}
FACTORS = {"*": "⋅", ".": "⋅", "&": "&"}
GREEK = {"theta": "θ", "alpha": "α", "pi": "π"}
# What a font has to have: ASCII, the signs above and those below, and letters as a browser slants them.
FONT_SIGNS = [*range(0x20, 0x7F), *map(ord, "−⋅≤…∑∈√′θαπ→"), 0x210E, *range(0x1D434, 0x1D468), *range(0x1D6FC, 0x1D71C)]
END = ("", "", "")  # a token: its kind, its text, the space in front of it


class NotMathsError(Exception):
    """A piece of text that is no equation."""


def set_block(text: str) -> str:
    """The HTML of an equation block: a row of three cells per line, left side, right side and remark."""
    rows = [set_line(line) for line in text.splitlines() if line.strip()]
    return f'<div class="equation">{"".join(rows)}</div>'


def set_line(line: str) -> str:
    """One line as three cells of a grid."""
    first, *notes = NOTE_GAP.split(re.sub(r" +(<?=) +", r" \1 ", line.strip()))
    if first.endswith(":"):
        return f'<div class="said">{escape(first)} {" ".join(map(set_note, notes))}</div>'
    pieces = split_top(first)
    if len(pieces) > 1 and " = " not in pieces[0]:  # a, b = f(x)
        pieces[:2] = [", ".join(pieces[:2])]
    left, right = "", math(pieces[0])
    if cut := re.match(r"(.*?) (<?=) (.*)", pieces[0]):
        left, right = math(cut[1]), math(f"{cut[2]} {cut[3]}")
    right += "".join(f",&ensp;{set_piece(piece)}" for piece in pieces[1:])
    note = "&emsp;".join(map(set_note, notes))
    return f'<div class="left">{left}</div><div class="right">{right}</div><div class="note">{note}</div>'


def set_note(text: str) -> str:
    """A remark: text, in which equations and the names of shapes are set."""
    if shapes := re.fullmatch(r"((?:\w+, )*\w+): +(\(.*)", text):
        return f"{math(shapes[1])}: {set_note(shapes[2])}"
    parts = re.split(r"(; +)", text)
    return "".join(
        part if i % 2 else ", ".join(set_piece(piece) for piece in split_top(part)) for i, part in enumerate(parts)
    )


def set_piece(text: str) -> str:
    """An equation, or one more value of one; or text as it is."""
    if " = " in text or re.fullmatch(r"\w+\(.*\)", text):
        try:
            return math(text)
        except NotMathsError:
            pass
    return escape(text)


def split_top(text: str) -> list[str]:
    """The text cut at commas outside all brackets."""
    pieces, depth = [""], 0
    for part in re.split(r"(, +|[()\[\]])", text):
        depth += (part in ("(", "[")) - (part in (")", "]"))
        if part.startswith(", ") and depth == 0:
            pieces.append("")
        else:
            pieces[-1] += part
    return pieces


def math(text: str) -> str:
    """A MathML element. Raises NotMathsError."""
    return f'<math displaystyle="true">{Parser(text).whole()}</math>'


class Parser:
    """Recursive descent over one equation; each method returns MathML for what it has read."""

    def __init__(self, text: str):
        self.tokens = [(m.lastgroup or "", m[m.lastgroup or 0], m["space"]) for m in TOKEN.finditer(text)]
        self.at = 0
        self.in_line = False  # in an exponent, and below a line, fractions stay in their line
        self.in_bars = False  # the next bar closes

    def peek(self, ahead: int = 0) -> tuple[str, str, str]:
        i = self.at + ahead
        return self.tokens[i] if i < len(self.tokens) else END

    def take(self, wanted: str = "") -> str:
        text = self.peek()[1]
        if not text or (wanted and text != wanted):
            raise NotMathsError(f"{wanted or 'more'} expected, not {text or 'the end'}")
        self.at += 1
        return text

    def whole(self) -> str:
        out = self.relation()
        if self.peek() != END:
            raise NotMathsError(f"{self.peek()[1]} is left")
        return out

    def relation(self) -> str:
        out = sign(RELATIONS[self.take()]) if self.peek()[1] in ("=", "<=") else ""
        out += self.sum()
        while self.peek()[1] in RELATIONS:
            out += sign(RELATIONS[self.take()]) + self.sum()
        return out

    def sum(self) -> str:
        out = ""
        if self.peek()[1] in ("-", "+"):
            out = f'<mo form="prefix">{"−" if self.take() == "-" else "+"}</mo>'
        out += self.term()
        while self.peek()[1] in ("-", "+"):
            out += sign("−" if self.take() == "-" else "+") + self.term()
        return out

    def term(self) -> str:
        """Factors side by side or with signs between them; what stands in front of ` / ` is all above the line."""
        if self.begins_big_sum():
            return self.big_sum() + self.term()
        start = self.at
        out = self.power()
        while True:
            kind, text, space = self.peek()
            if text == "/" and space and not self.in_line:
                above = self.without_brackets(start, out)
                self.take()
                line, before, self.in_line = self.at, self.in_line, True
                below = self.without_brackets(line, self.power())
                self.in_line = before
                out = f"<mfrac>{row(above)}{row(below)}</mfrac>"
            elif text == "/":
                self.take()
                out += "<mo lspace='0' rspace='0'>/</mo>" + self.power()
            elif text in FACTORS:
                self.take()
                out += sign(FACTORS[text]) + (self.term() if self.begins_big_sum() else self.power())
            elif text == "@":
                self.take()
                out += THIN + self.power()
            elif kind in ("name", "number") or text in ("(", "[") or (text == "|" and not self.in_bars):
                out += (THIN if space else "") + self.power()
            else:
                return out

    def without_brackets(self, start: int, out: str) -> str:
        """`out`, the tokens from `start` to here, without the brackets around all of it: the fraction's line does."""
        depth = 0
        for i in range(start, self.at):
            depth += {"(": 1, ")": -1}.get(self.tokens[i][1], 0)
            if depth == 0:
                break
        whole = depth == 0 and i == self.at - 1 and self.tokens[start][1] == "("
        return re.sub(r"^<mrow><mo[^>]*>\(</mo>|<mo[^>]*>\)</mo></mrow>$", "", out) if whole else out

    def begins_big_sum(self) -> bool:
        return self.peek()[1] == "sum" and self.peek(1)[1] in ("over", "of")

    def big_sum(self) -> str:
        """`sum over k of`, `sum over k in g of`, `sum of`."""
        self.take("sum")
        below = ""
        if self.peek()[1] == "over":
            self.take()
            while self.peek()[1] != "of":
                word = self.take()
                below += sign("∈") if word == "in" else (THIN if below.endswith("</mi>") else "") + name(word)
        self.take("of")
        return f"<munder><mo>∑</mo>{row(below)}</munder>" if below else "<mo>∑</mo>"

    def power(self) -> str:
        out = self.indexed()
        while self.peek()[1] == "^":
            self.take()
            before, self.in_line = self.in_line, True
            if self.peek()[1] == "(":
                self.take()
                raised = self.relation()
                self.take(")")
            else:
                raised = '<mo form="prefix">−</mo>' if self.peek()[1] == "-" and self.take() else ""
                raised += self.atom()
            self.in_line = before
            out = f"<msup>{row(out)}{row(raised)}</msup>"
        return out

    def indexed(self) -> str:
        """An atom with its indices `[t][k]`."""
        out, indices = self.atom(), []
        while self.peek()[1] == "[" and not self.peek()[2]:
            self.take()
            indices.append(self.relation())
            self.take("]")
        return f"<msub>{row(out)}{row(sign(',').join(indices))}</msub>" if indices else out

    def atom(self) -> str:
        if words := self.words():
            said = f"<mtext>{escape(words)}</mtext>"
            return said + THIN + self.term() if words.endswith((" to", " of")) else said
        kind, text, _ = self.peek()
        if kind == "number":
            return f"<mn>{self.take()}</mn>"
        if kind == "name":
            self.take()
            if text == "sqrt" and self.peek()[1] == "(":
                self.take()
                under = self.relation()
                self.take(")")
                return f"<msqrt>{under}</msqrt>"
            following, space = self.peek()[1:]
            if not space and (following == "(" or (following == "|" and not self.in_bars)):
                return name(text) + self.atom()
            return name(text)
        if text == "(":
            self.take()
            before, self.in_bars = self.in_bars, False
            inner = self.relation()
            self.in_bars = before
            self.take(")")
            return bracketed(inner)
        if text == "|" and not self.in_bars:
            self.take()
            self.in_bars = True
            inner = self.sum()
            self.in_bars = False
            self.take("|")
            return row(
                f'<mo fence="true" form="prefix" stretchy="true">|</mo>{inner}'
                '<mo fence="true" form="postfix" stretchy="true">|</mo>'
            )
        raise NotMathsError(f"{text or 'the end'} begins nothing")

    def words(self) -> str:
        """Words that stand side by side are no product: `bytes of weights`."""
        taken: list[str] = []
        while self.is_word(len(taken)) or (
            taken and is_letter(self.peek(len(taken))[1]) and self.is_word(len(taken) + 1)
        ):
            taken.append(self.peek(len(taken))[1])
        if len(taken) < 2:
            return ""
        self.at += len(taken)
        return " ".join(taken)

    def is_word(self, ahead: int) -> bool:
        kind, text, _ = self.peek(ahead)
        following, space = self.peek(ahead + 1)[1:]
        applied = following in ("(", "[", "^") or (following == "|" and not self.in_bars)
        return (
            kind == "name"
            and re.fullmatch(r"[A-Za-z]+", text) is not None
            and not is_symbol(text)
            and (bool(space) or not applied)
        )


THIN = '<mspace width="0.2em"/>'


def is_letter(text: str) -> bool:
    """A single small letter."""
    return re.fullmatch("[a-z]", text) is not None


def is_symbol(text: str) -> bool:
    """A letter, alone or with one more as its index: W, Wq, xq; or a Greek one."""
    return len(text) == 1 or re.fullmatch(r"W[a-z]|xq", text) is not None or text in GREEK


def name(text: str) -> str:
    """A name, with what is lowered in it: angle_i, Wq."""
    if low := re.fullmatch(r"(\w+)_([a-z])|(W|x)([a-z])", text):
        return f"<msub>{name(low[1] or low[3])}<mi>{low[2] or low[4]}</mi></msub>"
    if text[-1] in "'~":
        bare = name(text[:-1])
        return (
            f"<msup>{bare}<mo>′</mo></msup>" if text[-1] == "'" else f'<mover>{bare}<mo stretchy="false">~</mo></mover>'
        )
    return f"<mi>{GREEK.get(text, text)}</mi>"


def sign(text: str) -> str:
    """An operator."""
    return f"<mo>{escape(text)}</mo>"


def bracketed(inner: str) -> str:
    """Brackets that grow only with fractions and big sums: an index alone would make them too tall."""
    grows = str("<mfrac>" in inner or "<munder>" in inner).lower()
    return row(f'<mo stretchy="{grows}">(</mo>{inner}<mo stretchy="{grows}">)</mo>')


def row(inner: str) -> str:
    """Several elements as one."""
    return f"<mrow>{inner}</mrow>"
