"""The block of `patched_libraries()`: what it replaces, for which threads, its errors and its report.

In: settings. Out: replacements of huggingface_hub's downloads and safetensors' readers, undone at the end; a report.
Not here: which file is where (`hub_files`), how it is read (`reading`), how ranks read one together
(`loader.shared_files`).
"""

from __future__ import annotations

import copy
import functools
import inspect
import os
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
"""Names of torch as a framework of `safe_open`."""

_LIBRARY_ERRORS = (OSError, RuntimeError, ValueError, KeyError, TypeError, AttributeError, ImportError)
"""What libraries raise for a model that they cannot load."""


@dataclass(frozen=True, slots=True)
class FileRead:
    """A file of weights that was opened in a block.

    Attributes:
        name: its path; or its URI, with the commit.
        path: `streamed` from a hub, nothing of it on disk; or `local`, from a disk, of the hub's cache or elsewhere.
        nbytes: the size of the file.
        is_verified: its content was compared with the hub's digest before a tensor was given out.
    """

    name: str
    path: Literal["streamed", "local"]
    nbytes: int
    is_verified: bool


@dataclass(slots=True)
class PatchedLibrariesReport(Summarised):
    """The files that a block of `patched_libraries()` read, filled while it runs."""

    files: list[FileRead] = field(default_factory=list)
    shared: list[SharedReadReport] = field(default_factory=list)
    """What the ranks of a group read together: one report for each set of weights, in a group only."""
    seconds: float = 0.0
    """The time that the block took; 0 while it runs."""

    @property
    def streamed(self) -> list[str]:
        """Return the URIs of files that were streamed from a hub, each with its commit."""
        return [file.name for file in self.files if file.path == "streamed"]

    @property
    def local(self) -> list[str]:
        """Return the paths of files that were read from a disk."""
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
    """Read weights through Penstock in every `from_pretrained` of the block.

    Args:
        verify: compare every streamed file with the digest that the hub lists, before any tensor of it is given out.
            Each file is then held in host memory until its tensors are taken.
        memory_bytes: bound of the host memory for reads ahead; None: `PENSTOCK_MEMORY_BYTES`.
        storage_options: `token` and `endpoint` of the hub for reads of weights, in place of the environment's.
        group: a torch.distributed group whose ranks all run this block with the same loads: each reads its part of the
            weights from storage, once for all, and the ranks exchange the parts. `verify` then compares with the
            digests of a manifest beside the weights, and fails where there is none.

    Yields:
        The report of what was read.

    Raises:
        MissingExtra: huggingface_hub or safetensors is not installed.
        PenstockError: as the block's error where one caused it, also of the class that the library raised. A library
            may handle it within the block, as its own errors.
        PeerLost: another rank of the group failed in the block, or is silent: if one rank raises, all do.

    It applies to the calling thread, and to threads without a block of their own (libraries read in threads). Where
    several such blocks run, those threads use the newest. Blocks may be nested: the inner one applies.

    In a group, entering and leaving the block is collective. A rank may ask for tensors in another order than the
    others, for parts of them, or not at all: half of `memory_bytes` keeps tensors until they are requested. A tensor
    that was dropped to make room is read by this rank alone when it is requested (`read_again_bytes` of the report).
    A rank that requests nothing for `stall_s` no longer holds back the others.
    """
    settings = Settings.read(memory_bytes=memory_bytes)
    block = _Block(settings, storage_options or {}, verify)
    _enter(block)
    token = _current.set(block)
    try:
        # After `_enter`, which may raise: what `share` starts runs until the ranks end the block together.
        if group is not None:
            block.share(group)
        try:
            yield block.report
        except BaseException as error:
            # Before anything else: the other ranks wait for this one.
            block.end(error)
            block.abandon()
            raise
        block.end()
    except _LIBRARY_ERRORS as error:
        typed = _cause(error)
        if typed is None or isinstance(error, PenstockError):
            raise
        # A copy: the error itself is a cause of the library's, and chains of causes must not be circles.
        raise copy.copy(also(typed, *_own_class(error))) from error
    finally:
        # ValueError: the block ends in another context than it began in, as a generator of asyncio may. That context
        # goes on with a block that has ended, which `_block` passes over.
        with suppress(ValueError):
            _current.reset(token)
        _leave(block)


def directory(uri: str) -> str:
    """Return a directory that a library can load from, for a prefix of an object store or a repository of a hub.

    Args:
        uri: `s3://`, `gs://`, `az://`, `hf://`, `http(s)://` or another storage; a local path is returned. Below an
            http(s) URL, where nothing can be listed, the weights are those of its index.

    Raises:
        ConfigError: it is called outside of a block of `patched_libraries()`.
        NotFound, PermissionDenied, SourceUnavailable: as their names say.

    Small files are fetched at once; weights are streamed when a library opens them, in the same block. The directory
    is read only in the block; small files stay until the process ends.
    """
    block = _block()
    if block is None:
        raise ConfigError("directory() belongs into a block of patched_libraries()", uri=uri)
    return block.files.directory(uri)


