"""The fields of a JSON object, each taken with its type and its range checked."""

import math
from pathlib import Path
from typing import Any, NoReturn

from formats.errors import ModelError, shown
from formats.limits import Range


def is_whole(value: object) -> bool:
    """Whether a JSON value is a whole number; in Python true and false would be, too."""
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    """Whether a JSON value is a number, which in Python may be infinite or NaN."""
    return isinstance(value, int | float) and not isinstance(value, bool)


class Fields:
    """A JSON object of the file `path`; `inside` is its place there, such as "rope_scaling.". null is no value."""

    def __init__(self, path: Path, values: dict[str, Any], inside: str = ""):
        self.path, self.values, self.inside = path, values, inside

    def refuse(self, field: str, why: str, value: object = None) -> NoReturn:
        """Raises ModelError with the file, the field, its value (or one that follows from others) and the reason."""
        value = self.values.get(field) if value is None else value
        raise ModelError(f"{self.path}: {self.inside}{field} is {shown(value)}: {why}")

    def _value(self, field: str, default: Any) -> Any:
        value = self.values.get(field)
        if value is None and default is None:
            raise ModelError(f"{self.path}: {self.inside}{field} is missing")
        return default if value is None else value

    def whole(self, field: str, limits: Range, default: int | None = None) -> int:
        """A whole number. Raises ModelError for another value, and for none where there is no default."""
        value = self._value(field, default)
        if not is_whole(value) or value < 1 <= limits.low:
            self.refuse(field, "expected a positive whole number", value)
        if not limits.holds(value):
            self.refuse(field, f"expected {limits}", value)
        return value

    def number(self, field: str, limits: Range, default: float | None = None) -> float:
        """A number. Raises ModelError as `whole` does, and for null."""
        value = self._value(field, None if field in self.values else default)
        if not is_number(value) or not value < math.inf or value <= 0 < limits.low:
            self.refuse(field, "expected a positive number")
        if not limits.holds(value):
            self.refuse(field, f"expected {limits}")
        return float(value)

    def flag(self, field: str, default: bool = False) -> bool:
        """true or false."""
        value = self._value(field, default)
        if not isinstance(value, bool):
            self.refuse(field, "expected true or false")
        return value

    def one_of(self, field: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
        """One of some values, in small letters. Raises ModelError for another, and for none if `default` is not one."""
        value = self.values.get(field)
        value = default if value is None else value
        known = value.lower() if isinstance(value, str) else value
        if not any(known == a and type(known) is type(a) for a in allowed):
            supported = " or ".join(map(shown, allowed))
            raise ModelError(f"{self.path}: {self.inside}{field} is {shown(value)}, supported is {supported}")
        return known

    def pair(self, field: str) -> tuple[int, int]:
        """Two whole numbers above 0. Raises ModelError."""
        value = self._value(field, None)
        if not (isinstance(value, list) and len(value) == 2 and all(is_whole(n) and n > 0 for n in value)):
            self.refuse(field, "expected two positive whole numbers")
        return value[0], value[1]

    def object(self, field: str) -> "Fields":
        """An object, empty where there is none."""
        value = self._value(field, {})
        if not isinstance(value, dict):
            self.refuse(field, "expected an object")
        return Fields(self.path, value, f"{self.inside}{field}.")
