"""Complete versions of a sync in this process's memory, for engines that load tensors by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

import penstock
from penstock.config import ConnectionSettings, Settings
from penstock.lifecycle import Closeable
from penstock.memory.arena import Arena, needed_bytes
from penstock.ranks.agreement import RankWords
from penstock.sync.report import UpdateReport

_UNCHANGED = "the engine is unchanged, so send the weights again"


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
        self._ranks = None if group is None else RankWords(group, torch.device("cpu"), stall_s)
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
        try:
            if version is not None:
                self._subscriber.wait(version, timeout_s)
            self.report = self._subscriber.update(version, timeout_s)
        except BaseException as error:
            # A rank that failed must take part too, because the other ranks wait for it.
            if self._ranks is not None:
                self._ranks.agree(error=error)
            raise
        if self._ranks is not None:
            self._ranks.agree(hint=_UNCHANGED)
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
