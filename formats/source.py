"""A model to export or to run in fp32, whatever its form: a Hugging Face directory or a GGUF file."""

from functools import lru_cache
from pathlib import Path

from formats.checkpoint import DENSE, SPARSE, Checkpoint, ModelError
from formats.foreign import storage_of
from formats.gguf_model import GGUFModel
from formats.model_file import Generation, read_generation

Source = Checkpoint | GGUFModel


def is_gguf(path: Path) -> bool:
    """Whether a path can only be meant as a GGUF file, not as a directory. Raises ModelError if it can be neither."""
    path = Path(path)
    if path.is_dir():
        files = [] if (path / "config.json").exists() else sorted(path.glob("*.gguf"))
        if files:
            raise ModelError(f"{path}: no config.json, but GGUF files: give one of them, such as {files[0]}")
        return False
    if path.exists() and not path.is_file():
        raise ModelError(f"{path}: neither a directory nor a regular file")
    if not path.exists() and path.suffix == ".gguf":
        raise ModelError(f"{path}: no such file")
    return path.exists()


@lru_cache(maxsize=1)
def _open_gguf(path: Path, _size: int, _mtime_ns: int, archs: tuple[str, ...]) -> GGUFModel:
    return GGUFModel(path, archs)


def open_gguf(path: Path, archs: tuple[str, ...] = (*DENSE, *SPARSE)) -> GGUFModel:
    """The model in a GGUF file. Kept until another is opened, as reading a large vocabulary takes seconds."""
    status = Path(path).stat()
    return _open_gguf(Path(path), status.st_size, status.st_mtime_ns, archs)


def open_model(path: Path, archs: tuple[str, ...] = DENSE) -> Source:
    """The model at a path, quantized or not. Raises ModelError. archs: what the caller runs."""
    if is_gguf(path):
        model = open_gguf(path)
        return model if model.config.arch in archs else open_gguf(path, archs)
    storage = storage_of(path)
    return Checkpoint(path, storage and storage.form, archs)


def generation_of(source: Source) -> Generation:
    """Ids and sampling defaults of a model. Raises ModelError."""
    if is_gguf(source.path):
        return source.generation
    return read_generation(source.path, source.config.vocab_size)
