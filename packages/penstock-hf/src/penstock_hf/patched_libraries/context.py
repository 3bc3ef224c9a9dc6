"""The context `patched_libraries()`: which functions it replaces, for which threads, and its errors and report."""

from __future__ import annotations

import copy
import functools
import inspect
import os
import sys
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal
from weakref import WeakSet

from penstock.errors import ConfigError, MissingExtra, PenstockError, also
from penstock.spi import Settings, Summarised, bytes_text, install_hint, is_remote
from penstock_hf import safetensors as compat
from penstock_hf.patched_libraries.hub_files import HubFiles, Pointer

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

    from penstock.spi import SharedFile, SharedFiles, SharedReadReport

_DOWNLOADS = {
    "hf_hub_download": HubFiles.hf_hub_download,
    "snapshot_download": HubFiles.snapshot_download,
    "try_to_load_from_cache": HubFiles.try_to_load_from_cache,
}

_TORCH = {"pt", "torch", "pytorch"}
"""Names that `safe_open` accepts for torch as the framework."""

_LIBRARY_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, ImportError)
"""Errors that libraries raise for a model that they cannot load."""


@dataclass(frozen=True, slots=True)
class FileRead:
    """A weight file that was opened in the context.

    Attributes:
        name: path of the file, or its URI with the commit.
        path: `streamed` for a file on a hub without a copy on disk, or `local` for a file on disk.
        nbytes: size of the file in bytes.
        is_verified: whether the content was compared with the hub's digest before any tensor was returned.
    """

    name: str
    path: Literal["streamed", "local"]
    nbytes: int
    is_verified: bool


@dataclass(slots=True)
class PatchedLibrariesReport(Summarised):
    """A report of the files that a `patched_libraries()` context has read. The active context fills the report."""

    files: list[FileRead] = field(default_factory=list)
    shared: list[SharedReadReport] = field(default_factory=list)
    """A report for each set of weights that the ranks of a group read together. Empty without a group."""
    seconds: float = 0.0
    """Time spent in the context in seconds. 0 until its exit."""

    @property
    def streamed(self) -> list[str]:
        """Return the URIs of files that were streamed from a hub, each with its commit."""
        return [file.name for file in self.files if file.path == "streamed"]

    @property
    def local(self) -> list[str]:
        """Return the paths of files that were read from disk."""
        return [file.name for file in self.files if file.path == "local"]

    def summary(self) -> str:
        """See `Summarised`."""
        parts = []
        for path, words in (("streamed", "streamed from a hub"), ("local", "read from disk")):
            files = [file for file in self.files if file.path == path]
            if files:
                verified = sum(file.is_verified for file in files)
                size = bytes_text(sum(file.nbytes for file in files))
                parts.append(f"{len(files)} files {words} ({size}, {verified} verified)")
        line = f"{', '.join(parts) or 'no files of weights'}; {self.seconds:.2f} s"
        return "\n".join([line, *map(str, self.shared)])


