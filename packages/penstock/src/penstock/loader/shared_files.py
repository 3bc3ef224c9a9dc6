"""safetensors files that all ranks in a group open, so that storage is read once for all of them.

The files have the interface of `safetensors.safe_open`. Their tensors come from a `SharedRead` over the files that were
opened before the first request for a tensor.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from types import TracebackType
from typing import Any, Self

import torch
import torch.distributed as dist

from penstock.config import Settings, parse_bytes
from penstock.errors import Cancelled, ConfigError, NotFound, OperationFailed, PeerLost, PenstockError
from penstock.loader.shared_read import BEGIN, BUSY, BUSY_S, END, FAILED, RankWords, SharedRead, SharedReadReport
from penstock.logs import log_named
from penstock.storage import open_source, timed
from penstock.storage.safetensors import Header, read_header
from penstock.storage.weight_set import open_weights
from penstock.waits import start_thread

_logger = log_named(__name__)

MAX_PAUSE_S = 600.0
"""Seconds that a rank waits for another rank that is alive but makes no load. Source: the timeout of NCCL's groups."""


class SharedFiles:
    """The files that the ranks in a group read together, one weight set at a time.

    `__init__`, the first tensor of a weight set, and `end` are collective. A separate group with the same ranks is
    created, so the program's collectives in other threads do not matter.

    Args:
        group: the group. All ranks make the same calls in the same order.
        order: sorts names of tensors into the order in which the program requests them. A wrong order only costs extra
            reads.
        memory_bytes: host memory for bytes that were read ahead or gathered and not taken yet.
        verify: see `penstock.load`.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        *,
        order: Callable[[Iterable[str]], list[str]] = sorted,
        memory_bytes: int | str | None = None,
        verify: bool | None = None,
    ) -> None:
        self._settings = Settings.read(memory_bytes=None if memory_bytes is None else parse_bytes(memory_bytes))
        self._order = order
        self._verify = verify
        self._group = own_group(group, 4 * self._settings.stall_s)
        self.device = torch.device("cpu")
        if "nccl" in str(dist.get_backend(group)):
            self.device = torch.device("cuda", torch.cuda.current_device())
        self._ranks = RankWords(self._group, self.device, self._settings.stall_s)
        self._open: list[SharedFile] = []
        # Files opened since the last reading began.
        self._new: list[SharedFile] = []
        self._read: SharedRead | None = None
        self._members: list[SharedFile] = []
        self._is_broken = False
        # Threads of the program request tensors. The first of them begins the reading for all.
        self._lock = threading.RLock()
        self.reports: list[SharedReadReport] = []
        self._intents: queue.SimpleQueue[_Intent] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._conduct, name="penstock-shared-files", daemon=True)
        start_thread(self._thread)

    def open(
        self, uri: str, storage_options: Mapping[str, str] | None = None, *, device: str | int | torch.device = "cpu"
    ) -> SharedFile:
        """Open one file and read only its header.

        Whole tensors are returned on `device`, and parts on the group's device.
        """
        return SharedFile(self, uri, self._settings, storage_options, device)

    def take(self, file: SharedFile, name: str, index: Any) -> torch.Tensor:
        """Return a part of a tensor in an open file. See `SharedRead.take`."""
        return self._reading(file).take(name, index)

    def opened(self, file: SharedFile) -> None:
        """Count a file as open."""
        with self._lock:
            self._open.append(file)
            self._new.append(file)

    def closed(self, file: SharedFile) -> None:
        """Count a file as closed. After the last file of a weight set, this rank wants nothing more of the set."""
        with self._lock:
            for files in (self._open, self._new):
                if file in files:
                    files.remove(file)
            if self._read is not None and file in self._members and not any(f in self._open for f in self._members):
                self._read.discard()

    def end(self, error: BaseException | None = None) -> None:
        """Let the other ranks finish and agree that none failed. With `error`, tell them about the error instead.

        Raises:
            PeerLost: another rank failed. Otherwise raises like `SharedRead.close`.
        """
        if self._is_broken:
            return
        if error is not None:
            self._leave(error)
            return
        try:
            with self._lock:
                self._finish_read()
            self._say(_Intent(END))
        except PenstockError as failed:
            self._leave(failed)
            raise

    def _leave(self, error: BaseException) -> None:
        """Tell the other ranks about an error.

        The group is not used again, because ranks may be at different points.
        """
        self._is_broken = True
        forget_group(self._group)
        known = (
            error if isinstance(error, PenstockError) else OperationFailed(f"the program of this rank failed: {error}")
        )
        read, self._read = self._read, None
        # The program raises its own error, and not the errors that follow from it.
        with contextlib.suppress(PenstockError):
            if read is not None:
                read.fail(known)
                read.close()
        with contextlib.suppress(PenstockError):
            # An exchange that had ended, or that failed in its last round, told no other rank about the error.
            self._say(_Intent(FAILED, error=known))

    def _say(self, intent: _Intent) -> None:
        """Let the thread send this intent to the other ranks. Wait until all of them sent the same.

        Raises like `agree`.
        """
        self._intents.put(intent)
        # The thread has deadlines for all its waits. Once it has ended, its error is the answer to every intent.
        while self._thread.is_alive() and not intent.is_agreed.wait(BUSY_S):
            pass
        if not intent.is_agreed.is_set():
            raise self._error or Cancelled("the exchange thread has ended")

    def _conduct(self) -> None:
        """Make all collectives of this rank. Send what the program wants, or that it wants nothing yet."""
        try:
            with contextlib.ExitStack() as ends:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    # Use a separate stream. Otherwise the gathers would wait for the program's kernels.
                    ends.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
                while (intent := self._agreed()).word != END:
                    assert intent.read is not None
                    intent.read.exchange()
        except (PenstockError, OSError, RuntimeError, ValueError, MemoryError) as error:
            # The program's next call raises this error.
            self._error = error

    def _agreed(self) -> _Intent:
        """Return the program's next intent when all ranks have the same."""
        while True:
            try:
                intent = self._intents.get(timeout=BUSY_S)
            except queue.Empty:
                # The other ranks would take silence for the loss of this rank.
                self._ranks.agree(BUSY)
                continue
            deadline = time.monotonic() + MAX_PAUSE_S
            while not self._ranks.agree(intent.word, intent.digest, error=intent.error):
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"the program of another rank has paused for {MAX_PAUSE_S} s",
                        hint="check that rank, because all ranks must make the same loads",
                    )
            intent.is_agreed.set()
            return intent

    def _reading(self, file: SharedFile) -> SharedRead:
        """Return the `SharedRead` for this file. The first request for a tensor begins it."""
        with self._lock:
            if self._read is not None and file in self._members:
                return self._read
            if self._is_broken:
                raise PeerLost("an earlier load with this group failed", hint="start again with all ranks")
            if file not in self._open:
                raise ConfigError("file is closed", uri=file.uri, hint="use it inside its `with` block")
            try:
                self._finish_read()
                self._begin_read(file)
            except PenstockError as error:
                self._leave(error)
                raise
            assert self._read is not None
            return self._read

    def _begin_read(self, file: SharedFile) -> None:
        """Begin to read the files that were opened since the last reading began. `file` is one of them.

        Files of earlier readings may still be open, because the program dropped them without closing them. Reading them
        again would take longer with every file, and two models may have tensors with the same name. Only if the program
        returns to one of them are all open files read together.
        """
        files = list(self._new if file in self._new else self._open)
        # A file that was opened twice is read once. The files in a program's load share one storage.
        weights = open_weights(
            sorted({file.uri for file in files}), settings=self._settings, storage_options=file.storage_options
        )
        try:
            names = self._order(weights.manifest.tensors.names)
            read = SharedRead(weights, self._ranks, names, self._settings, self._verify)
            self._say(_Intent(BEGIN, digest=read.digest, read=read))
        except PenstockError:
            weights.close()
            raise
        self._read, self._members, self._new = read, files, []
        _logger.info("penstock: %d ranks read %s together", self._ranks.world_size, weights.uri)

    def _finish_read(self) -> None:
        read, self._read, self._members = self._read, None, []
        if read is not None:
            report = read.close()
            self.reports.append(report)
            _logger.info("penstock: %s", report)


