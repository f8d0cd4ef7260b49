"""What is wrong with an input, in one line: the error that every reader raises, and how values and texts are shown."""

import json
import re

# Control characters of ASCII and of Latin-1 (C0, DEL, C1), Unicode's separators of lines and paragraphs: in a message
# they would begin a new line, or be obeyed by the terminal. And halves of surrogate pairs, which cannot be printed.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")
MAX_SHOWN = 200  # characters of a value in a message


class ModelError(ValueError):
    """An input holds something that cannot be used; the text names the file, the field and the value."""


def shown(value: object) -> str:
    """A value from a JSON file as it stands there, cut after MAX_SHOWN characters."""
    try:
        text = json.dumps(value, ensure_ascii=False, default=str)
    except (RecursionError, ValueError):  # nested too deeply; a whole number of more digits than Python prints
        text = f"a very long {type(value).__name__}"
    return text if len(text) <= MAX_SHOWN else text[:MAX_SHOWN] + "..."


def one_line(error: object) -> str:
    r"""The text of an error as one line that a terminal only prints: control characters as \xNN or \uNNNN."""
    if isinstance(error, MemoryError):
        return f"out of memory{f': {error}' if str(error) else ''}"
    if isinstance(error, RecursionError):
        return "the input is nested too deeply"
    return _CONTROL.sub(lambda c: c[0].encode("unicode_escape").decode("ascii"), str(error))
