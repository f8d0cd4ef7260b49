"""engine/text/ and export/tokenizer.py against Hugging Face `tokenizers`, id for id.

The real Llama 3 vocabulary and the real chat templates are not in the repository. With MODEL_FAMILY_DATA set
to a folder that holds llama-3.2/tokenizer.model, llama-3.2/chat_template.jinja and qwen3/chat_template.jinja,
the tests that need them run as well.
"""

import base64
import functools
import itertools
import json
import os
import random
import re
import shutil
import struct
import subprocess
import sys
import unicodedata
import warnings
from collections.abc import Iterable
from pathlib import Path

import pytest
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
from export.chat_template import (  # noqa: E402
    DROP_THOUGHTS,
    FOLD_SYSTEM,
    STRIP_ANSWER,
    TRIM_ASSISTANT,
    TURNS_ONLY,
    NotLiteralError,
    Renderer,
    chat_template,
)
from export.tokenizer import GPT2_PATTERN, pcre2_pattern, tokenizer_section  # noqa: E402
from tests.helpers import FULL, some_of  # noqa: E402

CONTRACTIONS_AND_LETTERS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA_PATTERN = CONTRACTIONS_AND_LETTERS + r"\p{N}{1,3}" + REST
QWEN_PATTERN = CONTRACTIONS_AND_LETTERS + r"\p{N}" + REST

LEVEL = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
GPT2_LEVEL = LEVEL | {"use_regex": True}


def split(pattern: str | dict, behavior: str = "Isolated", invert: bool = False) -> dict:
    regex = pattern if isinstance(pattern, dict) else {"Regex": pattern}
    return {"type": "Split", "pattern": regex, "behavior": behavior, "invert": invert}


def digits(individual: bool) -> dict:
    return {"type": "Digits", "individual_digits": individual}


UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
O200K_WORDS = "|".join(
    rf"[^\r\n\p{{L}}\p{{N}}]?{UPPER}{upper}{LOWER}{lower}(?i:'s|'t|'re|'ve|'m|'ll|'d)?" for upper, lower in ("*+", "+*")
)
# The `pre_tokenizer` of real models, as the steps of a Sequence.
REAL_PRE_TOKENIZERS = {
    "llama-3": [split(LLAMA_PATTERN), LEVEL],
    "qwen3": [split(QWEN_PATTERN), LEVEL],
    "gpt-2": [GPT2_LEVEL],
    "smollm2": [digits(True), GPT2_LEVEL],  # StarCoder2, Granite code, Command R, too
    "digits-together": [digits(False), GPT2_LEVEL],
    "phi-4": [split(LLAMA_PATTERN, "Removed", invert=True), LEVEL],  # and others made of a tiktoken vocabulary
    "deepseek-v3": [
        split(r"\p{N}{1,3}"),
        split("[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"),
        split(
            r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
            r"| ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
        ),
        LEVEL,
    ],
    "deepseek-coder": [
        split("[\r\n]"),
        split(r"\s?\p{L}+"),
        split(r"\s?\p{P}+"),
        split("[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"),
        digits(True),
        LEVEL,
    ],
    "o200k": [split(O200K_WORDS + r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"), LEVEL],
    "qwen3.5": [split(QWEN_PATTERN.replace(r"\p{L}+", r"[\p{L}\p{M}]+").replace(r"\s\p{L}", r"\s\p{L}\p{M}")), LEVEL],
    "gaps-dropped": [split(r"\p{L}+| \p{N}", "Removed", invert=True), split("[aeiou]"), LEVEL],
}

FAMILY_DATA = os.environ.get("MODEL_FAMILY_DATA")
needs_family_data = pytest.mark.skipif(
    not FAMILY_DATA, reason="needs the tokenizer files of Llama 3 and Qwen3: MODEL_FAMILY_DATA=FOLDER make test"
)

# ----------------------------------------------------------------------------
# The two sides


@pytest.fixture(scope="session")
def tool() -> Path:
    """build/tokenize_tool, built if it is not there or older than its sources."""
    path = ROOT / "build" / "tokenize_tool"
    sources = [ROOT / "tests" / "tokenize_tool.cpp", *(ROOT / "engine" / "text").glob("*.h")]
    if path.exists() and path.stat().st_mtime >= max(s.stat().st_mtime for s in sources):
        return path
    if shutil.which("make"):
        subprocess.run(["make", "build/tokenize_tool"], cwd=ROOT, check=True)
    else:
        path.parent.mkdir(exist_ok=True)
        command = [os.environ.get("CXX", "g++"), "-std=c++20", "-O2", "-Wall", "-Wextra", "-Wshadow", "-Werror"]
        command += ["-DENGINE", f"-I{ROOT}", str(sources[0]), "-o", str(path), "-lpcre2-8", "-lutf8proc"]
        subprocess.run(command, check=True)
    return path


class Pair:
    """The same tokenizer twice: `hf` in `tokenizers`, `section` for the tool."""

    def __init__(self, hf_dir: Path, work: Path, tool: Path, vocab_size: int | None = None):
        self.hf = Tokenizer.from_file(str(hf_dir / "tokenizer.json"))
        self.vocab_size = vocab_size or max(self.hf.get_vocab().values()) + 1
        self.section = work / "section.bin"
        self.section.write_bytes(tokenizer_section(hf_dir, self.vocab_size))
        self.tool = tool
        self.config = {}
        if (hf_dir / "tokenizer_config.json").exists():
            self.config = json.loads((hf_dir / "tokenizer_config.json").read_text())

    def run(self, stdin: bytes, *options: str) -> bytes:
        command = [str(self.tool), str(self.section), str(self.vocab_size), *options]
        done = subprocess.run(command, input=stdin, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        return done.stdout

    def encode(self, texts: list[bytes], bos: bool = False) -> list[list[int]]:
        stdin = b"".join(struct.pack("<I", len(t)) + t for t in texts)
        out = self.run(stdin, *(["--bos"] if bos else []))
        return [list(struct.unpack(f"<{len(item) // 4}i", item)) for item in items(out, 4)]

    def decode(self, ids: list[list[int]]) -> list[bytes]:
        stdin = b"".join(struct.pack(f"<I{len(i)}i", len(i), *i) for i in ids)
        return items(self.run(stdin, "--decode"), 1)

    def hf_encode(self, texts: list[bytes], bos: bool = False) -> list[list[int]]:
        decoded = [t.decode("utf-8", errors="replace") for t in texts]
        return [e.ids for e in self.hf.encode_batch_fast(decoded, add_special_tokens=bos)]

    def check(self, texts: list[bytes], bos: bool = False) -> None:
        ours, theirs = self.encode(texts, bos), self.hf_encode(texts, bos)
        assert len(ours) == len(texts)
        wrong = [i for i in range(len(texts)) if ours[i] != theirs[i]]
        shown = [(texts[i][:200], ours[i][:50], theirs[i][:50]) for i in wrong[:5]]
        assert not wrong, f"{len(wrong)} of {len(texts)} strings differ: {shown}"


def items(data: bytes, size: int) -> list[bytes]:
    """Splits counted items of `size` bytes."""
    found, at = [], 0
    while at < len(data):
        (n,) = struct.unpack_from("<I", data, at)
        found.append(data[at + 4 : at + 4 + n * size])
        at += 4 + n * size
    return found


# ----------------------------------------------------------------------------
# Tokenizers


def byte_names() -> list[str]:
    """byte -> its character in GPT-2's alphabet (its encoder.py): printable ones stay, others follow U+0100."""
    names, n = [], 0
    for b in range(256):
        if 0x21 <= b <= 0x7E or 0xA1 <= b <= 0xAC or b >= 0xAE:
            names.append(chr(b))
        else:
            names.append(chr(256 + n))
            n += 1
    return names


NAMES = byte_names()


def save(tokenizer: Tokenizer, folder: Path, **config: object) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def byte_level(tokenizer: Tokenizer, pattern: str | None) -> Tokenizer:
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    steps = [pre_tokenizers.Split(Regex(pattern), "isolated"), level] if pattern else [level]
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(steps)
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def pairs_tokenizer(pattern: str | None, seed: int = 1, paired: Iterable[int] = range(256)) -> Tokenizer:
    """Every pair of bytes (those in `paired`) is a token, made by a merge. The ids show where the text was cut.

    Not every cut: bc may not merge in abcd, cut in the middle or not. In another order of the merges it does.
    """
    vocab = {name: b for b, name in enumerate(NAMES)}
    merges = [(NAMES[a], NAMES[b]) for a in paired for b in paired]
    random.Random(seed).shuffle(merges)
    vocab |= {a + b: 256 + i for i, (a, b) in enumerate(merges)}
    return byte_level(Tokenizer(models.BPE(vocab=vocab, merges=merges)), pattern)


def llama3_tokenizer(model_file: Path) -> Tokenizer:
    """Llama 3's tokenizer from its tiktoken ranks (lines of base64 token and rank).

    tiktoken merges two neighbours when their concatenation is a token, lowest rank of the result first. As
    pairs that is: for each token, by rank, every split of it into two tokens.
    """
    lines = (line.split() for line in model_file.read_text().splitlines())
    ranks = {base64.b64decode(token): int(rank) for token, rank in lines}
    names = {token: "".join(NAMES[b] for b in token) for token in ranks}
    merges = []
    for token in sorted(ranks, key=ranks.__getitem__):
        splits = [(token[:i], token[i:]) for i in range(1, len(token))]
        splits = [(a, b) for a, b in splits if a in ranks and b in ranks]
        merges += [(names[a], names[b]) for a, b in sorted(splits, key=lambda s: (ranks[s[0]], ranks[s[1]]))]
    vocab = {names[token]: rank for token, rank in ranks.items()}
    tokenizer = byte_level(Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True)), LLAMA_PATTERN)
    named = {0: "begin_of_text", 1: "end_of_text", 6: "start_header_id", 7: "end_header_id", 8: "eom_id", 9: "eot_id"}
    special = [f"<|{named.get(i, f'reserved_special_token_{i}')}|>" for i in range(256)]
    tokenizer.add_special_tokens(special)
    template = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        pair="<|begin_of_text|> $A <|begin_of_text|>:1 $B:1",
        special_tokens=[("<|begin_of_text|>", 128000)],
    )
    tokenizer.post_processor = processors.Sequence([processors.ByteLevel(trim_offsets=False), template])
    return tokenizer


