"""Models with codes and scales are filled from BF16 shards as by their loader from the quantised tensor."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import ExitStack

import pytest
import torch
from tests.integration.sync.test_models import halves, publishers, put, stack, together
from torch import nn

import penstock as ps
from penstock.errors import BudgetTooSmall, PlanError
from penstock.transform.formats import format_of
from penstock.transform.quantize import quantise

__all__ = ["stack"]  # a fixture

TAG = "fp8-block128"
SHAPES = {"q": (512, 256), "k": (256, 256), "v": (256, 256), "down": (200, 512)}
NAMES = {part: f"layers.0.{part}_proj.weight" for part in SHAPES}


def checkpoint(seed: int) -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(seed)
    found = {NAMES[part]: torch.randn(shape, generator=chance) for part, shape in SHAPES.items()}
    found |= {"norm.weight": torch.randn(256, generator=chance), "lm_head.weight": torch.randn(64, 256)}
    return {name: one.bfloat16() for name, one in found.items()}


def quantised(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    found = dict(tensors)
    for name in NAMES.values():
        found[name], found[f"{name}_scale_inv"] = quantise(format_of(TAG), tensors[name])
    return found


class Codes(nn.Module):
    def __init__(self, rows: int, columns: int) -> None:
        super().__init__()
        codes, scales = torch.zeros(rows, columns), torch.zeros(-(-rows // 128), -(-columns // 128))
        self.weight = nn.Parameter(codes.to(torch.float8_e4m3fn), requires_grad=False)
        self.weight_scale_inv = nn.Parameter(scales, requires_grad=False)


class Served(nn.Module):
    """A model for one of two tensor-parallel ranks, with fused q, k and v."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.qkv, self.down = Codes(512, 256), Codes(200, 256)
        self.norm = nn.LayerNorm(256, bias=False, dtype=torch.bfloat16)
        self.lm_head = nn.Linear(256, 64, bias=False, dtype=torch.bfloat16)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        first = {"q": 0, "k": 256, "v": 384}
        params = dict(self.named_parameters())
        for name, one in weights:
            part, _, kind = name.removeprefix("layers.0.").partition("_proj.")
            if part == "down":
                params[f"down.{kind}"].data.copy_(one.chunk(2, 1)[self.rank])
            elif part in first:
                step = 128 if kind.endswith("inv") else 1
                mine = one.chunk(2, 0)[self.rank]
                params[f"qkv.{kind}"].data.narrow(0, first[part] // step, len(mine)).copy_(mine)
            else:
                params[name].data.copy_(one)


def assert_same(model: nn.Module, other: nn.Module) -> None:
    for (name, a), (_, b) in zip(model.named_parameters(), other.named_parameters(), strict=True):
        assert torch.equal(a.data.view(torch.uint8), b.data.view(torch.uint8)), name


@pytest.mark.parametrize("mode", ["staged", "direct"])
@pytest.mark.parametrize("asked", [TAG, None])
def test_quantised_codes_and_scales_reach_loader_parameters(stack: ExitStack, mode: str, asked: str | None) -> None:
    held = [halves(checkpoint(0), rank) for rank in range(2)]
    pubs = publishers(stack, held, mode="live", transforms=TAG)
    models = [Served(rank) for rank in range(2)]
    subs = [
        stack.enter_context(ps.subscriber("toy", model, mode=mode, transforms=asked, rank=(rank, 2)))
        for rank, model in enumerate(models)
    ]
    pubs[0].wait_subscribers(2)
    for version in (1, 2):
        tensors = checkpoint(version)
        for rank in range(2):
            put(held[rank], tensors, rank)
        together(
            [
                *(lambda pub=pub, v=version: pub.publish(v) for pub in pubs),
                *(lambda sub=sub, v=version: (sub.wait(v), sub.update()) for sub in subs),
            ]
        )
        for rank, model in enumerate(models):
            wanted = Served(rank)
            wanted.load_weights(quantised(tensors).items())
            assert_same(model, wanted)


def test_receiver_serves_weights_in_received_format(stack: ExitStack) -> None:
    (pub,) = publishers(stack, [checkpoint(3)], mode="snapshot", transforms=TAG, keep_plain=False)
    pub.publish(1)
    first, second = Served(0), Served(0)
    stack.enter_context(ps.subscriber("toy", first)).update()
    pub.close()
    report = stack.enter_context(ps.subscriber("toy", second, transforms=TAG)).update()
    assert report.version == 1
    assert_same(second, first)


def test_model_with_different_format_is_refused(stack: ExitStack) -> None:
    (pub,) = publishers(stack, [checkpoint(3)], mode="snapshot", transforms={TAG: ["*"]}, keep_plain=False)
    pub.publish(1)
    plain = nn.Module()
    plain.layers = nn.ModuleList([nn.Module()])
    plain.layers[0].q_proj = nn.Linear(256, 512, bias=False, dtype=torch.bfloat16)
    sub = stack.enter_context(ps.subscriber("toy", dict(plain.named_parameters())))
    with pytest.raises(PlanError, match=r"layers.0.q_proj.weight: wanted as BF16.*held as F8_E4M3.*fp8-block128"):
        sub.update()
    with pytest.raises(BudgetTooSmall) as caught:
        ps.publisher("other", checkpoint(0), transforms=TAG, settings=ps.sync.PublisherSettings(memory_bytes=1 << 10))
    assert caught.value.minimum_bytes is not None and caught.value.minimum_bytes > 512 * 256