@contextmanager
def patched_libraries(
    *,
    verify: bool = False,
    memory_bytes: int | None = None,
    storage_options: Mapping[str, str] | None = None,
    group: ProcessGroup | None = None,
) -> Iterator[PatchedLibrariesReport]:
    """Read weights through Penstock in every `from_pretrained` inside the context.

    Args:
        verify: whether to compare every streamed file with the hub's digest before any of its tensors is returned. Each
            tensor of a compared file stays in host memory until the tensor is read.
        memory_bytes: limit in bytes of the host memory for data that is read ahead, by default `PENSTOCK_MEMORY_BYTES`.
        storage_options: `token` and `endpoint` for reading weights from the hub, which override
            environment variables.
        group: a torch.distributed group. All ranks of the group must enter the context and load the same models. Each
            rank reads a share of the weights from storage, and the ranks exchange the shares. If `group` is set,
            `verify=True` compares the bytes with the digests in a manifest next to the weights, which must exist.

    Yields:
        The report of the files that were read.

    Raises:
        MissingExtra: huggingface_hub or safetensors is not installed.
        PenstockError: reading failed, and the library did not handle the error. The error is also an instance of the
            built-in class that the library raised.
        PeerLost: another rank of the group failed in the context, or does not respond. All ranks then raise.

    The context applies to the calling thread, and to threads that never entered a context, because libraries start
    threads to read files. If several contexts are active, a thread that never entered a context uses the newest one. In
    nested contexts, the innermost context applies.

    If `group` is passed, entering and leaving the context is collective. Ranks may request tensors in different orders,
    request only slices, or request no tensors. Half of `memory_bytes` is used for tensors that have not been requested
    yet. If an unrequested tensor is dropped to free memory, each rank that requests this tensor later reads it again
    from storage (`read_again_bytes` in the report). A rank that requests no tensor for `stall_s` no longer delays the
    other ranks.
    """
    settings = Settings.read(memory_bytes=memory_bytes)
    block = _PatchedBlock(settings, storage_options or {}, verify)
    _enter(block)
    token = _current.set(block)
    try:
        # Call `share` after `_enter`, which may raise an error. `share` starts threads that stop only when the context
        # exits.
        if group is not None:
            block.share(group)
        try:
            yield block.report
        except BaseException as error:
            # Call `end` first, because the other ranks are waiting for this rank.
            block.end(error)
            block.abandon()
            raise
        block.end()
    except _LIBRARY_ERRORS as error:
        typed = _cause(error)
        if typed is None or isinstance(error, PenstockError):
            raise
        # Raise a copy, because the original is a cause of the library's error, and causes must not form a cycle.
        raise copy.copy(also(typed, *_own_class(error))) from error
    finally:
        # An asynchronous generator may exit in a different contextvars context, and `reset` then raises ValueError. The
        # first contextvars context still refers to this block, but `_block` ignores a block that has ended.
        with suppress(ValueError):
            _current.reset(token)
        _leave(block)


def directory(uri: str) -> str:
    """Return a directory from which a library can load the model at a URI.

    Small files are downloaded immediately and stay until the process exits. Weights are streamed when a library opens
    them, which works only inside the same context.

    Args:
        uri: a prefix in an object store, a repository on a hub, or an http(s) URL. A local path is returned unchanged.
            An http(s) URL cannot be listed, so its index must name the weights.

    Raises:
        ConfigError: there is no active context of `patched_libraries()`.
        NotFound, PermissionDenied, SourceUnavailable: the storage cannot be read.
    """
    block = _block()
    if block is None:
        raise ConfigError("directory() works only inside patched_libraries()", uri=uri)
    return block.files.directory(uri)