@pytest.fixture(scope="session", params=["tiny-llama", "tiny-qwen3", pytest.param("llama-3", marks=needs_family_data)])
def pair(request: pytest.FixtureRequest, tool: Path, tmp_path_factory: pytest.TempPathFactory) -> Pair:
    work = tmp_path_factory.mktemp(request.param)
    if request.param != "llama-3":
        hf_dir = ROOT / "models" / request.param
        return Pair(hf_dir, work, tool)
    folder = Path(FAMILY_DATA) / "llama-3.2"
    template = (folder / "chat_template.jinja").read_text()
    hf = llama3_tokenizer(folder / "tokenizer.model")
    assert hf.token_to_id("<|eot_id|>") == 128009
    return Pair(save(hf, work, bos_token="<|begin_of_text|>", chat_template=template), work, tool, 128256)


# ----------------------------------------------------------------------------
# Strings

WORDS = ["the", "The", "a", "I", "don't", "DON'T", "we'LL", "you’re", "it'ſ", "they'Ve", "O'Reilly"]
WORDS += ["naïve", "café", "Straße", "ΣΊΣΥΦΟΣ", "hello", "world"]
PIECES = [
    *" \n\t\r\v\f\0\x1c\x85\xa0\u1680\u180e\u2009\u200b\u2028\u202f\u205f\u3000\ufeff",
    *["  ", "   ", "\n\n", "\r\n", " \n ", "\t\t", "...", "!!!", "?!", "--", "==", "/*", "*/", "://", "<|", "|>", "#"],
    *["0", "12", "345", "6789", "1234567", "٣٤", "一二三", "½", "Ⅷ", "3.14", "1,000"],
    *["'s", "'S", "'t", "'RE", "'ve", "'M", "'ll", "'LL", "'d", "'ſ", "’s", "''", "'", '"'],
    *["e\u0301", "é", "a\u0323\u0302", "a\u0302\u0323", "A\u030a", "\u212b", "\u0344", "\u0958", "\u1e9b\u0323"],
    *["\u1100\u1161\u11a8", "\uac00\u11a8", "각", "한국어", "ㄱㅏ", "中文", "日本語"],
    *["ไทย", "हिन्दी", "עִבְרִית", "العربية"],
    *["👍", "👍🏽", "👨‍👩‍👧‍👦", "🇩🇪", "❤️", "🏴\U000e0067\U000e0062\U000e007f"],
    *["\U00011935\U00011930", "\U00011938", "\u0b47\u0b56", "\u07fd\u0301", "\U0001e2ae", "\U00010d40", "\U0001e5d0"],
]
BAD_BYTES = [
    *[bytes([b]) for b in (0x80, 0xBF, 0xC0, 0xC1, 0xC3, 0xE2, 0xF0, 0xF4, 0xF5, 0xFF)],
    *[b"\xe2\x82", b"\xf0\x9f", b"\xf0\x9f\x98"],
    *[b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xe0\x80\x80", b"\xc3\xc3\xa9"],
]


def random_strings(seed: int, n: int, added: list[str]) -> list[bytes]:
    """Strings of up to 30 pieces of every kind above, random code points, words, added tokens, bad bytes."""
    rng = random.Random(seed)

    def code_point() -> str:
        high = rng.choice([0x80, 0x250, 0x800, 0x3000, 0x10000, 0x20000, 0x32400, 0x110000])
        c = rng.randrange(high)
        return chr(c) if not 0xD800 <= c < 0xE000 else "\ufffd"

    def piece(kind: int) -> bytes:
        if kind < 4:
            return (rng.choice(["", " ", " ", " ", "  ", "\n"]) + rng.choice(WORDS)).encode()
        if kind < 7:
            return rng.choice(PIECES).encode()
        if kind == 7:
            return code_point().encode()
        if kind == 8:
            text = rng.choice(added) if added else "<none>"
            return rng.choice([text, text[:-1], text[1:], " " + text + " ", text * 2]).encode()
        if kind == 9:
            return rng.choice([piece(rng.randrange(9))] * 3 + [b" ", b"a", b"\n"]) * rng.randrange(1, 12)
        return rng.choice(BAD_BYTES)

    # One string in four has bad bytes: in the others, more that is next to each other survives.
    return [
        b"".join(piece(rng.randrange(11 if rng.random() < 0.25 else 10)) for _ in range(rng.randrange(30)))
        for _ in range(n)
    ]


FIXED_STRINGS = [
    b"",
    b" ",
    b"a",
    b"\n",
    b"Hello, world! It's 2024.",
    b" " * 1000,
    b"\n" * 1000 + b"x",
    b" " * 100 + b"x" + b" " * 100,
    b"a" * 20000,
    b"ab " * 5000,
    "é".encode() * 3000,
    "e\u0301".encode() * 3000,
    ("a" + "\u0301\u0323" * 500).encode(),
    "😀".encode() * 1000,
    bytes(range(256)),
    bytes(range(255, -1, -1)) * 3,
    b"0123456789" * 300,
    b"!" * 5000,
]


def added_contents(hf: Tokenizer) -> list[str]:
    contents = sorted(t.content for t in hf.get_added_tokens_decoder().values())
    return contents[:40]


def test_ids_of_random_strings(pair: Pair) -> None:
    texts = FIXED_STRINGS + random_strings(2024, 25000 if FULL else 3000, added_contents(pair.hf))
    pair.check(texts)


def test_ids_with_bos(pair: Pair) -> None:
    texts = FIXED_STRINGS + random_strings(7, 500, added_contents(pair.hf))
    pair.check(texts, bos=True)


def test_long_runs(pair: Pair) -> None:
    """Neither the regular expression nor the merging may be quadratic, or run out of a stack."""
    rng = random.Random(3)
    texts = [
        b" " * 1_000_000,
        b" " * 1_000_000 + b"x",
        b"\n" * 300_000,
        b"x" * 300_000,
        bytes(rng.choice(b"abcdefgh") for _ in range(100_000)),
        "中".encode() * 100_000,
        b"'" * 100_000,
        b"\xff" * 100_000,
    ]
    pair.check(texts)


@pytest.mark.parametrize("name", ["llama", "qwen", "gpt2"])
def test_long_texts_of_every_kind_of_character(name: str, tool: Path, tmp_path: Path) -> None:
    """No real pattern runs out of steps, and each cuts as in `tokenizers` also behind what it tries first.

    Of Llama's pattern, which has the most choices, a million characters; of the others a tenth, but with FULL=1.
    """
    hf = pairs_tokenizer({"llama": LLAMA_PATTERN, "qwen": QWEN_PATTERN, "gpt2": GPT2_PATTERN}[name])
    rng = random.Random(9)
    n = 1000 if name == "llama" or FULL else 100
    mixed = "".join(rng.choice(" \n\ra7-A'é中\u3000") * rng.choice([1, 2, 3, 200]) for _ in range(20 * n))
    texts = [c * (1000 * n) for c in " a\n"] + ["7" * 1_000_000, (" " * 999 + "x") * n, mixed]
    texts += [" " * (500 * n) + "\n" * (500 * n) + "x"]
    texts += [("-" * length + " " * length + "a") * 2 for length in range(120, 140)]
    Pair(save(hf, tmp_path), tmp_path, tool).check([t.encode() for t in texts])


def test_marks_in_any_order(tool: Path, tmp_path: Path) -> None:
    """Long runs of marks in NFC: equal to `tokenizers`, and to Python for marks that Unicode 3.2 had (UAX #15)."""
    hf = pairs_tokenizer(None)
    hf.normalizer = normalizers.NFC()
    old = unicodedata.ucd_3_2_0
    rng = random.Random(10)
    marks = [c for c in map(chr, range(0x32400)) if old.combining(c)]
    above, below = "\u0301", "\u0323"
    texts = ["a" + above * 20_000 + below * 20_000, "e" + (above + below) * 20_000]
    texts += ["ẹ" + "".join(sorted(marks * 9, key=lambda c: (-old.combining(c), c)))]
    texts += ["".join(rng.choice("aeẹ각") + "".join(rng.choices(marks, k=rng.choice([1, 50, 3000]))) for _ in range(9))]
    # Python's own way takes the square of a run's length, so that the longest are compared with it by parts.
    parts = [t[:4000] + t[20_000:24_000] for t in texts[:2]] + texts[2:]
    assert all(hf.normalizer.normalize_str(t) == unicodedata.normalize("NFC", t) for t in (texts if FULL else parts))
    Pair(save(hf, tmp_path), tmp_path, tool).check([t.encode() for t in texts])


def test_every_token_round_trips(pair: Pair) -> None:
    """The bytes of every token are those that `tokenizers` decodes it to."""
    ids = [[i] for i in range(pair.vocab_size)]
    theirs = pair.hf.decode_batch(ids, skip_special_tokens=False)
    assert pair.decode(ids) == [t.encode() for t in theirs]


def test_decoding_round_trips(pair: Pair) -> None:
    texts = random_strings(11, 3000, added_contents(pair.hf))
    ids = pair.encode(texts)
    decoded = pair.decode(ids)
    assert decoded == [t.encode() for t in pair.hf.decode_batch(ids, skip_special_tokens=False)]
    for text, back in zip(texts, decoded, strict=True):
        expected = text.decode("utf-8", errors="replace")
        if pair.hf.normalizer is not None:  # normalizing reaches from one added token to the next
            assert unicodedata.normalize("NFD", back.decode()) == unicodedata.normalize("NFD", expected)
        else:
            assert back.decode() == expected


# ----------------------------------------------------------------------------
# Unicode, one code point at a time


@functools.cache
def code_points() -> list[str]:
    """All characters up to where assignments end, the tags of plane 14, and every 61st of the rest.

    Of a run of 500 and more that have the same category (ideographs, Hangul, private use), all with FULL=1, otherwise
    the 16 at each end and one in ten of those between. But all of what is not assigned below U+20000, where each newer
    Unicode has some more scripts; behind it come ideographs, by whole blocks.
    """
    dense = []
    for kind, run in itertools.groupby(
        [*range(0x32400), *range(0xE0000, 0xE0200)], lambda c: unicodedata.category(chr(c))
    ):
        same = list(run)
        whole = len(same) < 500 or (kind == "Cn" and same[0] < 0x20000)
        dense += same if whole else [*same[:16], *some_of(same[16:-16], seed=same[0]), *same[-16:]]
    sparse = [*range(0x32400, 0xE0000, 61), *range(0xE0200, 0x110000, 61)]
    return [chr(c) for c in dense + sparse if not 0xD800 <= c < 0xE000]


def joined(texts: list[str], n: int = 32) -> list[bytes]:
    """n texts to a line each, in one string: fewer and longer strings go faster through `tokenizers`."""
    return ["\n".join(texts[i : i + n]).encode() for i in range(0, len(texts), n)]


def real_pre_tokenizer(name: str, seed: int = 1, paired: Iterable[int] = range(256)) -> Tokenizer:
    data = json.loads(pairs_tokenizer(None, seed, paired).to_str())
    data["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": REAL_PRE_TOKENIZERS[name]}
    return Tokenizer.from_str(json.dumps(data))


@pytest.mark.parametrize("name", ["llama-3", "qwen3", "gpt-2", "smollm2", "deepseek-v3", "o200k"])
def test_every_code_point(name: str, tool: Path, tmp_path: Path) -> None:
    """Each code point among letters, digits, spaces and marks is split and normalized as in `tokenizers`.

    Inside of long runs of one category one in ten, but with FULL=1: code_points(). Of all patterns but Llama's and
    Qwen's only what is below U+3400, which has each category, but with FULL=1.
    """
    hf = real_pre_tokenizer(name)
    some = code_points() if FULL or name in ("llama-3", "qwen3") else [c for c in code_points() if c < "\u3400"]
    if name == "qwen3":
        hf.normalizer = normalizers.NFC()
        # Marks of low and high combining class on both sides show the class of the character between.
        texts = [f"a\u0334{c}\u0301 e\u0345{c}\u0334{unicodedata.normalize('NFD', c)}" for c in some]
    else:
        texts = [f"a{c}1{c} {c}\n{c}'{c}.{c}{c} " for c in some]
    Pair(save(hf, tmp_path), tmp_path, tool).check(joined(texts))


# One character or more of each kind that a pre-tokenizer can tell apart.
CLASSES = [
    *["a", "s", "S", "\u00e9", "\u4e2d", "\u01c5", "\u02b0"],  # letters: ASCII, accented, other, title case, modifier
    *["1", "\u0663", "\u00bd", "\u2167"],  # Nd (ASCII and not), No, Nl
    *[" ", "\n", "\r", "\t", "\u00a0", "\u0085", "\u180e"],  # the last is no space to Oniguruma
    *["'", ".", "$", "\u3002", "\U0001f44d"],  # punctuation, symbols
    *["\u0301", "\u200d", "\0"],  # a mark, a format character, a control character
]


@pytest.mark.parametrize("name", REAL_PRE_TOKENIZERS)
def test_every_short_string(name: str, tool: Path, tmp_path: Path) -> None:
    """All strings of up to 3 characters of every kind, of 4 of the kinds that patterns look for; random longer ones."""
    texts = ["".join(t) for n in range(4) for t in itertools.product(CLASSES, repeat=n)]
    texts += ["".join(t) for t in itertools.product("as\u4e2d1 \n'.", repeat=4)]
    rng = random.Random(8)
    texts += ["".join(rng.choices([*CLASSES, *" as1"], k=rng.randrange(5, 16))) for _ in range(3000)]
    for seed in (1, 2) if FULL else (1,):
        work = tmp_path / str(seed)
        hf = real_pre_tokenizer(name, seed, set("".join(CLASSES).encode()))
        pair = Pair(save(hf, work), work, tool)
        pair.check([t.encode() for t in texts])


@pytest.mark.parametrize("name", ["smollm2", "deepseek-v3", "deepseek-coder", "o200k"])
def test_long_runs_by_real_pre_tokenizers(name: str, tool: Path, tmp_path: Path) -> None:
    runs = [" ", "\n", "a", "A", "\u01c5", "\u4e2d", "1", ".", "$", "\u0301", "'", "\0", " a", "1 ", "a1"]
    n = 30_000 if FULL else 5_000
    texts = [(run * n + end).encode() for run in runs for end in ("", "x", " \n")]
    hf = real_pre_tokenizer(name, paired=set("".join(CLASSES).encode()))
    Pair(save(hf, tmp_path), tmp_path, tool).check(texts)


def test_one_pattern_that_does_what_two_steps_do(tool: Path, tmp_path: Path) -> None:
    """SmolLM2's two steps as one pattern: digits alone, and blanks in front of a digit all in one word."""
    paired = set("".join(CLASSES).encode())
    composed = GPT2_PATTERN.replace(r" ?\p{N}+", r"\p{N}").replace(r"\s+(?!\S)", r"\s+(?=\p{N})|\s+(?!\S)")
    two = Pair(save(real_pre_tokenizer("smollm2", paired=paired), tmp_path / "two"), tmp_path / "two", tool)
    one = Pair(save(pairs_tokenizer(composed, paired=paired), tmp_path / "one"), tmp_path / "one", tool)
    texts = ["".join(t).encode() for n in range(4) for t in itertools.product(CLASSES, repeat=n)]
    assert one.encode(texts) == two.encode(texts)


def test_canonical_pairs(tool: Path, tmp_path: Path) -> None:
    """Every pair of characters that may compose, split by marks and not."""
    hf = pairs_tokenizer(None)
    hf.normalizer = normalizers.NFC()
    texts = []
    for c in map(chr, range(0x110000)):
        parts = unicodedata.decomposition(c)
        if parts and not parts.startswith("<"):
            text = "".join(chr(int(p, 16)) for p in parts.split())
            texts += [text, f"x{text}\u0301", c + "\u0334", *(mark.join(text) for mark in "\u0334\u0301\u200d")]
    rng = random.Random(4)
    marks = [chr(c) for c in range(0x32400) if unicodedata.combining(chr(c))]
    texts += ["".join(rng.choices(["a", "e", "\u0b47", "각", "가", *marks], k=8)) for _ in range(20000)]
    Pair(save(hf, tmp_path), tmp_path, tool).check(joined(texts, 4))


# ----------------------------------------------------------------------------
# Added tokens


@pytest.mark.parametrize("nfc", [False, True])
def test_added_token_flags(nfc: bool, tool: Path, tmp_path: Path) -> None:
    hf = pairs_tokenizer(LLAMA_PATTERN)
    if nfc:
        hf.normalizer = normalizers.NFC()
    tokens = [
        AddedToken("<a>", lstrip=True, normalized=False, special=True),
        AddedToken("<a>b", rstrip=True, normalized=False),
        AddedToken("<a", normalized=False),
        AddedToken("b>", lstrip=True, rstrip=True, normalized=False),
        AddedToken("w", single_word=True, normalized=False),
        AddedToken("ww", single_word=True, lstrip=True, rstrip=True, normalized=True),
        AddedToken("w-", normalized=True),
        AddedToken(" c", normalized=False),
        AddedToken("\n", rstrip=True, normalized=True),
        AddedToken("e\u0301", normalized=True),
        AddedToken("\u212b", single_word=True, normalized=True),
        AddedToken("中", normalized=False, special=True, single_word=True),
    ]
    for token in tokens:
        (hf.add_special_tokens if token.special else hf.add_tokens)([token])
    rng = random.Random(5)
    alphabet = ["<a>", "<a>b", "<a", "b>", "ww", " c", "  ", "\n", "e\u0301", *"abcw<>-_ \u3000\x85\x1c\u180e"]
    alphabet += [*"éÅ中١\u212b\u0301\u200d\u24b6\U00011f02"]
    texts = ["".join(rng.choices(alphabet, k=rng.randrange(1, 12))).encode() for _ in range(20000 if FULL else 5000)]
    pair = Pair(save(hf, tmp_path), tmp_path, tool, vocab_size=256 + 65536 + 100)
    pair.check(texts)
    # Which characters single_word takes for parts of words.
    pair.check(joined([f"{c}w{c} {c} w" for c in code_points() if FULL or not nfc]))


# ----------------------------------------------------------------------------
# Forms of tokenizer.json


def small_json(**changes: object) -> dict:
    """A sound tokenizer.json as a dict; `changes` maps paths, keys and indices joined by __, to new values."""
    vocab = {name: i for i, name in enumerate([*NAMES, "he", "ll", "hell"])}
    hf = byte_level(Tokenizer(models.BPE(vocab=vocab, merges=[("h", "e"), ("l", "l"), ("he", "ll")])), LLAMA_PATTERN)
    hf.normalizer = normalizers.NFC()
    hf.add_special_tokens(["<s>"])
    hf.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 259)])
    data = json.loads(hf.to_str())
    for path, value in changes.items():
        *parents, last = path.split("__")
        target: object = data
        for parent in parents:
            target = target[int(parent) if parent.isdigit() else parent]
        target[int(last) if last.isdigit() else last] = value
    return data


