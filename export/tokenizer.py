"""Hugging Face tokenizer -> tokenizer section of a model file.

Reads ``tokenizer.json``, or what formats/gguf_tokenizer.py makes of a GGUF file, and the chat template (see
chat_template.py), and writes the compact form that engine/text/vocabulary.h loads; docs/tokenizer.md gives its
byte layout. A section stands for exactly the ids that ``tokenizers`` computes: what it cannot say is refused with a
ValueError that names the file, the field and the value.
"""

import json
import re
import struct
import warnings
from dataclasses import replace
from pathlib import Path

import numpy as np

from export.chat_template import chat_section, end_of_turn, token_text
from export.tokenizer_json import check_types
from formats.errors import shown
from formats.files import read_json
from formats.gguf_tokenizer import TokenizerFiles
from formats.model_file import MAX_EOS_IDS, Generation
from formats.source import Source, generation_of, is_gguf, open_gguf

MAGIC = 0x6E6B6F74  # "tokn"
VERSION = 1
# flags of the section, of a token, of an added token
NFC, IGNORE_MERGES, ADD_BOS, HAS_CHAT, STEPS = 1, 2, 4, 8, 16
DEFINED, WORD, SPECIAL = 1, 2, 4
DROP_GAPS = 1  # of a step
MAX_STEPS = 16
ADDED_SPECIAL, ADDED_NORMALIZED, ADDED_LSTRIP, ADDED_RSTRIP, ADDED_SINGLE_WORD = 1, 2, 4, 8, 16

# What the programs load at most, in bytes (engine/text/vocabulary.h): the longest token, the longest added token, the
# pattern, and all merged tokens with 256 bytes more for each merge.
MAX_TOKEN, MAX_ADDED, MAX_PATTERN, MAX_MERGED = 1 << 14, 1 << 10, 1 << 14, 1 << 24

# What ByteLevel splits by when `use_regex` is true, written into `tokenizers` itself (it is GPT-2's).
GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
# What Digits splits by, by individual_digits: Rust's char::is_numeric, which in `tokenizers` 0.23 is \p{N} of Unicode
# 17. Matching what is between, too, moves no cut and leaves one match per piece instead of an attempt per character.
_NUMERIC = r"\p{N}" + "\U00011de0-\U00011de9\U00016ff4-\U00016ff6"
DIGITS_PATTERN = {True: f"[{_NUMERIC}]|[^{_NUMERIC}]+", False: f"[{_NUMERIC}]+|[^{_NUMERIC}]+"}

# White_Space, which is what \s means to Oniguruma; PCRE2's \s has U+180E besides.
_SPACE = r"\t-\r \x{85}\x{a0}\x{1680}\x{2000}-\x{200a}\x{2028}\x{2029}\x{202f}\x{205f}\x{3000}"

