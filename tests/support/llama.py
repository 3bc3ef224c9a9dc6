"""A small Llama in plain torch, both as trainers have it and as engines serve it, fused and tensor parallel.

The two modules compute the same. The first has the names of checkpoints.

    Llama: q_proj k_proj v_proj gate_proj up_proj   --load_weights-->   LlamaRank: its rows of qkv_proj, gate_up_proj
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

Reduce = Callable[[torch.Tensor], torch.Tensor]
"""Sums a tensor over the ranks."""

FUSED = dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj") | dict.fromkeys(
    ("gate_proj", "up_proj"), "gate_up_proj"
)
BY_ROWS, BY_COLUMNS = {*FUSED, "lm_head"}, {"o_proj", "down_proj"}


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """The sizes that define the model."""

    num_layers: int = 4
    hidden: int = 256
    inner: int = 768
    num_heads: int = 8
    num_kv_heads: int = 4
    vocab: int = 1024

    @property
    def head(self) -> int:
        """Return the size of one head."""
        return self.hidden // self.num_heads

    @property
    def num_params(self) -> int:
        """Return the number of parameters of the whole model."""
        attention = 2 * self.hidden * (self.num_heads + self.num_kv_heads) * self.head
        layer = attention + 3 * self.hidden * self.inner + 2 * self.hidden
        return self.num_layers * layer + 2 * self.vocab * self.hidden + self.hidden


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, head: int) -> torch.Tensor:
    """Compute causal attention of grouped queries with rotary positions.

    All tensors are [batch, tokens, heads * head].
    """
    batch, tokens, _ = q.shape
    q, k, v = (one.view(batch, tokens, -1, head).transpose(1, 2) for one in (q, k, v))
    mixed = functional.scaled_dot_product_attention(_rotated(q), _rotated(k), v, is_causal=True, enable_gqa=True)
    return mixed.transpose(1, 2).reshape(batch, tokens, -1)


def _rotated(heads: torch.Tensor) -> torch.Tensor:
    tokens, half = heads.shape[-2], heads.shape[-1] // 2
    rate = 10_000.0 ** (-torch.arange(half, device=heads.device) / half)
    angle = torch.arange(tokens, device=heads.device)[:, None] * rate
    cos, sin = angle.cos().to(heads.dtype), angle.sin().to(heads.dtype)
    first, second = heads.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class Attention(nn.Module):
    """The attention of one layer, in the form for training."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head = sizes.head
        self.q_proj = nn.Linear(sizes.hidden, sizes.num_heads * sizes.head, bias=False)
        self.k_proj = nn.Linear(sizes.hidden, sizes.num_kv_heads * sizes.head, bias=False)
        self.v_proj = nn.Linear(sizes.hidden, sizes.num_kv_heads * sizes.head, bias=False)
        self.o_proj = nn.Linear(sizes.num_heads * sizes.head, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the addition to the residual stream."""
        out: torch.Tensor = self.o_proj(attend(self.q_proj(x), self.k_proj(x), self.v_proj(x), self.head))
        return out


class Mlp(nn.Module):
    """The MLP of one layer, in the form for training."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.up_proj = nn.Linear(sizes.hidden, sizes.inner, bias=False)
        self.down_proj = nn.Linear(sizes.inner, sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the addition to the residual stream."""
        out: torch.Tensor = self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x))
        return out


class AttentionRank(nn.Module):
    """The attention heads of one rank."""

    def __init__(self, sizes: Sizes, world_size: int) -> None:
        super().__init__()
        self.head = sizes.head
        self.rows = [n * sizes.head // world_size for n in (sizes.num_heads, sizes.num_kv_heads, sizes.num_kv_heads)]
        self.qkv_proj = nn.Linear(sizes.hidden, sum(self.rows), bias=False)
        self.o_proj = nn.Linear(self.rows[0], sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the addition to the residual stream."""
        q, k, v = self.qkv_proj(x).split(self.rows, dim=-1)
        made: torch.Tensor = self.o_proj(attend(q, k, v, self.head))
        return made


class MlpRank(nn.Module):
    """One rank's part of the MLP's inner dim."""

    def __init__(self, sizes: Sizes, world_size: int) -> None:
        super().__init__()
        self.rows = [sizes.inner // world_size] * 2
        self.gate_up_proj = nn.Linear(sizes.hidden, sum(self.rows), bias=False)
        self.down_proj = nn.Linear(self.rows[0], sizes.hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return this rank's share of the addition to the residual stream."""
        gate, up = self.gate_up_proj(x).split(self.rows, dim=-1)
        made: torch.Tensor = self.down_proj(functional.silu(gate) * up)
        return made


class Layer(nn.Module):
    """A layer of a whole model or of one rank."""

    def __init__(self, sizes: Sizes, self_attn: nn.Module, mlp: nn.Module, reduce: Reduce) -> None:
        super().__init__()
        self.input_layernorm, self.self_attn = nn.RMSNorm(sizes.hidden, eps=1e-5), self_attn
        self.post_attention_layernorm, self.mlp = nn.RMSNorm(sizes.hidden, eps=1e-5), mlp
        self._reduce = reduce

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the residual stream after this layer."""
        x = x + self._reduce(self.self_attn(self.input_layernorm(x)))
        return x + self._reduce(self.mlp(self.post_attention_layernorm(x)))


class _Model(nn.Module):
    def __init__(self, sizes: Sizes, layers: Iterable[Layer], rows: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.model = nn.ModuleDict(
            {
                "embed_tokens": nn.Embedding(sizes.vocab, sizes.hidden),
                "layers": nn.ModuleList(layers),
                "norm": nn.RMSNorm(sizes.hidden, eps=1e-5),
            }
        )
        self.lm_head = nn.Linear(sizes.hidden, rows, bias=False)

    @property
    def layers(self) -> Iterable[nn.Module]:
        """Return the layers in order."""
        found = self.model["layers"]
        assert isinstance(found, nn.ModuleList)
        return found

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits for this rank's rows of the vocabulary."""
        x = self.model["embed_tokens"](tokens)
        for layer in self.layers:
            x = layer(x)
        made: torch.Tensor = self.lm_head(self.model["norm"](x))
        return made


class Llama(_Model):
    """The whole model under the names of checkpoints."""

    def __init__(self, sizes: Sizes) -> None:
        layers = (Layer(sizes, Attention(sizes), Mlp(sizes), _alone) for _ in range(sizes.num_layers))
        super().__init__(sizes, layers, sizes.vocab)


class LlamaRank(_Model):
    """The model of one rank of an engine: its heads, its part of the inner dim, and its rows of the vocabulary.

    Args:
        sizes: sizes of the whole model. Split dims are multiples of `world_size`.
        rank, world_size: tensor-parallel rank and size.
        reduce: sums over the ranks. None means a single rank.
    """

    def __init__(self, sizes: Sizes, rank: int = 0, world_size: int = 1, reduce: Reduce | None = None) -> None:
        sums = reduce or _alone
        layers = (
            Layer(sizes, AttentionRank(sizes, world_size), MlpRank(sizes, world_size), sums)
            for _ in range(sizes.num_layers)
        )
        super().__init__(sizes, layers, sizes.vocab // world_size)
        self.rank, self.world_size = rank, world_size
        q, kv, inner = (n // world_size for n in (sizes.hidden, sizes.num_kv_heads * sizes.head, sizes.inner))
        self._first = {"q_proj": 0, "k_proj": q, "v_proj": q + kv, "gate_proj": 0, "up_proj": inner}

    @torch.no_grad()
    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Copy each tensor's part for this rank into the fused parameters, as vLLM does."""
        for name, tensor in weights:
            module = name.split(".")[-2]
            into = self.get_parameter(name.replace(module, FUSED.get(module, module)))
            if module in BY_ROWS:
                tensor = tensor.chunk(self.world_size, 0)[self.rank]
            elif module in BY_COLUMNS:
                tensor = tensor.chunk(self.world_size, 1)[self.rank]
            into.narrow(0, self._first.get(module, 0), len(tensor)).copy_(tensor)


def _alone(part: torch.Tensor) -> torch.Tensor:
    return part
