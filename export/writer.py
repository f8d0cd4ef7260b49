"""Writing a model file, whatever the scheme: tensors at their places, then what comes of all of them."""

from collections.abc import Iterable
from typing import Any, BinaryIO

import numpy as np

from formats.checkpoint import Config
from formats.model_file import Generation, header, write_array
from formats.schemes import FileFormat
from formats.tensors import Tensor, weights_end, with_offsets


class Writer:
    """The tensors of a model file being written: each goes to its place, in any order."""

    def __init__(self, f: BinaryIO, tensors: Iterable[Tensor], alignment: int = 1):
        tensors = list(tensors)
        self._f = f
        self._places = {tensor.name: tensor for tensor in with_offsets(tensors, alignment=alignment)}
        self.end = weights_end(tensors, alignment)

    @property
    def names(self) -> list[str]:
        """The tensors of the file, in order."""
        return list(self._places)

    def write(self, name: str, values: np.ndarray) -> None:
        """Writes one tensor, in the type that the file has it in."""
        _, dtype, shape, position = self._places[name]
        if values.shape != shape:
            raise ValueError(f"{name} has shape {values.shape}, the file has room for {shape}")
        self._f.seek(position)
        write_array(self._f, values, dtype)


def finish(
    f: BinaryIO,
    config: Config,
    generation: Generation,
    file_format: FileFormat,
    group_size: int,
    end: int,
    tokenizer: bytes,
    **own: Any,
) -> None:
    """Writes the tokenizer section behind the tensors, which end at byte `end`, and the header in front of them.

    own: what the scheme has besides in the header, see `formats.model_file.header`.
    """
    f.seek(end)
    f.write(tokenizer)
    f.seek(0)
    f.write(header(config, generation, file_format, group_size, end, tokenizer, **own))
