"""Entry points by which installed packages add storages, transports and formats.

In: a group, and a name. Out: the objects that they name, or why one cannot be loaded.
Not here: what may be registered (`storage.registry`, `transport.choose`, `transform.formats`).
"""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

from penstock.errors import ConfigError


def entry_points(group: str, name: str | None = None) -> Iterator[importlib.metadata.EntryPoint]:
    """Return the entry points of a group, of one name or all. Cost: milliseconds, for a look at every package."""
    in_group = importlib.metadata.entry_points(group=group)
    return iter(in_group if name is None else in_group.select(name=name))


def load(entry: importlib.metadata.EntryPoint) -> object:
    """Import what an entry point names.

    Raises:
        ConfigError: its module, or the name in it, does not exist; names the package that declares it.
    """
    try:
        return entry.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        package = entry.dist.name if entry.dist is not None else "an installed package"
        raise ConfigError(
            f"the entry point {entry.name} = {entry.value} of {entry.group} cannot be loaded: {error}",
            hint=f"{package} declares it: repair or uninstall that package",
        ) from error