# Characters assigned in Unicode 15 to 16: in the tables of Oniguruma 6.9.10, with which `tokenizers` 0.23
# matches, but not in those of PCRE2 10.42 (Unicode 14). Found by trying every code point; a newer PCRE2 has
# them anyway. "Nd" and "No" make up \p{N}.
_NEWER = {
    "L": "1c89-1c8a a7cb-a7cd a7da-a7dc 105c0-105f3 10d4a-10d65 10d6f-10d85 10ec2-10ec4 1123f-11240 11380-11389 "
    "1138b 1138e 11390-113b5 113b7 113d1 113d3 11bc0-11be0 11f02 11f04-11f10 11f12-11f33 1342f 13441-13446 "
    "13460-143fa 16100-1611d 16d40-16d6c 18cff 1b132 1b155 1df25-1df2a 1e030-1e06d 1e4d0-1e4eb 1e5d0-1e5ed "
    "1e5f0 2b739 2ebf0-2ee5d 31350-323af",
    "M": "897 cf3 ece 10d69-10d6d 10efc-10eff 11241 113b8-113c0 113c2 113c5 113c7-113ca 113cc-113d0 113d2 "
    "113e1-113e2 11f00-11f01 11f03 11f34-11f3a 11f3e-11f42 11f5a 13440 13447-13455 1611e-1612f 1e08f "
    "1e4ec-1e4ef 1e5ee-1e5ef",
    "Nd": "10d40-10d49 116d0-116e3 11bf0-11bf9 11f50-11f59 16130-16139 16d70-16d79 1ccf0-1ccf9 1e4f0-1e4f9 1e5f1-1e5fa",
    "No": "1d2c0-1d2d3",
    "P": "1b4e-1b4f 1b7f 10d6e 113d4-113d5 113d7-113d8 11b00-11b09 11be1 11f43-11f4f 16d6d-16d6f 1e5ff",
    "S": "2427-2429 2ffc-2fff 31e4-31e5 31ef 10d8e-10d8f 1cc00-1ccef 1cd00-1ceb3 1f6dc 1f774-1f776 1f77b-1f77f 1f7d9 "
    "1f8b2-1f8bb 1f8c0-1f8c1 1fa75-1fa77 1fa87-1fa89 1fa8f 1faad-1faaf 1fabb-1fabf 1fac6 1face-1facf 1fada-1fadc "
    "1fadf 1fae8-1fae9 1faf7-1faf8 1fbcb-1fbef",
    # The parts of "L"; there is no newer Lt.
    "Lu": "1c89 a7cb-a7cc a7da a7dc 10d50-10d65",
    "Ll": "1c8a a7cd a7db 10d70-10d85 1df25-1df2a",
    "Lm": "10d4e 10d6f 16d40-16d42 16d6b-16d6c 1e030-1e06d 1e4eb",
    "Lo": "105c0-105f3 10d4a-10d4d 10d4f 10ec2-10ec4 1123f-11240 11380-11389 1138b 1138e 11390-113b5 113b7 113d1 "
    "113d3 11bc0-11be0 11f02 11f04-11f10 11f12-11f33 1342f 13441-13446 13460-143fa 16100-1611d 16d43-16d6a 18cff "
    "1b132 1b155 1e4d0-1e4ea 1e5d0-1e5ed 1e5f0 2b739 2ebf0-2ee5d 31350-323af",
}


def _newer(*categories: str) -> str:
    """The characters of _NEWER as the inside of a PCRE2 character class."""
    ranges = " ".join(_NEWER[c] for c in categories).split()
    return "".join("-".join(rf"\x{{{end}}}" for end in r.split("-")) for r in ranges)


_PROPERTIES = {name: rf"\p{{{name}}}" + _newer(name) for name in ("L", "M", "P", "S", "Lu", "Ll", "Lm", "Lo")}
_PROPERTIES |= {"N": r"\p{N}" + _newer("Nd", "No"), "Lt": r"\p{Lt}"}
# \w of Rust's regex crate, by which single_word tokens are told from parts of words.
_WORD_PATTERN = r"[\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\p{Join_Control}" + _newer("L", "M", "Nd") + "]"


# What a pattern may consist of: the constructs that byte-level tokenizers are written with, and of those only
# what means the same to Oniguruma and PCRE2 or can be spelt out. Left out, among others, are \d, \w, \h, \v,
# anchors, `.`, nested classes, {n}+ and repeated groups (the last can make backtracking explode).
_ESCAPE = r"\\[pP]\{\w+\}|\\[sSrntf]|\\[^\w\s]"
_TOKEN = re.compile(
    rf"(?P<escape>{_ESCAPE})"
    rf"|(?P<class>\[\^?+(?:{_ESCAPE}|[^\[\]\\&]|&(?!&))+\])"
    # Without ff, fi, fl, ss and st, which match one character (a ligature, sharp s) caseless in Oniguruma only.
    r"|(?P<caseless>\(\?i:(?:(?!f[fil]|s[st])[a-z'|])+\)(?![*+{]))"
    r"|\(\?[:!=]|\((?![?*])|\)(?![*+{])|\{\d{1,3}(?:,\d{0,3})?\}(?![+?])|[^\\\[\](){}.^$]",
    re.ASCII | re.DOTALL,
)


def _expand(escape: str, pattern: str, in_class: bool) -> str:
    r"""\s, \S, \p{..} or \P{..} as a character class, or as members of one; other escapes as they are."""
    if escape[1] not in "sSpP":
        return escape
    members = _SPACE if escape[1] in "sS" else _PROPERTIES.get(escape[3:-1])
    inverse = escape[1] in "SP"
    if members is None or (inverse and in_class):
        raise ValueError(f"{escape} in {pattern!r} is not supported")
    return members if in_class else f"[{'^' * inverse}{members}]"


