"""The window of a shared read: the tensors that have arrived on a rank, until the rank's program takes them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterable, Sequence

import msgspec
import torch

from penstock.config import Settings
from penstock.errors import Cancelled, DestinationError
from penstock.ranks.exchange import BUSY_S
from penstock.types import Box


class TurnPiece(msgspec.Struct, frozen=True):
    """Bytes `[start, stop)` of a tensor, at offset `at` in their turn."""

    row: int
    start: int
    stop: int
    at: int

    @property
    def nbytes(self) -> int:
        """Return the size of the piece in bytes."""
        return self.stop - self.start


class KeptRegion(msgspec.Struct, frozen=True):
    """A range of one dim, as columns `[first, last)` of the tensor's bytes viewed as `[num_rows, row_bytes]`."""

    num_rows: int
    row_bytes: int
    first: int
    last: int

    @property
    def nbytes(self) -> int:
        """Return the size of the region in bytes."""
        return self.num_rows * (self.last - self.first)

    def place(self, into: torch.Tensor, start: int, data: torch.Tensor) -> None:
        """Copy the bytes of `data` that are in the region into `into`, flat uint8 of `nbytes`.

        `data` are the flat uint8 bytes of the tensor from byte `start` on.
        """
        head = -(-start // self.row_bytes)
        tail = max(head, (start + data.numel()) // self.row_bytes)
        first_whole, last_whole = head * self.row_bytes - start, tail * self.row_bytes - start
        self._place_part(into, start, data[:first_whole])
        if head < tail:
            rows = data[first_whole:last_whole].view(tail - head, self.row_bytes)[:, self.first : self.last]
            into.view(self.num_rows, self.last - self.first)[head:tail].copy_(rows)
        self._place_part(into, tail * self.row_bytes, data[last_whole:])

    def _place_part(self, into: torch.Tensor, start: int, data: torch.Tensor) -> None:
        row, column = divmod(start, self.row_bytes)
        low, high = max(column, self.first), min(column + data.numel(), self.last)
        if low < high:
            at = row * (self.last - self.first) - self.first
            into[at + low : at + high].copy_(data[low - column : high - column])


def region_of(box: Box, shape: Sequence[int], nbytes: int) -> KeptRegion | None:
    """Return the box as columns of a tensor of `nbytes`. Return None if the box is cut in several dims or is empty."""
    cut = [dim for dim, size in enumerate(shape) if (box.start[dim], box.stop[dim]) != (0, size)]
    count = math.prod(shape)
    if len(cut) != 1 or not math.prod(box.shape) or not count:
        return None
    dim = cut[0]
    column = math.prod(shape[dim + 1 :]) * (nbytes // count)
    return KeptRegion(
        num_rows=math.prod(shape[:dim]),
        row_bytes=shape[dim] * column,
        first=box.start[dim] * column,
        last=box.stop[dim] * column,
    )


class _Tensor(msgspec.Struct, eq=False):
    nbytes: int
    position: int = 0
    """Index in the order of the exchange."""
    arrived: int = 0
    in_window: int = 0
    """Bytes that count towards the window."""
    buffer: torch.Tensor | None = None
    region: KeptRegion | None = None
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


View = Callable[[torch.Tensor, KeptRegion | None], torch.Tensor]
"""Views the flat bytes of a region, or of a whole tensor, as the part of the tensor that the program requested."""


class TensorWindow:
    """The tensors of a shared read that have arrived on one rank, until its program takes them. Thread-safe.

    Whole tensors and regions that a thread of the program waits for do not count towards the limit.

    Args:
        nbytes: size in bytes of each tensor, by row.
        order: the rows in the order of the exchange.
        settings: half of `memory_bytes` is the limit. After `stall_s` without a request, a full window drops tensors.
        round_bytes: size of a round in bytes. A round that the program waits for may exceed the limit.

    Attributes:
        error: why this rank cannot continue, or None.
        peak_bytes: peak size of the window in bytes.
        again_bytes: size in bytes of the tensors that were requested after they had left the window.
        busy_s: seconds during which the exchange waited for space.
    """

    def __init__(self, nbytes: Sequence[int], order: Sequence[int], settings: Settings, round_bytes: int) -> None:
        self._tensors = list(map(_Tensor, nbytes))
        self._order = [self._tensors[row] for row in order]
        for position, tensor in enumerate(self._order):
            tensor.position = position
        self._limit_bytes, self._round_bytes = settings.memory_bytes // 2, round_bytes
        self._stall_s = settings.stall_s
        # The condition guards the attributes below and the tensors.
        self._changed = threading.Condition()
        self._waited: set[_Tensor] = set()
        self._progressed = time.monotonic()
        self._discards = False
        self._nbytes = self.peak_bytes = self.again_bytes = 0
        self.busy_s = 0.0
        self.error: BaseException | None = None

    def take(self, row: int, region: KeptRegion | None, view: View, *, is_whole: bool) -> torch.Tensor | None:
        """Wait for a tensor and return a view of it that the caller owns, or None if it has left the window.

        Raise the error of `fail`, and Cancelled after `discard`. `region` contains all requested bytes, if it is set.
        """
        tensor = self._tensors[row]
        with self._changed:
            if tensor.is_gone or tensor.region not in {None, region}:
                self.again_bytes += tensor.nbytes
                return None
            self._demand(tensor, region, is_whole=is_whole)
            try:
                while not tensor.is_complete:
                    if self.error is not None:
                        raise self.error
                    if self._discards:
                        raise Cancelled("the files were closed before a requested tensor arrived")
                    # All waits in the exchange thread have deadlines. That thread wakes this one with its error.
                    self._changed.wait(BUSY_S)
            except BaseException:
                self._stop_waiting(tensor)
                raise
            buffer, kept_region = tensor.buffer, tensor.region
            is_own = (is_whole or kept_region is not None) and tensor.num_waiting == 1
            if is_own:
                self._stop_waiting(tensor)
        assert buffer is not None
        if buffer.is_cuda:
            # The caller may use a different stream, whose work must finish before the memory is reused.
            buffer.record_stream(torch.cuda.current_stream(buffer.device))
        if is_own:
            return view(buffer, kept_region)
        # Count this thread as waiting until it has its copy, so that no other thread becomes the buffer's owner.
        try:
            return view(buffer, kept_region).clone()
        finally:
            with self._changed:
                self._stop_waiting(tensor)

    def _demand(self, tensor: _Tensor, region: KeptRegion | None, *, is_whole: bool) -> None:
        """Register a waiting thread. If nothing of the tensor has arrived, choose the region to keep."""
        tensor.num_waiting += 1
        if is_whole and tensor.region is None and not tensor.is_kept_whole:
            self._nbytes -= tensor.in_window
            tensor.in_window = 0
            tensor.is_kept_whole = True
        # Keep a tensor whole if it fits, because a program that joins slices requests the next slice soon.
        elif region is not None and tensor.buffer is None and not tensor.is_complete and tensor.num_waiting == 1:
            expected = sum(other.nbytes - other.in_window for other in self._waited)
            if self._nbytes + expected + tensor.nbytes > self._limit_bytes:
                tensor.region = region
        self._waited.add(tensor)
        self._changed.notify_all()

    def _stop_waiting(self, tensor: _Tensor) -> None:
        """Remove a waiting thread. The last thread releases a buffer that does not count towards the window."""
        tensor.num_waiting -= 1
        if not tensor.num_waiting:
            self._waited.discard(tensor)
            is_over = tensor.is_complete and (tensor.is_kept_whole or tensor.region is not None)
            if not tensor.is_gone and (is_over or self._discards):
                self._release(tensor)
        tensor.is_taken = True
        self._progressed = time.monotonic()
        self._changed.notify_all()

    def _release(self, tensor: _Tensor) -> None:
        self._nbytes -= tensor.in_window
        tensor.in_window = 0
        tensor.is_gone = True
        tensor.buffer = None

    def discard(self) -> None:
        """Discard bytes that arrive from now on, because the program has finished. Other ranks still receive bytes."""
        with self._changed:
            self._discards = True
            for tensor in self._tensors:
                if not tensor.num_waiting and not tensor.is_gone:
                    self._release(tensor)
            self._changed.notify_all()

    def fail(self, error: BaseException) -> None:
        """Make all waits raise `error`, because this rank cannot continue. A second error is ignored."""
        with self._changed:
            self.error = self.error or error
            self._changed.notify_all()

    def wait_for_space(self, pieces: Sequence[TurnPiece], deadline: float) -> bool:
        """Wait until the window can hold the pieces of a round. Return False after `deadline`."""
        with self._changed:
            while True:
                if self.error is not None:
                    raise self.error
                if self._has_space(pieces):
                    return True
                began = time.monotonic()
                if began >= deadline:
                    return False
                self._changed.wait(deadline - began)
                self.busy_s += time.monotonic() - began

    def _has_space(self, pieces: Sequence[TurnPiece]) -> bool:
        """Return whether the window can hold these pieces, after dropping tensors that are not awaited."""
        if self._discards:
            return True
        arriving = [self._tensors[piece.row] for piece in pieces]
        need = sum(piece.nbytes for piece, tensor in zip(pieces, arriving, strict=True) if tensor.goes_to_window)
        space = self._limit_bytes - need
        # If a slice of a tensor was taken, the rest of the tensor may never be requested.
        if self._drop(space, lambda tensor: tensor.is_taken):
            return True
        waited = [tensor.position for tensor in self._waited if not tensor.is_complete]
        if waited and min(waited) <= max(tensor.position for tensor in arriving):
            # A thread waits for this round, so let the window exceed its limit by one round.
            self._drop(space + self._round_bytes, lambda tensor: True)
            return True
        # Drop skipped tensors if every tensor that the program waits for comes after them, or if the program has
        # requested nothing for so long that the other ranks cannot wait any longer.
        if waited or time.monotonic() - self._progressed > self._stall_s:
            if not self._drop(space, lambda tensor: True):
                for tensor in arriving:
                    if tensor.goes_to_window and not tensor.num_waiting:
                        self._release(tensor)
            return True
        return False

    def _drop(self, limit: int, may_go: Callable[[_Tensor], bool]) -> bool:
        """Drop tensors until the window has at most `limit` bytes. Return whether that was possible."""
        for tensor in self._order:
            if self._nbytes <= limit:
                break
            if tensor.in_window and not tensor.num_waiting and may_go(tensor):
                self._release(tensor)
        return self._nbytes <= limit

    def keep(self, pieces: Iterable[tuple[TurnPiece, torch.Tensor]]) -> None:
        """Copy the bytes of pieces to their tensors. `arrived` counts them, because a device only queues the copies."""
        with self._changed:
            for piece, data in pieces:
                tensor = self._tensors[piece.row]
                if tensor.is_gone:
                    continue
                if tensor.buffer is None:
                    nbytes = tensor.region.nbytes if tensor.region else tensor.nbytes
                    tensor.buffer = _new_buffer(nbytes, data.device)
                if tensor.region is not None:
                    tensor.region.place(tensor.buffer, piece.start, data)
                else:
                    tensor.buffer[piece.start : piece.stop].copy_(data)

    def arrived(self, pieces: Iterable[TurnPiece]) -> None:
        """Count the bytes of pieces as arrived, and wake the threads that wait for their tensors."""
        with self._changed:
            for piece in pieces:
                tensor = self._tensors[piece.row]
                if tensor.is_gone:
                    continue
                if tensor.goes_to_window:
                    tensor.in_window += piece.nbytes
                    self._nbytes += piece.nbytes
                    self.peak_bytes = max(self.peak_bytes, self._nbytes)
                tensor.arrived += piece.nbytes
            self._changed.notify_all()


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
