"""The quantization schemes that have a model file: one row each.

A new scheme is a row here, beside its list of tensors in formats/tensors.py (GPTQ's: formats/gptq.py, MoE's:
formats/moe.py); a module export/NAME.py; and a row in golden/schemes.py.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from formats import gptq, moe
from formats.checkpoint import DENSE, SPARSE, Config
from formats.tensors import Tensor, awq_tensors, q8_tensors, w8a8_tensors

Layout = gptq.GptqLayout | moe.MoeLayout  # what a scheme's own fields in the header say


@dataclass(frozen=True)
class FileFormat:
    """How the model files of a scheme begin, and what they hold."""

    scheme: str  # its name: python -m export NAME
    program: str  # that runs such files
    magic: int
    version: int
    # Takes config, group_size and the header's `activations`, or config and layout where there is `read_layout`.
    tensors: Callable[..., Iterator[Tensor]]
    # KuiperLLama's header has head_dim where llama2.c's has group_size, and group_size behind it. Its files have no
    # extension block, and are Qwen3.
    is_kuiper: bool = False
    alignment: int = 1  # bytes: every tensor begins at a multiple of it
    archs: tuple[str, ...] = DENSE  # of the models that it takes
    # Reads the scheme's own fields in the header. It takes path, the header's bytes from 0xC0 on, config and
    # group_size, and returns the config with what the fields add to it, and a layout.
    read_layout: Callable[[Path, bytes, Config, int], tuple[Config, Layout]] | None = None


Q8_FILE = FileFormat("q8", "runq", 0x616B3432, 2, lambda c, g, _: q8_tensors(c, g))  # "ak42", llama2.c's version 2
W8A8_FILE = FileFormat("w8a8", "runq_w8a8", 0x616B3838, 1, lambda c, g, a: w8a8_tensors(c, g, bool(a)))
AWQ_FILE = FileFormat(  # "ak48", KuiperLLama's Qwen3 AWQ
    "awq", "runq_awq", 0x616B3438, 5, lambda c, g, _: awq_tensors(c, g), is_kuiper=True
)
GPTQ_FILE = FileFormat(  # "akgp"
    "gptq", "runq_gptq", 0x616B6770, 1, gptq.gptq_tensors, alignment=gptq.ALIGNMENT, read_layout=gptq.read_layout
)
MOE_FILE = FileFormat(  # "akme"
    "moe",
    "runq_moe",
    0x616B6D65,
    1,
    moe.moe_tensors,
    alignment=moe.ALIGNMENT,
    archs=SPARSE,
    read_layout=moe.read_layout,
)
FORMATS = {
    f.scheme: f
    for f in (
        Q8_FILE,
        W8A8_FILE,
        AWQ_FILE,
        GPTQ_FILE,
        MOE_FILE,
    )
}


def format_of(magic: int) -> FileFormat | None:
    """The scheme whose files begin with this number."""
    return next((f for f in FORMATS.values() if f.magic == magic), None)
