"""Files on disk: reading nothing but regular files, and writing such that a file is there complete or not at all.

A directory from elsewhere may hold anything under the names of a model: a FIFO blocks whoever opens it, a device may
do worse. So a file's kind is looked at before it is opened. Links are followed, as the Hugging Face cache consists of
them.
"""

import fcntl
import json
import os
import re
import shutil
import stat
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, BinaryIO

from formats.errors import ModelError, one_line, shown

MAX_TEXT = 1 << 28  # bytes of a JSON file or a template; the largest tokenizer.json known has 35 MB
GIT_LFS = b"version https://git-lfs.github.com/spec/"  # https://github.com/git-lfs/git-lfs/blob/main/docs/spec.md

KINDS = (
    (stat.S_ISDIR, "directory"),
    (stat.S_ISFIFO, "FIFO"),
    (stat.S_ISSOCK, "socket"),
    (stat.S_ISCHR, "character device"),
    (stat.S_ISBLK, "block device"),
)


# ----------------------------------------------------------------------------
# Reading


def check_regular(path: Path) -> int:
    """The size in bytes of a regular file. Raises ModelError for one that is missing or of another kind."""
    try:
        status = path.stat()
    except FileNotFoundError:
        raise ModelError(f"{path}: no such file") from None
    except (OSError, ValueError) as error:  # ValueError: a name with a null character
        raise ModelError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    for is_kind, name in KINDS:
        if is_kind(status.st_mode):
            raise ModelError(f"{path}: is a {name}, expected a regular file")
    return status.st_size


def check_file(path: Path) -> int:
    """The size of a regular file that has its content. Raises ModelError, also for what Git LFS leaves in its place."""
    size = check_regular(path)
    try:
        with path.open("rb") as f:
            start = f.read(len(GIT_LFS))
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None
    if start == GIT_LFS:
        raise ModelError(
            f"{path}: is a Git LFS pointer, not the file itself; run `git lfs pull` in the directory it was cloned to"
        )
    return size


