"""Checks for arguments. A wrong argument raises a ConfigError that contains the argument's name."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import ParamSpec, TypeVar
from urllib.parse import urlsplit

from penstock.errors import ConfigError

P = ParamSpec("P")
T = TypeVar("T")


def formerly(**names: str) -> Callable[[Callable[P, T]], Callable[P, T]]:
    """Accept arguments by their former names too, with a DeprecationWarning. `names` maps former to current names."""

    def accepting(function: Callable[P, T]) -> Callable[P, T]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> T:
            for former, name in names.items():
                if former in kwargs:
                    warnings.warn(f"{former}= is called {name}= now", DeprecationWarning, stacklevel=2)
                    kwargs[name] = kwargs.pop(former)
            return function(*args, **kwargs)

        return call

    return accepting


def former_value(what: str, value: T, former: Mapping[str, T]) -> T:
    """Replace a former value of an argument, with a DeprecationWarning. `former` maps former to current values."""
    if not isinstance(value, str) or value not in former:
        return value
    warnings.warn(f"{what}={value!r} is called {former[value]!r} now", DeprecationWarning, stacklevel=3)
    return former[value]


def wrong(what: str, value: object, expected: str) -> ConfigError:
    """Return the error for an argument with an unexpected type or value."""
    # Shorten the text, because the value may be a dict with thousands of tensors.
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ConfigError(f"{what} is {shown} ({type(value).__name__})", hint=f"pass {expected}")


def require_type(what: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise ConfigError unless a value has one of these types. A bool does not count as an int."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise wrong(what, value, expected)


def require_seconds(what: str, value: object) -> None:
    """Raise ConfigError unless a value is None or a non-negative number of seconds."""
    if value is None:
        return
    # `not value >= 0` also rejects NaN, because a wait with NaN would never end.
    if isinstance(value, bool) or not isinstance(value, int | float) or not value >= 0:
        raise wrong(what, value, "a number of seconds, 0 or more, or None")


def require_version(value: object) -> None:
    """Raise ConfigError unless a value is None or a valid version number."""
    if value is not None:
        require_type("version", value, int, "the number of a version, or None")


def require_name(what: str, value: object) -> None:
    """Raise ConfigError unless a value is a non-empty str."""
    if not isinstance(value, str) or not value:
        raise wrong(what, value, "a name: a str that is not empty")


def require_texts(what: str, value: object, expected: str) -> None:
    """Raise ConfigError unless a value is None or a collection of strings. A single str is rejected."""
    if value is None:
        return
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise wrong(what, value, expected)
    for text in value:
        require_type(what, text, str, expected)


def require_text_map(what: str, value: object, expected: str) -> None:
    """Raise ConfigError unless a value is None or a mapping from str to str."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise wrong(what, value, expected)


def require_hub_address(value: object) -> None:
    """Raise ConfigError unless a value is a hub's URL: `unix:///path`, or `http(s)://host` with an optional port."""
    require_type("hub", value, str, "the URL of a hub")
    try:
        parts = urlsplit(str(value))
        # Without a host the URL would mean this host, and any process listening there would receive the token.
        is_address = bool(parts.hostname) if parts.scheme in {"http", "https"} else str(value).startswith("unix:///")
        is_address = is_address and (parts.scheme == "unix" or parts.port != 0)
    except ValueError:  # The port is not a number or is out of range.
        is_address = False
    if not is_address:
        raise ConfigError(f"{value!r} is not the address of a hub", hint="write http(s)://host:port or unix:///path")
