"""The schemes that the reference runs: one row each. Their files' formats are in formats/schemes.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from formats import schemes
from formats.checkpoint import Config
from formats.model_file import read_format
from golden.awq import AWQ
from golden.forward import Scheme
from golden.gptq import GPTQ
from golden.moe import MoE
from golden.q8 import Q8File
from golden.w8a8 import W8A8


class FileScheme(Scheme, Protocol):
    """A scheme that was read from a model file, with the file's config."""

    config: Config


DENSE_MODELS, MOE_MODELS = ("tiny-llama", "tiny-qwen3"), ("tiny-qwen3-moe",)  # below models/
W8A8_VARIANTS = ("w8a8", "w8a8-block32", "w8a8-static", "w8a8-rotate")
GPTQ_VARIANTS = ("gptq-w8", "gptq-w4", "gptq-ladder", "gptq-sparse")
MOE_VARIANTS = ("moe-a8w8", "moe-a8w4", "moe-a8w4-pure", "moe-mxfp8", "moe-ladder")
# Small random models, for what no trained one has: activations in an order, and routers' weights that are not
# normalized. They write no text, so that they have traces alone. Name: scheme and variant.
RANDOM_MODELS = {"random-llama": ("gptq", "gptq-order"), "random-qwen3-moe": ("moe", "moe-a8w8")}


@dataclass(frozen=True)
class Reference:
    """How the reference gets at a scheme, and which of its model files have golden vectors."""

    format: schemes.FileFormat
    # A model file. None: golden vectors are made from a Hugging Face directory, by golden.q8.
    read: Callable[[Path], FileScheme] | None
    variants: tuple[str, ...]  # in the names of files: build/models/MODEL.VARIANT.bin
    short_traces: tuple[str, ...] = ()  # the variants whose golden traces have two tokens
    models: tuple[str, ...] = DENSE_MODELS  # of which there are golden vectors


SCHEMES = {
    reference.format.scheme: reference
    for reference in (
        Reference(schemes.Q8_FILE, None, ("q8",)),
        Reference(schemes.W8A8_FILE, W8A8, W8A8_VARIANTS, short_traces=W8A8_VARIANTS[2:]),
        Reference(schemes.AWQ_FILE, AWQ, ("awq", "awq-g64"), short_traces=("awq-g64",)),
        Reference(schemes.GPTQ_FILE, GPTQ, GPTQ_VARIANTS, short_traces=GPTQ_VARIANTS),
        Reference(schemes.MOE_FILE, MoE, MOE_VARIANTS, short_traces=MOE_VARIANTS, models=MOE_MODELS),
    )
}


def goldens(only: str | None = None, model: str | None = None) -> Iterator[tuple[str, str, Reference]]:
    """Model, variant and reference of all that has golden vectors: of all schemes, or one; of all models, or one."""
    for name in (*DENSE_MODELS, *MOE_MODELS):
        for scheme, reference in SCHEMES.items():
            if only in (None, scheme) and model in (None, name) and name in reference.models:
                yield from ((name, variant, reference) for variant in reference.variants)


def random_goldens(only: str | None = None, model: str | None = None) -> Iterator[tuple[str, str, Reference]]:
    """The same of the random models."""
    for name, (scheme, variant) in RANDOM_MODELS.items():
        if only in (None, scheme) and model in (None, name):
            yield name, variant, SCHEMES[scheme]


def read_file(path: Path) -> FileScheme:
    """The scheme of a model file, by its magic. Raises ModelError if it has none that can be read here."""
    file_format = read_format(path)
    if file_format is schemes.Q8_FILE:
        return Q8File(path)
    reference = SCHEMES.get(file_format.scheme) if file_format else None
    read = reference.read if reference else None
    return (read or W8A8)(path)  # W8A8 refuses what is no model file, and says what it found
