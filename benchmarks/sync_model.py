"""Models of the sync benchmark: checkpoints by shape, a trainer's dim-0 shards of them, an engine's fused parameters.

In: a kind, bytes, a rank. Out: names and shapes; values that say which tensor, element and version they are; a module
with a loader as engines have them: fused, cut for tensor or expert parallelism.
Not here: processes and timing (`sync_worker`).
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterable, Mapping

import torch

Shape = tuple[int, ...]

FUSED = {"q_proj": "qkv_proj", "k_proj": "qkv_proj", "v_proj": "qkv_proj", "gate_proj": "gate_up", "up_proj": "gate_up"}
COLUMNS = ("o_proj", "down_proj")
"""Cut by their second dim."""
TAGS = {"fp8": "fp8-block128"}
"""The format of a kind whose engines serve codes."""
SCALES = "_scale_inv"
BLOCK = 128


def shapes_of(kind: str, nbytes: int, *, small: bool) -> dict[str, Shape]:
    """Return the shapes of about `nbytes` bytes of BF16: `llama`, `fp8` (the same), or `moe`: 30,000 experts."""
    if kind == "moe":
        return _moe(nbytes, num_layers=4 if small else 40, num_experts=25 if small else 250)
    hidden, inner, kv, vocab = (256, 512, 256, 512) if small else (8192, 28672, 1024, 128256)
    found: dict[str, Shape] = {"model.embed_tokens.weight": (vocab, hidden), "lm_head.weight": (vocab, hidden)}
    layer = {
        "input_norm.weight": (hidden,),
        "self_attn.q_proj.weight": (hidden, hidden),
        "self_attn.k_proj.weight": (kv, hidden),
        "self_attn.v_proj.weight": (kv, hidden),
        "self_attn.o_proj.weight": (hidden, hidden),
        "post_norm.weight": (hidden,),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    of_layer = 2 * sum(map(math.prod, layer.values()))
    for number in range(max(1, round((nbytes - 4 * vocab * hidden) / of_layer))):
        found |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return found


def _moe(nbytes: int, *, num_layers: int, num_experts: int) -> dict[str, Shape]:
    """Three matrices an expert, all of as many elements."""
    elements = nbytes // 2 // (3 * num_layers * num_experts)
    inner = 1 << max(3, (elements.bit_length() - 1) // 2)
    hidden = max(16, elements // inner // 16 * 16)
    found: dict[str, Shape] = {}
    for layer in range(num_layers):
        for expert in range(num_experts):
            at = f"model.layers.{layer}.mlp.experts.{expert}"
            found |= {f"{at}.gate_proj.weight": (inner, hidden), f"{at}.up_proj.weight": (inner, hidden)}
            found[f"{at}.down_proj.weight"] = (hidden, inner)
    return found


def served_of(kind: str, shapes: Mapping[str, Shape]) -> dict[str, Shape]:
    """Return the tensors that engines of a kind load: as trained, or codes with their scales."""
    found = dict(shapes)
    for name, shape in shapes.items():
        if kind in TAGS and name.endswith("_proj.weight"):
            found[name + SCALES] = -(-shape[0] // BLOCK), -(-shape[1] // BLOCK)
    return found


def fill(tensor: torch.Tensor, name: str, version: int, first_row: int = 0) -> None:
    """Rows `first_row` on of the tensor of this name, in this version: numbers of 2^-7 to 2, others for each element,
    near enough."""
    bits = tensor.view(torch.int16)
    rows = torch.arange(first_row, first_row + len(bits), device=bits.device, dtype=torch.int32) * 7919
    values = rows if bits.dim() == 1 else rows[:, None] + torch.arange(bits.shape[1], device=bits.device) * 31
    bits.copy_(((values + zlib.crc32(name.encode()) % 32768) & 0x83FF | 0x3C00) + version)


def advance(flat: torch.Tensor) -> None:
    """The next version of everything that `fill` filled."""
    flat.view(torch.int16).add_(1)


class Served(torch.nn.Module):
    """The tensors of one rank of an engine.

    Args:
        shapes: of `served_of`.
        rank, world_size: rows and columns are cut, experts dealt out.
        device: where.
    """

    def __init__(self, shapes: Mapping[str, Shape], rank: int, world_size: int, device: str) -> None:
        super().__init__()
        self.rank, self.world_size = rank, world_size
        self.num_experts = 1 + max((_expert(name) for name in shapes), default=0)
        self.places: dict[str, tuple[str, int, int]] = {}
        """Of each tensor that this rank wants: the parameter, the expert in it (-1: none), the first row."""
        sizes: dict[str, list[int]] = {}
        dtypes: dict[str, torch.dtype] = {}
        first_row: dict[tuple[str, str], int] = {}
        mine = range(rank * self.num_experts // world_size, (rank + 1) * self.num_experts // world_size)
        for name, shape in shapes.items():
            expert, cut = _expert(name), self._cut(name, shape)
            if expert >= 0 and expert not in mine:
                continue
            stem, _, suffix = name.rpartition(".weight")
            *head, last = stem.split(".")
            target = "_".join([*(head if expert < 0 else head[:-1]), FUSED.get(last, last)]) + suffix
            size = sizes.setdefault(target, [0, *cut[1:]])
            dtypes[target] = (
                torch.float32 if suffix else torch.float8_e4m3fn if name + SCALES in shapes else torch.bfloat16
            )
            if (target, last) not in first_row:
                first_row[target, last] = size[0]
                size[0] += cut[0]
            self.places[name] = target, expert - mine.start if expert >= 0 else -1, first_row[target, last]
        for target, size in sizes.items():
            whole = [len(mine), *size] if "experts" in target else size
            made = torch.zeros(whole, dtype=dtypes[target], device=device)
            self.register_parameter(target, torch.nn.Parameter(made, requires_grad=False))

    def _cut(self, name: str, shape: Shape) -> Shape:
        if _expert(name) >= 0 or len(shape) == 1:
            return shape
        if name.split(".")[-2] in COLUMNS:
            return shape[0], shape[1] // self.world_size
        return shape[0] // self.world_size, *shape[1:]

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        """As engines do: each tensor's part of it copied to its place."""
        with torch.no_grad():
            for name, tensor in weights:
                if name in self.places:
                    self.part(name, self._cut(name, tuple(tensor.shape))[0]).copy_(self.wanted(name, tensor))

    def part(self, name: str, num_rows: int) -> torch.Tensor:
        """Return the position of a tensor's part."""
        target, expert, row = self.places[name]
        into = self.get_parameter(target)
        return (into if expert < 0 else into[expert]).narrow(0, row, num_rows)

    def wanted(self, name: str, whole: torch.Tensor) -> torch.Tensor:
        """Return the part of a tensor that this rank wants."""
        for dim, length in enumerate(self._cut(name, tuple(whole.shape))):
            if length != whole.shape[dim]:
                whole = whole.narrow(dim, self.rank * length, length)
        return whole


def _expert(name: str) -> int:
    parts = name.split(".")
    return int(parts[parts.index("experts") + 1]) if "experts" in parts else -1
