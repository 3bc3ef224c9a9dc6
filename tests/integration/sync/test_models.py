"""A sync fills models like their loader does, version after version, in place."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from tests.integration.conftest import Host
from tests.unit.sync.toy import Place, Toy, checkpoint
from torch import nn

import penstock as ps
from penstock.errors import PlanError

DTYPE = torch.bfloat16


@pytest.fixture
def stack(host: Host) -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def halves(tensors: dict[str, torch.Tensor], rank: int) -> dict[str, Any]:
    """Return the shards of one of two FSDP ranks, with uneven rows and unsliced scalars."""
    found: dict[str, Any] = {}
    for name, one in tensors.items():
        if not one.ndim or not one.numel():
            found[name] = one.clone()
            continue
        parts = one.chunk(2)
        if rank < len(parts):
            part = parts[rank].clone()
            found[name] = ps.Shard(
                tensor=part, global_shape=tuple(one.shape), offset=(rank * len(parts[0]), *[0] * (one.ndim - 1))
            )
    return found


def put(params: dict[str, Any], tensors: dict[str, torch.Tensor], rank: int) -> None:
    for name, one in halves(tensors, rank).items():
        params[name].tensor.copy_(one.tensor) if isinstance(one, ps.Shard) else params[name].copy_(one)


def publishers(stack: ExitStack, held: list[dict[str, Any]], **options: Any) -> list[ps.sync.Publisher]:
    found: dict[int, ps.sync.Publisher] = {}

    def make(rank: int) -> None:
        found[rank] = ps.publisher("toy", held[rank], rank=(rank, len(held)), **options)

    together(lambda rank=rank: make(rank) for rank in range(len(held)))
    return [stack.enter_context(found[rank]) for rank in range(len(held))]


def together(work: Any) -> None:
    """Call all functions concurrently, and raise the first error."""
    errors: list[BaseException] = []

    def guarded(one: Any) -> None:
        try:
            one()
        except BaseException as error:
            errors.append(error)
            raise

    threads = [threading.Thread(target=guarded, args=(one,)) for one in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    if errors:
        raise errors[0]


@pytest.mark.parametrize("source", ["live", "snapshot"])
@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_sync_fills_model_exactly_as_its_loader_does(stack: ExitStack, mode: str, source: str) -> None:
    places = [Place(tp_rank=rank, tp=2, ep_rank=rank, ep=2, dtype=DTYPE) for rank in range(2)]
    held = [halves(checkpoint(DTYPE), rank) for rank in range(2)]
    pubs = publishers(stack, held, mode=source)
    models = [Toy(place) for place in places]
    calls: list[tuple[str, int]] = []
    hooks = ps.Hooks(
        before_pause=lambda v: calls.append(("pause", v)),
        at_commit=lambda v: calls.append(("commit", v)),
        after_resume=lambda v: calls.append(("resume", v)),
    )
    subs = [
        stack.enter_context(ps.subscriber("toy", model, mode=mode, hooks=hooks, rank=(rank, 2)))
        for rank, model in enumerate(models)
    ]
    pubs[0].wait_subscribers(2)
    before = [{name: one.data_ptr() for name, one in model.named_parameters()} for model in models]
    for version in (1, 2, 5):
        tensors = checkpoint(DTYPE, seed=version)
        for rank in range(2):
            put(held[rank], tensors, rank)
        calls.clear()
        together(
            [
                *(lambda pub=pub, v=version: pub.publish(v) for pub in pubs),
                *(lambda sub=sub, v=version: (sub.wait(v), sub.update()) for sub in subs),
            ]
        )
        assert sorted(calls) == sorted([("pause", version), ("commit", version), ("resume", version)] * 2)
        for model, place in zip(models, places, strict=True):
            wanted = Toy(place)
            wanted.load_weights(tensors.items())
            for name, one in wanted.state_dict().items():
                assert torch.equal(model.state_dict()[name], one), (version, name)
    assert before == [{name: one.data_ptr() for name, one in model.named_parameters()} for model in models]


def test_module_without_loader_syncs_by_parameter_name(stack: ExitStack) -> None:
    trained, served = nn.Linear(8, 4), nn.Linear(8, 4)
    (pub,) = publishers(stack, [trained], mode="snapshot")  # type: ignore[list-item]
    pub.publish(1)
    sub = stack.enter_context(ps.subscriber("toy", served))
    report = sub.update()
    assert report.nbytes == 4 * (8 * 4 + 4) and report.version == sub.version == 1
    assert torch.equal(served.weight, trained.weight) and torch.equal(served.bias, trained.bias)
    assert "version 1" in report.summary()


def test_strict_sync_error_lists_unpublished_parameters(stack: ExitStack) -> None:
    (pub,) = publishers(stack, [{"weight": torch.ones(4, 8)}], mode="snapshot")
    pub.publish(1)
    served = nn.Linear(8, 4)
    before = served.weight.clone()
    sub = stack.enter_context(
        ps.subscriber("toy", served, load=lambda w: served.load_state_dict(dict(w), strict=False))
    )
    with pytest.raises(PlanError, match="bias: 4 of 4 elements"):
        sub.update()
    assert torch.equal(served.weight, before)
    lax = stack.enter_context(
        ps.subscriber("toy", served, strict=False, load=lambda w: served.load_state_dict(dict(w), strict=False))
    )
    assert lax.update().version == 1
    assert torch.equal(served.weight, torch.ones(4, 8))
