"""A weight set that the ranks in a group read once and exchange ahead of the requests of each rank's program.

The tensors are exchanged in the likely order of the requests, and each rank keeps the bytes that its program wants. The
program may skip tensors, take slices or use a different order. Tensors wait in a bounded window until the program
requests them. A tensor that was dropped from the window is read again by this rank alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from blake3 import blake3

from penstock.config import Settings
from penstock.digest.leaf import LEAF_BYTES
from penstock.engine.check import TensorChecker
from penstock.errors import Cancelled, DestinationError, NotFound
from penstock.loader.index import bounding_box
from penstock.loader.shared_turns import TurnPiece, TurnRegion, cut_turns, region_of
from penstock.loader.tensor import as_tensor, torch_dtype, torch_shape
from penstock.ranks.agreement import RankWords
from penstock.ranks.exchange import BUSY_S, STATUS_BYTES, RankExchange, reads_per_turn
from penstock.report import Summarised, bytes_text
from penstock.storage.files import FileSource
from penstock.storage.weight_set import WeightSet, nothing_to_verify
from penstock.types import GB, Box, DType

MAX_READS = 16
"""Number of concurrent reads. 16 reads of 8 MiB saturate a link of 10 Gb/s with round trips of 100 ms."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SharedReadReport(Summarised):
    """The result of a shared read on one rank."""

    num_ranks: int
    nbytes: int
    """Size of the weight set in bytes."""
    read_bytes: int
    """Bytes that this rank read from storage for all ranks."""
    group_bytes: int
    """Bytes that other ranks sent."""
    read_again_bytes: int
    """Bytes that this rank read again, because they were requested after they had left the window."""
    peak_window_bytes: int
    """Peak size of the window, in bytes."""
    busy_s: float
    """Seconds during which this rank waited for its program to request tensors."""
    wall_s: float
    verified: bool
    why: str

    def summary(self) -> str:
        """Return two lines of text for users."""
        again = f", {bytes_text(self.read_again_bytes)} read again" if self.read_again_bytes else ""
        rate = self.nbytes / GB / self.wall_s if self.wall_s else 0.0
        return (
            f"{bytes_text(self.nbytes)} by {self.num_ranks} ranks in {self.wall_s:.3f} s ({rate:.2f} GB/s): "
            f"{bytes_text(self.read_bytes)} read by this rank, {bytes_text(self.group_bytes)} from the others{again}; "
            f"window peak {bytes_text(self.peak_window_bytes)}\n"
            f"{'verified' if self.verified else 'not verified'}: {self.why}"
        )


class _Tensor(msgspec.Struct, eq=False):
    nbytes: int
    arrived: int = 0
    in_window: int = 0
    """Bytes that count towards the window."""
    buffer: torch.Tensor | None = None
    region: TurnRegion | None = None
    """The region that is kept, or None for the whole tensor."""
    num_waiting: int = 0
    is_kept_whole: bool = False
    """Whether the program receives the whole buffer, which then does not count towards the window."""
    is_taken: bool = False
    """Whether the program has taken a slice, after which it may request other slices of the tensor."""
    is_gone: bool = False
    """Whether the tensor was returned to the program or dropped."""

    @property
    def is_complete(self) -> bool:
        return self.arrived == self.nbytes

    @property
    def goes_to_window(self) -> bool:
        return not self.is_gone and not self.is_kept_whole and self.region is None