def write_json(folder: Path, data: dict) -> Path:
    (folder / "tokenizer.json").write_text(json.dumps(data))
    return folder


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"model__merges": ["h e", "l l", "he ll"]},
        {"model__merges": ["#version: 0.2", "h e", "l l", "he ll", "h e"]},
        {"model__merges": [["l", "l"], ["h", "e"], ["he", "ll"], ["l", "l"]]},
        {"model__unk_token": "<s>"},
        {"model__continuing_subword_prefix": "", "model__end_of_word_suffix": ""},
        {"model__ignore_merges": True, "model__merges": []},
        {"normalizer": None},
        {"normalizer": {"type": "Sequence", "normalizers": [{"type": "NFC"}]}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}},
        {"pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}},
        {"post_processor": None},
        {"pre_tokenizer__pretokenizers__0__pattern__Regex": r"l{1,2}|\p{L}*|\s(?=x)|[^\p{M}a-c]"},
        {"pre_tokenizer__pretokenizers__0__pattern__Regex": r"(?:h|el)?|\P{L}"},
    ],
)
def test_forms(changes: dict, tool: Path, tmp_path: Path) -> None:
    pair = Pair(write_json(tmp_path, small_json(**changes)), tmp_path, tool, vocab_size=300)
    text = "hello hell<s>helllo, he ll e\u0301 x 12 bcx".encode()
    pair.check([text, *random_strings(1, 300, ["hello", "hell", "<s>"])], bos=True)


