"""Closing of objects at the end of a `with` block.

In / Out: nothing. Not here: what closing means (each class), blocks that end otherwise than by `close`.
"""

from __future__ import annotations

from typing import Protocol, Self


class _Closes(Protocol):
    def close(self) -> None: ...


class Closing:
    """A context manager, for classes that have a `close`."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self: _Closes, *_: object) -> None:
        self.close()
