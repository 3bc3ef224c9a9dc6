"""Run by Python at its start in every process of `penstock run`: put Penstock under safetensors once that is imported.

In: this directory on PYTHONPATH. Out: a hook that waits for `import safetensors`; then the `sitecustomize` that the
program would have without this one.
Not here: the replacement (`penstock_hf.safetensors`), starting the program (`run_command`).

A process that never imports safetensors pays for nothing but this file, which imports only what Python has loaded by
then. Python skips it under `-S`, `-I` and `-E`.
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
    """The loader of safetensors, which puts Penstock under it after it has run."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loader.create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        # The program sees the loader that it would see without this file.
        module.__loader__ = self._loader
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        # From here on a reload finds the module as it is, without this finder.
        sys.meta_path[:] = [finder for finder in sys.meta_path if finder is not _Finder]
        _begin()


class _Finder:
    """Finds safetensors by asking the other finders, until it is imported."""

    @classmethod
    def find_spec(cls, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> Any:
        if name != "safetensors":
            return None
        # A program may ask many times whether safetensors is installed before it imports it, or install it meanwhile.
        for finder in sys.meta_path:
            # As Python itself does, leave out finders of the protocol before Python 3.4.
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
            # Often another interpreter than that of `penstock run`.
            why = f"cannot import penstock ({error})"
            hint = "Install penstock in the program's own environment."
        else:
            why, hint = f"cannot use penstock ({type(error).__name__}: {error})", ""
        message = f"penstock: {sys.executable} {why}: safetensors stays as it is there. {hint}"
        try:
            sys.stderr.write(f"{message.rstrip()}\n")
        except (AttributeError, OSError, ValueError):
            # The program has no standard error. It goes on without the message.
            return


def _run_next() -> None:
    """Run the `sitecustomize` that this one stands before, as if this one were not there."""
    # Children find this directory by PYTHONPATH, not by this list.
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
