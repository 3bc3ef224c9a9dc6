"""Base of all reports: a text for people, a dictionary for programs, a cell for notebooks; numbers of bytes in words.

In: a frozen dataclass with a `summary`. Out: `str`, `to_dict`, `_repr_html_`.
Not here: what is measured (each journey's `report`).
"""

from __future__ import annotations

import dataclasses
import enum
import html
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec


class HasSummary(Protocol):
    """A value that describes itself."""

    def summary(self) -> str:
        """Return a few lines for people."""
        ...


class Readable:
    """The methods of every report, for a class that has a `summary`: `str()` is that, `to_dict()` has the fields."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as plain values that JSON has."""
        return cast("dict[str, Any]", plain(self))

    def __str__(self: HasSummary) -> str:
        return self.summary()

    def _repr_html_(self: HasSummary) -> str:
        return pre(self.summary())


class Summarised(Readable, ABC):
    """A report that is a dataclass. A struct of msgspec has another metaclass, and takes `Readable`."""

    __slots__ = ()

    @abstractmethod
    def summary(self) -> str:
        """Return a few lines for people."""


def plain(value: Any) -> Any:
    """Return dataclasses, structs, enums, paths and numpy scalars as JSON's types."""
    # Enums before str: a StrEnum is both, and its value is the plain text.
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, msgspec.Struct):
        return plain(msgspec.structs.asdict(value))
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, Sequence):
        return [plain(item) for item in value]
    # What is left is a numpy scalar; anything else fails here, in tests, and not in a user's JSON parser.
    return value.item()


def pre(text: str) -> str:
    """Return a text as HTML that keeps its lines; names in it cannot become markup."""
    return f"<pre>{html.escape(text)}</pre>"


def names_text(names: Sequence[str]) -> str:
    """Return the first three names, and how many more there are."""
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes in decimal units: `2.14 GB`, `512 B`."""
    # Powers of 1000, as vendors give memory and links: a rate in GB/s can be compared with a data sheet.
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