class _Block:
    """A running block of `patched_libraries()`: its files, its report, and the group that it shares them with."""

    def __init__(self, settings: Settings, storage_options: Mapping[str, str], verify: bool) -> None:
        self.files = HubFiles(settings, storage_options)
        self.report = PatchedLibrariesReport()
        self._verify = verify
        self._memory_bytes = settings.memory_bytes
        self._started = time.perf_counter()
        self._opened: WeakSet[Any] = WeakSet()
        # Libraries open files on several threads, and a set that grows cannot be iterated over.
        self._changing = threading.Lock()
        self.shared: SharedFiles | None = None

    def share(self, group: ProcessGroup) -> None:
        """Read together with the other ranks of a group."""
        # On first use: it imports torch.
        from penstock.spi import SharedFiles

        verify = self._verify or None
        self.shared = SharedFiles(group, order=_in_reading_order, memory_bytes=self._memory_bytes, verify=verify)
        self.report.shared = self.shared.reports

    def end(self, error: BaseException | None = None) -> None:
        """Let the other ranks of the group finish, and learn whether one of them failed."""
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

        Args:
            uri: of the file, with `storage_options`.
            framework, device, backend: the arguments of `safe_open` after its name.
        """
        assert self.shared is not None
        file = self.shared.open(uri, storage_options, device="cpu" if device is None else device)
        path: Literal["streamed", "local"] = "streamed" if is_remote(uri) else "local"
        self.report.files.append(FileRead(uri, path, file.nbytes, self._verify))
        return file

    def open(self, pointer: Pointer, *arguments: Any, **options: Any) -> Any:
        """Return a file of a hub, opened with the arguments of `safe_open` after its name."""
        # On first use: it imports torch.
        from penstock_hf.patched_libraries.reading import StreamedFile, VerifiedFile

        opened = VerifiedFile if self._verify else StreamedFile
        options |= {"storage_options": pointer.storage_options, "memory_bytes": self._memory_bytes}
        file = opened(pointer.uri, *arguments, **options)
        self.report.files.append(FileRead(pointer.uri, "streamed", file.nbytes, self._verify))
        with self._changing:
            self._opened.add(file)
        return file

    def abandon(self) -> None:
        """Close the files that a failed load has left open: the error's traceback may keep them for long."""
        with self._changing:
            opened = list(self._opened)
        for file in opened:
            file.abandon()

    def close(self) -> None:
        """Remove what only the block uses."""
        self.report.seconds = time.perf_counter() - self._started
        self.files.close()


_current: ContextVar[_Block | None] = ContextVar("penstock_accelerated", default=None)
_lock = threading.Lock()
_blocks: list[_Block] = []
# Undoes the replacements of the blocks that run.
_undo = ExitStack()


def _enter(block: _Block) -> None:
    with _lock:
        if not _blocks:
            _undo.enter_context(compat.installed(_open, _replacements()))
        _blocks.append(block)


def _leave(block: _Block) -> None:
    with _lock:
        _blocks.remove(block)
        if not _blocks:
            _undo.close()
    block.close()


def _forked() -> None:
    global _lock
    # Another thread of the parent may have held it.
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_forked)


def _block() -> _Block | None:
    """Return the block that a call belongs to; None if it has none."""
    block = _current.get()
    blocks = _blocks[-1:]
    # Threads and tasks may go on with a copy of the context when the block has ended: its token is not theirs then.
    if block is not None and block in _blocks:
        return block
    return blocks[0] if blocks else None


def _open(filename: Any, *arguments: Any, **options: Any) -> Any:
    """Return the open file that a pointer stands for; None for another file. It notes both in the report."""
    block = _block()
    if block is None or not isinstance(filename, str | os.PathLike):
        return None
    path = os.fspath(filename)
    # Arrays of NumPy are not exchanged: each rank reads such a file alone.
    shared = block.shared is not None and _framework(*arguments, **options) in _TORCH
    # Of any block: a thread may open what another one found.
    for other in (block, *reversed(_blocks)):
        pointer = other.files.find(path)
        if pointer is not None:
            if shared:
                return block.open_shared(pointer.uri, pointer.storage_options, *arguments, **options)
            return block.open(pointer, *arguments, **options)
    if shared and os.path.isfile(path):
        return block.open_shared(os.fsdecode(path), None, *arguments, **options)
    if os.path.isfile(path):
        block.report.files.append(FileRead(os.fsdecode(path), "local", os.path.getsize(path), False))
    return None


def _framework(framework: Any = "pt", *_: Any, **__: Any) -> Any:
    """Return the framework in the arguments of `safe_open` after the file's name."""
    return framework


def _in_reading_order(names: Iterable[str]) -> list[str]:
    """Return names of tensors in the order in which transformers reads them; see `reading`."""
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
    """Return the replacement of one of huggingface_hub's downloads. Its signature is the same: PEFT reads it."""
    names = list(inspect.signature(stock).parameters)

    @functools.wraps(stock)
    def download(*args: Any, **kwargs: Any) -> Any:
        block = _block()
        if block is None:
            return stock(*args, **kwargs)
        # By name, with arguments that only the library's own wrapper knows (`proxies`).
        given = dict(zip(names, args, strict=False)) | kwargs
        return method(block.files, stock, given)

    return download


def _cause(error: BaseException) -> PenstockError | None:
    """Return the typed error that led to another one; None if none did."""
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
    """Return the class of an error that a typed one can have too: of Python's own, whose instances need no fields."""
    return [type(error)] if type(error) in {OSError, ValueError, RuntimeError, KeyError, TypeError} else []