# What PCRE2 compiles of it, as configured by default: groups nested up to 250, counts up to 65535, and 64 KiB of
# compiled code, of which a class takes less than 48 bytes and twice its length, another token less than 16 and that.
MAX_NESTING, MAX_COUNT, MAX_COMPILED, CLASS_SIZE, TOKEN_SIZE = 250, 65535, 65000, 48, 16
_MEMBER = re.compile(rf"{_ESCAPE}|.", re.ASCII | re.DOTALL)
_CONTROL_ESCAPES = {"\\r": "\r", "\\n": "\n", "\\t": "\t", "\\f": "\f"}


def _check_class(text: str) -> None:
    """Refuses a character class with a range that has no or the wrong ends, or that PCRE2 takes for a POSIX class."""
    members = _MEMBER.findall(text.removeprefix("[").removeprefix("^")[:-1])
    if len(text) > 3 and text[1] == text[-2] and text[1] in ":.=":
        raise ValueError(f"{text} is not supported")
    i = 0
    while i < len(members):
        if i + 2 < len(members) and members[i + 1] == "-":
            ends = [_CONTROL_ESCAPES.get(m, m[-1]) for m in (members[i], members[i + 2])]
            if any(m[0] == "\\" and m[1] in "sSpP" for m in (members[i], members[i + 2])) or ends[0] > ends[1]:
                raise ValueError(f"{''.join(members[i : i + 3])} in {text} is no range")
            i += 3
        elif members[i] == "-" and 0 < i < len(members) - 1:
            raise ValueError(f"'-' in the middle of {text} is not supported")
        else:
            i += 1


def _check_quantifier(text: str, before: str) -> None:
    """Refuses a quantifier that stands behind another or behind nothing, or whose counts are not in order.

    before: the token in front, "?+*" also for one of them with a suffix.
    """
    if text[0] == "{":
        low, _, high = text[1:-1].partition(",")
        if int(low) > MAX_COUNT or (high and not int(low) <= int(high) <= MAX_COUNT):
            raise ValueError(f"{text} is not supported")
    if before in ("", "(", "(?:", "(?=", "(?!", "|", "*", "+", "?", "?+*") or before[0] == "{":
        raise ValueError(f"there is nothing for {text} to repeat")


def pcre2_pattern(pattern: str) -> str:
    """Translates a pattern from Oniguruma, which ``tokenizers`` uses, to PCRE2 with the same matches.

    ValueError for a construct that is not in _TOKEN, or that PCRE2 does not compile.
    """
    out, at, depth, before, size = [], 0, 0, "", 0
    while at < len(pattern):
        token = _TOKEN.match(pattern, at)
        if token is None:
            raise ValueError(f"{pattern[at : at + 4]!r} at character {at} of {pattern!r} is not supported")
        text = token[0]
        depth += (text[0] == "(" and not token["caseless"]) - (text == ")")
        if depth < 0 or depth > MAX_NESTING:
            break
        if text[0] in "*+?{":
            is_suffix = before in ("*", "+", "?") and text in ("+", "?")
            if not is_suffix:
                _check_quantifier(text, before)
            before = "?+*" if is_suffix else text
        else:
            before = text
        if token["escape"]:
            text = _expand(text, pattern, in_class=False)
        elif token["class"]:
            _check_class(text)
            text = re.sub(_ESCAPE, lambda m: _expand(m[0], pattern, in_class=True), text, flags=re.ASCII)
        out.append(text)
        at = token.end()
        size += (CLASS_SIZE if text[0] == "[" else TOKEN_SIZE) + 2 * len(text.encode("utf-8", "surrogatepass"))
    if size > MAX_COMPILED:
        raise ValueError(f"a pattern of {len(pattern)} characters is too long")
    if depth > MAX_NESTING:
        raise ValueError(f"groups are nested more than {MAX_NESTING} deep")
    if depth != 0:
        raise ValueError(f"unbalanced parentheses in {pattern!r}")
    return "".join(out)


# ----------------------------------------------------------------------------
# tokenizer.json


