"""The bases of all reports: text for users, a dictionary for programs, HTML for notebooks, and values for telemetry."""

from __future__ import annotations

import dataclasses
import enum
import os
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, cast

import msgspec

from penstock.units import GB


class _HasSummary(Protocol):
    def summary(self) -> str: ...


class Readable:
    """Methods of every report."""

    __slots__ = ()

    def to_dict(self) -> dict[str, Any]:
        """Return the fields by name, as values that JSON can represent."""
        return cast("dict[str, Any]", plain(self))

    def __str__(self: _HasSummary) -> str:
        return self.summary()

    def _repr_html_(self: _HasSummary) -> str:
        return pre(self.summary())


class Summarised(Readable, ABC):
    """A report that is a dataclass. Msgspec structs have another metaclass, so their reports derive from `Readable`."""

    __slots__ = ()

    @abstractmethod
    def summary(self) -> str:
        """Return a readable summary of a few lines."""


class TransferStats(Readable, msgspec.Struct, frozen=True, kw_only=True):
    """The bytes and seconds of one call. Its report adds fields to them, and metrics and spans show them."""

    nbytes: int
    """Number of bytes at the destination. For an update, the number of bytes read."""
    verified_bytes: int = 0
    """Number of bytes that this process compared with digests."""
    wall_s: float
    phases: Mapping[str, float]
    """Seconds in each phase."""
    revision: str
    """Equal revisions mean equal bytes."""

    @property
    def gb_per_s(self) -> float:
        """Return the decimal GB that arrived at the destination per second of wall time."""
        return self.nbytes / GB / self.wall_s if self.wall_s else 0.0


def plain(value: Any) -> Any:
    """Convert dataclasses, structs, enums, paths and numpy scalars to JSON types."""
    # Check enums before str, because a StrEnum is both.
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
    # Only numpy scalars remain. Any other type fails here in tests, and not in a user's JSON parser.
    return value.item()


def pre(text: str) -> str:
    """Return a text as escaped HTML that preserves the line breaks."""
    import html

    return f"<pre>{html.escape(text)}</pre>"


def names_text(names: Sequence[str], most: int = 3) -> str:
    """Return a text with the first `most` names and the number of remaining names."""
    return ", ".join(names[:most]) + (f" and {len(names) - most} more" if len(names) > most else "")


def phases_text(phases: Mapping[str, float]) -> str:
    """Return the phases with their seconds, such as `open 0.010 s, move 1.200 s`."""
    return ", ".join(f"{name} {seconds:.3f} s" for name, seconds in phases.items())


def shares_text(nbytes_by_path: Mapping[str, int]) -> str:
    """Return the paths with their shares of the bytes, such as `75% shm <- MEMBER, 25% storage URI`."""
    total = max(1, sum(nbytes_by_path.values()))
    ordered = sorted(nbytes_by_path.items(), key=lambda item: -item[1])
    return ", ".join(f"{nbytes / total:.0%} {path}" for path, nbytes in ordered)


def bytes_text(nbytes: float) -> str:
    """Return a number of bytes in decimal units, such as `2.14 GB` or `512 B`."""
    # Vendors state link speeds in powers of 1000.
    for unit in ("B", "kB", "MB", "GB"):
        if abs(nbytes) < 1000:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.2f} {unit}"
        nbytes /= 1000
    return f"{nbytes:.2f} TB"
