"""Publishing by a trainer's ranks, for adapters. Tensors may move in memory between two versions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

import penstock
from penstock.config import ConnectionSettings
from penstock.errors import ConfigError
from penstock.lifecycle import Closeable
from penstock.sync.publish.publisher import Publisher
from penstock.sync.report import PublishMode, PublishReport
from penstock.sync.shards import Declarable, Shard


class TrainerPublisher(Closeable):
    """Publisher of versions from one rank of a trainer. `rank` is a pair: this rank and the number of ranks."""

    def __init__(
        self,
        name: str,
        *,
        connection: ConnectionSettings,
        transforms: str | Mapping[str, Any] | None = None,
        rank: tuple[int, int],
    ) -> None:
        self.name = name
        self._connection = connection
        self._transforms = transforms
        self._rank = rank
        self._publisher: Publisher | None = None
        self._version = -1
        # The publisher finds the tensors of the newest version here.
        self._params: dict[str, Declarable] = {}

    @property
    def latest(self) -> int:
        """Return the newest version that this rank knows, or -1."""
        return self._version if self._publisher is None else max(self._version, self._publisher.latest)

    def publish(
        self,
        params: Mapping[str, Declarable],
        version: int | None = None,
        *,
        mode: PublishMode = "snapshot",
        num_receivers: int = 0,
    ) -> PublishReport:
        """Publish the current tensors. All ranks call this method with the same version.

        Args:
            params: this rank's shards, with equal names and boxes in all versions. The tensors may be new objects.
            version: must be above all earlier versions. None means the next version.
            mode: see `penstock.publisher`.
            num_receivers: number of subscribers to wait for before publishing, because a live version is visible only
                to known subscribers.

        Raises:
            PenstockError: see `penstock.publisher` and `penstock.sync.Publisher.publish`.
        """
        self._params.clear()
        self._params.update(params)
        if self._publisher is None:
            self._publisher = penstock.publisher(
                self.name,
                self._params,
                connection=self._connection,
                mode=mode,
                transforms=self._transforms,
                rank=self._rank,
            )
            if self._rank[0] == 0:
                # Wait for all ranks, because a late rank would find the version at another member and not publish it.
                self._publisher.wait_ranks()
        if num_receivers and self._rank[0] == 0:
            self._publisher.wait_subscribers(num_receivers)
        report = self._publisher.publish(self.latest + 1 if version is None else version)
        self._version = report.version
        return report

    def close(self) -> None:
        """Leave the sync. Receivers keep their version. Idempotent."""
        if self._publisher is not None:
            self._publisher.close()
            self._publisher = None


class WholeTensorShares:
    """This rank's share of unsharded tensors: a copy of some rows of each tensor, refilled for each version.

    All ranks together publish one copy of the model.

    Attributes:
        params: the shares to publish, in the same memory for all versions.
    """

    def __init__(self, rank: int, world_size: int) -> None:
        self.params: dict[str, Shard] = {}
        self._rank = rank
        self._world_size = world_size

    def fill(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy this rank's rows. All ranks iterate over all tensors, because gathering a tensor is a collective.

        A tensor with a new name, shape or dtype raises ConfigError.
        """
        is_first = not self.params
        for number, (name, tensor) in enumerate(tensors):
            rows = self._rows(number, tensor)
            if rows is None:
                continue
            part = tensor.detach()[rows] if tensor.ndim else tensor.detach()
            if is_first:
                offset = (rows.start or 0, *(0 for _ in tensor.shape[1:])) if tensor.ndim else ()
                copy = torch.empty(part.shape, dtype=part.dtype, device=part.device)
                self.params[name] = Shard(tensor=copy, global_shape=tuple(tensor.shape), offset=offset)
            shard = self.params.get(name)
            if shard is None or (shard.global_shape, shard.tensor.dtype) != (tuple(tensor.shape), tensor.dtype):
                raise ConfigError(f"the trainer changed the name, shape or dtype of {name}", hint="restart the run")
            shard.tensor.copy_(part)

    def _rows(self, number: int, tensor: torch.Tensor) -> slice | None:
        rows = tensor.shape[0] if tensor.ndim else 0
        if rows < self._world_size:
            # The tensor has too few rows to divide, so one rank gets the whole tensor.
            return slice(0, None) if number % self._world_size == self._rank else None
        return slice(rows * self._rank // self._world_size, rows * (self._rank + 1) // self._world_size)
