"""The errors users see. Each says which field, which value, what is allowed, and what exists instead."""

from collections.abc import Iterable
from numbers import Integral, Real
from pathlib import Path
from typing import Any


class SpecdecError(Exception):
    """Base of every error this package raises on purpose; the command line prints it and exits with 1."""


class SettingError(SpecdecError, ValueError):
    """A setting is outside its range."""

    def __init__(self, field: str, value: Any, allowed: str) -> None:
        super().__init__(f"{field} = {value!r}: allowed is {allowed}")
        self.field = field


class UnknownNameError(SpecdecError, LookupError):
    """A name that is not in a registry; lists what is."""

    def __init__(self, kind: str, name: Any, known: Iterable[str]) -> None:
        super().__init__(f"no {kind} {name!r}; there is: {', '.join(sorted(known)) or 'none'}")


class DataError(SpecdecError):
    """A file that cannot be used; the message names the file and, where there is one, the line."""


class ModelError(SpecdecError):
    """A model that cannot be loaded, or cannot do what decoding needs of it."""


class ArchitectureError(ModelError):
    """An architecture that cannot serve draft/verify decoding, as one whose state cannot be rolled back."""


def require(field: str, value: Any, ok: bool, allowed: str) -> None:
    """Raise SettingError unless `ok`."""
    if not ok:
        raise SettingError(field, value, allowed)


def require_writable(file: Path) -> None:
    """Raise DataError unless the file can be written. Makes its folder where there is none; what is in it stays."""
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        new = not file.exists()
        with open(file, "a", encoding="utf-8"):
            pass
        if new:
            file.unlink()
    except OSError as error:
        raise DataError(f"{file}: cannot be written ({error.strerror})") from error


def whole(value: Any) -> bool:
    """Whether a setting is an integer (numpy's too); 2.0 and True are not."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def share(value: Any) -> bool:
    """Whether a setting is a number from 0 to 1; True and NaN are not."""
    return isinstance(value, Real) and not isinstance(value, bool) and 0 <= float(value) <= 1