class _PatchedBlock:
    """An active context of `patched_libraries()`: its files, its report, and the group that shares the reads."""

    def __init__(self, settings: Settings, storage_options: Mapping[str, str], verify: bool) -> None:
        self.files = HubFiles(settings, storage_options)
        self.report = PatchedLibrariesReport()
        self._verify = verify
        self._memory_bytes = settings.memory_bytes
        self._started = time.perf_counter()
        self._opened: WeakSet[Any] = WeakSet()
        # The lock protects the set of files. Libraries open files in several threads, and a set must not change during
        # an iteration.
        self._changing = threading.Lock()
        self.shared: SharedFiles | None = None

    def share(self, group: ProcessGroup) -> None:
        """Start reading files together with the other ranks of a group. Calling this imports torch."""
        from penstock.spi import SharedFiles

        verify = self._verify or None
        self.shared = SharedFiles(group, order=_in_reading_order, memory_bytes=self._memory_bytes, verify=verify)
        self.report.shared = self.shared.reports

    def end(self, error: BaseException | None = None) -> None:
        """Wait until all ranks of the group agree that no rank failed, or report `error` to the other ranks."""
        if self.shared is not None:
            self.shared.end(error)

    def open_shared(
        self,
        uri: str,
        storage_options: Mapping[str, str] | None,
        framework: str = "pt",
        device: Any = "cpu",
        *,
        backend: str = "mmap",
    ) -> SharedFile:
        """Return a file that all ranks of the group read together.

        `storage_options` apply to the URI. `safe_open` documents the remaining arguments.
        """
        assert self.shared is not None
        file = self.shared.open(uri, storage_options, device="cpu" if device is None else device)
        path: Literal["streamed", "local"] = "streamed" if is_remote(uri) else "local"
        self.report.files.append(FileRead(uri, path, file.nbytes, self._verify))
        return file

    def open(self, pointer: Pointer, *arguments: Any, **options: Any) -> Any:
        """Open the file that a pointer refers to, with the arguments of `safe_open` after the file name."""
        # Import `reading` only here, because the module imports torch.
        from penstock_hf.patched_libraries.reading import StreamedFile, VerifiedFile

        opened = VerifiedFile if self._verify else StreamedFile
        options |= {"storage_options": pointer.storage_options, "memory_bytes": self._memory_bytes}
        file = opened(pointer.uri, *arguments, **options)
        self.report.files.append(FileRead(pointer.uri, "streamed", file.nbytes, self._verify))
        with self._changing:
            self._opened.add(file)
        return file

    def open_local(self, path: str, *arguments: Any, **options: Any) -> Any:
        """Open a file on disk, with the arguments of `safe_open` after the file name. See `DiskFile`."""
        from penstock_hf.patched_libraries.reading import DiskFile

        file = DiskFile(path, *arguments, memory_bytes=self._memory_bytes, **options)
        with self._changing:
            self._opened.add(file)
        return file

    def abandon(self) -> None:
        """Close the files that a failed load left open, because the error's traceback may otherwise keep them open."""
        with self._changing:
            opened = list(self._opened)
        for file in opened:
            file.abandon()

    def close(self) -> None:
        """Remove the pointer files that only this context uses."""
        self.report.seconds = time.perf_counter() - self._started
        self.files.close()


_current: ContextVar[_PatchedBlock | None] = ContextVar("penstock_accelerated", default=None)
_lock = threading.Lock()
_blocks: list[_PatchedBlock] = []
# Restores the original functions when the last context exits.
_undo = ExitStack()


def _enter(block: _PatchedBlock) -> None:
    with _lock:
        if not _blocks:
            _undo.enter_context(compat.installed(_open, _replacements()))
        _blocks.append(block)


def _leave(block: _PatchedBlock) -> None:
    with _lock:
        _blocks.remove(block)
        if not _blocks:
            _undo.close()
    block.close()


def _forked() -> None:
    global _lock
    # Replace the lock after a fork, because a different thread of the parent may have held it.
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _block() -> _PatchedBlock | None:
    """Return the active context that applies to this thread, or None."""
    block = _current.get()
    blocks = _blocks[-1:]
    # Threads and tasks may have copies of contextvars that still refer to a context that has ended.
    if block is not None and block in _blocks:
        return block
    return blocks[0] if blocks else None


def _open(filename: Any, *arguments: Any, **options: Any) -> Any:
    """Open the file that a pointer file refers to. Return None for any other file. Add the file to the report."""
    block = _block()
    if block is None or not isinstance(filename, str | os.PathLike):
        return None
    path = os.fspath(filename)
    # Ranks do not exchange NumPy arrays. If a program reads a file for NumPy, each rank reads the whole file itself.
    shared = block.shared is not None and _framework(*arguments, **options) in _TORCH
    # Search all contexts, because a different thread may have obtained the path of the pointer file.
    for other in (block, *reversed(_blocks)):
        pointer = other.files.find(path)
        if pointer is not None:
            if shared:
                return block.open_shared(pointer.uri, pointer.storage_options, *arguments, **options)
            return block.open(pointer, *arguments, **options)
    if shared and os.path.isfile(path):
        return block.open_shared(os.fsdecode(path), None, *arguments, **options)
    if not os.path.isfile(path):
        return None
    local = os.fsdecode(path)
    block.report.files.append(FileRead(local, "local", os.path.getsize(path), False))
    # Ask for the size last, because the limit is in a module that imports the whole reader.
    if _opens_for_transformers(*arguments, **options) and compat.is_gpu("cuda") and compat.is_large(local):
        return block.open_local(local, *arguments, **options)
    return None


