"""Complete versions of a sync in this process's memory, for engines that load tensors by name."""

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
"""Size in bytes of the reason that a rank sends to the other ranks. Collectives require the same size on all ranks."""


class VersionReceiver(Closeable):
    """The newest version of a sync in one arena. The memory is the same for all versions.

    Attributes:
        version: the version in memory, or -1.

    Args:
        connection: see `penstock.join`.
        transforms: tags of the forms in which to receive tensors, if the publisher offers these forms.
        rank: a pair, this rank and the number of ranks that receive the version.
        group: the ranks' process group, with a CPU backend, if either all ranks or none must receive each version.
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
        # Update directly, because the engine does not read this memory before the version is complete.
        self._subscriber = penstock.subscriber(
            name, self._allocate, connection=connection, mode="direct", transforms=transforms, rank=rank
        )

    @property
    def version(self) -> int:
        """Return the newest version that was received, or -1."""
        return self._subscriber.version

    def receive(self, version: int | None = None, timeout_s: float | None = None) -> Mapping[str, torch.Tensor]:
        """Receive and verify a version. Return the version's tensors, valid until the next version is received.

        Args:
            version: the version to receive. None means the newest.
            timeout_s: seconds to wait until the version is announced. None means the default of `Subscriber.wait`.

        Raises:
            PenstockError: see `penstock.sync.Subscriber.update`.
            PeerLost: another rank is lost or did not receive the version, so no tensors are returned.
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
            # A rank that failed must take part too, because the other ranks wait for it.
            if self._ranks is not None:
                self._ranks.agree(why)
        return self._tensors

    def close(self) -> None:
        """Leave the sync. Idempotent."""
        self._subscriber.close()

    def _allocate(self, published: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        arena = Arena.allocate(needed_bytes(tensor.nbytes for tensor in published.values()), self._device)
        offsets = arena.place(tensor.nbytes for tensor in published.values())
        self._tensors = {
            name: arena.bytes_at(offset, tensor.nbytes).view(tensor.dtype).view(tensor.shape)
            for (name, tensor), offset in zip(published.items(), offsets, strict=True)
        }
        return self._tensors


class _Ranks(GroupCollectives):
    poll_s = 0.01

    def agree(self, why: str) -> None:
        """Raise PeerLost if another rank failed and this rank did not. `why` says why this rank failed, or is empty."""
        sent = why.encode()[:_REASON_BYTES].ljust(_REASON_BYTES, b"\0")
        reasons = [reason.rstrip(b"\0").decode(errors="replace") for reason in self.gather_bytes(sent)]
        others = [f"rank {rank}: {reason}" for rank, reason in enumerate(reasons) if reason]
        if others and not why:
            raise PeerLost("; ".join(others), hint="the engine is unchanged, so send the weights again")
