"""Malformed model directories, made from a bundled model: a wrong value at every field, and broken files of every kind.

`small_model` cuts a bundled model down, so that thousands of exports take seconds. `field_cases` replaces each field of
each JSON file by values of every type; `file_cases` does to whole files what disks, downloads and strangers do to them;
`weight_cases` does so to model.safetensors. The same cases come out every time.
"""

import copy
import json
import os
import shutil
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save, save_file

DIM, HIDDEN, HEADS, HEAD_DIM, MERGES = 64, 64, 2, 32, 24


class Case(NamedTuple):
    """What is done to a directory: the content of one file, or a function that makes something else of it."""

    name: str
    file: str
    content: bytes | Callable[[Path], None]


# ----------------------------------------------------------------------------
# A small model


def small_tokenizer(tokenizer: dict) -> tuple[dict, list[int]]:
    """A tokenizer.json with the bytes' tokens and the first merges, and which of the old ids are its ids 0, 1, ..."""
    vocab, merges = tokenizer["model"]["vocab"], tokenizer["model"]["merges"][:MERGES]
    names = [*list(vocab)[:256], *("".join(pair) for pair in merges)]
    names = list(dict.fromkeys(names))
    added = [token["content"] for token in tokenizer["added_tokens"]]
    new_ids = {name: i for i, name in enumerate([*names, *added])}
    old_ids = {token["content"]: token["id"] for token in tokenizer["added_tokens"]} | vocab
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer["model"]["vocab"] = {name: new_ids[name] for name in names}
    tokenizer["model"]["merges"] = merges
    for token in tokenizer["added_tokens"]:
        token["id"] = new_ids[token["content"]]
    for step in (tokenizer["post_processor"] or {}).get("processors", []):
        for name, special in step.get("special_tokens", {}).items():
            special["ids"] = [new_ids[name]]
    return tokenizer, [old_ids[name] for name in new_ids]


