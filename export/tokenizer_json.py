"""The types of what is in a tokenizer.json, as far as export/tokenizer.py uses it: checked first, so that the code
there may rely on them. What a field may say is checked there.
"""

from collections.abc import Callable, Iterator
from typing import Any

Refuse = Callable[[str, object, str], ValueError]  # of field, value and why

MAX_DEPTH = 8  # of Sequences in a Sequence
KIND = {dict: "an object", list: "an array", str: "a text", bool: "true or false", int: "a whole number"}
ADDED_TOKEN = {"id": int, "content": str, "special": bool, "normalized": bool, "lstrip": bool, "rstrip": bool,
               "single_word": bool}  # fmt: skip
# The fields of steps of normalizers, pre-tokenizers, post-processors and decoders, by name.
STEP = {"type": str, "behavior": str, "invert": bool, "add_prefix_space": bool, "trim_offsets": bool,
        "use_regex": bool, "individual_digits": bool, "pattern": dict}  # fmt: skip
SEQUENCES = {"normalizer": "normalizers", "pre_tokenizer": "pretokenizers", "post_processor": "processors",
             "decoder": "decoders"}  # fmt: skip


def _check(value: object, kind: type, field: str, refuse: Refuse) -> None:
    """Refuses a value of another type; true and false are no numbers. A text has to be valid Unicode."""
    if type(value) is not kind:
        raise refuse(field, value, f"is not {KIND[kind]}")
    if kind is str:
        try:
            value.encode("utf-8")
        except UnicodeEncodeError:
            raise refuse(field, value, "has half of a surrogate pair") from None


def _check_model(model: dict[str, Any], refuse: Refuse) -> None:
    """A BPE model: its vocabulary and merges. Others are refused by their type elsewhere."""
    if model.get("type", "BPE") != "BPE":
        return
    vocab, merges = model.get("vocab"), model.get("merges")
    _check(vocab, dict, "model.vocab", refuse)
    for name, token_id in vocab.items():
        if type(token_id) is not int:
            raise refuse("model.vocab", {name: token_id}, "is not a whole number")
    for name in vocab:
        _check(name, str, "model.vocab", refuse)
    _check(merges, list, "model.merges", refuse)
    for i, merge in enumerate(merges):
        if type(merge) is list:
            for part in merge:
                _check(part, str, f"model.merges[{i}]", refuse)
        elif type(merge) is not str:
            raise refuse(f"model.merges[{i}]", merge, "is not a pair")
    if model.get("ignore_merges") is not None:
        _check(model["ignore_merges"], bool, "model.ignore_merges", refuse)


def _steps(component: object, field: str, key: str, refuse: Refuse, depth: int = 0) -> Iterator[dict[str, Any]]:
    """The steps of a component, each with the types of its fields checked."""
    _check(component, dict, field, refuse)
    if depth > MAX_DEPTH:
        raise refuse(field, component, "is nested too deeply")
    if component.get("type") != "Sequence":
        for name, kind in STEP.items():
            if component.get(name) is not None:
                _check(component[name], kind, f"{field}.{name}", refuse)
        yield component
        return
    _check(component.get(key), list, f"{field}.{key}", refuse)
    for part in component[key]:
        yield from _steps(part, field, key, refuse, depth + 1)


def _check_template(step: dict[str, Any], refuse: Refuse) -> None:
    """A TemplateProcessing: a list of pieces, and the ids of the special tokens among them."""
    field = "post_processor"
    _check(step.get("single"), list, f"{field}.single", refuse)
    if not step["single"]:
        raise refuse(f"{field}.single", [], "is empty")
    for piece in step["single"]:
        _check(piece, dict, f"{field}.single", refuse)
        if "SpecialToken" not in piece:
            continue
        _check(piece["SpecialToken"], dict, f"{field}.single", refuse)
        name = piece["SpecialToken"].get("id")
        _check(name, str, f"{field}.single", refuse)
        _check(step.get("special_tokens"), dict, f"{field}.special_tokens", refuse)
        _check(step["special_tokens"].get(name), dict, f"{field}.special_tokens.{name}", refuse)
        ids = step["special_tokens"][name].get("ids")
        _check(ids, list, f"{field}.special_tokens.ids", refuse)
        for token_id in ids:
            _check(token_id, int, f"{field}.special_tokens.ids", refuse)


def check_types(tokenizer: dict[str, Any], refuse: Refuse) -> None:
    """Raises what `refuse` makes of the first field of a wrong type. null stands for a field that is not there."""
    _check(tokenizer.get("model"), dict, "model", refuse)
    _check_model(tokenizer["model"], refuse)
    added = tokenizer.get("added_tokens")
    if added is not None:
        _check(added, list, "added_tokens", refuse)
        for i, token in enumerate(added):
            _check(token, dict, f"added_tokens[{i}]", refuse)
            for name, kind in ADDED_TOKEN.items():
                _check(token.get(name), kind, f"added_tokens[{i}].{name}", refuse)
    for field, key in SEQUENCES.items():
        if tokenizer.get(field) is None:
            continue
        for step in _steps(tokenizer[field], field, key, refuse):
            if step.get("type") == "TemplateProcessing":
                _check_template(step, refuse)
            if step.get("type") == "Split":
                _check(step.get("pattern"), dict, f"{field}.pattern", refuse)
                for text in step["pattern"].values():
                    _check(text, str, f"{field}.pattern", refuse)
