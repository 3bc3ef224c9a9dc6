"""Synthetic, deterministic checkpoints with realistic shapes, for tests, the demo and the benchmarks.

The checkpoints are safetensors files in the ecosystem's layout (shards, index). A Llama checkpoint without FP8 tensors
also gets a `config.json`, so that engines can serve it, but its output is random. `storage.safetensors` does not write
these files, because the files test that module.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from math import gcd, prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from penstock.types import DType, bits_to_bytes

Bits = npt.NDArray[Any]

# Number of elements in a tile, the largest prime below 2^20. If a tile is repeated through a tensor, each leaf
# therefore begins at a different offset in the tile. No two leaves are equal, so misplaced bytes are detected.
_TILE = 1_048_573
_BLOCK_BYTES = 4 << 20
_FP8_BLOCK = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Tensor:
    """A tensor to write."""

    name: str
    dtype: DType
    shape: tuple[int, ...]
    kind: str
    """Kind of values: `weight`, `norm`, `fp8` or `scale`."""
    exponent: int = 0
    """Values of a `weight` are normally distributed with standard deviation `2**exponent`."""

    @property
    def nbytes(self) -> int:
        """Return the size of the tensor in bytes."""
        return bits_to_bytes(prod(self.shape), self.dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """The sizes that define a Llama-like checkpoint. The defaults are those of a 1B model."""

    num_layers: int = 16
    hidden: int = 2048
    intermediate: int = 8192
    vocab: int = 128256
    num_kv_heads: int = 8
    num_heads: int = 32

    def config(self) -> dict[str, object]:
        """Return the `config.json` of a Llama with these sizes."""
        # Attention kernels in engines require heads of 64 elements or more. The tensors fix only the ratio of heads.
        num_heads = max(self.num_heads // self.num_kv_heads, gcd(self.hidden // 64, self.num_heads))
        return {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "dtype": "bfloat16",
            "hidden_size": self.hidden,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": num_heads,
            "num_key_value_heads": num_heads * self.num_kv_heads // self.num_heads,
            "head_dim": self.hidden // num_heads,
            "vocab_size": self.vocab,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "tie_word_embeddings": False,
            "bos_token_id": 1,
            "eos_token_id": 2,
        }

    @classmethod
    def of_bytes(cls, total_bytes: int, *, fp8: bool = True) -> LlamaShape:
        """Return the widest shape of about `total_bytes` with at least 8 layers, or else the smallest single layer."""
        for hidden in (8192, 4096, 2048, 1024, 512, 256, 128):
            vocab = 128256 if hidden >= 2048 else 16 * hidden
            wide = cls(num_layers=0, hidden=hidden, intermediate=4 * hidden, vocab=vocab)
            frame = sum(tensor.nbytes for tensor in wide.tensors(fp8=fp8))
            single = cls(num_layers=1, hidden=hidden, intermediate=wide.intermediate, vocab=vocab)
            layer = sum(tensor.nbytes for tensor in single.tensors(fp8=fp8)) - frame
            num_layers = round((total_bytes - frame) / layer)
            if num_layers >= 8 or hidden == 128:
                break
        return cls(num_layers=max(1, num_layers), hidden=hidden, intermediate=wide.intermediate, vocab=wide.vocab)

    def tensors(self, *, fp8: bool) -> Iterator[Tensor]:
        """Yield every tensor, layer by layer. With `fp8`, the MLP is F8_E4M3 with F32 scales for 128 x 128 blocks."""
        hidden, kv = self.hidden, self.hidden * self.num_kv_heads // self.num_heads
        attention = {"q": (hidden, hidden), "k": (kv, hidden), "v": (kv, hidden), "o": (hidden, hidden)}
        wide = self.intermediate
        mlp = {"gate": (wide, hidden), "up": (wide, hidden), "down": (hidden, wide)}
        yield _weight("model.embed_tokens.weight", (self.vocab, hidden), -6)
        for layer in range(self.num_layers):
            at = f"model.layers.{layer}"
            yield _norm(f"{at}.input_layernorm.weight", hidden)
            for name, shape in attention.items():
                yield _weight(f"{at}.self_attn.{name}_proj.weight", shape, -5 - layer % 3)
            yield _norm(f"{at}.post_attention_layernorm.weight", hidden)
            for name, shape in mlp.items():
                if fp8:
                    yield from _fp8(f"{at}.mlp.{name}_proj.weight", shape)
                else:
                    yield _weight(f"{at}.mlp.{name}_proj.weight", shape, -6 - layer % 3)
        yield _norm("model.norm.weight", hidden)
        yield _weight("lm_head.weight", (self.vocab, hidden), -7)


def write_llama(
    directory: str | os.PathLike[str],
    *,
    total_bytes: int | None = None,
    num_layers: int = 2,
    hidden: int = 256,
    intermediate: int | None = None,
    vocab: int = 2048,
    fp8: bool = True,
    shards: int = 2,
    seed: int = 0,
) -> list[Path]:
    """Write a Llama-like checkpoint in BF16, with an FP8 MLP if `fp8`. Engines can serve a checkpoint without FP8.

    Args:
        directory: created if it does not exist. Files with the same names are replaced.
        total_bytes: approximate size, which replaces `num_layers`, `hidden`, `intermediate` and `vocab`.
        num_layers: number of decoder layers.
        hidden: hidden size, a multiple of 32.
        intermediate: MLP size, or None for 4 x `hidden`.
        vocab: number of rows in the embedding and in the head.
        fp8: write the MLP as F8_E4M3 with F32 `weight_scale_inv`.
        shards: number of files. A single file is called `model.safetensors` and has no index.
        seed: changes the values but not the shapes.

    Returns:
        The shards in order. Several shards have the index `model.safetensors.index.json` in the same directory.
    """
    if total_bytes is None:
        wide = 4 * hidden if intermediate is None else intermediate
        shape = LlamaShape(num_layers=num_layers, hidden=hidden, intermediate=wide, vocab=vocab)
    else:
        shape = LlamaShape.of_bytes(total_bytes, fp8=fp8)
    paths = _write_sharded(Path(directory), list(shape.tensors(fp8=fp8)), shards=shards, seed=seed)
    if not fp8:
        (Path(directory) / "config.json").write_text(json.dumps(shape.config(), indent=2))
    return paths


def _weight(name: str, shape: tuple[int, ...], exponent: int) -> Tensor:
    return Tensor(name=name, dtype=DType.BF16, shape=shape, kind="weight", exponent=exponent)


def _norm(name: str, width: int) -> Tensor:
    return Tensor(name=name, dtype=DType.BF16, shape=(width,), kind="norm")


def _fp8(name: str, shape: tuple[int, int]) -> Iterator[Tensor]:
    blocks = (-(-shape[0] // _FP8_BLOCK), -(-shape[1] // _FP8_BLOCK))
    yield Tensor(name=name, dtype=DType.F8_E4M3, shape=shape, kind="fp8")
    yield Tensor(name=f"{name}_scale_inv", dtype=DType.F32, shape=blocks, kind="scale")


def _write_sharded(directory: Path, tensors: Sequence[Tensor], *, shards: int, seed: int) -> list[Path]:
    directory.mkdir(parents=True, exist_ok=True)
    ends = np.cumsum([tensor.nbytes for tensor in tensors])
    # A tensor goes to the shard that contains its middle.
    middles = ends - np.array([tensor.nbytes for tensor in tensors]) / 2
    shard_of = np.minimum((middles * shards / ends[-1]).astype(np.int64), shards - 1)
    names = [f"model-{i + 1:05}-of-{shards:05}.safetensors" for i in range(shards)]
    if shards == 1:
        names = ["model.safetensors"]

    def write_shard(shard: int) -> Path:
        # Sort by element width, then by name, as safetensors does, so that every offset is aligned.
        at: list[int] = np.flatnonzero(shard_of == shard).tolist()
        mine = sorted(at, key=lambda i: (-tensors[i].dtype.bits, tensors[i].name))
        _write(directory / names[shard], [(tensors[i], i) for i in mine], seed)
        return directory / names[shard]

    with ThreadPoolExecutor(max_workers=min(shards, 4)) as pool:
        paths = list(pool.map(write_shard, range(shards)))
    index = directory / "model.safetensors.index.json"
    index.unlink(missing_ok=True)
    if shards > 1:
        weight_map = {tensor.name: names[shard] for tensor, shard in zip(tensors, shard_of, strict=True)}
        index.write_text(json.dumps({"metadata": {"total_size": int(ends[-1])}, "weight_map": weight_map}, indent=2))
    return paths


def _write(path: Path, tensors: Sequence[tuple[Tensor, int]], seed: int) -> None:
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    offset = 0
    for tensor, _ in tensors:
        stop = offset + tensor.nbytes
        header[tensor.name] = {"dtype": tensor.dtype.value, "shape": list(tensor.shape), "data_offsets": [offset, stop]}
        offset = stop
    raw = json.dumps(header, separators=(",", ":")).encode()
    raw += b" " * (-len(raw) % 8)
    # An interrupted run must not leave a file that a later test mistakes for a checkpoint.
    partial = path.with_name(path.name + ".partial")
    with partial.open("wb") as file:
        file.write(len(raw).to_bytes(8, "little") + raw)
        for tensor, index in tensors:
            file.writelines(_blocks(tensor, index, seed))
    partial.replace(path)


def _blocks(tensor: Tensor, index: int, seed: int) -> Iterator[memoryview]:
    """Yield the tensor's bytes. No two tensors of a checkpoint start at the same offset in their tile."""
    if not tensor.nbytes:
        return
    # Primes put the starts of neighbouring tensors and seeds far apart in the tile. A digest would not reveal a mix-up
    # of two tensors with equal bytes.
    start = (index * 104_729 + seed * 15_485_863) % _TILE
    left = tensor.nbytes // (tensor.dtype.bits // 8)
    bits = _tiles()[tensor.kind][start : start + min(left, _TILE)]
    if tensor.kind == "weight":
        # A BF16 exponent begins at bit 7, so adding to it multiplies by an exact power of two.
        bits = bits + np.uint16((tensor.exponent << 7) & 0xFFFF)
    if left > _TILE:
        # Write several tiles at once, so that writes are fewer and larger.
        bits = np.tile(bits, max(1, min(_BLOCK_BYTES // bits.nbytes, left // _TILE)))
    block = memoryview(bits.data).cast("B")
    for at in range(0, tensor.nbytes, block.nbytes):
        yield block[: tensor.nbytes - at]


@cache
def _tiles() -> Mapping[str, Bits]:
    """Return a tile of bit patterns, never zero or NaN, for each kind of tensor. Each tile is stored twice in a row."""
    # The seed is fixed, so that digests and results can be compared between machines.
    rng = np.random.default_rng(20_261_121)
    normal = rng.standard_normal(_TILE, dtype=np.float32)
    normal = np.where(np.abs(normal) < 2.0**-12, np.float32(2.0**-12), normal)
    noise = rng.random(_TILE, dtype=np.float32)
    # E4M3 has steps of 2^-9 below 2^-6, then 8 steps per power of two up to 448 (0x7e). 0x7f is NaN.
    codes = np.arange(1, 0x7F)
    exponents, mantissas = codes >> 3, codes & 7
    values = np.where(exponents == 0, mantissas * 2.0**-9, (1 + mantissas / 8) * 2.0 ** (exponents - 7))
    nearest = np.clip(np.searchsorted(values, np.abs(normal) * 100), 0, len(codes) - 1)
    fp8 = codes[nearest].astype(np.uint8) | (normal < 0).astype(np.uint8) << 7
    tiles = {
        "weight": _bf16(normal),
        "norm": _bf16(1 + np.float32(0.02) * normal),
        "fp8": fp8,
        "scale": (np.float32(1e-4) * (1 + noise)).astype(np.float32).view(np.uint32),
    }
    return {kind: np.concatenate([tile, tile]) for kind, tile in tiles.items()}


def _bf16(values: npt.NDArray[np.float32]) -> Bits:
    return (values.view(np.uint32) >> 16).astype(np.uint16)