PATTERN = "pre_tokenizer__pretokenizers__0__pattern__Regex"
REFUSED = [
    ({"model__type": "WordPiece"}, "model.type", "WordPiece"),
    ({"model__type": "Unigram", "model__vocab": [["a", 0.0]]}, "model.type", "Unigram"),
    ({"model__dropout": 0.1}, "model.dropout", "0.1"),
    ({"model__byte_fallback": True}, "model.byte_fallback", "true"),
    ({"model__continuing_subword_prefix": "##"}, "model.continuing_subword_prefix", "##"),
    ({"model__end_of_word_suffix": "</w>"}, "model.end_of_word_suffix", "</w>"),
    ({"model__unk_token": "he", "model__vocab": {"h": 0, "e": 1, "he": 2}, "model__merges": []}, "unk_token", "he"),
    ({"model__merges": [["h", "x y"]]}, "model.merges[0]", "x y"),
    ({"model__merges": ["h e l"]}, "model.merges[0]", "h e l"),
    ({"model__vocab__hell": 300}, "model.vocab", "300"),
    ({"model__vocab__hell": 257}, "model.vocab", "257"),
    ({"normalizer": {"type": "NFKC"}}, "normalizer.type", "NFKC"),
    ({"normalizer": {"type": "Sequence", "normalizers": [{"type": "Lowercase"}]}}, "normalizer.type", "Lowercase"),
    ({"pre_tokenizer": None}, "pre_tokenizer", "null"),
    ({"pre_tokenizer": {"type": "Whitespace"}}, "pre_tokenizer", "Whitespace"),
    ({"pre_tokenizer__pretokenizers": [{"type": "Punctuation"}, LEVEL]}, "pre_tokenizer.type", "Punctuation"),
    ({"pre_tokenizer__pretokenizers": [GPT2_LEVEL, digits(True), LEVEL]}, "pre_tokenizer.type", "Digits"),
    ({"pre_tokenizer__pretokenizers": [GPT2_LEVEL, digits(True)]}, "pre_tokenizer", "does not end in ByteLevel"),
    ({"pre_tokenizer__pretokenizers": [split("a")] * 17 + [LEVEL]}, "pre_tokenizer", "more than 16 steps"),
    ({"pre_tokenizer__pretokenizers": [split("a"), split(r"\d"), LEVEL]}, "pre_tokenizer.pattern", r"\\d"),
    ({"pre_tokenizer__pretokenizers__0__behavior": "Removed"}, "pre_tokenizer.behavior", "Removed"),
    ({"pre_tokenizer__pretokenizers__0__behavior": "Contiguous"}, "pre_tokenizer.behavior", "Contiguous"),
    ({"pre_tokenizer__pretokenizers__0__invert": True}, "pre_tokenizer.invert", "true"),
    ({"pre_tokenizer__pretokenizers__0__pattern": {"String": " "}}, "pre_tokenizer.pattern", "String"),
    ({"pre_tokenizer__pretokenizers__1__add_prefix_space": True}, "pre_tokenizer.add_prefix_space", "true"),
    ({PATTERN: r"\d+"}, "pre_tokenizer.pattern", r"\\d"),
    ({"decoder": {"type": "WordPiece"}}, "decoder", "WordPiece"),
    ({"post_processor": {"type": "BertProcessing"}}, "post_processor.type", "BertProcessing"),
    ({"post_processor__single": [{"Sequence": {"id": "A", "type_id": 0}}] * 2}, "post_processor.single", "Sequence"),
    ({"added_tokens__0__id": 270}, "added_tokens[0].id", "270"),
    ({"added_tokens__0__content": "é"}, "added_tokens[0].id", "259"),
    ({"added_tokens__0__content": ""}, "added_tokens[0]", "empty"),
    ({"added_tokens__0__content": "x" * 16385}, "added_tokens", "16385"),
    ({"model__vocab__" + "x" * 16385: 259, "added_tokens": [], "post_processor": None}, "model.vocab", "16385"),
    ({PATTERN: "[" + "a" * 16383 + "]"}, "pre_tokenizer.pattern", "16385"),
]


