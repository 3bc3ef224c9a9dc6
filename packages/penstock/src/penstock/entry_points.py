"""Entry points of installed packages, and the extras of this package."""

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
    "penstock_nixl": "nixl",
    "penstock_convert": "convert",
    "penstock_dcp": "dcp",
    "penstock_hub": "hub",
    "prometheus_client": "metrics",
    "ray": "ray",
    "redis": "redis",
    "starlette": "hub",
    "uvicorn": "hub",
}
"""Maps the import name of each optional package to its extra."""
_OWN = {"compile-cache", "convert", "dcp", "hub", "nixl", "rl", "sglang", "tools", "transformers", "vllm"}
"""Extras that install other packages of this project."""


def entry_points(group: str, name: str | None = None) -> Iterator[importlib.metadata.EntryPoint]:
    """Return the entry points in a group, optionally only those with a given name. The scan takes milliseconds."""
    in_group = importlib.metadata.entry_points(group=group)
    return iter(in_group if name is None else in_group.select(name=name))


def load(entry: importlib.metadata.EntryPoint) -> object:
    """Import the object of an entry point. Raise ConfigError if its module or attribute cannot be imported."""
    try:
        return entry.load()
    except (ImportError, AttributeError, SyntaxError) as error:
        package = entry.dist.name if entry.dist is not None else "an installed package"
        raise ConfigError(
            f"the entry point {entry.name} = {entry.value} of {entry.group} cannot be loaded: {error}",
            hint=f"repair or uninstall {package}, which declares this entry point",
        ) from error


def own_version() -> str:
    """Return the version of this package."""
    try:
        return importlib.metadata.version("penstock")
    except importlib.metadata.PackageNotFoundError:
        # The program runs from a source tree that is not installed.
        return "0+unknown"


def install_hint(extra: str) -> str:
    """Return the command that installs an extra's packages, no matter how Penstock was installed."""
    if extra in _OWN:
        return f'pip install "penstock[{extra}]"'
    try:
        requirements = importlib.metadata.requires("penstock") or []
    except importlib.metadata.PackageNotFoundError:
        # The program runs from a source tree that is not installed.
        requirements = []
    marker = re.compile(rf"""\bextra\s*==\s*['"]{re.escape(extra)}['"]""")
    names = [text.partition(";")[0].strip() for text in requirements if marker.search(text.partition(";")[2])]
    if not names:
        return f"install the packages that the extra {extra!r} in penstock's pyproject.toml lists"
    return "pip install " + " ".join(f"'{name}'" for name in names)


def missing_extra(error: ImportError) -> MissingExtra | None:
    """Return the error that names the extra to install, or None if no extra contains the module."""
    package = (error.name or "").partition(".")[0]
    extra = _EXTRA_OF.get(package)
    if extra is None:
        return None
    # An installed package can fail to import too, for example because a system library is missing.
    why = "which is not installed" if isinstance(error, ModuleNotFoundError) else f"whose import failed: {error}"
    return MissingExtra(f"this needs {package} (the extra penstock[{extra}]), {why}", hint=install_hint(extra))


@contextmanager
def extras_named() -> Iterator[None]:
    """Raise MissingExtra if the block fails to import an optional package. Other errors pass unchanged."""
    try:
        yield
    except MissingExtra:
        raise
    except ImportError as error:
        if (missing := missing_extra(error)) is None:
            raise
        raise missing from error


def require_package(name: str) -> None:
    """Raise MissingExtra unless an optional package is installed, without importing the package."""
    with extras_named():
        try:
            found = importlib.util.find_spec(name) is not None
        except ValueError:
            # A program added the module to sys.modules without a spec.
            return
        if not found:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
