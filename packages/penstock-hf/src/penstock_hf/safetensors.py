"""Replaces `safetensors.safe_open` with Penstock's reader in an unmodified program.

Call `install()` once in a process, or use `with installed():`. The installed `safetensors.safe_open` and the functions
that use it (`safetensors.torch.load_file` and `load_model`, `safetensors.numpy.load_file`) choose a reader for each
file:

- A URI that Penstock reads (`s3://`, `gs://`, `az://`, `hf://`, `http(s)://`, `file://`) gets Penstock's reader.
- A file on a network file system that is not entirely in the page cache gets Penstock's reader, for torch or numpy.
  Penstock's reader reads ahead with large reads, and its tensors own their memory.
- A large file that is opened for a GPU gets Penstock's reader, which reads ahead straight to the device.
- Any other file gets the original reader, which maps local files without a copy.

Only `safe_open` is replaced. All other functions of safetensors are unchanged. An error of the original reader keeps
its type, its arguments, its text and its traceback, and gets Penstock's hint as a note (`BaseException.add_note`).
"""

from __future__ import annotations

import inspect
import logging
import os
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

from penstock.errors import ConfigError, MissingExtra, PenstockError
from penstock.spi import (
    NetworkFile,
    Settings,
    extras_named,
    is_remote,
    log_named,
    network_file_system,
)
from penstock_hf.rebinding import rebind

__all__ = ["install", "installed", "uninstall"]

_log = log_named("penstock.safetensors")

_FRAMEWORKS = {"pt", "torch", "pytorch", "np", "numpy"}


class _Replacement(type):
    """The metaclass of the replacement for `safetensors.safe_open`. Calling the replacement selects a reader.

    Instances of the original class also count as instances of the replacement.
    """

    def __call__(cls, *arguments: Any, **options: Any) -> Any:
        """Open a file with Penstock or with the original class. Raise the errors of the selected reader."""
        filename = arguments[0] if arguments else options.get("filename")
        for opener in reversed(_openers):
            file = opener(*arguments, **options)
            if file is not None:
                return file
        framework = arguments[1] if len(arguments) > 1 else options.get("framework")
        device = arguments[2] if len(arguments) > 2 else options.get("device")
        # A program may still reference this class after `uninstall`, for example in a default argument.
        reason = _reason_for_penstock(filename, framework, device) if _count else ""
        if not reason:
            _log.debug("%s: read by safetensors", filename)
            try:
                return _original(*arguments, **options)
            except Exception as error:
                if _count:
                    _add_hint(error, filename)
                raise
        _log.debug("%s: read by penstock: %s", filename, reason)
        # Import `safe_open` only here, because it imports torch, which the program may not need.
        with extras_named():
            from penstock import safe_open

        return safe_open(*arguments, **options)

    def __instancecheck__(cls, instance: object) -> bool:
        return cls.__subclasscheck__(type(instance))

    def __subclasscheck__(cls, subclass: type) -> bool:
        ours = getattr(sys.modules.get("penstock.loader.safe_open"), "safe_open", None)
        return subclass in {cls, _original, ours}

    def __getattr__(cls, name: str) -> Any:
        # A program may access methods of the original through the class.
        return getattr(_original, name)


_lock = threading.Lock()
_count = 0
_original: Any = None
_replacement: Any = None
_original_exit: Any = None
# Functions that are called before a reader is selected, newest first. Each returns an open file, or None to decline.
_openers: list[Callable[..., Any]] = []


def install(replacements: Mapping[Any, Any] | None = None) -> None:
    """Replace `safetensors.safe_open` in this process. `uninstall` undoes it.

    The globals of all loaded modules are replaced, and modules that are imported later get the replacement. Calls nest:
    only the last `uninstall` restores the original. `install` does not import torch, and any thread may call it.
    Open files are not affected. Raise MissingExtra if safetensors is not installed.

    Args:
        replacements: additional objects to replace in the same pass. Pass the same mapping to `uninstall`.
    """
    global _count, _original, _original_exit, _replacement
    try:
        import safetensors
    except ImportError as error:
        raise MissingExtra("safetensors is not installed", hint="pip install safetensors") from error
    with _lock:
        if _replacement is None:
            _original = safetensors.safe_open
            _replacement = _make(_original)
            _original_exit = getattr(_original, "__exit__", None)
        if not _count and _original_exit is not None:
            _set_exit(_exit)
        rebind({**({} if _count else {_original: _replacement}), **(replacements or {})})
        _count += 1


def uninstall(replacements: Mapping[Any, Any] | None = None) -> None:
    """Undo one `install`. Only the last `uninstall` restores the original in every module."""
    global _count
    with _lock:
        if not _count:
            return
        _count -= 1
        if not _count and getattr(_original, "__exit__", None) is _exit:
            _set_exit(_original_exit)
        others = {new: old for old, new in (replacements or {}).items()}
        rebind({**({} if _count else {_replacement: _original}), **others})


