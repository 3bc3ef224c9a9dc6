"""safetensors files that the ranks of a group open alike, so that storage is read once for all of them.

In: a group; files opened one after the other, as `safetensors.safe_open` opens them. Out: the same interface, whose
tensors come from a `SharedRead` of the files that were opened before the first request for a tensor.
Not here: the exchange (`shared_read`), who opens the files (adapters).
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
"""Seconds that a rank waits for one whose program makes no load, but lives. Source: the timeout of NCCL's groups."""


class SharedFiles:
    """The files that the ranks of a group read together, a weight set at a time.

    Args:
        group: its ranks make the same calls, in the same order.
        order: sorts names of tensors as the program asks for them; a wrong order costs reads, nothing else.
        memory_bytes: host memory of what was read ahead, gathered and not yet taken.
        verify: see `penstock.load`.

    Order: `__init__`, the first tensor of a weight set and `end` are collective. No other thread waits in a collective
    of the program meanwhile: a group of its own is made, with the same ranks.
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
        # Opened since the last reading began.
        self._new: list[SharedFile] = []
        self._read: SharedRead | None = None
        self._members: list[SharedFile] = []
        self._is_broken = False
        # Threads of the program ask for tensors; the first of them begins the reading for all.
        self._lock = threading.RLock()
        self.reports: list[SharedReadReport] = []
        self._intents: queue.SimpleQueue[_Intent] = queue.SimpleQueue()
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._conduct, name="penstock-shared-files", daemon=True)
        start_thread(self._thread)

    def open(
        self, uri: str, storage_options: Mapping[str, str] | None = None, *, device: str | int | torch.device = "cpu"
    ) -> SharedFile:
        """Open one file; only its header is read. Whole tensors are given on `device`, parts on the group's."""
        return SharedFile(self, uri, self._settings, storage_options, device)

    def take(self, file: SharedFile, name: str, index: Any) -> torch.Tensor:
        """Return a part of a tensor of an open file; see `SharedRead.take`."""
        return self._reading(file).take(name, index)

    def opened(self, file: SharedFile) -> None:
        """Count a file as open."""
        with self._lock:
            self._open.append(file)
            self._new.append(file)

    def closed(self, file: SharedFile) -> None:
        """Count a file as closed; with the last one of a weight set, the rank wants no more of it."""
        with self._lock:
            for files in (self._open, self._new):
                if file in files:
                    files.remove(file)
            if self._read is not None and file in self._members and not any(f in self._open for f in self._members):
                self._read.discard()

    def end(self, error: BaseException | None = None) -> None:
        """Let the other ranks finish, and agree that none failed; with `error`, tell them of it instead.

        Raises:
            PeerLost: another rank failed. Else as `SharedRead.close`.
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
        """Tell the other ranks of an error, and do not use the group again: ranks may stand at different points."""
        self._is_broken = True
        forget_group(self._group)
        known = error if isinstance(error, PenstockError) else OperationFailed(f"this rank's program failed: {error}")
        read, self._read = self._read, None
        # The program raises the error that it has, and not those that follow from it.
        with contextlib.suppress(PenstockError):
            if read is not None:
                read.fail(known)
                read.close()
        with contextlib.suppress(PenstockError):
            # An exchange that had ended, or that failed in its last round, told no other rank.
            self._say(_Intent(FAILED, error=known))

    def _say(self, intent: _Intent) -> None:
        """Have the thread say this to the other ranks, and return when all of them said the same. Raises as `agree`."""
        self._intents.put(intent)
        # The thread has deadlines for all it waits for; once it has ended, its error is the answer to every intent.
        while self._thread.is_alive() and not intent.is_agreed.wait(BUSY_S):
            pass
        if not intent.is_agreed.is_set():
            raise self._error or Cancelled("the thread that exchanges has ended")

    def _conduct(self) -> None:
        """Make all collectives of this rank: say what the program wants, or that it wants nothing yet."""
        try:
            with contextlib.ExitStack() as ends:
                if self.device.type == "cuda":
                    torch.cuda.set_device(self.device)
                    # On a stream of its own, or it would wait for the program's kernels.
                    ends.enter_context(torch.cuda.stream(torch.cuda.Stream(self.device)))
                while (intent := self._agreed()).word != END:
                    assert intent.read is not None
                    intent.read.exchange()
        except (PenstockError, OSError, RuntimeError, ValueError, MemoryError) as error:
            # The program's next call raises it.
            self._error = error

    def _agreed(self) -> _Intent:
        """Return the program's next intent, once all ranks have the same."""
        while True:
            try:
                intent = self._intents.get(timeout=BUSY_S)
            except queue.Empty:
                # The others would take silence for the loss of this rank.
                self._ranks.agree(BUSY)
                continue
            deadline = time.monotonic() + MAX_PAUSE_S
            while not self._ranks.agree(intent.word, intent.digest, error=intent.error):
                if time.monotonic() > deadline:
                    raise PeerLost(
                        f"the program of another rank has paused for {MAX_PAUSE_S} s",
                        hint="see that rank: all ranks must make the same loads",
                    )
            intent.is_agreed.set()
            return intent

    def _reading(self, file: SharedFile) -> SharedRead:
        """Return what reads this file: begun by the first tensor that any thread asks for."""
        with self._lock:
            if self._read is not None and file in self._members:
                return self._read
            if self._is_broken:
                raise PeerLost("an earlier load of this group failed", hint="begin anew with all ranks")
            if file not in self._open:
                raise ConfigError("file is closed", uri=file.uri, hint="keep it inside its `with` block")
            try:
                self._finish_read()
                self._begin_read(file)
            except PenstockError as error:
                self._leave(error)
                raise
            assert self._read is not None
            return self._read

    def _begin_read(self, file: SharedFile) -> None:
        """Begin to read the files that were opened since the last reading began, one of which is `file`.

        Files of earlier readings may be open still, because the program dropped them without closing them: to read
        them again would take longer with every file, and two models may have tensors of one name. Only a program that
        comes back to one of them has all open files read together.
        """
        files = list(self._new if file in self._new else self._open)
        # A file may have been opened twice: it is read once. Files of one program's load are of one storage.
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
"""Groups by the name of the group whose ranks they have. Kept: to make one takes a second with NCCL, and torch names a
group by its ranks, so that a new one would find the addresses of one that was destroyed."""


