"""Penstock under safetensors' own names, in a program that is not changed.

In: `install()`, once, in any process; or `with installed():`. Out: `safetensors.safe_open` and all that is built on it
(`safetensors.torch.load_file` and `load_model`, `safetensors.numpy.load_file`) read remote files and files on network
file systems through Penstock, and everything else through the original.
Not here: the reader itself (`loader.safe_open`), starting a program unchanged (`run_command`).

Only `safe_open` is replaced. The functions of safetensors call it by its name in their module, so they stay the
originals: their signatures, their errors and their identity are safetensors' own. Saving is not touched.

What a call gets:

- A URI that Penstock reads (`s3://`, `gs://`, `az://`, `hf://`, `http(s)://`, `file://`): Penstock's reader.
- A file on a network file system that is not wholly in the page cache, for torch or numpy: Penstock's reader. It reads
  ahead with large reads, and gives tensors that own their memory.
- Anything else: the original object, which is as fast as it was. Local files are mapped by it without a copy.
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from penstock.errors import ConfigError, MissingExtra, PenstockError
from penstock.spi import NetworkFile, Settings, extras_named, is_remote, log_named, network_file_system
from penstock_hf.rebinding import rebind

__all__ = ["install", "installed", "uninstall"]

_log = log_named("penstock.safetensors")

_FRAMEWORKS = {"pt", "torch", "pytorch", "np", "numpy"}


class _Replacement(type):
    """The class of the replacement for `safetensors.safe_open`: calling it chooses a reader.

    Instances of the original, made before or after, count as instances of it.
    """

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Return an open file: Penstock's, or the original's. Raises as the one that was chosen."""
        filename = arguments[0] if arguments else options.get("filename")
        for opener in reversed(_openers):
            file = opener(*arguments, **options)
            if file is not None:
                return file
        framework = arguments[1] if len(arguments) > 1 else options.get("framework")
        # After `uninstall` a program may still hold this class, in a default argument or a closure.
        reason = _reason_for_penstock(filename, framework) if _count else ""
        if not reason:
            _log.debug("%s: read by safetensors", filename)
            return _original(*arguments, **options)
        _log.debug("%s: read by penstock: %s", filename, reason)
        # On first use: it imports torch, which a program may never need.
        with extras_named():
            from penstock import safe_open

        return safe_open(*arguments, **options)

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        ours = getattr(sys.modules.get("penstock.loader.safe_open"), "safe_open", None)
        return subclass in {cls, _original, ours}

    def __getattr__(cls, name: str) -> Any:
        # The methods, as a program may look them up on the class.
        return getattr(_original, name)


_lock = threading.Lock()
_count = 0
_original: Any = None
_replacement: Any = None
# Asked before all else, the newest first: they return an open file, or None for a name that is not theirs.
_openers: list[Callable[..., Any]] = []


def install(replacements: Mapping[Any, Any] | None = None) -> None:
    """Put Penstock under `safetensors.safe_open` in this process; `uninstall` undoes it.

    Every module that is loaded and has the original among its globals gets the replacement there; a module that is
    imported later imports the replacement. Calls nest: the last `uninstall` takes effect. It does not import torch.

    Args:
        replacements: other objects to be bound in the same pass over all modules; `uninstall` takes them back.

    Raises:
        MissingExtra: safetensors is not installed.

    Order: any thread, any time. Files that are open stay as they are.
    """
    global _count, _original, _replacement
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtra("safetensors is not installed", hint="pip install safetensors") from error
    with _lock:
        if _replacement is None:
            _original = safetensors.safe_open
            _replacement = _make(_original)
        rebind({**({} if _count else {_original: _replacement}), **(replacements or {})})
        _count += 1


def uninstall(replacements: Mapping[Any, Any] | None = None) -> None:
    """Undo one `install`: after the last, every module has the original again. Nothing happens without an `install`."""
    global _count
    with _lock:
        if not _count:
            return
        _count -= 1
        others = {new: old for old, new in (replacements or {}).items()}
        rebind({**({} if _count else {_replacement: _original}), **others})


@contextmanager
def installed(
    opener: Callable[..., Any] | None = None, replacements: Mapping[Any, Any] | None = None
) -> Iterator[None]:
    """Install for the time of a block. Raises as `install`.

    Args:
        opener: called first for every file, in the thread that opens it, with the arguments of `safe_open`. It returns
            an open file, or None for one that is not its own.
        replacements: see `install`.
    """
    install(replacements)
    if opener is not None:
        _openers.append(opener)
    try:
        yield
    finally:
        if opener is not None:
            _openers.remove(opener)
        uninstall(replacements)


def install_in_program() -> None:
    """Install for the rest of a process of `penstock run`; with `PENSTOCK_SAFETENSORS_LOG`, say what each file gets.

    Raises:
        ConfigError: an environment variable of Penstock does not parse.
    """
    if Settings.read().safetensors_log:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("penstock: %(message)s"))
        _log.logger.addHandler(handler)
        _log.setLevel(logging.DEBUG)
        # The program's own handlers would write each line again.
        _log.logger.propagate = False
    install()


def _make(original: Any) -> Any:
    """Return the replacement of a class, with its name, documentation and signature."""
    body = {
        # Not the original's `builtins`, where nothing finds it: by this name it can be pickled.
        "__module__": "safetensors",
        "__doc__": original.__doc__,
        "__signature__": inspect.signature(original),
    }
    return _Replacement("safe_open", (), body)


def _reason_for_penstock(filename: object, framework: object) -> str:
    """Return why Penstock reads a file; "" if the original does."""
    if not isinstance(filename, str | os.PathLike):
        return ""
    text = os.fspath(filename)
    if not isinstance(text, str) or not text:
        return ""
    if "://" in text:
        try:
            return "a URI" if text.startswith("file://") or is_remote(text) else ""
        except ConfigError:
            # No storage has the scheme. It may be a strange path: the original says what is wrong with it.
            return ""
    if framework not in _FRAMEWORKS:
        return ""
    try:
        kind = network_file_system(text)
        return f"a file on {kind}" if kind and not _is_cached(text) else ""
    except (PenstockError, ValueError):
        # It cannot be opened, or no file can have this name: the original raises its own error for it.
        return ""


def _is_cached(path: str) -> bool:
    file = NetworkFile(path)
    try:
        return file.is_cached()
    finally:
        file.close()


def _forked() -> None:
    global _lock
    # Another thread of the parent may have held it.
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
