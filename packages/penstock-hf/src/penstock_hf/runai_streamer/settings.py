"""Environment variables of the Run:ai Model Streamer, as Penstock settings."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from penstock.errors import ConfigError
from penstock.spi import Settings, environment_with_prefix

_FLAGS = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}


@dataclass(frozen=True, slots=True, kw_only=True)
class RunaiSettings:
    """Settings from environment variables. None means that the variable is not set."""

    fetch_threads: int | None
    chunk_bytes: int | None
    memory_bytes: int | None
    """Memory limit in bytes, if it is lower than Penstock's default."""
    distributed: Literal["auto", "on", "off"]
    storage_options: Mapping[str, str]
    """Options for S3, under obstore's names."""


def runai_settings(environ: Mapping[str, str] | None = None) -> RunaiSettings:
    """Read the environment variables `RUNAI_STREAMER_*`. Raise ConfigError if a value is invalid.

    For `RUNAI_STREAMER_MEMORY_LIMIT`, the values -1 (no limit) and 0 (size of the largest tensor) have no effect,
    because Penstock always limits its staging memory.
    """
    environ = environment_with_prefix("RUNAI_STREAMER_") if environ is None else environ

    def number(name: str, least: int) -> int | None:
        text = environ.get(name, "")
        try:
            value = int(text) if text else None
        except ValueError as error:
            raise ConfigError(f"environment variable {name}={text!r} cannot be parsed: {error}") from error
        if value is not None and value < least:
            raise ConfigError(f"environment variable {name}={text!r} must be at least {least}")
        return value

    def flag(name: str) -> bool | None:
        text = environ.get(name, "")
        if text and text.lower() not in _FLAGS:
            raise ConfigError(f"environment variable {name}={text!r} is neither on nor off", hint="use 1 or 0")
        return _FLAGS[text.lower()] if text else None

    limit = number("RUNAI_STREAMER_MEMORY_LIMIT", -1) or -1
    spread = environ.get("RUNAI_STREAMER_DIST", "") or "auto"
    modes: dict[str, Literal["auto", "on", "off"]] = {"auto": "auto", "1": "on", "0": "off"}
    if spread not in modes:
        raise ConfigError(f"environment variable RUNAI_STREAMER_DIST={spread!r} is not one of auto, 0, 1")
    options: dict[str, str] = {}
    if endpoint := environ.get("RUNAI_STREAMER_S3_ENDPOINT", ""):
        options["endpoint"] = endpoint
    if (is_virtual := flag("RUNAI_STREAMER_S3_USE_VIRTUAL_ADDRESSING")) is not None:
        options["virtual_hosted_style_request"] = "true" if is_virtual else "false"
    if flag("RUNAI_STREAMER_S3_UNSIGNED"):
        options["skip_signature"] = "true"
    return RunaiSettings(
        fetch_threads=number("RUNAI_STREAMER_CONCURRENCY", 1),
        chunk_bytes=number("RUNAI_STREAMER_CHUNK_BYTESIZE", 1),
        memory_bytes=limit if 0 < limit < Settings().memory_bytes else None,
        distributed=modes[spread],
        storage_options=options,
    )
