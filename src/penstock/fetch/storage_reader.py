"""Reading claimed chunks from storage, each byte once, straight to where it belongs.

In: an open session of the loader, and chunk numbers. Out: bytes in the holding's tensors, not yet verified.
Not here: which chunks (`run`, by the hub's claims), how they are read (`engine`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from penstock.engine.choose_place import place_on
from penstock.engine.run import LoadRun
from penstock.errors import PenstockError
from penstock.loader.session import Session
from penstock.peer.weight_layout import WeightLayout
from penstock.storage import Counting
from penstock.types import I64, DType, TensorTable

AT_ONCE = 4
"""Least chunks handed on together, 64 MiB: others get the first of a claim while the rest is read."""
HAND_ON_S = 1.0
"""What waited for so long for the others is handed on alone, so that slow storage is seen to get on."""
GATHER_S = 0.025
"""Least time between two hand-overs: from fast storage more is handed on together, since each costs a millisecond of
digesting, telling and posting. A chunk waits so long for others once, on its way to all members."""


class StorageReader:
    """One worker's reads of storage.

    Args:
        session: of the weight set whose tensors the line has; closed by this.
        line: its table has the files and offsets of that weight set.
        rows: flat uint8, where each row of the line goes.

    Attributes:
        nbytes: bytes asked of storage so far.
    """

    def __init__(self, session: Session, layout: WeightLayout, rows: Sequence[torch.Tensor]) -> None:
        self._session, self._layout, self._rows = session, layout, rows
        self.uri = session.weights.uri
        self.nbytes = 0
        self._moved_bytes = 0
        self._runs: list[LoadRun] = []
        self._lock, self._is_warm = threading.Lock(), False
        self._error: PenstockError | None = None

    @property
    def received_bytes(self) -> int:
        """A number that grows with every byte that storage gives, of reads that are not done too; not their sum."""
        given = sum(one.received_bytes for one in self._session.weights.sources if isinstance(one, Counting))
        with self._lock:
            return given + self._moved_bytes + sum(run.ticket.moved_bytes for run in self._runs)

    def read(self, chunks: I64) -> Iterator[I64]:
        """Read these chunks into their rows; yield some of them each time, once their bytes are there.

        Raises what the loader raises. Leaving the iterator early ends the reading.
        """
        pieces, owner = self._layout.chunks.pieces_apart(chunks)
        table, count = self._layout.table, len(pieces.row)
        asked = TensorTable(
            names=tuple(map(str, range(count))),
            dtypes=(DType.U8,) * count,
            shapes=tuple((nbytes,) for nbytes in pieces.nbytes.tolist()),
            file_index=table.file_index[pieces.row],
            offset=table.offset[pieces.row] + pieces.start,
            nbytes=pieces.nbytes,
        )
        order = np.lexsort((asked.offset, asked.file_index))
        asked = asked.take(order.tolist())
        columns = (pieces.row[order].tolist(), pieces.start[order].tolist(), pieces.nbytes[order].tolist())
        flat = [self._rows[row][start : start + nbytes] for row, start, nbytes in zip(*columns, strict=True)]
        left = np.bincount(owner, minlength=len(chunks))
        ready: list[int] = []
        handed, run = time.monotonic(), self._begin(asked, flat)
        try:
            for slab in run.slabs():
                of = int(owner[order[slab]])
                left[of] -= 1
                if left[of] == 0:
                    ready.append(of)
                waited_s = time.monotonic() - handed
                if ready and waited_s > (GATHER_S if len(ready) >= AT_ONCE else HAND_ON_S):
                    yield chunks[ready]
                    ready, handed = [], time.monotonic()
            if ready:
                yield chunks[ready]
        except PenstockError as error:
            # The first is why: closing its run ends a read beside it too, by the staging they share.
            self._error = self._error or error
            raise self._error from None
        finally:
            with self._lock:
                self.nbytes += sum(run.paths.values())
                self._runs.remove(run)
                self._moved_bytes += run.ticket.moved_bytes
            run.close()

    def _begin(self, asked: TensorTable, flat: list[torch.Tensor]) -> LoadRun:
        """A run that reads these rows into these tensors."""
        session = self._session
        with self._lock:
            if not self._is_warm:
                self._is_warm = True
                session.intake.warm(self.uri)
            plan = session.make_plan(asked, [None] * len(flat), pack=False, exact=True)
            run = session.begin(plan, place_on(session.options.device, plan.slab_nbytes.tolist(), flat))
            self._runs.append(run)
            return run

    def check_unchanged(self) -> None:
        """See `Session.check_unchanged`."""
        self._session.check_unchanged()

    def close(self) -> None:
        """Close the session. Idempotent."""
        self._session.close()
