"""The tokenizer in a GGUF file's metadata, in the form of tokenizer.json and tokenizer_config.json.

A GGUF file names its pre-tokenizer (`tokenizer.ggml.pre`) and leaves the rest to who reads it. PRE_TOKENIZERS says what
a name stands for: how Hugging Face's tokenizer of those models splits and normalizes a text. What the file does not
keep, and what is taken instead, is in docs/gguf.md.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

from formats.gguf_file import Metadata

# Types of tokens: llama.cpp's numbers.
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5


class PreTokenizer(NamedTuple):
    """What a name in `tokenizer.ggml.pre` stands for."""

    pattern: str  # by which a text is split into words, in Oniguruma's syntax
    nfc: bool = False  # whether a text is normalized first
    ignore_merges: bool = False  # whether a word that is a token is taken whole
    add_bos: bool = False  # unless tokenizer.ggml.add_bos_token says otherwise


_CONTRACTIONS = "'s|'t|'re|'ve|'m|'ll|'d"
_ANY_CASE_AND_LETTERS = rf"(?i:{_CONTRACTIONS})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+"
_PUNCTUATION_AND_LINES = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_ANY_CASE_AND_LETTERS}|\p{{N}}{{1,3}}|{_PUNCTUATION_AND_LINES}"
_QWEN2 = rf"{_ANY_CASE_AND_LETTERS}|\p{{N}}|{_PUNCTUATION_AND_LINES}"
_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
# Sequence[Digits(individual), ByteLevel] as one pattern: each digit alone, what lies between by GPT-2's. White space
# in front of a digit ends its piece, so that none of it is left for a next word.
_DIGITS_GPT2 = rf"{_CONTRACTIONS}| ?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}]+|\s+(?=\p{{N}})|\s+(?!\S)|\s+"

_LLAMA3_MODELS = PreTokenizer(_LLAMA3, ignore_merges=True, add_bos=True)
PRE_TOKENIZERS = {
    "llama-bpe": _LLAMA3_MODELS,
    "llama3": _LLAMA3_MODELS,
    "llama-v3": _LLAMA3_MODELS,
    "qwen2": PreTokenizer(_QWEN2, nfc=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "gpt-2": PreTokenizer(_GPT2),
    "smollm": PreTokenizer(_DIGITS_GPT2),
    "starcoder": PreTokenizer(_DIGITS_GPT2),
    "refact": PreTokenizer(_DIGITS_GPT2),
}

# The names of special tokens in tokenizer_config.json, and the key of each one's id.
SPECIAL_TOKENS = {"bos_token": "bos_token_id", "eos_token": "eos_token_id", "unk_token": "unknown_token_id",
                  "pad_token": "padding_token_id"}  # fmt: skip

# Control tokens at which llama.cpp ends a text by their names, whatever the metadata says: the list in its
# src/llama-vocab.cpp, without those of tokenizers that cannot be read here.
END_TOKENS = frozenset(
    {"<|endoftext|>", "<|end_of_text|>", "<|eot_id|>", "<|eom_id|>", "<|im_end|>", "<|end|>", "<end_of_turn>",
     "<end_of_utterance>", "</s>", "<eos>", "<EOT>", "_<EOT>", "<｜end▁of▁sentence｜>"}
    # of prompts that fill a gap in code
    | {"<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
       "<reponame>", "<|file_sep|>"}
)  # fmt: skip


@dataclass(frozen=True)
class TokenizerFiles:
    """tokenizer.json and tokenizer_config.json, and the file that messages about them should name."""

    path: Any  # pathlib.Path
    tokenizer: dict[str, Any]
    config: dict[str, Any]


def tokenizer_files(m: Metadata, vocab_size: int) -> TokenizerFiles:
    """The tokenizer that the metadata describes. Raises ModelError for one that is not byte-level BPE."""
    kind = m.text("tokenizer.ggml.model")
    if kind != "gpt2":
        what = "SentencePiece is not supported, only gpt2" if kind == "llama" else "supported is gpt2"
        raise m.refuse("tokenizer.ggml.model", f"{what} (byte-level BPE)")
    name = m.text("tokenizer.ggml.pre")
    if name not in PRE_TOKENIZERS:
        raise m.refuse("tokenizer.ggml.pre", f"known are {', '.join(PRE_TOKENIZERS)}")
    pre = PRE_TOKENIZERS[name]
    for key in ("tokenizer.ggml.add_eos_token", "tokenizer.ggml.add_space_prefix"):
        if m.flag(key, False):
            raise m.refuse(key, "not supported")

    vocab, added = _read_tokens(m, vocab_size)
    special, name_of = {}, {token["id"]: token["content"] for token in added}
    for name, key in SPECIAL_TOKENS.items():
        token_id = m.integer(f"tokenizer.ggml.{key}", -1, least=0, most=vocab_size - 1)
        if token_id in name_of:
            special[name] = name_of[token_id]
    bos = special.get("bos_token")
    add_bos = m.flag("tokenizer.ggml.add_bos_token", pre.add_bos)
    if add_bos and bos is None:
        raise m.refuse("tokenizer.ggml.bos_token_id", "add_bos_token needs a token of type control")
    byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
    split = {"type": "Split", "pattern": {"Regex": pre.pattern}, "behavior": "Isolated", "invert": False}
    tokenizer = {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": added,
        "normalizer": {"type": "NFC"} if pre.nfc else None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": [split, byte_level]},
        "post_processor": _bos_in_front(bos, m.integer("tokenizer.ggml.bos_token_id", 0, 0)) if add_bos else byte_level,
        "decoder": byte_level,
        "model": {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "continuing_subword_prefix": None,
            "end_of_word_suffix": None,
            "fuse_unk": False,
            "byte_fallback": False,
            "ignore_merges": pre.ignore_merges,
            "vocab": vocab,
            "merges": _read_merges(m, vocab),
        },
    }
    template = m.text("tokenizer.chat_template", "")
    return TokenizerFiles(m.path, tokenizer, special | {"chat_template": template or None})


def end_tokens(m: Metadata, vocab_size: int) -> list[int]:
    """Ids of the control tokens whose names end a text; none if the file has no tokenizer. Raises ModelError."""
    if "tokenizer.ggml.tokens" not in m:
        return []
    tokens = enumerate(_names_and_types(m, vocab_size))
    return [i for i, (name, kind) in tokens if kind == CONTROL and name in END_TOKENS]


def _names_and_types(m: Metadata, vocab_size: int) -> list[tuple[str, int]]:
    """Name and type of each id, from 0 on. Raises ModelError if there are more than rows of the embedding."""
    names, types = m.texts("tokenizer.ggml.tokens"), m.integers("tokenizer.ggml.token_type")
    if not 0 < len(names) <= vocab_size or len(types) != len(names):
        raise m.refuse(
            "tokenizer.ggml.tokens", f"{len(names)} tokens and {len(types)} types, the embedding has {vocab_size} rows"
        )
    return list(zip(names, types, strict=True))


def _read_tokens(m: Metadata, vocab_size: int) -> tuple[dict[str, int], list[dict[str, Any]]]:
    """(the model's vocabulary, added tokens).

    Added tokens behind all others are left out of the vocabulary, as in tokenizers that were extended by them (Llama
    3's, Qwen's); otherwise they are in both. Unused ids, with which the converter fills a vocabulary up to the rows of
    the embedding, are in neither.
    """
    vocab: dict[str, int] = {}
    added = []
    for i, (name, kind) in enumerate(_names_and_types(m, vocab_size)):
        if kind == UNUSED:
            continue
        if kind not in (NORMAL, CONTROL, USER_DEFINED):
            raise m.refuse("tokenizer.ggml.token_type", f"type {kind} of token {i} is not supported")
        if not name or name in vocab:
            why = f"is that of {vocab[name]}, too" if name else "is empty"
            raise m.refuse("tokenizer.ggml.tokens", f"the name {name!r} of token {i} {why}")
        vocab[name] = i
        if kind != NORMAL:
            added.append(
                {"id": i, "content": name, "single_word": False, "lstrip": False, "rstrip": False,
                 "normalized": False, "special": kind == CONTROL}
            )  # fmt: skip
    n_normal = len(vocab) - len(added)
    if [token["id"] for token in added] == list(range(n_normal, len(vocab))):
        vocab = {name: i for name, i in vocab.items() if i < n_normal}
    return vocab, added


def _read_merges(m: Metadata, vocab: dict[str, int]) -> list[list[str]]:
    """Pairs of names. Raises ModelError for one that is not in the vocabulary."""
    merges = []
    for rank, merge in enumerate(m.texts("tokenizer.ggml.merges")):
        pair = merge.split(" ")
        if len(pair) != 2 or not {*pair, "".join(pair)} <= vocab.keys():
            raise m.refuse("tokenizer.ggml.merges", f"{merge!r} at {rank} is not a pair of tokens that make a third")
        merges.append(pair)
    return merges


def _bos_in_front(bos: str, bos_id: int) -> dict[str, Any]:
    """The post-processor that begins every text with the BOS token."""
    token, text = {"SpecialToken": {"id": bos, "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}
    second = [{"SpecialToken": {"id": bos, "type_id": 1}}, {"Sequence": {"id": "B", "type_id": 1}}]
    return {
        "type": "TemplateProcessing",
        "single": [token, text],
        "pair": [token, text, *second],
        "special_tokens": {bos: {"id": bos, "ids": [bos_id], "tokens": [bos]}},
    }