def small_model(source: Path, out: Path) -> Path:
    """A bundled Llama with one layer, 64 channels and the first tokens of its vocabulary, its weights in two shards."""
    out.mkdir()
    tokenizer, ids = small_tokenizer(json.loads((source / "tokenizer.json").read_text()))
    new_id = {old: new for new, old in enumerate(ids)}
    config = json.loads((source / "config.json").read_text())
    config |= {"hidden_size": DIM, "intermediate_size": HIDDEN, "num_hidden_layers": 1, "num_attention_heads": HEADS,
               "num_key_value_heads": 1, "head_dim": HEAD_DIM, "vocab_size": len(ids),
               "max_position_embeddings": 64}  # fmt: skip
    generation = json.loads((source / "generation_config.json").read_text())
    for fields in (config, generation):
        fields["bos_token_id"] = new_id[fields["bos_token_id"]]
        fields["eos_token_id"] = [new_id[i] for i in fields["eos_token_id"]]
    files = {"config.json": config, "generation_config.json": generation, "tokenizer.json": tokenizer}
    for name, content in files.items():
        (out / name).write_text(json.dumps(content))
    shutil.copy(source / "tokenizer_config.json", out)

    weights = {}
    for name, value in load_file(source / "model.safetensors").items():
        if ".layers." in name and ".layers.0." not in name:
            continue
        if name == "model.embed_tokens.weight":
            value = value[ids]
        rows = {"k_proj": HEAD_DIM, "v_proj": HEAD_DIM}.get(name.split(".")[-2], len(ids) if "embed" in name else DIM)
        weights[name] = np.ascontiguousarray(value[:rows] if value.ndim == 1 else value[:rows, :DIM])
    names = sorted(weights)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        shard = f"model-{i + 1:05d}-of-00002.safetensors"
        save_file({name: weights[name] for name in part}, out / shard)
        weight_map |= dict.fromkeys(part, shard)
    (out / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return out


# ----------------------------------------------------------------------------
# Fields

MISSING = object()
WRONG = [MISSING, None, True, 0, -1, 1.5, 2**31, 10**400, float("nan"), "", "x", "\ud800", [], [1], [["x", "x"]], {},
         {"x": [1]}]  # fmt: skip
NUMBERS = [1, 2**24 + 1, 2**64, 1e-60, 1e60, float("inf"), False, "1"]  # also in config files
CONFIGS = ("config.json", "generation_config.json")
# Fields that the bundled models do not have.
ABSENT = {
    "config.json": ("rope_parameters", "layer_types", "quantization_config", "use_sliding_window",
                    "partial_rotary_factor"),
    "tokenizer_config.json": ("unk_token",),
}  # fmt: skip
# Fields that nobody here reads: one wrong value each.
UNREAD = ("architectures", "attention_dropout", "initializer_range", "torch_dtype", "use_cache", "pad_token_id",
          "version", "truncation", "padding", "pair", "trim_offsets", "type_id", "tokens", "fuse_unk", "add_bos_token",
          "clean_up_tokenization_spaces", "model_input_names", "model_max_length", "tokenizer_class")  # fmt: skip
SAMPLED = 1  # of the entries at both ends of a long list or object


def paths(value: Any, path: tuple = ()) -> Iterator[tuple]:
    """The path of every value inside a JSON value; of long lists and objects the first and the last few."""
    items = list(value.items()) if isinstance(value, dict) else list(enumerate(value)) if type(value) is list else []
    if len(items) > 3 and (type(value) is list or len(items) > 30):
        items = items[:SAMPLED] + items[-SAMPLED:]
    for key, inner in items:
        yield (*path, key)
        if key in UNREAD:
            continue
        yield from paths(inner, (*path, key))


def replaced(value: Any, path: tuple, new: Any) -> Any:
    """A copy of a JSON value with another value at a path, or none."""
    value = copy.copy(value)
    if len(path) > 1:
        value[path[0]] = replaced(value[path[0]], path[1:], new)
    elif new is MISSING:
        del value[path[0]]
    else:
        value[path[0]] = new
    return value


def field_cases(directory: Path) -> Iterator[Case]:
    """Each field of each JSON file replaced by each wrong value."""
    for file in sorted(path.name for path in directory.glob("*.json")):
        value = json.loads((directory / file).read_text())
        absent = ABSENT.get(file, ())
        for path in [*paths(value), *((name,) for name in absent)]:
            wrong = [[1]] if path[-1] in UNREAD else [*WRONG, *(NUMBERS if file in CONFIGS else [])]
            for new in wrong[1:] if path[0] in absent else wrong:
                name = "missing" if new is MISSING else json.dumps(new)[:30]
                text = json.dumps(replaced(value, path, new))
                yield Case(f"{file}: {'.'.join(map(str, path))}: {name}", file, text.encode())


# ----------------------------------------------------------------------------
# Files

LFS_POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"4d7a2146" * 8 + b"\nsize 12345\n"


def as_directory(path: Path) -> None:
    path.unlink()
    path.mkdir()


def as_fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def as_dangling_link(path: Path) -> None:
    path.unlink()
    path.symlink_to("nowhere")


def as_link_to_a_device(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def as_link_to_itself(path: Path) -> None:
    path.unlink()
    path.symlink_to(path.name)


def as_huge(path: Path) -> None:
    """10 GB, of which none is on the disk."""
    os.truncate(path, 10_000_000_000)


def file_cases(directory: Path) -> Iterator[Case]:
    """Whole files that are broken: each of the directory's in each way."""
    for file in sorted(path.name for path in directory.iterdir()):
        for change in (Path.unlink, as_directory, as_fifo, as_dangling_link, as_link_to_a_device, as_link_to_itself,
                       as_huge):  # fmt: skip
            yield Case(f"{file}: {change.__name__}", file, change)
        content = (directory / file).read_bytes()
        yield Case(f"{file}: empty", file, b"")
        yield Case(f"{file}: Git LFS", file, LFS_POINTER)
        yield Case(f"{file}: cut off", file, content[: len(content) // 2])
        yield Case(f"{file}: zeros", file, bytes(len(content)))
        yield Case(f"{file}: something behind", file, content + b"x")
        if not file.endswith(".json"):
            continue
        value = json.loads(content)
        name, inner = next(iter(value.items()))
        yield Case(f"{file}: byte order mark", file, b"\xef\xbb\xbf" + content)
        yield Case(f"{file}: not UTF-8", file, content.replace(b'"', b'"\xff', 1))
        yield Case(f"{file}: UTF-16", file, content.decode().encode("utf-16"))
        for text in ("null", "[]", "0", '"x"', "[" * 100_000, "[" * 100_000 + "]" * 100_000, "{"):
            yield Case(f"{file}: {text[:9]}", file, text.encode())
        deep = '{"x": ' + '{"x": [' * 5_000 + "]}" * 5_000 + ", "
        yield Case(f"{file}: deep in an unknown field", file, deep.encode() + content[1:])
        for inside in ("[" * 900 + "]" * 900, "9" * 5_000, "9" * 4_300):
            text = json.dumps(value | {name: "HERE"}).replace('"HERE"', inside)
            yield Case(f"{file}: {name} {inside[:2]}, {len(inside)} characters", file, text.encode())
        double = json.dumps({name: 0})[:-1] + ", " + content.decode()[1:]
        yield Case(f"{file}: {name} twice", file, double.encode())
        double = content.decode()[:-1] + ", " + json.dumps({name: inner})[1:]
        yield Case(f"{file}: {name} twice the same", file, double.encode())


# ----------------------------------------------------------------------------
# Weights


def with_header(header: object, data: bytes = b"") -> bytes:
    """A safetensors file of any header."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def weight_cases(directory: Path) -> Iterator[Case]:
    """Shards that are no safetensors files, or have other tensors than the config implies."""
    file = "model-00001-of-00002.safetensors"
    content = (directory / file).read_bytes()
    weights = load_file(directory / file)
    (length,) = struct.unpack_from("<Q", content)
    header, data = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(iter(weights))
    entry = header[name]

    for size in (0, 1, 7, 8, length + 1, 1 << 31, 1 << 40, 1 << 63, (1 << 64) - 1):
        yield Case(f"header of {size} bytes", file, struct.pack("<Q", size) + content[8:])
    for text in (b"", b"{", b"[]", b"null", b"\xff", b"[" * 100_000, b'{"a": 1}', b'{"__metadata__": 1}'):
        yield Case(f"header {text[:20]!r}", file, with_header(text, data))
    for field, wrong in (
        ("dtype", "F8_E4M3"), ("dtype", "F8_E5M2"), ("dtype", "F4"), ("dtype", "I32"), ("dtype", "BOOL"),
        ("dtype", "C64"), ("dtype", "X"), ("dtype", 5), ("dtype", None),
        ("shape", []), ("shape", [0]), ("shape", [0, 5]), ("shape", [1 << 62, 1 << 62]), ("shape", [-1, 64]),
        ("shape", [1.5]), ("shape", "x"), ("shape", [1 << 70]), ("shape", [[64]]),
        ("data_offsets", [0, 0]), ("data_offsets", [8, 4]), ("data_offsets", [0, 1 << 63]), ("data_offsets", [-4, 4]),
        ("data_offsets", [1]), ("data_offsets", {}),
    ):  # fmt: skip
        yield Case(f"{field} {wrong}", file, with_header(header | {name: entry | {field: wrong}}, data))
    other = next(n for n in header if n not in (name, "__metadata__"))
    overlapping = header | {other: header[other] | {"data_offsets": entry["data_offsets"]}}
    yield Case("overlapping tensors", file, with_header(overlapping, data))
    yield Case("a name with control characters", file, with_header({"\x1b[2J\n" + name: entry}, data))

    def saved(**tensors: np.ndarray) -> bytes:
        return save({key: np.ascontiguousarray(value) for key, value in (weights | tensors).items()})

    value = weights[name].astype(np.float32)
    for what, wrong in (
        ("NaN", np.full_like(value, np.nan)),
        ("infinity", np.full_like(value, -np.inf)),
        ("the largest fp32", np.full_like(value, np.finfo(np.float32).max)),
        ("the smallest fp32", np.full_like(value, 1e-45)),
        ("zeros", np.zeros_like(value)),
        ("fp64", value.astype(np.float64)),
        ("int8", np.zeros(value.shape, np.int8)),
        ("float8", value.astype(ml_dtypes.float8_e4m3fn)),
        ("bool", np.zeros(value.shape, bool)),
        ("another shape", value.reshape(-1)),
        ("no dimension", np.float32(1).reshape(())),
        ("no value", np.zeros((0, *value.shape[1:]), np.float32)),
        ("one more dimension", value[None]),
    ):
        yield Case(f"{name} of {what}", file, saved(**{name: wrong}))
    yield Case("a tensor less", file, save({key: value for key, value in weights.items() if key != name}))
    yield Case("no tensors", file, save({}))
    yield Case("a bias", file, saved(**{"model.layers.0.self_attn.q_proj.bias": np.zeros(4, np.float32)}))
