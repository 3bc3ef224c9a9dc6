"""Whole versions of a sync in memory of this process, for engines that load tensors by name.

In: a sync's name, a version. Out: all published tensors of the version, verified, once every rank has them.
Not here: receiving only what a model needs, into the model (`penstock.subscriber`); loading
(`penstock_rl.verl`, `penstock_sglang.plugin`).

    receive(version) -> wait until it is announced -> read and verify all of it -> every rank has it, or all raise
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import penstock
from penstock.config import ConnectionSettings, Settings
from penstock.errors import PeerLost
from penstock.lifecycle import Closeable
from penstock.memory.arena import Arena, needed_bytes
from penstock.sync.report import UpdateReport
from penstock.transport.collective import GroupCollectives

_REASON_BYTES = 1024
"""Size of the reason that a rank sends to the others: collectives need the same size on all."""


class VersionReceiver(Closeable):
    """The newest version of a sync, whole, in one arena; the memory is the same for all versions.

    Attributes:
        version: the version in memory; -1: none yet.
        report: of the newest version.

    Args:
        name: of the sync.
        connection: see `penstock.join`.
        device: of the tensors.
        transforms: the tags under which tensors are received where they are offered.
        rank: this rank among those that receive together, and their number.
        group: their group, with a backend for the CPU, if each version is to be received by all of them or none.

    Raises:
        As `penstock.subscriber`.
    """

    def __init__(
        self,
        name: str,
        *,
        connection: ConnectionSettings,
        device: str = "cpu",
        transforms: Sequence[str] | None = None,
        rank: tuple[int, int] = (0, 1),
        group: torch.distributed.ProcessGroup | None = None,
    ) -> None:
        self.report: UpdateReport | None = None
        self._device = device
        self._tensors: dict[str, torch.Tensor] = {}
        stall_s = Settings.read(stall_s=connection.stall_s).stall_s
        self._ranks = None if group is None else _Ranks(group, torch.device("cpu"), stall_s)
        # Direct, but into memory of this process: the engine gets nothing before the version is complete.
        self._subscriber = penstock.subscriber(
            name, self._allocate, connection=connection, mode="direct", transforms=transforms, rank=rank
        )

    @property
    def version(self) -> int:
        """Return the newest version that was received; -1: none yet."""
        return self._subscriber.version

    def receive(self, version: int | None = None, timeout_s: float | None = None) -> Mapping[str, torch.Tensor]:
        """Receive and verify a version; return its tensors.

        Args:
            version: exactly this one; None: the newest.
            timeout_s: how long to wait until it is announced; None: as `Subscriber.wait`.

        Raises:
            PenstockError: as `penstock.sync.Subscriber.update`. PeerLost: another rank did not receive the version, or
                is lost. The engine was given nothing.

        Ownership: the tensors are valid until the next version is received.
        """
        why = ""
        try:
            if version is not None:
                self._subscriber.wait(version, timeout_s)
            self.report = self._subscriber.update(version, timeout_s)
        except BaseException as error:
            why = str(error) or type(error).__name__
            raise
        finally:
            # In `finally`: a rank that failed takes part too, or the others would wait for it.
            if self._ranks is not None:
                self._ranks.agree(why)
        return self._tensors

    def close(self) -> None:
        """Leave the sync. Idempotent."""
        self._subscriber.close()

    def _allocate(self, published: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Return memory for the published tensors, in one arena, so that a peer on this host reaches all of it."""
        arena = Arena.allocate(needed_bytes(tensor.nbytes for tensor in published.values()), self._device)
        offsets = arena.place(tensor.nbytes for tensor in published.values())
        self._tensors = {
            name: arena.bytes_at(offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            for (name, tensor), offset in zip(published.items(), offsets, strict=True)
        }
        return self._tensors


class _Ranks(GroupCollectives):
    """The ranks that receive a version together."""

    poll_s = 0.01

    def agree(self, why: str) -> None:
        """Raise PeerLost if another rank failed and this one did not; `why` is this one's reason, or empty."""
        sent = why.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        reasons = [reason.rstrip(b"\0").decode(errors="replace") for reason in self.gather_bytes(sent)]
        others = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        if others and not why:
            raise PeerLost("; ".join(others), hint="the engine was not touched; send the weights again")
