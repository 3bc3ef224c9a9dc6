"""Install Penstock's replacement when a Python process of `penstock run` imports safetensors.

Python runs this file at startup, because the file's directory is on PYTHONPATH. The file adds a hook for `import
safetensors`, and then runs the program's own `sitecustomize`. The file imports only modules that Python has already
loaded. An interpreter with the option `-S`, `-I` or `-E` does not run this file.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from types import ModuleType
from typing import Any

_HERE = os.path.dirname(os.path.abspath(__file__))


class _Loader:
    """A loader that loads safetensors and then installs Penstock's replacement."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # Restore the original loader, so that the program gets the same loader as without this file.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # Remove this finder, so that a reload finds the module without it.
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
        _begin()


class _Finder:
    """A finder that locates safetensors through the other finders, and is removed after safetensors was imported."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "safetensors":
            return None
        # Keep this finder after a search, because a program may search for safetensors often before the import.
        for finder in sys.meta_path:
            # Skip finders without `find_spec`, as Python itself does.
            find_spec = None if finder is cls else getattr(finder, "find_spec", None)
            spec = None if find_spec is None else find_spec(name, path, target)
            if spec is not None:
                if spec.loader is not None:
                    spec.loader = _Loader(spec.loader)
                return spec
        return None


def _begin() -> None:
    try:
        from penstock_hf.safetensors import install_in_program

        install_in_program()
    except Exception as error:  # noqa: BLE001 - the program's own `import safetensors` would raise it
        if isinstance(error, ImportError):
            # The program may run a different interpreter than `penstock run`.
            why = f"cannot import penstock ({error})"
            hint = "Install penstock in the program's own environment."
        else:
            why, hint = f"cannot use penstock ({type(error).__name__}: {error})", ""
        message = f"penstock: {sys.executable} {why}, so safetensors stays unchanged there. {hint}"
        try:
            sys.stderr.write(f"{message.rstrip()}\n")
        except (AttributeError, OSError, ValueError):
            # The program has no stderr, so continue without the message.
            return


def _run_next() -> None:
    """Run the program's own `sitecustomize`, because this file has the same name and hides it."""
    # Remove this file's directory from `sys.path`. Child processes still find the directory through PYTHONPATH.
    sys.path[:] = [entry for entry in sys.path if os.path.abspath(entry or os.curdir) != _HERE]
    spec = PathFinder.find_spec("sitecustomize", sys.path)
    if spec is None or spec.loader is None:
        return
    module = ModuleType("sitecustomize")
    module.__spec__, module.__loader__, module.__file__ = spec, spec.loader, spec.origin
    sys.modules["sitecustomize"] = module
    spec.loader.exec_module(module)


sys.meta_path.insert(0, _Finder)
_run_next()