@pytest.mark.parametrize("name", ["hell", "</s>"])
@pytest.mark.parametrize("flag", ["rstrip", "normalized", "special"])
@pytest.mark.parametrize("values", [(True, False), (False, True)])
def test_of_two_entries_the_later_counts(name: str, flag: str, values: tuple, tool: Path, tmp_path: Path) -> None:
    token = {"content": name, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    token |= {"id": 258 if name == "hell" else 260, "special": False}
    data = small_json(model__vocab__XXX=259, post_processor=None)
    data["model"]["vocab"].update({"</s>": 260})
    data["added_tokens"] = [token | {flag: value} for value in values]
    pair = Pair(write_json(tmp_path, data), tmp_path, tool, vocab_size=300)
    assert len(pair.hf.get_added_tokens_decoder()) == 1
    pair.check([f"a{name} hell  {name} {name}\n".encode(), *random_strings(1, 100, [name])])


@pytest.mark.parametrize(("changes", "field", "value"), REFUSED)
def test_refusals(changes: dict, field: str, value: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError) as error:
        tokenizer_section(write_json(tmp_path, small_json(**changes)), 300)
    message = str(error.value)
    assert message.startswith(f"{tmp_path / 'tokenizer.json'}: ")
    assert field in message and value in message and "\n" not in message


def test_tokens_of_tokenizer_config_alone_are_named(tmp_path: Path) -> None:
    write_json(tmp_path, small_json())
    flags = {"lstrip": False, "rstrip": False, "single_word": False, "normalized": False, "special": True}

    def warned(**config: object) -> str:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            tokenizer_section(tmp_path, 300)
        return " ".join(str(w.message) for w in caught)

    assert warned(bos_token="<s>", eos_token=None, added_tokens_decoder={"259": {"content": "<s>"} | flags}) == ""
    assert warned(bos_token={"content": "<s>"} | flags, additional_special_tokens=[]) == ""
    only_here = {
        "pad_token": "<pad>",
        "additional_special_tokens": ["<a>"],
        "added_tokens_decoder": {
            "259": {"content": "<s>"} | flags | {"lstrip": True},
            "260": {"content": "<b>"} | flags,
        },
    }
    expected = (
        f"{tmp_path / 'tokenizer_config.json'}: not followed, unlike in transformers: tokens that tokenizer.json lacks"
    )
    assert warned(**only_here) == f'{expected} or has with other flags: "<pad>", "<a>", "<b>", "<s>"'
    assert warned(extra_special_tokens={str(i): f"<{i}>" for i in range(9)}).endswith('"<4>", ...')


def test_missing_and_broken_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"tokenizer\.json: missing"):
        tokenizer_section(tmp_path, 300)
    (tmp_path / "tokenizer.json").write_text("{")
    with pytest.raises(ValueError, match=r"tokenizer\.json: not JSON"):
        tokenizer_section(tmp_path, 300)