def read_text(path: Path) -> str:
    """The text of a regular file. Raises ModelError if it is none, too long, or not UTF-8."""
    size = check_file(path)
    if size > MAX_TEXT:
        raise ModelError(f"{path}: is {size} bytes, expected at most {MAX_TEXT}")
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ModelError(f"{path}: not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise ModelError(f"{path}: {error.strerror}") from None


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file. Raises ModelError if there is none."""
    try:
        value = json.loads(read_text(path))
    except ModelError:
        raise
    except ValueError as error:  # beside JSONDecodeError: a number of more digits than Python takes
        raise ModelError(f"{path}: not JSON: {error}") from None
    except RecursionError:
        raise ModelError(f"{path}: is nested too deeply") from None
    if not isinstance(value, dict):
        raise ModelError(f"{path}: expected a JSON object, found {type(value).__name__}")
    return value


# ----------------------------------------------------------------------------
# Names of files that come from a stranger

MAX_NAME = 240  # bytes; of the 255 that file systems take, 15 are for what _locked_temporary puts around a name
# What leads to another folder, here or on Windows, where "a:b" is a file of another drive, or a hidden part of file a.
# And what Windows has in no name.
_NOT_IN_NAMES = re.compile(r'[/\\:*?"<>|]')
# https://learn.microsoft.com/en-us/windows/win32/fileio/naming-a-file: devices, whatever stands behind the first dot
_DEVICE = re.compile(r"(con|prn|aux|nul|conin\$|conout\$|(com|lpt)[0-9\u00b9\u00b2\u00b3]) *(\..*)?", re.IGNORECASE)


def _wrong_with(name: str, ending: str) -> str | None:
    """Why a name, with this ending, cannot be that of a file; None if it can."""
    size = len((name + ending).encode(errors="replace"))
    if not name:
        return "is empty"
    if name[0] == "." or name[-1] in ". ":
        return "begins with a dot, or ends with a dot or a blank"
    if one_line(name) != name:
        return "has control characters"
    if found := _NOT_IN_NAMES.search(name):
        return f"has the character {found[0]}"
    if size > MAX_NAME:
        return f"takes {size} bytes with {ending}, expected at most {MAX_NAME}"
    return "is a device on Windows" if _DEVICE.fullmatch(name) else None


def check_file_names(source: Path, names: Iterable[str], ending: str) -> None:
    """Refuses tensors whose names, with this ending, cannot be those of files in one folder, on any system.

    Whoever makes a name of a file out of what a file from elsewhere says asks here, before anything is written. Raises
    ModelError. source: the file that has the tensors.
    """
    seen: dict[str, str] = {}
    for name in names:
        if why := _wrong_with(name, ending):
            raise ModelError(f"{source}: tensor {shown(name)}: no file can have that name, it {why}")
        other = seen.setdefault(unicodedata.normalize("NFD", name).casefold(), name)
        if other != name:
            raise ModelError(
                f"{source}: tensors {shown(other)} and {shown(name)}: one file on systems that ignore case"
            )


# ----------------------------------------------------------------------------
# Writing


def cannot_write(path: Path, error: OSError) -> ModelError:
    """The error for an output that the system refuses."""
    return ModelError(f"{path}: cannot write: {error.strerror}")


def check_output(path: Path, inputs: Iterable[Path] = ()) -> None:
    """Refuses an output that is there and is no regular file, or is one of the inputs, by whatever name or link."""
    if path.is_dir():
        raise ModelError(f"{path}: is a directory")
    try:
        if not path.exists():
            return
        check_regular(path)
        same = next((file for file in inputs if file.exists() and path.samefile(file)), None)
    except OSError as error:
        raise cannot_write(path, error) from None
    if same is not None:
        raise ModelError(f"{path}: is the same file as the input {same}")


def sync_directory(path: Path) -> None:
    """Makes the names in a directory last through a loss of power, where the file system can do that."""
    with suppress(OSError):
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def remove_stale(path: Path) -> None:
    """Removes what killed writers of `path` have left: temporary files and directories whose lock nobody holds."""
    temporary = re.compile(re.escape(f".{path.name}.") + r"\w{8}\.part")  # as tempfile names them
    try:
        found = [p for p in path.parent.iterdir() if temporary.fullmatch(p.name)]
    except OSError:
        return
    for left in found:
        with suppress(OSError):  # another's, or locked: its writer is alive
            descriptor = os.open(left, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                if stat.S_ISDIR(os.fstat(descriptor).st_mode):
                    shutil.rmtree(left, ignore_errors=True)
                else:
                    left.unlink()
            finally:
                os.close(descriptor)


def _is_at(descriptor: int, path: Path) -> bool:
    """Whether an open file still has this name."""
    try:
        return os.path.samestat(os.fstat(descriptor), path.stat())
    except FileNotFoundError:
        return False


def _locked_temporary(path: Path, directory: bool) -> tuple[int, Path]:
    """A new private file or directory beside `path`, and its descriptor, which holds a lock on it for as long as it
    is open: what is not locked is stale. Until it is locked another process may take it for stale and remove it."""
    while True:
        if directory:
            temporary = Path(tempfile.mkdtemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent))
            descriptor = os.open(temporary, os.O_RDONLY | os.O_DIRECTORY)
        else:
            descriptor, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".part", dir=path.parent)
            temporary = Path(name)
        with suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX)
        if _is_at(descriptor, temporary):
            return descriptor, temporary
        os.close(descriptor)


@contextmanager
def _temporary(path: Path, directory: bool) -> Iterator[tuple[int, Path]]:
    """A locked temporary that vanishes, and an OSError that becomes a ModelError, if the block ends in an error."""
    try:
        remove_stale(path)
        descriptor, temporary = _locked_temporary(path, directory)
    except OSError as error:
        raise cannot_write(path, error) from None
    try:
        yield descriptor, temporary
    except BaseException as error:
        if directory:
            shutil.rmtree(temporary, ignore_errors=True)
        else:
            temporary.unlink(missing_ok=True)
        if isinstance(error, OSError):
            raise cannot_write(path, error) from None
        raise
    finally:
        os.close(descriptor)
    sync_directory(path.parent)


@contextmanager
def working_directory(path: Path) -> Iterator[Path]:
    """A directory beside `path` for the time of the block. What a killed process leaves goes with the next that writes
    `path`. Raises OSError."""
    remove_stale(path)
    descriptor, temporary = _locked_temporary(path, directory=True)
    try:
        yield temporary
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
        os.close(descriptor)


@contextmanager
def replacing(path: Path, inputs: Iterable[Path] = ()) -> Iterator[BinaryIO]:
    """A file that becomes `path` when the block ends well and vanishes when it does not.

    It is on the disk before it gets its name. Raises ModelError for an output that is no regular file or one of the
    inputs, and for an OSError in the block, such as of a full disk.
    """
    path = Path(path)
    check_output(path, inputs)
    with _temporary(path, directory=False) as (descriptor, temporary):
        with os.fdopen(descriptor, "wb", closefd=False) as f:
            yield f
            f.flush()
            os.fsync(descriptor)
        umask = os.umask(0)
        os.umask(umask)
        os.fchmod(descriptor, 0o666 & ~umask)  # mkstemp makes it private
        os.replace(temporary, path)


@contextmanager
def new_directory(path: Path) -> Iterator[Path]:
    """A directory that becomes `path`, where nothing may be, when the block ends well, and vanishes when it does not.

    Its files are on the disk before it gets its name. Raises ModelError as `replacing` does.
    """
    path = Path(path)
    with _temporary(path, directory=True) as (descriptor, temporary):
        yield temporary
        for file in temporary.iterdir():
            with file.open("rb") as f:
                os.fsync(f.fileno())
        os.fsync(descriptor)
        temporary.rename(path)