def _opens_for_transformers(framework: Any = "pt", device: Any = "cpu", *_: Any, **__: Any) -> bool:
    """Return whether transformers opens a file on the CPU whose tensors it may then move to a GPU."""
    return framework in _TORCH and device in ("cpu", None) and _patch_transformers()


def _patch_transformers() -> bool:
    """Let transformers move tensors of a `DiskFile` through Penstock. Return False if this release cannot.

    transformers reads a slice on the CPU and then copies it to the device, from pages that no device can read directly.
    The last context restores the function.
    """
    module: Any = sys.modules.get("transformers.core_model_loading")
    original = getattr(module, "_materialize_copy", None)
    if original is None or list(inspect.signature(original).parameters) != ["tensor", "device", "dtype"]:
        return False
    with _lock:
        if _blocks and not isinstance(original, _Materialize):
            module._materialize_copy = _Materialize(original)
            _undo.callback(_restore, module)
    return True


class _Materialize:
    """The replacement of a function of transformers. See `reading.materialize`."""

    def __init__(self, original: Callable[..., Any]) -> None:
        self.original = original

    def __call__(self, tensor: Any, device: Any = None, dtype: Any = None) -> Any:
        from penstock_hf.patched_libraries.reading import materialize

        return materialize(self.original, tensor, device, dtype)


def _restore(module: Any) -> None:
    # The program may have replaced the function meanwhile.
    if isinstance(module._materialize_copy, _Materialize):
        module._materialize_copy = module._materialize_copy.original


def _framework(framework: Any = "pt", *_: Any, **__: Any) -> Any:
    """Return the framework from the arguments of `safe_open` after the file name."""
    return framework


def _in_reading_order(names: Iterable[str]) -> list[str]:
    """Return names of tensors in the order in which transformers reads them. See `reading`."""
    from penstock_hf.patched_libraries.reading import in_natural_order

    return sorted(names, key=in_natural_order)


def _replacements() -> dict[Any, Any]:
    try:
        import huggingface_hub
    except ImportError as error:
        raise MissingExtra("patched_libraries() needs huggingface_hub", hint=install_hint("hf")) from error
    replaced = {}
    for name, method in _DOWNLOADS.items():
        stock = getattr(huggingface_hub, name)
        replaced[stock] = _download(stock, method)
    return replaced


def _download(stock: Callable[..., Any], method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a replacement for a download function of huggingface_hub.

    The replacement has the same signature, because PEFT inspects the signature.
    """
    names = list(inspect.signature(stock).parameters)

    @functools.wraps(stock)
    def download(*args: Any, **kwargs: Any) -> Any:
        block = _block()
        if block is None:
            return stock(*args, **kwargs)
        # Pass all arguments by name. Some arguments, such as `proxies`, are accepted only by the library's own wrapper.
        given = dict(zip(names, args, strict=False)) | kwargs
        return method(block.files, stock, given)

    return download


def _cause(error: BaseException) -> PenstockError | None:
    """Return the Penstock error among the causes of an error, or None."""
    from penstock.spi import typed_error_of_hub

    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, PenstockError):
            return seen
        typed = typed_error_of_hub(seen)
        if typed is not None:
            return typed
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return None


def _own_class(error: Exception) -> list[type[Exception]]:
    """Return a list with the error's class if a Penstock error can inherit from this class, or else an empty list."""
    return [type(error)] if type(error) in {OSError, ValueError, RuntimeError, KeyError, TypeError} else []
