"""Hugging Face directories of quantized models: what all formats share that exporters read, or write as --hf-out.

A directory that is written beside a model file has the configuration and the tokenizer's files of the model that was
exported, and its own tensors. Of a GGUF file these are made (export/gguf_files.py).
"""

import argparse
import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from export.gguf_files import config_json, metadata_files
from formats import safetensors
from formats.checkpoint import Config
from formats.errors import ModelError
from formats.files import new_directory, read_json
from formats.model_file import write_array
from formats.source import Source, is_gguf, open_gguf
from formats.tensors import Tensor
from golden.forward import hf_name

COPIED = ("tokenizer*", "generation_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
          "merges.txt", "chat_template*")  # fmt: skip


# A tensor of a directory in Hugging Face's name, and what gives its values.
Content = tuple[Tensor, Callable[[], np.ndarray]]


# ----------------------------------------------------------------------------
# In


def tell_model(source: Source) -> None:
    """Says, where a directory is quantized, that its codes are not kept, as a warning of the command line."""
    if source.forms:
        kinds = "; ".join(sorted({str(form) for form in source.forms.values()}))
        warnings.warn(f"{source.path}: {kinds}: weights are codes times scales, and rounded anew", stacklevel=2)


def part_name(config: Config, step_name: str, part: str) -> str:
    """The name of a tensor in the place of a step's `weight`: `qweight` -> `model.layers.0....q_proj.qweight`."""
    return hf_name(config, step_name).removesuffix("weight") + part


# ----------------------------------------------------------------------------
# Out


def add_hf_out(parser: argparse.ArgumentParser, what: str) -> None:
    """The option --hf-out. what: whose format the directory is in."""
    parser.add_argument("--hf-out", type=Path, metavar="DIR", help=f"also write a Hugging Face directory as {what}")


def check_destination(hf_out: Path, model_file: Path | None = None, source: Path | None = None) -> None:
    """Refuses a directory that exists, that nothing can be written beside, or that is the model file.

    Also a source that is a GGUF file with a tokenizer that a directory cannot express.
    """
    if model_file is not None and hf_out.resolve() == model_file.resolve():
        raise ModelError(f"{model_file}: is the model file, --hf-out needs another place")
    if hf_out.exists() or hf_out.is_symlink():
        raise ModelError(f"{hf_out}: exists already")
    if not hf_out.parent.is_dir():
        raise ModelError(f"{hf_out}: cannot write: {hf_out.parent} is no directory")
    if source is not None and is_gguf(source):
        metadata_files(open_gguf(source))


@contextmanager
def after_model_file(hf_out: Path, model_file: Path) -> Iterator[None]:
    """While `hf_out` is written: an error or interrupt also says that the model file is there, which stays."""
    try:
        yield
    except (ModelError, OSError) as error:
        raise ModelError(f"{error}; {model_file} was written") from None
    except KeyboardInterrupt as interrupt:
        raise type(interrupt)(f"{hf_out} was not written, {model_file} was") from None


def read_source_config(source: Path, tied: bool) -> dict[str, Any]:
    """config.json of the model that was exported. tied: whether the classifier is the embedding in the model file."""
    config = config_json(open_gguf(source)) if is_gguf(source) else read_json(source / "config.json")
    config.pop("compression_config", None)
    if config.get("tie_word_embeddings", False) != tied:  # lm_head.weight was another matrix: Checkpoint
        config["tie_word_embeddings"] = tied
    return config


def other_files(source: Path) -> dict[str, bytes]:
    """The files of the tokenizer and of generation by name: copies, or made of a GGUF file's metadata."""
    if is_gguf(source):
        return metadata_files(open_gguf(source))
    files = sorted({file for pattern in COPIED for file in source.glob(pattern) if file.is_file()})
    return {file.name: file.read_bytes() for file in files}


def unquantized(source: Source, name: str) -> np.ndarray:
    """A tensor as it is stored; of a quantized classifier the weights that it stands for."""
    return source.tensor(name) if name in source.forms else source.stored(name)


def as_stored(source: Source, name: str, stored: str) -> Content:
    """The tensor `name` of a directory that is the tensor `stored` of the source, in its type."""
    values = unquantized(source, stored)
    dtype = "bfloat16" if values.dtype.name == "bfloat16" else values.dtype.str
    return Tensor(name, dtype, values.shape), partial(unquantized, source, stored)


def write_directory(source: Path, hf_out: Path, config: dict[str, Any], contents: Iterable[Content]) -> None:
    """Writes `hf_out`, which must not exist. It appears when it is complete, or not at all; raises ModelError.

    source: the Hugging Face directory or GGUF file of the model, for the tokenizer's files. config: for config.json.
    contents: those of model.safetensors, each asked once for its values, in this order, so that one is in memory.
    """
    contents = list(contents)
    check_destination(hf_out)
    files = other_files(source)
    with new_directory(hf_out) as temporary:
        for name, content in files.items():
            (temporary / name).write_bytes(content)
        (temporary / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        with (temporary / "model.safetensors").open("wb") as f:
            f.write(safetensors.header(tensor for tensor, _ in contents))
            for tensor, load in contents:
                values = load()
                if values.shape != tensor.shape:
                    raise ValueError(f"{tensor.name} has shape {values.shape}, listed is {tensor.shape}")
                write_array(f, values, tensor.dtype)
        # mkdtemp makes it private. Who may read the source may read this; and enter it, where the source is a file.
        mode = source.stat().st_mode
        temporary.chmod((mode if source.is_dir() else mode | (mode & 0o444) >> 2) | 0o700)