class SharedRead:
    """The tensors of one weight set, on the ranks in a group, for a program that requests them from any thread.

    Args:
        weights: the open weight set, which this object closes.
        names: all tensors in the likely order of the program's requests, which is the same on all ranks.
        settings: deadlines and `memory_bytes`. Half of the memory is for the window, a quarter for reads ahead, and a
            quarter for gathered bytes. On CUDA half of the host memory is for reads ahead, and the device holds the
            window and one round.
        verify: whether to compare bytes with the manifest's digests, or None to compare them if there are digests.

    Attributes:
        digest: digest of everything that the ranks must agree on before `exchange`.
        why: how the bytes are verified, or why they are not.
    """

    def __init__(
        self, weights: WeightSet, ranks: RankWords, names: Sequence[str], settings: Settings, verify: bool | None
    ) -> None:
        self._weights = weights
        self._ranks = ranks
        self._settings = settings
        self._table = weights.manifest.tensors
        self._row_of = {name: row for row, name in enumerate(self._table.names)}
        self._began = time.monotonic()
        self._leaf_bytes = weights.manifest.leaf_bytes or LEAF_BYTES
        self._checker, self.why = self._choose_checker(verify)
        is_host = ranks.device.type == "cpu"
        budget = settings.memory_bytes
        self._window_limit = budget // 2
        # A read consists of whole leaves, so that its reader can compare all of them.
        share = budget // 4 // ranks.world_size - STATUS_BYTES if is_host else settings.chunk_bytes
        max_read_bytes = max(self._leaf_bytes, min(settings.chunk_bytes, share) // self._leaf_bytes * self._leaf_bytes)
        self._order = [self._row_of[name] for name in names]
        per_turn = reads_per_turn(ranks.device, max_read_bytes, budget // 4)
        nbytes = self._table.nbytes.tolist()
        self._turns = cut_turns(nbytes, self._order, max_read_bytes, self._leaf_bytes, per_turn)
        self._max_read_bytes, self._max_turn_bytes = max_read_bytes, per_turn * max_read_bytes
        self._exchange = RankExchange(ranks, [turn[-1][-1].at + turn[-1][-1].nbytes for turn in self._turns])
        # On the CPU, turns are read into the payloads. On CUDA, they are read into pinned memory.
        most = budget // 4 // self._exchange.width if is_host else budget // 2 // self._max_turn_bytes
        self._depth = min(self._exchange.num_rounds, max(2, min(MAX_READS, most)))
        self._staging: list[torch.Tensor] = []
        self._posted: list[list[Future[None]]] = []
        self._tensors = list(map(_Tensor, nbytes))
        self._changed = threading.Condition()
        self._error: BaseException | None = None
        self._discards = False
        self._waited: set[int] = set()
        self._position = [0] * len(self._table)
        for position, row in enumerate(self._order):
            self._position[row] = position
        self._window_bytes = self._peak_bytes = 0
        self._read_bytes = self._group_bytes = self._again_bytes = 0
        self._busy_s = 0.0
        self._progressed = time.monotonic()
        digest = blake3(weights.manifest.revision.encode())
        digest.update("\n".join(names).encode())
        digest.update(f"{sum(map(len, self._turns))} {max_read_bytes} {per_turn}".encode())
        self.digest = digest.digest()
        self._reader = ThreadPoolExecutor(MAX_READS, thread_name_prefix="penstock-shared-read")
        self._done = threading.Event()

    def _choose_checker(self, verify: bool | None) -> tuple[TensorChecker | None, str]:
        manifest = self._weights.manifest
        if verify is False:
            return None, "verify=False"
        if manifest.leaves is None:
            why = self._weights.why_unverified or "no digests"
            if verify:
                raise nothing_to_verify(why)
            return None, why
        return TensorChecker(manifest), f"{len(manifest.leaves)} leaf digests compared, each by the rank that read it"

    def take(self, name: str, index: Any) -> torch.Tensor:
        """Return the slice of a tensor that torch's `index` selects, once it has arrived on the group's device.

        Thread-safe, in any order. The caller owns the result. Raise the error of this rank, or PeerLost for another
        rank's error, NotFound for an unknown name, and Cancelled after `close`.
        """
        try:
            row = self._row_of[name]
        except KeyError:
            raise NotFound(f"the weights have no tensor {name}", uri=self._weights.uri, tensor=name) from None
        dtype, shape = self._table.dtypes[row], self._table.shapes[row]
        extent = torch_shape(dtype, shape)
        # Raise torch's error for an invalid index before any wait.
        torch.empty((), dtype=torch_dtype(dtype)).expand(extent)[index]
        box, rest = bounding_box(index, extent)
        is_whole = box == Box.full(extent)
        tensor = self._tensors[row]
        region = None if is_whole or dtype is DType.F4 else region_of(box, extent, tensor.nbytes)
        with self._changed:
            is_kept = not tensor.is_gone and tensor.region in {None, region}
            if is_kept:
                self._demand(tensor, region, is_whole=is_whole)
                self._waited.add(row)
                try:
                    self._wait_for(tensor)
                except BaseException:
                    self._stop_waiting(row)
                    raise
                buffer, kept_region = tensor.buffer, tensor.region
                is_own = (is_whole or kept_region is not None) and tensor.num_waiting == 1
                if is_own:
                    self._stop_waiting(row)
        if not is_kept:
            return self._read_again(row)[index].clone()
        if buffer is None:
            buffer = torch.empty(0, dtype=torch.uint8, device=self._ranks.device)
        if buffer.is_cuda:
            # The caller may use a different stream, whose work must finish before the memory is reused.
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        if kept_region is not None:
            part = buffer.view(torch_dtype(dtype)).view(box.shape)[rest]
        else:
            part = as_tensor(buffer, dtype, shape)[index]
        if is_own:
            return part
        # Count this thread as waiting until it has its copy, so that no other thread becomes the buffer's owner.
        try:
            return part.clone()
        finally:
            with self._changed:
                self._stop_waiting(row)

    def _stop_waiting(self, row: int) -> None:
        """Remove a waiting thread. The last thread releases a buffer that does not count towards the window."""
        tensor = self._tensors[row]
        tensor.num_waiting -= 1
        if not tensor.num_waiting:
            self._waited.discard(row)
            is_over = tensor.is_complete and (tensor.is_kept_whole or tensor.region is not None)
            if not tensor.is_gone and (is_over or self._discards):
                self._release(tensor)
        tensor.is_taken = True
        self._progressed = time.monotonic()
        self._changed.notify_all()

    def _demand(self, tensor: _Tensor, region: TurnRegion | None, *, is_whole: bool) -> None:
        """Register a waiting thread. If nothing of the tensor has arrived, choose the region to keep."""
        tensor.num_waiting += 1
        if is_whole and tensor.region is None and not tensor.is_kept_whole:
            self._window_bytes -= tensor.in_window
            tensor.in_window = 0
            tensor.is_kept_whole = True
        # Keep a tensor whole if it fits, because a program that joins slices requests the next slice soon.
        elif region is not None and tensor.buffer is None and not tensor.is_complete and tensor.num_waiting == 1:
            expected = sum(other.nbytes - other.in_window for other in map(self._tensors.__getitem__, self._waited))
            if self._window_bytes + expected + tensor.nbytes > self._window_limit:
                tensor.region = region
        self._changed.notify_all()

    def _wait_for(self, tensor: _Tensor) -> None:
        while not tensor.is_complete:
            if self._error is not None:
                raise self._error
            if self._discards:
                raise Cancelled("the files were closed before a requested tensor arrived")
            if self._done.is_set():
                raise Cancelled("the exchange ended before this tensor arrived")
            # All waits in the exchange thread have deadlines. That thread wakes this one with its error.
            self._changed.wait(BUSY_S)

    def _release(self, tensor: _Tensor) -> None:
        self._window_bytes -= tensor.in_window
        tensor.in_window = 0
        tensor.is_gone = True
        tensor.buffer = None

    def _read_again(self, row: int) -> torch.Tensor:
        nbytes = int(self._table.nbytes[row])
        buffer = torch.empty(nbytes, dtype=torch.uint8)
        for at in range(0, nbytes, self._max_read_bytes):
            stop = min(nbytes, at + self._max_read_bytes)
            self._read(row, at, stop, buffer[at:stop].numpy().data)
        with self._changed:
            self._again_bytes += nbytes
        return as_tensor(buffer.to(self._ranks.device), self._table.dtypes[row], self._table.shapes[row])

    def discard(self) -> None:
        """Discard bytes that arrive from now on, because the program has finished. Other ranks still receive bytes."""
        with self._changed:
            self._discards = True
            for tensor in self._tensors:
                if not tensor.num_waiting and not tensor.is_gone:
                    self._release(tensor)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Report to the other ranks that this rank cannot continue."""
        with self._changed:
            self._error = self._error or error
            self._changed.notify_all()

    def close(self) -> SharedReadReport:
        """Exchange until every rank has all bytes. Release all memory, and return the report or raise the error."""
        self.discard()
        # All waits in `exchange` have deadlines.
        while not self._done.wait(BUSY_S):
            pass
        self._reader.shutdown(wait=True, cancel_futures=True)
        try:
            if self._error is not None:
                raise self._error
            for source in self._weights.sources:
                if isinstance(source, FileSource):
                    source.check_unchanged()
        finally:
            self._weights.close()
        return SharedReadReport(
            num_ranks=self._ranks.world_size,
            nbytes=self._weights.manifest.nbytes,
            read_bytes=self._read_bytes,
            group_bytes=self._group_bytes,
            read_again_bytes=self._again_bytes,
            peak_window_bytes=self._peak_bytes,
            busy_s=self._busy_s,
            wall_s=time.monotonic() - self._began,
            verified=self._checker is not None,
            why=self.why,
        )

    def _pieces(self, k: int) -> Iterator[tuple[int, TurnPiece]]:
        """Yield each piece of round k with its rank."""
        for rank, turn in enumerate(self._exchange.turns(k)):
            for read in self._turns[turn] if turn < len(self._turns) else ():
                for piece in read:
                    yield rank, piece

    def _post_reads(self, k: int) -> list[Future[None]]:
        turn = self._exchange.turns(k)[self._ranks.rank]
        if turn >= len(self._turns):
            return []
        memory = (self._staging[k % self._depth] if self._staging else self._exchange.payload(k)).numpy().data
        return [self._reader.submit(self._read_pieces, read, memory) for read in self._turns[turn]]

    def _read_pieces(self, pieces: list[TurnPiece], memory: memoryview) -> None:
        for piece in pieces:
            self._read(piece.row, piece.start, piece.stop, memory[piece.at : piece.at + piece.nbytes])
        with self._changed:
            self._read_bytes += sum(piece.nbytes for piece in pieces)

    def _read(self, row: int, start: int, stop: int, into: memoryview) -> None:
        source = self._weights.sources[int(self._table.file_index[row])]
        source.readv(int(self._table.offset[row]) + start, [into])
        if self._checker is not None:
            self._checker.check(row, start, into, uri=source.uri)

    def exchange(self) -> None:
        """Read and exchange everything. Collective. On CUDA the current stream must belong to this thread."""
        try:
            num_payloads = self._depth if self._ranks.device.type == "cpu" else 1
            self._exchange.prepare(self.digest, num_payloads=num_payloads)
            self._exchange.carry_out(self)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            self._staging, self._posted = [], []
            self._done.set()

    def begin(self) -> None:
        """See `RankPart.begin`."""
        if self._ranks.device.type == "cuda":
            shape = (self._depth, self._exchange.width - STATUS_BYTES)
            try:
                self._staging = list(torch.empty(shape, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise DestinationError(f"cannot allocate the buffers of the exchange: {error}") from error
        self._posted = [self._post_reads(k) for k in range(self._depth)]

    def fill(self, k: int, payload: torch.Tensor, timeout_s: float) -> bool:
        """See `RankPart.fill`. This rank can keep a round if the window has space for it."""
        deadline = time.monotonic() + timeout_s
        for read in self._posted[k % self._depth]:
            try:
                read.result(max(0.0, deadline - time.monotonic()))
            except TimeoutError:
                # The source has a deadline and raises if it makes no progress.
                if not read.done():
                    return False
                read.result()
        with self._changed:
            while True:
                if self._error is not None:
                    raise self._error
                if self._has_space(k):
                    break
                left = deadline - time.monotonic()
                if left <= 0:
                    return False
                began = time.monotonic()
                self._changed.wait(left)
                self._busy_s += time.monotonic() - began
        if self._staging:
            payload.copy_(self._staging[k % self._depth], non_blocking=True)
        return True

    def _has_space(self, k: int) -> bool:
        """Return whether the window can hold the bytes of round k, after dropping tensors that are not awaited."""
        if self._discards:
            return True
        arriving: dict[int, int] = {}
        for _, piece in self._pieces(k):
            arriving[piece.row] = arriving.get(piece.row, 0) + piece.nbytes
        need = sum(nbytes for row, nbytes in arriving.items() if self._tensors[row].goes_to_window)
        space = self._window_limit - need
        if self._window_bytes <= space:
            return True
        # If a slice of a tensor was taken, the rest of the tensor may never be requested.
        self._drop(space, lambda tensor: tensor.is_taken)
        if self._window_bytes <= space:
            return True
        waited = [self._position[row] for row in self._waited if not self._tensors[row].is_complete]
        if any(position <= max(self._position[row] for row in arriving) for position in waited):
            # A thread waits for this round, so let the window exceed its limit by one round.
            self._drop(space + self._max_turn_bytes * self._ranks.world_size, lambda tensor: True)
            return True
        # Drop skipped tensors if every tensor that the program waits for comes after them, or if the program has
        # requested nothing for so long that the other ranks cannot wait any longer.
        if waited or time.monotonic() - self._progressed > self._settings.stall_s:
            self._drop(space, lambda tensor: True)
            if self._window_bytes > space:
                for row in arriving:
                    if self._tensors[row].goes_to_window and not self._tensors[row].num_waiting:
                        self._release(self._tensors[row])
            return True
        return False

    def _drop(self, limit: int, may_go: Callable[[_Tensor], bool]) -> None:
        for row in self._order:
            if self._window_bytes <= limit:
                return
            tensor = self._tensors[row]
            if tensor.in_window and not tensor.num_waiting and may_go(tensor):
                self._release(tensor)

    def keep(self, k: int, payloads: torch.Tensor) -> None:
        """See `RankPart.keep`. The bytes are counted in `arrived`, because on a device the copies are only queued."""
        with self._changed:
            for rank, piece in self._pieces(k):
                tensor, data = self._tensors[piece.row], payloads[rank, piece.at : piece.at + piece.nbytes]
                if tensor.is_gone:
                    continue
                if tensor.buffer is None:
                    tensor.buffer = _new_buffer(tensor.region.nbytes if tensor.region else tensor.nbytes, data.device)
                if tensor.region is not None:
                    tensor.region.place(tensor.buffer, piece.start, data)
                else:
                    tensor.buffer[piece.start : piece.stop].copy_(data)

    def arrived(self, k: int) -> None:
        """See `RankPart.arrived`."""
        with self._changed:
            for rank, piece in self._pieces(k):
                if rank != self._ranks.rank:
                    self._group_bytes += piece.nbytes
                tensor = self._tensors[piece.row]
                if tensor.is_gone:
                    continue
                if tensor.goes_to_window:
                    tensor.in_window += piece.nbytes
                    self._window_bytes += piece.nbytes
                    self._peak_bytes = max(self._peak_bytes, self._window_bytes)
                tensor.arrived += piece.nbytes
            self._changed.notify_all()
        self._posted[k % self._depth] = self._post_reads(k + self._depth)


def _new_buffer(nbytes: int, device: torch.device) -> torch.Tensor:
    """Allocate memory for a tensor or a region, which the current stream fills and the program keeps."""
    try:
        if device.type != "cuda":
            return torch.empty(nbytes, dtype=torch.uint8)
        current, program = torch.cuda.current_stream(device), torch.cuda.default_stream(device)
        # Torch does not reuse memory that was freed on another stream. transformers reserves the model's size on the
        # default stream, so allocate there.
        with torch.cuda.stream(program):
            buffer = torch.empty(nbytes, dtype=torch.uint8, device=device)
    except RuntimeError as error:
        raise DestinationError(f"cannot keep what arrived: {error}") from error
    # Kernels of the program that used this memory may still run.
    current.wait_stream(program)
    buffer.record_stream(current)
    return buffer
