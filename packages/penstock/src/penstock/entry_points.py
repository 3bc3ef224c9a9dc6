"""Metadata of installed packages: entry points that add storages, transports and formats, and what our extras need.

In: a group and a name, or an extra. Out: the objects that entry points name; the command that installs an extra, and
the error that has it; the version of this package.
Not here: what may be registered (`storage`, `transport.choose`, `transform.formats`).
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from collections.abc import Iterator
from contextlib import contextmanager

from penstock.errors import ConfigError, MissingExtra

_EXTRA_OF = {
    "torch": "torch",
    "boto3": "aws",
    "gguf": "gguf",
    "huggingface_hub": "hf",
    "modelscope": "ms",
    "modelscope_hub": "ms",
    "nixl": "nixl",
    "prometheus_client": "metrics",
    "ray": "ray",
    "redis": "redis",
    "starlette": "hub",
    "uvicorn": "hub",
}
"""The extra that installs each optional package, by the package's name in an import."""


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


def missing_extra(error: ImportError) -> MissingExtra | None:
    """Return the error that names the extra to install; None if the module belongs to no extra of this package."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(package)
    if extra is None:
        return None
    # A package that is there, and cannot be imported, has its own reason: a library of the system that is missing, say.
    why = "which is not installed" if isinstance(error, ModuleNotFoundError) else f"whose import failed: {error}"
    return MissingExtra(f"this needs {package} (the extra penstock[{extra}]), {why}", hint=install_hint(extra))


@contextmanager
def extras_named() -> Iterator[None]:
    """Raise MissingExtra for a failed import of an optional package in this block. Other failures stay as they are."""
    try:
        yield
    except MissingExtra:
        raise
    except ImportError as error:
        if (missing := missing_extra(error)) is None:
            raise
        raise missing from error


def require_package(name: str) -> None:
    """Raise MissingExtra unless an optional package is installed. It is not imported.

    For code that imports the package elsewhere: in another process, or only after some work is done.
    """
    with extras_named():
        try:
            found = importlib.util.find_spec(name) is not None
        except ValueError:
            # The module was imported, and has no specification: somebody made it by hand.
            return
        if not found:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
