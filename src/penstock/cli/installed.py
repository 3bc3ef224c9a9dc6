"""Look up installed packages without importing them."""

from __future__ import annotations

import importlib.metadata
import importlib.util


def package_version(name: str) -> str | None:
    """Return the installed version of a distribution; None when it is not installed."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def importable(module: str) -> bool:
    """Return whether a module could be imported, without importing it."""
    return importlib.util.find_spec(module) is not None