PATTERNS_REFUSED = [
    r"\d",
    r"\w",
    r"\h",
    r"\v",
    r"\x41",
    r"\p{Han}",
    r"\p{^L}",
    r"[\S]",
    r"[a[b]]",
    "[a&&b]",
    "[]a]",
    "[^]",
]
PATTERNS_REFUSED += ["(a+)+", "(a|b){2}", "(?<n>a)", "(?i)a", "(?i:ss)", "(?i:é)", "(?i:s+)", ".", "^a", "a$"]
PATTERNS_REFUSED += ["a{2}+", "a{2}?", "a{,2}", "a{1000}", "(*F)", "(a", "a)", "[a"]


@pytest.mark.parametrize("pattern", PATTERNS_REFUSED)
def test_patterns_that_are_refused(pattern: str) -> None:
    with pytest.raises(ValueError):
        pcre2_pattern(pattern)


# ----------------------------------------------------------------------------
# Chat templates


def chat_ids(conversations: list[tuple[list[dict], bool, bool]]) -> bytes:
    def string(s: str | bytes) -> bytes:
        raw = s if isinstance(s, bytes) else s.encode()
        return struct.pack("<I", len(raw)) + raw

    return b"".join(
        struct.pack("<BI", think | 2 * generate, len(messages))
        + b"".join(string(m["role"]) + string(m["content"]) for m in messages)
        for messages, think, generate in conversations
    )


