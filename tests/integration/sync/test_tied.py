"""Targets that share memory under several names, with equal and different published tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import penstock as ps


class Tied(torch.nn.Module):
    def __init__(self, *, is_tied: bool) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        if is_tied:
            self.head.weight = self.embed.weight


class Names(Tied):
    """A model with its own loader, which copies each name."""

    def load_weights(self, weights: Any) -> None:
        params = dict(self.named_parameters(remove_duplicate=False))
        for name, tensor in weights:
            params[name].data.copy_(tensor)


def halves(tensor: torch.Tensor, rank: int, dim: int) -> ps.Shard:
    offset = [0, 0]
    offset[dim] = rank * tensor.shape[dim] // 2
    part = tensor.chunk(2, dim)[rank].clone()
    return ps.Shard(tensor=part, global_shape=tuple(tensor.shape), offset=tuple(offset))


def publishers(stack: Any, embed: torch.Tensor, head: torch.Tensor, layout: str) -> list[ps.sync.Publisher]:
    """Return publishers that shard the tensors differently."""
    if layout == "one place":
        held = [{"embed": embed, "head": embed if torch.equal(embed, head) else head}]
    elif layout == "one rank":
        held = [{"embed": embed.clone(), "head": head.clone()}]
    elif layout == "two ranks":
        held = [{"embed": embed.clone()}, {"head": head.clone()}]
    else:
        held = [{"embed": halves(embed, rank, 0), "head": halves(head, rank, 1)} for rank in range(2)]
    return [stack.enter_context(ps.publisher("tied", each, rank=(rank, len(held)))) for rank, each in enumerate(held)]


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("layout", ["one place", "one rank", "two ranks", "rows and columns"])
def test_tied_dict_requires_equal_sources(layout: str, mode: Any) -> None:
    from contextlib import ExitStack

    embed, shared = torch.randn(8, 4), torch.zeros(8, 4)
    other = embed.clone()
    other[5, 2] += 1
    for head in (other, embed):
        with ExitStack() as stack:
            pubs = publishers(stack, embed, head, layout)
            subscriber = stack.enter_context(ps.subscriber("tied", {"embed": shared, "head": shared}, mode=mode))
            for pub in pubs:
                pub.publish(1)
            if head is other:
                with pytest.raises(ps.PlanError, match=r"embed and head are one memory .* sources differ") as caught:
                    subscriber.update()
                assert (caught.value.mutated, subscriber.version, subscriber.is_dirty) == (False, -1, False)
                assert not shared.any()
            else:
                report = subscriber.update()
                assert torch.equal(shared, embed)
                assert report.nbytes == shared.nbytes, "the bytes are read once"


@pytest.mark.parametrize("make", [Tied, Names])
def test_tied_module_requires_equal_sources(make: type[Tied]) -> None:
    served, untied = make(is_tied=True), Tied(is_tied=False)
    before = served.embed.weight.detach().clone()
    with ps.publisher("modules", untied) as publisher, ps.subscriber("modules", served) as subscriber:
        publisher.publish(1)
        with pytest.raises(ps.PlanError, match=r"embed.weight and .*head.weight|head.weight and .*embed.weight"):
            subscriber.update()
        assert torch.equal(served.embed.weight, before)
        with torch.no_grad():
            untied.head.weight.copy_(untied.embed.weight)
        publisher.publish(2)
        report = subscriber.update()
        assert torch.equal(served.embed.weight, untied.embed.weight)
        assert report.nbytes == before.nbytes


def test_tied_module_with_different_dtypes_is_refused() -> None:
    served = Tied(is_tied=True)
    weight = torch.randn(8, 4)
    published = {"embed.weight": weight, "head.weight": weight.bfloat16()}
    with ps.publisher("dtypes", published) as publisher, ps.subscriber("dtypes", served) as subscriber:
        publisher.publish(1)
        with pytest.raises(ps.PlanError, match=r"fill one tied parameter, but are published as F32 .* and BF16"):
            subscriber.update()


@pytest.mark.parametrize("kind", ["overlap", "expanded"])
def test_partly_overlapping_targets_are_rejected(kind: str) -> None:
    memory = torch.zeros(12)
    target = {"a": memory[:8], "b": memory[4:]} if kind == "overlap" else {"a": torch.zeros(1).expand(8)}
    published = {name: torch.ones(8) for name in target}
    with ps.publisher("shares", published) as publisher, ps.subscriber("shares", target) as subscriber:
        publisher.publish(1)
        with pytest.raises(ps.PlanError, match=r"share|overlap"):
            subscriber.update()
        assert not memory.any()


def test_stored_version_restores_tied_module() -> None:
    served, trained = Tied(is_tied=True), Tied(is_tied=True)
    with ps.subscriber("stored", served) as subscriber:
        with ps.publisher("stored", trained) as publisher:
            publisher.publish(1)
            subscriber.update()
        weight = trained.embed.weight.detach()
        for name in ("embed.weight", "head.weight"):
            subscriber.release()
            subscriber.restore(
                None, 0.0, stored=ps.sync.StoredVersion(version=1, weights=lambda name=name: [(name, weight)])
            )
            assert torch.equal(served.embed.weight, weight)
        subscriber.release()
        both = [("embed.weight", weight), ("head.weight", weight + 1)]
        with pytest.raises(ps.PlanError, match=r"embed.weight and head.weight are one memory"):
            subscriber.restore(None, 0.0, stored=ps.sync.StoredVersion(version=2, weights=lambda: both))


@pytest.mark.parametrize("mode", ["staged", "direct"])
def test_update_between_forward_and_backward_is_detected(mode: Any) -> None:
    served = torch.nn.Linear(3, 1)
    with (
        ps.publisher("autograd", torch.nn.Linear(3, 1)) as publisher,
        ps.subscriber("autograd", served, mode=mode) as subscriber,
    ):
        loss = served(torch.ones(2, 3, requires_grad=True)).sum()
        publisher.publish(1)
        subscriber.update()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