@contextmanager
def installed(
    opener: Callable[..., Any] | None = None, replacements: Mapping[Any, Any] | None = None
) -> Iterator[None]:
    """Install the replacement for the duration of a `with` block. Raise the same errors as `install`.

    Args:
        opener: function that is called first for every file, in the thread that opens the file, with the arguments of
            `safe_open`. The function returns an open file, or None to decline.
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
    """Install the replacement permanently in a Python process of `penstock run`.

    If `PENSTOCK_SAFETENSORS_LOG` is set, print to stderr which reader each file gets. An invalid environment
    variable raises ConfigError.
    """
    if Settings.read().safetensors_log:
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("penstock: %(message)s"))
        _log.logger.addHandler(handler)
        _log.setLevel(logging.DEBUG)
        # Do not propagate, because the program's own log handlers would write each line a second time.
        _log.logger.propagate = False
    install()


def _make(original: Any) -> Any:
    """Return a replacement for a class, with the same name, documentation and signature."""
    body = {
        # The original's `__module__` is `builtins`, which does not contain the class. With `safetensors`, the class can
        # be pickled.
        "__module__": "safetensors",
        "__doc__": original.__doc__,
        "__signature__": inspect.signature(original),
    }
    return _Replacement("safe_open", (), body)


def _set_exit(function: Any) -> None:
    """Let files of the original class call a function at the end of a `with` block."""
    # A release of safetensors may make its class immutable. Its errors in `with` blocks then have no hint.
    with suppress(AttributeError, TypeError):
        _original.__exit__ = function


def _exit(file: Any, kind: Any, error: Any, trace: Any, /) -> Any:
    """Close a file of the original class like its `__exit__`.

    A wrapper of `get_tensor` would slow down every read, so an error gets its hint here.
    """
    if isinstance(error, Exception):
        _add_hint(error, file=file)
    return _original_exit(file, kind, error, trace)


def _add_hint(error: Exception, filename: Any = None, file: Any = None) -> None:
    """Add a hint to an error that the original reader raised, for a file to open or for an open file."""
    try:
        from penstock_hf import reader_hints

        hint = reader_hints.of_open(error, filename) if file is None else reader_hints.of_use(error, file)
        if hint:
            error.add_note(f"{reader_hints.PREFIX}{hint}.")
    except Exception:  # noqa: BLE001 - the program must get the reader's error, and not an error about the hint
        return


def _reason_for_penstock(filename: object, framework: object, device: object) -> str:
    """Return the reason why Penstock reads a file, or an empty string if the original reader reads it."""
    if not isinstance(filename, str | os.PathLike):
        return ""
    text = os.fspath(filename)
    if not isinstance(text, str) or not text:
        return ""
    if "://" in text:
        try:
            return "a URI" if text.startswith("file://") or is_remote(text) else ""
        except ConfigError:
            # No storage has this scheme. If the name is not a path either, the original reader raises an error.
            return ""
    if framework not in _FRAMEWORKS:
        return ""
    try:
        kind = network_file_system(text)
        if kind and not _is_cached(text):
            return f"a file on {kind}"
        return "a large file for a GPU" if is_gpu(device) and is_large(text) else ""
    except (PenstockError, OSError, ValueError):
        # If the name is invalid or the file cannot be opened, let the original reader raise its error.
        return ""


def is_gpu(device: object) -> bool:
    """Return whether an argument of `safe_open` means a CUDA device of this host. Do not import torch for it."""
    torch = sys.modules.get("torch")
    if device is None or torch is None or isinstance(device, bool):
        return False
    try:
        # safetensors takes a number as the index of a CUDA device.
        place = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
    except (RuntimeError, TypeError):
        # The original reader raises its error.
        return False
    if place.type != "cuda":
        return False
    # `is_available` would initialise the driver, and then a forked child could not use the GPU.
    exists: bool = (place.index or 0) < torch.cuda.device_count()
    return exists


def is_large(path: str) -> bool:
    """Return whether Penstock reads a file to a GPU faster than safetensors does. Raise OSError like `stat`."""
    # Import the size only here, because it imports torch, which `install` must not import.
    from penstock.spi import ENGINE_CUDA_BYTES

    return os.path.getsize(path) >= ENGINE_CUDA_BYTES


def _is_cached(path: str) -> bool:
    file = NetworkFile.open(path)
    try:
        return file.is_cached()
    finally:
        file.close()


def _forked() -> None:
    global _lock
    # Replace the lock, because another thread of the parent may have held it.
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)