def own_group(group: dist.ProcessGroup, timeout_s: float) -> dist.ProcessGroup:
    """Return a group with the ranks of `group` for Penstock's collectives alone. Collective where there is none yet.

    The program's own collectives may then run between these, in another order on each rank.
    """
    name = group.group_name
    own = _own_groups.get(name)
    if own is not None:
        try:
            dist.get_rank(own)
        except (RuntimeError, ValueError):
            # torch.distributed was ended, and initialised anew.
            own = None
    if own is None:
        ranks = dist.get_process_group_ranks(group)
        own = dist.new_group(
            ranks,
            backend=dist.get_backend(group),
            timeout=timedelta(seconds=max(60.0, timeout_s)),
            # Where other ranks do not make this call. torch names a group then by the number of groups that each rank
            # has, which should not be relied on where all of them make it.
            use_local_synchronization=len(ranks) < dist.get_world_size(),
        )
        _own_groups[name] = own
    return own


def forget_group(own: dist.ProcessGroup) -> None:
    """Have the next load make a new group."""
    # Not destroyed: with NCCL that may wait for a rank that is lost.
    for name in [name for name, group in _own_groups.items() if group is own]:
        del _own_groups[name]


class _Intent:
    """The next step that the program of a rank needs of the group: to begin a reading, to end, or to fail."""

    def __init__(
        self, word: int, *, digest: bytes = b"", error: BaseException | None = None, read: SharedRead | None = None
    ) -> None:
        self.word = word
        self.digest = digest
        self.error = error
        self.read = read
        self.is_agreed = threading.Event()


class SharedFile:
    """An open file of `SharedFiles`, with the interface of `safetensors.safe_open` for torch.

    Attributes:
        uri: of the file.
        storage_options: credentials and endpoint of its storage.
        nbytes: its size.
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
        """Return the header's `__metadata__`; None where it has none."""
        return dict(self._header.metadata) or None

    def get_tensor(self, name: str) -> torch.Tensor:
        """Return the whole of a tensor, on the file's device; see `SharedRead.take`."""
        return self.get_slice(name)[...].to(self._device)

    def get_tensors(self) -> dict[str, torch.Tensor]:
        """Return all tensors by name, on the file's device."""
        return {name: self.get_tensor(name) for name in self.keys()}

    def get_slice(self, name: str) -> SharedSlice:
        """Return a handle that gives parts of a tensor by index. NotFound: the file has none of that name."""
        if name not in self._rows:
            raise NotFound(f"file does not contain tensor {name}", uri=self.uri, tensor=name)
        return SharedSlice(self._files, self, self._header, self._rows[name])


class SharedSlice:
    """A handle on one tensor of a `SharedFile`, indexed like a tensor from any thread."""

    def __init__(self, files: SharedFiles, file: SharedFile, header: Header, row: int) -> None:
        self._files = files
        self._file = file
        self._table = header.tensors
        self._row = row

    def get_shape(self) -> list[int]:
        """Return the shape in the header."""
        return list(self._table.shapes[self._row])

    def get_dtype(self) -> str:
        """Return the dtype's name in the format, such as `BF16`."""
        return str(self._table.dtypes[self._row])

    def __getitem__(self, index: Any) -> torch.Tensor:
        """Return the part that `index` selects; see `SharedRead.take`."""
        return self._files.take(self._file, self._table.names[self._row], index)