def random_conversations(seed: int, n: int) -> list[tuple[list[dict], bool, bool]]:
    rng = random.Random(seed)
    parts = ["Hi", "there", "\n\n", *" \n\t\x1c\u3000é'", "{{x}}", "<|im_end|>"]
    parts += ["<think>", "</think>", "<tool_response>", "</tool_response>"]

    def content() -> str:
        return "".join(rng.choices(parts, k=rng.randrange(7)))

    found = []
    for _ in range(n):
        messages = [{"role": "system", "content": content()}] if rng.random() < 0.5 else []
        for role in rng.choices(["user", "assistant", "user assistant", "system"], [4, 3, 6, 1], k=rng.randrange(1, 4)):
            messages += [{"role": r, "content": content()} for r in role.split()]
        found.append((messages, rng.random() < 0.5, rng.random() < 0.5))
    return found


def takes_turns(messages: list[dict]) -> bool:
    roles = [m["role"] for m in messages]
    turns = roles[1:] if roles[0] == "system" else roles
    return bool(turns) and all(role == ("user", "assistant")[i % 2] for i, role in enumerate(turns))


def check_chat(pair: Pair, source: str, special: dict[str, str]) -> None:
    """Texts are equal, or else refused, which only those may be in which user and assistant do not take turns."""
    render = Renderer(source, special)
    conversations = random_conversations(6, 3000)
    texts = items(pair.run(chat_ids(conversations), "--chat"), 1)
    assert sum(takes_turns(messages) for messages, _, _ in conversations) > 500
    for (messages, think, generate), ours in zip(conversations, texts, strict=True):
        if ours.startswith(b"\xff"):
            assert not takes_turns(messages), (messages, ours)
        else:
            assert ours.decode() == render(messages, generate, think), messages


def test_chat(pair: Pair) -> None:
    source = pair.config["chat_template"]
    special = {k: pair.config[k] for k in ("bos_token", "eos_token") if isinstance(pair.config.get(k), str)}
    check_chat(pair, source, special)


