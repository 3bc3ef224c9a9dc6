"""A weight set that the ranks in a group read once and exchange ahead of the requests of each rank's program.

The tensors are exchanged in the likely order of the requests, and each rank keeps the bytes that its program wants. The
program may skip tensors, take slices or use a different order. Tensors wait in a bounded window until the program
requests them. A tensor that was dropped from the window is read again by this rank alone.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent import futures
from dataclasses import dataclass
from typing import Any

import torch
from blake3 import blake3

from penstock.config import Settings
from penstock.digest.leaf import LEAF_BYTES
from penstock.engine.check import TensorChecker
from penstock.errors import DestinationError, NotFound
from penstock.loader.index import bounding_box
from penstock.loader.shared_window import KeptRegion, TensorWindow, TurnPiece, region_of
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
        window: the tensors that have arrived on this rank.
    """

    def __init__(
        self, weights: WeightSet, ranks: RankWords, names: Sequence[str], settings: Settings, verify: bool | None
    ) -> None:
        manifest, budget = weights.manifest, settings.memory_bytes
        self._began = time.monotonic()
        self._weights = weights
        self._ranks = ranks
        self._rows = {name: row for row, name in enumerate(manifest.tensors.names)}
        self._checker = None
        self._why = "verify=False" if verify is False else weights.why_unverified or "no digests"
        if verify is not False and manifest.leaves is not None:
            self._checker = TensorChecker(manifest)
            self._why = f"{len(manifest.leaves)} leaf digests compared, each by the rank that read it"
        elif verify:
            raise nothing_to_verify(self._why)
        self._is_host = ranks.device.type == "cpu"
        # A read consists of whole leaves, so that its reader can compare all of them.
        leaf_bytes = manifest.leaf_bytes or LEAF_BYTES
        share = budget // 4 // ranks.world_size - STATUS_BYTES if self._is_host else settings.chunk_bytes
        self._max_read_bytes = max(leaf_bytes, min(settings.chunk_bytes, share) // leaf_bytes * leaf_bytes)
        per_turn = reads_per_turn(ranks.device, self._max_read_bytes, budget // 4)
        nbytes, order = manifest.tensors.nbytes.tolist(), [self._rows[name] for name in names]
        self._turns = cut_turns(nbytes, order, self._max_read_bytes, leaf_bytes, per_turn)
        self._exchange = RankExchange(ranks, [turn[-1][-1].at + turn[-1][-1].nbytes for turn in self._turns])
        # On the CPU, turns are read into the payloads. On CUDA, they are read into pinned memory.
        turn_bytes = per_turn * self._max_read_bytes
        most = budget // 4 // self._exchange.width if self._is_host else budget // 2 // turn_bytes
        self._depth = min(self._exchange.num_rounds, max(2, min(MAX_READS, most)))
        self._buffers: list[torch.Tensor] = []
        self._posted: dict[int, list[futures.Future[None]]] = {}
        self._reader = futures.ThreadPoolExecutor(MAX_READS, thread_name_prefix="penstock-shared-read")
        self.window = TensorWindow(nbytes, order, settings, turn_bytes * ranks.world_size)
        digest = blake3(manifest.revision.encode())
        digest.update("\n".join(names).encode())
        digest.update(f"{sum(map(len, self._turns))} {self._max_read_bytes} {per_turn}".encode())
        self.digest = digest.digest()
        self._done = threading.Event()

    def take(self, name: str, index: Any) -> torch.Tensor:
        """Return the slice of a tensor that torch's `index` selects, once it has arrived on the group's device.

        Thread-safe, in any order. The caller owns the result. Raise the error of this rank, or PeerLost for another
        rank's error, NotFound for an unknown name, and Cancelled after `close`.
        """
        row = self._rows.get(name)
        if row is None:
            raise NotFound(f"the weights have no tensor {name}", uri=self._weights.uri, tensor=name)
        table = self._weights.manifest.tensors
        dtype, shape, nbytes = table.dtypes[row], table.shapes[row], int(table.nbytes[row])
        extent = torch_shape(dtype, shape)
        # Raise torch's error for an invalid index before any wait.
        torch.empty((), dtype=torch_dtype(dtype)).expand(extent)[index]
        box, rest = bounding_box(index, extent)
        is_whole = box == Box.full(extent)

        def view(buffer: torch.Tensor, region: KeptRegion | None) -> torch.Tensor:
            if region is not None:
                return buffer.view(torch_dtype(dtype)).view(box.shape)[rest]
            return as_tensor(buffer, dtype, shape)[index]

        region = None if is_whole or dtype is DType.F4 else region_of(box, extent, nbytes)
        # No bytes of an empty tensor arrive.
        part = self.window.take(row, region, view, is_whole=is_whole) if nbytes else None
        return view(self._read_again(row, nbytes), None).clone() if part is None else part

    def _read_again(self, row: int, nbytes: int) -> torch.Tensor:
        buffer, step = torch.empty(nbytes, dtype=torch.uint8), self._max_read_bytes
        pieces = [TurnPiece(row, at, min(nbytes, at + step), at) for at in range(0, nbytes, step)]
        self._read(pieces, buffer.numpy().data)
        return buffer.to(self._ranks.device)

    def close(self) -> SharedReadReport:
        """Exchange until every rank has all bytes. Release all memory, and return the report or raise the error."""
        self.window.discard()
        # All waits in `exchange` have deadlines.
        while not self._done.wait(BUSY_S):
            pass
        try:
            if self.window.error is not None:
                raise self.window.error
            for source in self._weights.sources:
                if isinstance(source, FileSource):
                    source.check_unchanged()
        finally:
            self._weights.close()
        own = self._turns[self._ranks.rank :: self._ranks.world_size]
        read_bytes = sum(piece.nbytes for turn in own for read in turn for piece in read)
        return SharedReadReport(
            num_ranks=self._ranks.world_size,
            nbytes=self._weights.manifest.nbytes,
            read_bytes=read_bytes,
            group_bytes=self._weights.manifest.nbytes - read_bytes,
            read_again_bytes=self.window.again_bytes,
            peak_window_bytes=self.window.peak_bytes,
            busy_s=self.window.busy_s,
            wall_s=time.monotonic() - self._began,
            verified=self._checker is not None,
            why=self._why,
        )

    def _pieces(self, k: int) -> list[tuple[int, TurnPiece]]:
        """Return each piece of round k with its rank."""
        turns = self._exchange.turns(k)
        rows = enumerate(self._turns[turns.start : turns.stop])
        return [(rank, piece) for rank, turn in rows for read in turn for piece in read]

    def _post_reads(self, k: int) -> None:
        """Post this rank's reads of round k into a buffer that no earlier round needs any more."""
        turn = self._exchange.turns(k)[self._ranks.rank]
        memory = self._buffers[k % self._depth].numpy().data
        reads = [read for reads in self._turns[turn : turn + 1] for read in reads]
        self._posted[k % self._depth] = [self._reader.submit(self._read, read, memory) for read in reads]

    def _read(self, pieces: list[TurnPiece], memory: memoryview) -> None:
        table = self._weights.manifest.tensors
        for piece in pieces:
            source = self._weights.sources[int(table.file_index[piece.row])]
            into = memory[piece.at : piece.at + piece.nbytes]
            source.readv(int(table.offset[piece.row]) + piece.start, [into])
            if self._checker is not None:
                self._checker.check(piece.row, piece.start, into, uri=source.uri)

    def exchange(self) -> None:
        """Read and exchange everything. Collective. On CUDA the current stream must belong to this thread."""
        try:
            self._exchange.prepare(self.digest, num_payloads=self._depth if self._is_host else 1)
            self._exchange.carry_out(self)
        except BaseException as error:
            self.window.fail(error)
            raise
        finally:
            self._reader.shutdown(cancel_futures=True)
            self._buffers, self._posted = [], {}
            self._done.set()

    def begin(self) -> None:
        """See `RankPart.begin`."""
        if self._is_host:
            self._buffers = list(map(self._exchange.payload, range(self._depth)))
        else:
            shape = (self._depth, self._exchange.width - STATUS_BYTES)
            try:
                self._buffers = list(torch.empty(shape, dtype=torch.uint8, pin_memory=True))
            except RuntimeError as error:
                raise DestinationError(f"cannot allocate the buffers of the exchange: {error}") from error
        for k in range(self._depth):
            self._post_reads(k)

    def fill(self, k: int, payload: torch.Tensor, timeout_s: float) -> bool:
        """See `RankPart.fill`. This rank can keep a round if the window has space for it."""
        deadline = time.monotonic() + timeout_s
        # The sources have deadlines and raise if they make no progress.
        done, waiting = futures.wait(self._posted[k % self._depth], timeout_s, futures.FIRST_EXCEPTION)
        for read in done:
            read.result()
        if waiting or not self.window.wait_for_space([piece for _, piece in self._pieces(k)], deadline):
            return False
        if not self._is_host:
            payload.copy_(self._buffers[k % self._depth], non_blocking=True)
        return True

    def keep(self, k: int, payloads: torch.Tensor) -> None:
        """See `RankPart.keep`."""
        pieces = self._pieces(k)
        self.window.keep((piece, payloads[rank, piece.at : piece.at + piece.nbytes]) for rank, piece in pieces)

    def arrived(self, k: int) -> None:
        """See `RankPart.arrived`."""
        self.window.arrived(piece for _, piece in self._pieces(k))
        self._post_reads(k + self._depth)


def cut_turns(
    nbytes: Sequence[int], order: Sequence[int], read_bytes: int, leaf_bytes: int, per_turn: int
) -> list[list[list[TurnPiece]]]:
    """Return the pieces of each read in each turn: the tensors' bytes in `order`, split between leaves.

    A read has at most `read_bytes`, and a turn has `per_turn` reads.
    """
    turns: list[list[list[TurnPiece]]] = []
    at = left = 0
    for row in order:
        start = 0
        while start < nbytes[row]:
            stop = min(nbytes[row], start + left)
            if stop < nbytes[row]:
                stop -= stop % leaf_bytes
            if stop <= start:
                if not turns or len(turns[-1]) == per_turn:
                    turns.append([])
                    at = 0
                turns[-1].append([])
                left = read_bytes
                continue
            turns[-1][-1].append(TurnPiece(row, start, stop, at))
            at, left, start = at + stop - start, left - (stop - start), stop
    return turns
