"""Loggers that escape the arguments of messages, which may contain text from other programs or users."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from penstock.errors import printable
from penstock.report import Readable

if TYPE_CHECKING:
    _Adapter = logging.LoggerAdapter[logging.Logger]
else:
    _Adapter = logging.LoggerAdapter


class Log(_Adapter):
    """A logger that escapes the arguments of each message. The message itself must be a literal and is not escaped."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See `logging.Logger.log`."""
        if self.isEnabledFor(level):
            # Without this, each record would name this method as the caller.
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            is_shown = "%r" in str(msg)
            self.logger.log(level, msg, *(_escaped(arg, is_shown) for arg in args), **kwargs)


def log_named(name: str) -> Log:
    """Return the logger with this name."""
    return Log(logging.getLogger(name), {})


class _Escaped:
    """The escaped texts of an argument. A record that holds the argument itself could keep an error's frames alive."""

    __slots__ = ("_repr", "_str")

    def __init__(self, value: object, is_shown: bool) -> None:
        if isinstance(value, Readable):
            # Penstock composed this text. Indent its lines, so that no line looks like a new log record.
            self._str = printable(str(value), keep_lines=True).replace("\n", "\n    ")
        else:
            self._str = printable(str(value))
        self._repr = printable(repr(value)) if is_shown else ""

    def __str__(self) -> str:
        return self._str

    def __repr__(self) -> str:
        return self._repr


def _escaped(value: object, is_shown: bool) -> object:
    # Numbers stay numbers, for `%d` and `%.3f`.
    if value is None or isinstance(value, int | float) or (isinstance(value, str) and value.isprintable()):
        return value
    return _Escaped(value, is_shown)