_own_groups: dict[str, dist.ProcessGroup] = {}
"""Separate groups, by the name of the group with the same ranks. They are kept, because creating one takes a second
with NCCL. Torch also names a group by its ranks, so a new group would find the addresses of a destroyed one."""


def own_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Return a separate group with the same ranks for Penstock's collectives. Collective if there is none yet.

    The program's collectives may then run between these, in a different order on each rank.
    """
    name = group.group_name
    own = _own_groups.get(name)
    if own is not None:
        try:
            dist.get_rank(own)
        except (RuntimeError, ValueError):
            # torch.distributed was shut down and initialised again.
            own = None
    if own is None:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(
            ranks,
            backend=dist.get_backend(group),
            timeout=timedelta(seconds=max(60.0, timeout_s)),
            # Use this if some ranks do not make this call. Torch then names the group by the number of groups in each
            # rank, which is unreliable if all ranks call it.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        _own_groups[name] = own
    return own


def forget_group(own: dist.ProcessGroup) -> None:
    """Make the next load create a new group."""
    # Do not destroy the group, because with NCCL that may wait for a lost rank.
    for name in [name for name, group in _own_groups.items() if group is own]:
        del _own_groups[name]


class _Intent:
    """The next step that a rank's program needs from the group: begin a reading, end, or fail."""

    def __init__(
        self, word: int, *, digest: bytes = b"", error: BaseException | None = None, read: SharedRead | None = None
    ) -> None:
        self.word = word
        self.digest = digest
        self.error = error
        self.read = read
        self.is_agreed = threading.Event()