@needs_family_data
@pytest.mark.filterwarnings("ignore:.*not followed")  # the small tokenizer lacks these models' BOS token
@pytest.mark.parametrize("family", ["llama-3.2", "qwen3"])
def test_real_chat_templates(family: str, tool: Path, tmp_path: Path) -> None:
    source = (Path(FAMILY_DATA) / family / "chat_template.jinja").read_text()
    assert not chat_template(source, {}).flags & TURNS_ONLY
    write_json(tmp_path, small_json())
    (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": {"content": "<|begin_of_text|>"}}))
    check_chat(Pair(tmp_path, tmp_path, tool), source, {"bos_token": "<|begin_of_text|>"})


# The rules of DeepSeek-R1's distillations: the system message comes first wherever it was said, without a mark, and an
# answer is what follows its thoughts, in every turn.
R1_RULES = """{% set found = namespace(system='') %}
{% for m in messages if m.role == 'system' %}{% set found.system = m.content %}{% endfor %}
{{- bos_token ~ found.system -}}
{% for m in messages %}
{%- if m.role == 'user' %}{{ '<U>' ~ m.content }}{% endif %}
{%- if m.role == 'assistant' %}{{ '<A>' ~ m.content.split('</think>')[-1] AFTER ~ '<end>' }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<A><think>\\n' }}{% endif %}"""


@pytest.mark.parametrize(
    ("after", "flags"),
    [
        ("", TURNS_ONLY | DROP_THOUGHTS),
        ("| trim", TURNS_ONLY | DROP_THOUGHTS | STRIP_ANSWER | TRIM_ASSISTANT),
        (".lstrip('\\n') if '</think>' in m.content else m.content", TURNS_ONLY | DROP_THOUGHTS | STRIP_ANSWER),
    ],
)
def test_thoughts_dropped_from_every_answer(after: str, flags: int, tool: Path, tmp_path: Path) -> None:
    source = R1_RULES.replace("m.content.split('</think>')[-1] AFTER", f"(m.content.split('</think>')[-1] {after})")
    chat = chat_template(source, {"bos_token": "<s>"})
    assert chat.flags == flags
    assert (chat.no_system, chat.system_prefix, chat.generate) == ("<s>", "<s>", "<A><think>\n")
    write_json(tmp_path, small_json())
    (tmp_path / "chat_template.jinja").write_text(source)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>"}))
    check_chat(Pair(tmp_path, tmp_path, tool), source, {"bos_token": "<s>"})


CHATML = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def test_template_that_insists_on_turns() -> None:
    turn = "{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('turns') }}{% endif %}"
    assert chat_template(CHATML, {}).flags & TURNS_ONLY == 0
    system = (
        "{% if messages[0].role == 'system' %}S:{{ messages[0].content }}\n{% set messages = messages[1:] %}{% endif %}"
    )
    chat = chat_template(system + CHATML.replace("%}<|{{", "%}" + turn + "<|{{"), {})
    assert chat.flags & TURNS_ONLY
    assert (chat.system_prefix, chat.user_prefix) == ("S:", "<|user|>")


# As of Llama 2, and plainer.
@pytest.mark.parametrize("marks", [("<<SYS>>\n", "\n<</SYS>>\n\n"), ("", "\n\n")])
def test_a_system_message_within_the_first_of_the_user(marks: tuple[str, str], tool: Path, tmp_path: Path) -> None:
    source = (
        "{% set s = '' %}{% if messages[0].role == 'system' %}"
        f"{{% set s = {marks[0]!r} ~ messages[0].content ~ {marks[1]!r} %}}"
        "{% set messages = messages[1:] %}{% endif %}"
        "{% for m in messages %}{% if m.role != ('user', 'assistant')[loop.index0 % 2] %}"
        "{{ raise_exception('turns') }}{% endif %}{% if m.role == 'user' %}"
        "{{ '<s>[INST] ' ~ (s if loop.first else '') ~ m.content ~ ' [/INST]' }}"
        "{% else %}{{ ' ' ~ m.content ~ ' </s>' }}{% endif %}{% endfor %}"
    )
    chat = chat_template(source, {})
    assert (chat.flags, chat.differs) == (TURNS_ONLY | FOLD_SYSTEM, "")
    assert (chat.system_prefix, chat.system_suffix) == (f"<s>[INST] {marks[0]}", marks[1])
    write_json(tmp_path, small_json())
    (tmp_path / "chat_template.jinja").write_text(source)
    check_chat(Pair(tmp_path, tmp_path, tool), source, {})


TURN = "<|{{ m.role }}|>{{ m.content }}<|end|>\n"
REASONING = "{% if loop.last %}<think>{{ m.reasoning_content | default('') }}</think>{% endif %}"
PROMPT = "{% if add_generation_prompt %}<|assistant|>{% endif %}"
# What the pieces hold of a template is what a chat is made of; what they do not is said.
HELD_IN_PART = {
    "thoughts in a field of their own": (
        "{% for m in messages %}" + TURN.replace("{{ m.content", "{% if m.role == 'assistant' %}" + REASONING
                                                 + "{% endif %}{{ m.content") + "{% endfor %}" + PROMPT,
        "the conversation (user, assistant) is not as the template has it",
    ),
    "today's date": (
        "<|date|>{{ strftime_now('%d %b %Y') }}\n" + CHATML, "the date is always 2024-07-26",
    ),
    "no system message": (
        "{% if messages[0].role == 'system' %}{{ raise_exception('no') }}{% endif %}" + CHATML,
        "the conversation (system, user) is not as the template has it",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", HELD_IN_PART)
def test_templates_that_are_held_in_part(name: str, tmp_path: Path) -> None:
    source, differs = HELD_IN_PART[name]
    chat = chat_template(source, {})
    assert chat.differs == differs
    assert (chat.user_prefix, chat.user_suffix, chat.generate) == ("<|user|>", "<|end|>\n", "<|assistant|>")
    assert chat.no_system == ("<|date|>26 Jul 2024\n" if "date" in name else "")
    if name == "no system message":  # it is put where the template would not refuse it
        assert (chat.system_prefix, chat.system_suffix, chat.flags & FOLD_SYSTEM) == ("<|user|>", "\n\n", FOLD_SYSTEM)
    write_json(tmp_path, small_json())
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.warns(UserWarning, match=re.escape(f"{tmp_path}: chat template: {differs}")):
        assert b"<|user|>" in tokenizer_section(tmp_path, 300)


def test_named_templates_and_generation_blocks(tmp_path: Path) -> None:
    assert chat_template(CHATML, {}).user_prefix == "<|user|>"
    marked = CHATML.replace("{{ m.content }}", "{% generation %}{{ m.content }}{% endgeneration %}")
    assert chat_template(marked, {}) == chat_template(CHATML, {})
    write_json(tmp_path, small_json())
    sections = []
    for template in (CHATML, [{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}]):
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
        sections.append(tokenizer_section(tmp_path, 300))
    assert sections[0] == sections[1]
    assert b"<|user|>" in sections[0]


@pytest.mark.parametrize(
    "source",
    [
        "fixed text",
        CHATML.replace("{{ m.content }}", "{{ m.content | upper }}"),
        CHATML.replace("{{ m.content }}", "{{ m.content }}{{ loop.index }}"),
        CHATML.replace("{{ m.content }}", "{{ m.content | replace('\\n', ' ') }}"),
        CHATML.replace("{{ m.content }}", "{{ m.content | tojson }}"),
        CHATML.replace(
            "{{ m.content }}",
            "{{ m.content.split('</think>')[-1].lstrip() if '</think>' in m.content else m.content }}",
        ),
        CHATML.replace("{{ m.content }}", "{{ m.content.split('</think>')[0] }}"),
        "{{ raise_exception('no') }}",
    ],
)
def test_templates_that_are_not_literal(source: str, tmp_path: Path) -> None:
    with pytest.raises(NotLiteralError):
        chat_template(source, {})
    write_json(tmp_path, small_json())
    (tmp_path / "chat_template.jinja").write_text(source)
    with pytest.warns(UserWarning, match="no chat template exported"):
        section = tokenizer_section(tmp_path, 300)
    (tmp_path / "chat_template.jinja").unlink()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert section == tokenizer_section(tmp_path, 300)


def test_template_that_is_not_jinja(tmp_path: Path) -> None:
    write_json(tmp_path, small_json())
    (tmp_path / "chat_template.jinja").write_text("{% if %}")
    with pytest.warns(UserWarning, match="no chat template exported"):
        tokenizer_section(tmp_path, 300)


# ----------------------------------------------------------------------------
# Speed: printed (pytest -s), never asserted


def test_speed(pair: Pair, tmp_path: Path) -> None:
    """Of a short text, whose figures mean little, but with FULL=1."""
    size = 4_000_000 if FULL else 100_000
    text = "\n".join(str((ROOT / p).read_text()) for p in ("engine/text/tokenizer.h", "tests/test_tokenizer.py"))
    text = (text * (1 + size // len(text)))[:size]
    (tmp_path / "text").write_text(text)
    print(f"\n{pair.vocab_size} ids:", pair.run(b"", "--bench", str(tmp_path / "text")).decode().strip())
