"""Checks of arguments, so that a wrong one is a ConfigError that names it, not a TypeError from far inside.

In: what a caller passed. Out: nothing, or a ConfigError.
Not here: what depends on more than the type (each function checks that itself).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.errors import ConfigError


def wrong(what: str, value: object, expected: str) -> ConfigError:
    """Return the error for an argument of another type than expected."""
    shown = repr(value)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    return ConfigError(f"{what} is {shown} ({type(value).__name__})", hint=f"give {expected}")


def require_type(what: str, value: object, kinds: type | tuple[type, ...], expected: str) -> None:
    """Raise ConfigError unless a value is of one of these types. A bool counts as bool only."""
    allowed = kinds if isinstance(kinds, tuple) else (kinds,)
    if not isinstance(value, allowed) or (isinstance(value, bool) and bool not in allowed):
        raise wrong(what, value, expected)


def require_name(what: str, value: object) -> None:
    """Raise ConfigError unless a value is a text that is not empty."""
    if not isinstance(value, str) or not value:
        raise wrong(what, value, "a name: a str that is not empty")


def require_texts(what: str, value: object, expected: str) -> None:
    """Raise ConfigError unless a value is None or several texts; one text alone is not several."""
    if value is None:
        return
    if isinstance(value, str | bytes) or not isinstance(value, Sequence | set | frozenset):
        raise wrong(what, value, expected)
    for text in value:
        require_type(what, text, str, expected)


def require_text_map(what: str, value: object, expected: str) -> None:
    """Raise ConfigError unless a value is None or a mapping of texts to texts."""
    if value is None:
        return
    if not isinstance(value, Mapping) or not all(isinstance(part, str) for pair in value.items() for part in pair):
        raise wrong(what, value, expected)


def require_hub_address(value: object) -> None:
    """Raise ConfigError unless a value is a URL that a hub can have."""
    require_type("hub", value, str, "the URL of a hub")
    if not str(value).startswith(("unix:///", "http://", "https://")):
        raise ConfigError(f"{value!r} is no address of a hub", hint="write http(s)://host:port or unix:///path")