class SharedFile:
    """An open file in `SharedFiles`, with the interface of `safetensors.safe_open` for torch.

    Attributes:
        uri: URI of the file.
        storage_options: credentials and endpoint of its storage.
        nbytes: size of the file.
    """

    def __init__(
        self,
        files: SharedFiles,
        uri: str,
        settings: Settings,
        storage_options: Mapping[str, str] | None,
        device: str | int | torch.device,
    ) -> None:
        self.uri = uri
        self.storage_options = storage_options
        self._files = files
        self._device = device
        source = open_source(uri, settings=settings, storage_options=storage_options)
        try:
            self._header: Header = read_header(timed(source, uri, settings))
            self.nbytes = source.nbytes
        finally:
            source.close()
        table = self._header.tensors
        self._rows = {name: row for row, name in enumerate(table.names)}
        files.opened(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._files.closed(self)

    def keys(self) -> list[str]:
        """Return the names of the tensors, sorted."""
        return sorted(self._header.tensors.names)

    def offset_keys(self) -> list[str]:
        """Return the names of the tensors, in the order of their bytes in the file."""
        return list(self._header.tensors.names)

    def metadata(self) -> dict[str, str] | None:
        """Return `__metadata__` from the header, or None if there is none."""
        return dict(self._header.metadata) or None

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return a whole tensor on the file's device. See `SharedRead.take`."""
        return self.get_slice(name)[...].to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, on the file's device."""
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> SharedSlice:
        """Return a handle that reads parts of a tensor by index. Raise NotFound if the file has no such tensor."""
        if name not in self._rows:
            raise NotFound(f"file does not contain tensor {name}", uri=self.uri, tensor=name)
        return SharedSlice(self._files, self, self._header, self._rows[name])


class SharedSlice:
    """A handle for one tensor in a `SharedFile`, which is indexed like a tensor from any thread."""

    def __init__(self, files: SharedFiles, file: SharedFile, header: Header, row: int) -> None:
        self._files = files
        self._file = file
        self._table = header.tensors
        self._row = row

    def get_shape(self) -> list[int]:
        """Return the shape from the header."""
        return list(self._table.shapes[self._row])

    def get_dtype(self) -> str:
        """Return the dtype's name in the format, such as `BF16`."""
        return str(self._table.dtypes[self._row])

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part that `index` selects. See `SharedRead.take`."""
        return self._files.take(self._file, self._table.names[self._row], index)
