"""safetensors files that all ranks in a group open, so that storage is read once for all of them.

The tensors come from a `SharedRead` over all files that were opened before the first request for a tensor.
"""

from __future__ import annotations

import contextlib
import queue
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec
import torch
import torch.distributed as dist

from penstock.config import Settings, parse_bytes
from penstock.errors import Cancelled, ConfigError, NotFound, OperationFailed, PeerLost, PenstockError
from penstock.lifecycle import Closeable
from penstock.loader.shared_read import SharedRead, SharedReadReport
from penstock.logs import log_named
from penstock.ranks.agreement import BEGIN, BUSY, END, RankWords
from penstock.ranks.collectives import forget_group, own_group
from penstock.ranks.exchange import BUSY_S
from penstock.storage import open_source, timed
from penstock.storage.safetensors import Header, read_header
from penstock.storage.weight_set import open_weights
from penstock.types import TensorTable
from penstock.waits import start_thread

_logger = log_named(__name__)

MAX_PAUSE_S = 600.0
"""Seconds that a rank waits for a live rank that does not load. Source: the timeout of NCCL's groups."""


class SharedFiles:
    """The files that the ranks in a group read together, one weight set at a time.

    `__init__`, the first tensor of a weight set, and `end` are collective. All collectives use a separate group with
    the same ranks, so that the program can use its own group in other threads.

    Args:
        group: the group. All ranks make the same calls in the same order.
        order: sorts tensor names into the order of the program's requests. A wrong order only costs extra reads.
        memory_bytes: host memory for bytes that were read ahead or gathered and not requested yet.
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
        # A round on CUDA has waits below a millisecond. On the CPU, polling takes CPU time from the reads.
        poll_s = 5e-5 if self.device.type == "cuda" else 5e-4
        self._ranks = RankWords(self._group, self.device, self._settings.stall_s, poll_s=poll_s)
        self._open: set[SharedFile] = set()
        # The files that were opened since the last shared read began.
        self._new: set[SharedFile] = set()
        self._read: SharedRead | None = None
        self._members: set[SharedFile] = set()
        self._is_broken = False
        # Several threads may request tensors. The first request begins the shared read.
        self._lock = threading.RLock()
        self.reports: list[SharedReadReport] = []
        self._intents: queue.SimpleQueue[_Intent] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run_collectives, name="penstock-shared-files", daemon=True)
        start_thread(self._thread)

    def open(
        self, uri: str, storage_options: Mapping[str, str] | None = None, *, device: str | int | torch.device = "cpu"
    ) -> SharedFile:
        """Open one file and read only its header. Whole tensors are returned on `device`."""
        with contextlib.closing(open_source(uri, settings=self._settings, storage_options=storage_options)) as source:
            header = read_header(timed(source, uri, self._settings))
            file = SharedFile(self, uri, storage_options, device, header, source.nbytes)
        with self._lock:
            self._open.add(file)
            self._new.add(file)
        return file

    def closed(self, file: SharedFile) -> None:
        """Record a file as closed. After the last file of a weight set, this rank discards the rest of the set."""
        with self._lock:
            self._open.discard(file)
            self._new.discard(file)
            if self._read is not None and file in self._members and self._open.isdisjoint(self._members):
                self._read.window.discard()

    def end(self, error: BaseException | None = None) -> None:
        """Finish the current read and agree with the other ranks that no rank failed, or report `error` to them.

        Raise PeerLost if another rank failed, and otherwise raise like `SharedRead.close`.
        """
        if self._is_broken:
            return
        if error is not None:
            self._report_failure(error)
            return
        try:
            with self._lock:
                self._finish_read()
            self._send_intent(_Intent())
        except PenstockError as failed:
            self._report_failure(failed)
            raise

    def _report_failure(self, error: BaseException) -> None:
        """Report an error to the other ranks. The group is not used again, because ranks may be at different points."""
        self._is_broken = True
        forget_group(self._group)
        known = (
            error if isinstance(error, PenstockError) else OperationFailed(f"the program of this rank failed: {error}")
        )
        read, self._read = self._read, None
        # The program raises its own error, and not the errors that follow from it.
        with contextlib.suppress(PenstockError):
            if read is not None:
                read.window.fail(known)
                read.close()
        with contextlib.suppress(PenstockError):
            # Report the error separately, because a finished exchange has not reported it.
            self._send_intent(_Intent(error=known))

    def _send_intent(self, intent: _Intent) -> None:
        self._intents.put(intent)
        # All waits in the exchange thread have deadlines. Once the thread has ended, every intent raises an error.
        while self._thread.is_alive() and not intent.is_agreed.wait(BUSY_S):
            pass
        if not intent.is_agreed.is_set():
            raise self._error or Cancelled("the exchange thread has ended")

    def _run_collectives(self) -> None:
        """Make this rank's collective calls, for the program's intents or to report that there is no intent yet."""
        try:
            with contextlib.ExitStack() as ends:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    # On a separate stream the gathers do not wait for the program's kernels.
                    ends.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
                while (read := self._agreed()) is not None:
                    read.exchange()
        except (PenstockError, OSError, RuntimeError, ValueError, MemoryError) as error:
            # The program's next call raises this error.
            self._error = error

    def _agreed(self) -> SharedRead | None:
        """Return the shared read that all ranks begin, or None if all ranks end."""
        while True:
            try:
                intent = self._intents.get(timeout=BUSY_S)
            except queue.Empty:
                # Without this word the other ranks would consider this rank lost.
                self._ranks.agree(BUSY)
                continue
            deadline = time.monotonic() + MAX_PAUSE_S
            word, digest = (END, b"") if intent.read is None else (BEGIN, intent.read.digest)
            while not self._ranks.agree(word, digest, error=intent.error):
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"the program on another rank has paused for {MAX_PAUSE_S} s",
                        hint="check that rank, because all ranks must load the same files",
                    )
            intent.is_agreed.set()
            return intent.read

    def reading(self, file: SharedFile) -> SharedRead:
        """Return the `SharedRead` for this file. The first request for a tensor begins the read."""
        with self._lock:
            if self._read is not None and file in self._members:
                return self._read
            if self._is_broken:
                raise PeerLost("an earlier load with this group failed", hint="restart all ranks")
            if file not in self._open:
                raise ConfigError("file is closed", uri=file.uri, hint="use the file inside its `with` block")
            try:
                self._finish_read()
                return self._begin_read(file)
            except PenstockError as error:
                self._report_failure(error)
                raise

    def _begin_read(self, file: SharedFile) -> SharedRead:
        """Begin to read the files that were opened since the last shared read began, or all open files.

        If `file` is new, older files are not read, because the program may have dropped them without closing them.
        """
        files = set(self._new if file in self._new else self._open)
        uris = sorted({file.uri for file in files})
        # All files in a program's load have the same storage options.
        weights = open_weights(uris, settings=self._settings, storage_options=file.storage_options)
        try:
            names = self._order(weights.manifest.tensors.names)
            read = SharedRead(weights, self._ranks, names, self._settings, self._verify)
            self._send_intent(_Intent(read=read))
        except PenstockError:
            weights.close()
            raise
        self._read, self._members, self._new = read, files, set()
        _logger.info("penstock: %d ranks read %s together", self._ranks.world_size, weights.uri)
        return read

    def _finish_read(self) -> None:
        read, self._read, self._members = self._read, None, set()
        if read is not None:
            report = read.close()
            self.reports.append(report)
            _logger.info("penstock: %s", report)


@dataclass(eq=False, kw_only=True)
class _Intent:
    """The next step that a rank's program needs from the group: begin a read, fail with an error, or else end."""

    read: SharedRead | None = None
    error: BaseException | None = None
    is_agreed: threading.Event = field(default_factory=threading.Event)


