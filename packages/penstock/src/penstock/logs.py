"""The loggers of this package: text of others in their lines is escaped.

In: a message written here, with arguments that may have text of others: names, paths, errors, answers. Out: one line of
the standard logger of that name, for the handlers that the application configured.
Not here: errors and terminals, which use `errors.printable` themselves; handlers (`cli`, `hub.audit`).
"""

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
    """A logger whose arguments are escaped where they are formatted. A message must be a literal: it is not."""

    def log(self, level: int, msg: object, *args: object, **kwargs: Any) -> None:
        """See `logging.Logger.log`."""
        if self.isEnabledFor(level):
            # Else each line would name this function as its place.
            kwargs["stacklevel"] = kwargs.get("stacklevel", 1) + 1
            is_shown = "%r" in str(msg)
            self.logger.log(level, msg, *(_escaped(arg, is_shown) for arg in args), **kwargs)


def log_named(name: str) -> Log:
    """Return the logger of this name."""
    return Log(logging.getLogger(name), {})


class _Escaped:
    """The texts of an argument, and not the argument: a record that a handler keeps would keep an error's frames."""

    __slots__ = ("_repr", "_str")

    def __init__(self, value: object, is_shown: bool) -> None:
        if isinstance(value, Readable):
            # Composed here, of several lines. No part of it can begin a line of the log.
            self._str = printable(str(value), keep_lines=True).replace("\n", "\n    ")
        else:
            self._str = printable(str(value))
        self._repr = printable(repr(value)) if is_shown else ""

    def __str__(self) -> str:
        return self._str

    def __repr__(self) -> str:
        return self._repr


def _escaped(value: object, is_shown: bool) -> object:
    """Return an argument as text; `is_shown`: the message may take its `repr`."""
    # Numbers stay: for `%d` and `%.3f`.
    if value is None or isinstance(value, int | float) or (isinstance(value, str) and value.isprintable()):
        return value
    return _Escaped(value, is_shown)