def byte_alphabet() -> dict[str, int]:
    """GPT-2's printable stand-ins: character -> the byte that it stands for in a token's name."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


class Refusal:
    """Makes the one kind of error of this module: file, field, value, and why."""

    def __init__(self, path: Path):
        self.path = path

    def __call__(self, field: str, value: object, why: str = "is not supported") -> ValueError:
        return ValueError(f"{self.path}: {field}: {shown(value)} {why}")


def _steps(component: dict | None, key: str) -> list[dict]:
    """A component as the list of its steps: none, one, or those of a (nested) Sequence."""
    if component is None:
        return []
    if component.get("type") == "Sequence":
        return [step for part in component[key] for step in _steps(part, key)]
    return [component]


def _split_pattern(step: dict, refuse: Refusal) -> tuple[str, int]:
    """(pattern as `tokenizers` matches it, flags) of a Split.

    The behaviors are those that byte-level tokenizers use: matches and what is between them (Isolated), or matches
    alone (Removed, inverted: what is *not* a match goes).
    """
    behavior, invert = step.get("behavior"), bool(step.get("invert"))
    if behavior != "Isolated" and (behavior, invert) != ("Removed", True):
        raise refuse("pre_tokenizer.behavior", behavior)
    if behavior == "Isolated" and invert:
        raise refuse("pre_tokenizer.invert", step["invert"])
    pattern = step.get("pattern")
    if not isinstance(pattern, dict) or set(pattern) != {"Regex"}:
        raise refuse("pre_tokenizer.pattern", pattern)
    return pattern["Regex"], DROP_GAPS if invert else 0


def read_steps(tokenizer: dict, refuse: Refusal) -> list[tuple[str, int]]:
    """(pattern for PCRE2, flags) of each step of `pre_tokenizer` that cuts text. The last step is ByteLevel.

    A step gets each piece that the one before it left, and sees nothing around it.
    """
    component = tokenizer.get("pre_tokenizer")
    steps = _steps(component, "pretokenizers")
    if not steps or steps[-1].get("type") != "ByteLevel":
        raise refuse("pre_tokenizer", component, "does not end in ByteLevel")
    found = []
    for i, step in enumerate(steps):
        kind = step.get("type")
        if kind == "Split":
            found.append(_split_pattern(step, refuse))
        elif kind == "Digits":
            found.append((DIGITS_PATTERN[bool(step.get("individual_digits"))], 0))
        elif kind != "ByteLevel":
            raise refuse("pre_tokenizer.type", kind)
        elif i + 1 < len(steps):
            after = steps[i + 1].get("type")
            raise refuse("pre_tokenizer.type", after, "is not supported behind ByteLevel, where it cuts bytes")
        elif step.get("add_prefix_space"):
            raise refuse("pre_tokenizer.add_prefix_space", True)
        elif step.get("use_regex", True):
            found.append((GPT2_PATTERN, 0))
    if len(found) > MAX_STEPS:
        raise refuse("pre_tokenizer", component, f"has more than {MAX_STEPS} steps")
    translated = []
    for pattern, flags in found:
        try:
            translated.append((pcre2_pattern(pattern), flags))
        except ValueError as error:
            raise refuse("pre_tokenizer.pattern", pattern, f"cannot be translated: {error}") from None
    return translated


def _step_bytes(steps: list[tuple[str, int]]) -> tuple[bytes, int]:
    """(pattern of the section, its flag): one plain pattern as it is, or else every step with flags and length."""
    if not steps:
        return b"", 0
    if len(steps) == 1 and steps[0][1] == 0:
        return steps[0][0].encode("utf-8"), 0
    encoded = [(pattern.encode("utf-8"), flags) for pattern, flags in steps]
    return b"".join(struct.pack("<II", flags, len(pattern)) + pattern for pattern, flags in encoded), STEPS


def _read_nfc(tokenizer: dict, refuse: Refusal) -> bool:
    steps = _steps(tokenizer.get("normalizer"), "normalizers")
    for step in steps:
        if step.get("type") != "NFC":
            raise refuse("normalizer.type", step.get("type"))
    return bool(steps)


def read_bos(tokenizer: dict, config: dict, ids: dict[str, int], refuse: Refusal) -> tuple[int, bool]:
    """(id of the BOS token or -1, whether encoding puts it first)."""
    bos = token_text(config, "bos_token", refuse.path.with_name("tokenizer_config.json"))
    bos_id = ids.get(bos, -1) if bos else -1
    add_bos = False
    for step in _steps(tokenizer.get("post_processor"), "processors"):
        if step.get("type") == "ByteLevel":  # moves offsets only
            continue
        if step.get("type") != "TemplateProcessing":
            raise refuse("post_processor.type", step.get("type"))
        single = step["single"]
        special = [part["SpecialToken"]["id"] for part in single if "SpecialToken" in part]
        if add_bos or "Sequence" not in single[-1] or len(single) != len(special) + 1 or len(special) > 1:
            raise refuse("post_processor.single", single, "is not [one BOS token and] the text")
        if special:
            special_ids = step["special_tokens"][special[0]]["ids"]
            if len(special_ids) != 1:
                raise refuse("post_processor.special_tokens.ids", special_ids)
            bos_id, add_bos = special_ids[0], True
    return bos_id, add_bos


def _check_model(model: dict, refuse: Refusal, all_bytes: bool) -> None:
    if model.get("type", "BPE") != "BPE":
        raise refuse("model.type", model["type"])
    for field in ("dropout", "byte_fallback", "continuing_subword_prefix", "end_of_word_suffix"):
        if model.get(field):
            raise refuse(f"model.{field}", model[field])
    if model.get("unk_token") is not None and not all_bytes:
        raise refuse("model.unk_token", model["unk_token"], "would be used, as not every byte has a token")


def _read_merges(model: dict, vocab: dict[str, int], words: set[int], refuse: Refusal) -> np.ndarray:
    """(n, 3) int32: left id, right id, merged id, by rank."""
    merges: dict[tuple[int, int], int] = {}
    for rank, merge in enumerate(model["merges"]):
        pair = merge.split(" ") if isinstance(merge, str) else merge
        if rank == 0 and isinstance(merge, str) and merge.startswith("#version"):
            continue
        if len(pair) != 2:
            raise refuse(f"model.merges[{rank}]", merge, "is not a pair")
        try:
            left, right, merged = vocab[pair[0]], vocab[pair[1]], vocab[pair[0] + pair[1]]
        except KeyError as error:
            raise refuse(f"model.merges[{rank}]", merge, f"needs {error}, which is not in the vocabulary") from None
        if words.issuperset((left, right, merged)):  # others are never reached from bytes
            merges.pop((left, right), None)  # of two equal pairs, the later counts
            merges[left, right] = merged
    rows = [(left, right, merged) for (left, right), merged in merges.items()]
    return np.array(rows, dtype="<i4").reshape(-1, 3)


def _check_sizes(
    tokens: list[bytes], merges: np.ndarray, added: dict[int, int], pattern: bytes, refuse: Refusal
) -> None:
    """Refuses what is larger than the programs load."""
    others = [token for token_id, token in enumerate(tokens) if token_id not in added]
    for field, size, most in (
        ("model.vocab", max(map(len, others), default=0), MAX_TOKEN),
        ("added_tokens", max((len(tokens[token_id]) for token_id in added), default=0), MAX_ADDED),
        ("pre_tokenizer.pattern", len(pattern), MAX_PATTERN),
        ("model.merges", sum(len(tokens[merged]) for merged in merges[:, 2]), MAX_MERGED + 256 * len(merges)),
    ):
        if size > most:
            raise refuse(field, size, f"bytes, expected at most {most}")


def _only_in_config(config: dict, added: list[dict]) -> list[str]:
    """Names that `transformers` makes added tokens because tokenizer_config.json says so and not tokenizer.json.

    Those that both name, but with other flags in tokenizer_config.json, which then count, are among them.
    """
    flags = ("lstrip", "rstrip", "single_word", "normalized")
    in_tokenizer = {token["content"]: [token[f] for f in flags] for token in added}
    tokens = [config.get(f"{kind}_token") for kind in ("bos", "eos", "unk", "pad", "sep", "cls", "mask")]
    for field in ("additional_special_tokens", "extra_special_tokens", "added_tokens_decoder"):
        several = config.get(field) or []
        tokens += several.values() if isinstance(several, dict) else several
    names = [token.get("content") if isinstance(token, dict) else token for token in tokens]
    decoder = config.get("added_tokens_decoder") or {}
    names = [name for name in names if name and name not in in_tokenizer]
    for token in decoder.values():
        theirs = in_tokenizer.get(token["content"])
        if theirs is not None and theirs != [token.get(f, ours) for f, ours in zip(flags, theirs, strict=True)]:
            names.append(token["content"])
    return list(dict.fromkeys(names))


def _listed(names: list[str]) -> str:
    """The first of some names, for a message."""
    return ", ".join(json.dumps(name, ensure_ascii=False) for name in names[:5]) + ", ..." * (len(names) > 5)


def read_files(source: Path) -> TokenizerFiles:
    """tokenizer.json and tokenizer_config.json of a directory, or what a GGUF file says in their place."""
    if is_gguf(source):
        return open_gguf(source).tokenizer_files()
    path, config_path = source / "tokenizer.json", source / "tokenizer_config.json"
    if not path.exists():
        raise ValueError(f"{path}: missing; only tokenizers in this form can be exported")
    return TokenizerFiles(path, read_json(path), read_json(config_path) if config_path.exists() else {})


def text_of(source: Source, with_tokenizer: bool = True) -> tuple[Generation, bytes]:
    """How a model generates text, and its tokenizer section, empty if it is to be without.

    A text also ends at tokenizer_config.json's `eos_token`, and at the token with which the chat template ends an
    answer: many a fine-tune of a base model has left `eos_token_id` as it was. Raises ModelError for more ends than
    the header has room for, and ValueError as `tokenizer_section` does.
    """
    generation, vocab_size = generation_of(source), source.config.vocab_size
    if not with_tokenizer:
        return generation, b""
    section, files = tokenizer_section(source.path, vocab_size), read_files(source.path)
    added = files.tokenizer.get("added_tokens") or []
    ids = files.tokenizer["model"]["vocab"] | {token["content"]: token["id"] for token in added}
    pieces, _ = chat_section(source.path, files.config)
    names = (
        token_text(files.config, "eos_token", files.path),
        end_of_turn(pieces, [token["content"] for token in added if token["special"]]),
    )
    ends = list(
        dict.fromkeys(generation.eos_ids + [ids[name] for name in names if ids.get(name, vocab_size) < vocab_size])
    )
    if len(ends) > MAX_EOS_IDS:
        raise ValueError(f"{files.path}: a text ends at ids {ends}, at most {MAX_EOS_IDS} fit the header")
    return replace(generation, eos_ids=ends), section


def tokenizer_section(hf_dir: Path, vocab_size: int) -> bytes:
    """The tokenizer section for the tokenizer in `hf_dir` (or a GGUF file), with `vocab_size` ids (the model's).

    ValueError if tokenizer.json holds anything that the section cannot say. A chat template that is not made
    of literal pieces is left out, with a warning. So are tokens that only tokenizer_config.json has.
    """
    files = read_files(Path(hf_dir))
    path, tokenizer, config = files.path, files.tokenizer, files.config
    refuse = Refusal(path)
    config_path = path.with_name("tokenizer_config.json")
    check_types(tokenizer, refuse)

    # Tokens of the model: their names spell bytes in GPT-2's alphabet. A name with other characters is nothing
    # that text can turn into.
    model = tokenizer["model"]
    alphabet = byte_alphabet()
    table = str.maketrans({name: chr(byte) for name, byte in alphabet.items()})
    tokens = [b""] * vocab_size
    flags = np.zeros(vocab_size, dtype=np.uint8)
    if not isinstance(model.get("vocab"), dict):
        raise refuse("model.type", model.get("type"))
    vocab: dict[str, int] = model["vocab"]

    def define(name: str, token_id: int, field: str) -> None:
        if not 0 <= token_id < vocab_size:
            raise refuse(field, {name: token_id}, f"is not below the model's vocab_size, {vocab_size}")
        if not name:
            raise refuse(field, {name: token_id}, "is an empty token")

    for name, token_id in vocab.items():
        define(name, token_id, "model.vocab")
        if flags[token_id]:
            raise refuse("model.vocab", {name: token_id}, "has the id of another token")
        if alphabet.keys() >= set(name):
            tokens[token_id] = name.translate(table).encode("latin-1")
            flags[token_id] = DEFINED | WORD
        else:
            tokens[token_id] = name.encode("utf-8")
            flags[token_id] = DEFINED
    words = set(np.flatnonzero(flags & WORD).tolist())
    _check_model(model, refuse, all_bytes=all(name in vocab for name in alphabet))
    merges = _read_merges(model, vocab, words, refuse)

    # Added tokens. `tokenizers` numbers a new one itself, and ignores the number in the file.
    ids = dict(vocab)
    added: dict[int, int] = {}  # id -> flags; of two entries for an id the later counts
    next_id, beyond = len(vocab), []
    for i, token in enumerate(tokenizer.get("added_tokens") or []):
        name, token_id, field = token["content"], token["id"], f"added_tokens[{i}]"
        if token_id >= vocab_size:
            beyond.append(name)
            continue
        define(name, token_id, field)
        if ids.get(name, next_id) != token_id:
            raise refuse(f"{field}.id", token_id, f"is loaded as {ids.get(name, next_id)} by `tokenizers`")
        if name in vocab and tokens[token_id] != name.encode("utf-8"):
            raise refuse(f"{field}.content", name, "is other bytes in model.vocab")
        if name not in ids:
            next_id += 1
        elif name not in vocab:
            raise refuse(f"{field}.content", name, "is there twice")
        ids[name] = token_id
        tokens[token_id] = name.encode("utf-8")
        flags[token_id] = (flags[token_id] & WORD) | DEFINED | (SPECIAL if token["special"] else 0)
        added_flags = (
            ADDED_SPECIAL * token["special"]
            | ADDED_NORMALIZED * token["normalized"]
            | ADDED_LSTRIP * token["lstrip"]
            | ADDED_RSTRIP * token["rstrip"]
            | ADDED_SINGLE_WORD * token["single_word"]
        )
        added[token_id] = added_flags

    if any(step.get("type") != "ByteLevel" for step in _steps(tokenizer.get("decoder"), "decoders")):
        raise refuse("decoder", tokenizer["decoder"])
    pattern, steps_flag = _step_bytes(read_steps(tokenizer, refuse))
    needs_words = any(added_flags & ADDED_SINGLE_WORD for added_flags in added.values())
    word_pattern = _WORD_PATTERN.encode("utf-8") if needs_words else b""
    bos_id, add_bos = read_bos(tokenizer, config, ids, refuse)
    if not (0 if add_bos else -1) <= bos_id < vocab_size:
        raise refuse("post_processor.special_tokens.ids", bos_id, f"is not below the model's vocab_size, {vocab_size}")
    chat, reason = chat_section(Path(hf_dir), config)
    if reason:
        warnings.warn(reason, stacklevel=2)
    if beyond:
        warnings.warn(
            f"{path}: added tokens beyond the model's {vocab_size} ids, left out: {_listed(beyond)}", stacklevel=2
        )
    if names := _only_in_config(config, tokenizer.get("added_tokens") or []):
        warnings.warn(
            f"{config_path}: not followed, unlike in transformers: tokens that {path.name} lacks or has with other "
            f"flags: {_listed(names)}",
            stacklevel=2,
        )

    section_flags = (
        NFC * _read_nfc(tokenizer, refuse)
        | IGNORE_MERGES * bool(model.get("ignore_merges"))
        | ADD_BOS * add_bos
        | HAS_CHAT * bool(chat)
        | steps_flag
    )
    _check_sizes(tokens, merges, added, pattern, refuse)
    offsets = np.zeros(vocab_size + 1, dtype="<u4")
    offsets[1:] = np.cumsum([len(token) for token in tokens])
    body = b"".join(
        [
            offsets.tobytes(),
            merges.tobytes(),
            np.array([*added.items()], dtype="<u4").tobytes(),
            flags.tobytes(),
            *tokens,
            pattern,
            word_pattern,
            chat,
        ]
    )
    if 48 + len(body) >= 1 << 32:
        raise ValueError(f"{path}: takes {48 + len(body)} bytes in a model file, expected less than 4 GiB")
    header = struct.pack(
        "<IIIIIiIIIIII",
        MAGIC,
        VERSION,
        48 + len(body),
        vocab_size,
        section_flags,
        bos_id,
        len(merges),
        len(added),
        len(pattern),
        len(word_pattern),
        len(chat),
        int(offsets[-1]),
    )
    return header + body