class SharedFile(Closeable):
    """An open file in `SharedFiles`, with the interface of `safetensors.safe_open` for torch.

    Attributes:
        uri: URI of the file.
        storage_options: credentials and endpoint of the storage.
        nbytes: size of the file in bytes.
    """

    def __init__(
        self,
        files: SharedFiles,
        uri: str,
        storage_options: Mapping[str, str] | None,
        device: str | int | torch.device,
        header: Header,
        nbytes: int,
    ) -> None:
        self.uri = uri
        self.storage_options = storage_options
        self.nbytes = nbytes
        self._files = files
        self._device = device
        self._header = header
        self._rows = {name: row for row, name in enumerate(header.tensors.names)}

    def close(self) -> None:
        """End the use of the file by this rank. Idempotent."""
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
        return SharedSlice(self._files, self, self._header.tensors, self._rows[name])


class SharedSlice(msgspec.Struct, frozen=True, eq=False):
    """A handle for one tensor in a `SharedFile`, which is indexed like a tensor from any thread."""

    files: SharedFiles
    file: SharedFile
    tensors: TensorTable
    row: int

    def get_shape(self) -> list[int]:
        """Return the shape from the header."""
        return list(self.tensors.shapes[self.row])

    def get_dtype(self) -> str:
        """Return the dtype's name in the format, such as `BF16`."""
        return str(self.tensors.dtypes[self.row])

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part that `index` selects. See `SharedRead.take`."""
        return self.files.reading(self.file).take(self.tensors.names[self.row], index)
