"""Metadata of installed packages: entry points that add storages, transports and formats, and what our extras need.

In: a group and a name, or an extra. Out: the objects that entry points name; the command that installs an extra; the
version of this package.
Not here: what may be registered (`storage`, `transport.choose`, `transform.formats`).
"""

from __future__ import annotations

import importlib.metadata
import re
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


def own_version() -> str:
    """Return the version of this package."""
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        # Run from a source tree that is not installed.
        return "0+unknown"


def install_hint(extra: str) -> str:
    """Return the command that installs the packages of one of this package's extras.

    It names these packages, not the extra: pip finds them wherever this package itself came from (a clone, a wheel).
    """
    try:
        requirements = importlib.metadata.requires("penstock") or []
    except importlib.metadata.PackageNotFoundError:  # run from a source tree that is not installed
        requirements = []
    marker = re.compile(rf"""\bextra\s*==\s*['"]{re.escape(extra)}['"]""")
    names = [text.partition(";")[0].strip() for text in requirements if marker.search(text.partition(";")[2])]
    if not names:
        return f"install what the extra {extra!r} in penstock's pyproject.toml lists"
    return "pip install " + " ".join(f"'{name}'" for name in names)
