"""A toy model with typical transformations by loaders, sharded like in vLLM."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import nn

from penstock.holding.weight_layout import tabulate
from penstock.loader.tensor import dtype_of
from penstock.types import TensorTable

HIDDEN, HEADS, KV_HEADS, HEAD, INNER, EXPERTS, VOCAB, RANK = 8, 4, 2, 4, 12, 4, 20, 6


@dataclass(frozen=True, kw_only=True)
class Place:
    """Position in the grid of inference ranks."""

    tp_rank: int = 0
    tp: int = 1
    ep_rank: int = 0
    ep: int = 1
    dtype: torch.dtype = torch.float32


def checkpoint(dtype: torch.dtype = torch.float32, seed: int = 0, layers: int = 2) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)

    def made(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    found = {"embed.weight": made(VOCAB - 3, HIDDEN), "norm.weight": made(HIDDEN), "none.weight": made(0, HIDDEN)}
    found |= {"scale": made().abs(), "vision.proj": made(3, 3)}
    for layer in range(layers):
        at = f"layers.{layer}."
        found[at + "q.weight"] = made(HEADS * HEAD, HIDDEN)
        found[at + "k.weight"] = made(KV_HEADS * HEAD, HIDDEN)
        found[at + "v.weight"] = made(KV_HEADS * HEAD, HIDDEN)
        found[at + "q.bias"] = made(HEADS * HEAD)
        found[at + "o.weight"] = made(HIDDEN, HEADS * HEAD)
        found[at + "kv_b.weight"] = made(HEADS * 2 * HEAD, RANK)
        found[at + "gate.weight"] = made(EXPERTS, HIDDEN)
        for expert in range(EXPERTS):
            found[at + f"experts.{expert}.w1"] = made(INNER, HIDDEN)
            found[at + f"experts.{expert}.w3"] = made(INNER, HIDDEN)
            found[at + f"experts.{expert}.w2"] = made(HIDDEN, INNER)
        found[at + "mlp.gate"] = made(INNER, HIDDEN)
        found[at + "mlp.up"] = made(INNER, HIDDEN)
        found[at + "mlp.down"] = made(HIDDEN, INNER)
    return found


def table_of(tensors: Mapping[str, torch.Tensor]) -> TensorTable:
    values = tensors.values()
    return tabulate(list(tensors), [dtype_of(t.dtype) for t in values], [tuple(t.shape) for t in values])


class Layer(nn.Module):
    def __init__(self, place: Place) -> None:
        super().__init__()
        self.place = place

        def room(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.full(shape, 7.0).to(place.dtype), requires_grad=False)

        heads, inner, local = HEADS // place.tp, INNER // place.tp, EXPERTS // place.ep
        kv = max(1, KV_HEADS // place.tp)
        self.qkv = room((heads + 2 * kv) * HEAD, HIDDEN)
        self.q_bias = room(heads * HEAD)
        self.o = room(HIDDEN, heads * HEAD)
        self.gate = room(EXPERTS, HIDDEN)
        self.gate_up = room(2 * inner, HIDDEN)
        self.down_t = room(inner, HIDDEN)  # stored transposed
        self.w13 = room(local, 2 * inner, HIDDEN)
        self.w2 = room(local, HIDDEN, inner)
        # MLA splits kv_b into keys and values, and stores the keys per head and transposed.
        self.w_uk_t = room(heads, RANK, HEAD)
        self.w_uv = room(heads, HEAD, RANK)

    def load(self, name: str, w: torch.Tensor) -> None:
        place = self.place
        heads, kv = HEADS // place.tp, max(1, KV_HEADS // place.tp)
        if name in ("q.weight", "k.weight", "v.weight"):
            part = {"q": 0, "k": heads, "v": heads + kv}[name[0]] * HEAD
            count = (heads if name[0] == "q" else kv) * HEAD
            rank = place.tp_rank if name[0] == "q" else place.tp_rank * KV_HEADS // max(place.tp, KV_HEADS)
            self.qkv.data.narrow(0, part, count).copy_(w.narrow(0, rank * count, count))
        elif name == "q.bias":
            self.q_bias.data[:] = w.chunk(place.tp)[place.tp_rank]
        elif name == "o.weight":
            self.o.data.copy_(w.tensor_split(place.tp, dim=1)[place.tp_rank])
        elif name == "gate.weight":
            self.gate.copy_(w)
        elif name == "kv_b.weight":
            mine = w.view(HEADS, 2 * HEAD, RANK)[place.tp_rank * heads : (place.tp_rank + 1) * heads]
            uk, uv = mine.split([HEAD, HEAD], dim=1)
            self.w_uk_t.data.copy_(uk.transpose(1, 2).contiguous())
            self.w_uv.data.copy_(uv)
        elif name.startswith("mlp."):
            self.load_mlp(name[4:], w)
        else:
            _, expert, which = name.split(".")
            self.load_expert(int(expert), which, w)

    def load_mlp(self, which: str, w: torch.Tensor) -> None:
        inner = INNER // self.place.tp
        if which == "down":
            mine = w.t()[self.place.tp_rank * inner :][:inner]
            self.down_t.data = self.down_t.data  # an assignment that changes nothing
            self.down_t.data[...] = mine
        else:
            half = self.gate_up.data.view(2, inner, HIDDEN)[0 if which == "gate" else 1]
            half.copy_(w.reshape(self.place.tp, inner, HIDDEN)[self.place.tp_rank])

    def load_expert(self, expert: int, which: str, w: torch.Tensor) -> None:
        local, inner = EXPERTS // self.place.ep, INNER // self.place.tp
        at = expert - self.place.ep_rank * local
        if not 0 <= at < local:
            return
        if which == "w2":
            self.w2.data[at].copy_(w.narrow(1, self.place.tp_rank * inner, inner))
        else:
            begin = 0 if which == "w1" else inner
            mine = w.narrow(0, self.place.tp_rank * inner, inner)
            self.w13.data[at].narrow(0, begin, inner).copy_(mine)


class Toy(nn.Module):
    def __init__(self, place: Place, layers: int = 2) -> None:
        super().__init__()
        self.place = place
        self.rows = VOCAB // place.tp
        self.embed = nn.Module()
        self.embed.weight = nn.Parameter(torch.full((self.rows, HIDDEN), 7.0).to(place.dtype))
        self.head = nn.Module()
        self.head.weight = self.embed.weight
        self.norm = nn.Parameter(torch.full((HIDDEN,), 7.0).to(place.dtype))
        self.register_buffer("none", torch.empty(0, HIDDEN))
        self.register_buffer("scale", torch.full((1,), 7.0))
        self.layers = nn.ModuleList(Layer(place) for _ in range(layers))

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> set[str]:
        loaded = set()
        for name, w in weights:
            if name.startswith("vision."):
                continue
            loaded.add(name)
            if name == "embed.weight":  # padded to a multiple
                start = self.place.tp_rank * self.rows
                mine = w[start : start + self.rows]
                self.embed.weight[: len(mine)] = mine
                self.embed.weight[len(mine) :].data.fill_(0)
            elif name == "norm.weight":
                self.norm.copy_(w)
            elif name == "none.weight":
                self.none.copy_(w)
            elif name == "scale":
                self.scale.copy_(w.view(1))
            else:
                _, layer, rest = name.split(".", 2)
                self.layers[int(layer)].load(rest, w)
        return loaded
