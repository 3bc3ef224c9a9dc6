"""Publishing and receiving adapters: tensors that move, and shares of unsliced tensors."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import penstock as ps
from penstock.config import ConnectionSettings
from penstock.spi.trainer_publisher import TrainerPublisher, WholeTensorShares
from penstock.spi.version_receiver import VersionReceiver

SHAPES = {"up.weight": (7, 4), "norm.weight": (3,), "bias": (1, 4), "scale": ()}
HERE = ConnectionSettings(stall_s=10.0)


@pytest.fixture(autouse=True)
def runtime(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RUNTIME_DIR", str(tmp_path))


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    """Use two threads, because the ranks of a trainer wait for each other."""
    with ThreadPoolExecutor(2) as threads:
        yield threads


def whole(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


def test_receiver_assembles_tensors_divided_among_trainer_ranks(pool: ThreadPoolExecutor) -> None:
    shares = [WholeTensorShares(rank, 2) for rank in range(2)]
    senders = [TrainerPublisher("policy", connection=HERE, rank=(rank, 2)) for rank in range(2)]
    with senders[0], senders[1], VersionReceiver("policy", connection=HERE) as receiver:
        for version in range(2):
            for share in shares:
                share.fill(whole(version).items())
            published = pool.map(lambda sender, share: sender.publish(share.params), senders, shares)
            assert [report.version for report in published] == [version, version]
            received = receiver.receive(version)
            assert received.keys() == SHAPES.keys()
            assert all(torch.equal(received[name], tensor) for name, tensor in whole(version).items())
    # Each rank has three or four of seven rows.
    assert sorted(len(share.params["up.weight"].tensor) for share in shares) == [3, 4]


def test_publishing_changed_tensor_set_is_rejected() -> None:
    share = WholeTensorShares(0, 1)
    share.fill(whole(0).items())
    with pytest.raises(ps.ConfigError, match="shape or dtype of other"):
        share.fill({"other": torch.zeros(4)}.items())
    with pytest.raises(ps.ConfigError, match=r"shape or dtype of up\.weight"):
        share.fill({"up.weight": torch.zeros(7, 5)}.items())


def test_reallocated_tensors_are_published_with_next_version() -> None:
    with TrainerPublisher("policy", connection=HERE, rank=(0, 1)) as sender:
        assert sender.publish(whole(0)).version == 0
        # No receiver has version 0, and no other process knows that it was used.
        assert sender.publish(whole(1)).version == 1
        with VersionReceiver("policy", connection=HERE) as receiver:
            received = receiver.receive(1)
            assert all(torch.equal(received[name], tensor) for name, tensor in whole(1).items())
            assert sender.publish(whole(2)).version == 2
            assert torch.equal(receiver.receive()["up.weight"], whole(2)["up.weight"])


def test_subscriber_fills_tensors_from_allocate_function() -> None:
    seen: dict[str, torch.Tensor] = {}

    def allocate(published: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        assert all(tensor.is_meta for tensor in published.values())
        seen.update({name: torch.zeros(tensor.shape, dtype=tensor.dtype) for name, tensor in published.items()})
        return seen

    with (
        ps.publisher("policy", whole(0), mode="snapshot") as publisher,
        ps.subscriber("policy", allocate) as subscriber,
    ):
        publisher.publish(0)
        subscriber.update()
    assert all(torch.equal(seen[name], tensor) for name, tensor in whole(0).items())
    with pytest.raises(ps.ConfigError, match="to an arena"):
        ps.subscriber("policy", allocate, settings=ps.sync.SubscriberSettings(arena=True))
    with pytest.raises(ps.ConfigError, match="target"):
        ps.subscriber("policy", 3)  # type: ignore[arg-type]
