"""Digests of all memory behind some tensors."""

from __future__ import annotations

import numpy as np
import pytest
import torch
import xxhash

from penstock.digest.leaf import LEAF_BYTES
from penstock.holding.digester import digests_of
from penstock.sync.memory_digests import MemoryDigests
from penstock.transport.protocol import Memory


def memories_of(tensors: list[torch.Tensor]) -> list[Memory]:
    return [
        Memory(address=one.data_ptr(), nbytes=one.numel() * one.itemsize, device="cpu", owner=one) for one in tensors
    ]


def expected(data: bytes) -> int:
    leaves = [xxhash.xxh3_64_intdigest(data[at : at + LEAF_BYTES]) for at in range(0, len(data), LEAF_BYTES)]
    if len(leaves) == 1:
        return leaves[0]
    return xxhash.xxh3_64_intdigest(np.array(leaves, "<u8").tobytes())


def test_each_tensor_memory_has_separate_digest() -> None:
    dice = np.random.default_rng(3)
    sizes = [1, 7, 240, 241, 4096, LEAF_BYTES, LEAF_BYTES + 1, 3 * LEAF_BYTES + 12345]
    arena = torch.from_numpy(dice.integers(0, 256, sum(sizes) + 64 * len(sizes), np.uint8))
    tensors, at = [], 0
    for size in sizes:
        tensors.append(arena[at : at + size])
        at += size + 13
    tensors += [torch.from_numpy(dice.integers(0, 256, size, np.uint8)) for size in sizes]
    # The order differs from that of the addresses.
    tensors = [tensors[i] for i in dice.permutation(len(tensors))]
    assert digests_of(memories_of(tensors)).tolist() == [expected(one.numpy().tobytes()) for one in tensors]
    assert digests_of([]).tolist() == []


class Model(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(torch.nn.Linear(n, 300, bias=n % 2 == 0) for n in range(1, 12))
        self.tied = self.layers[3].weight
        storage = torch.arange(600.0)
        self.register_buffer("first", storage[:100])
        self.register_buffer("second", storage[200:500].view(30, 10).t(), persistent=False)
        self.register_buffer("nothing", torch.empty(0))


@torch.no_grad()
def test_digest_check_detects_changed_byte() -> None:
    model = Model()
    digests = MemoryDigests.of_target(model)
    assert digests.is_same()
    for tensor in [*model.parameters(), model.first, model.second]:
        raw = tensor.untyped_storage()
        for at in (0, len(raw) - 1):
            before = raw[at]
            raw[at] = before ^ 1
            assert not digests.is_same()
            raw[at] = before
        assert digests.is_same()


@torch.no_grad()
def test_equal_bytes_at_new_address_match_digests() -> None:
    model = Model()
    digests = MemoryDigests.of_target(model)
    kept = [parameter.data for parameter in model.parameters()]
    for parameter, before in zip(model.parameters(), kept, strict=True):
        parameter.data = before.clone()
    assert digests.is_same()


@pytest.mark.parametrize("number", [0, 5, -1])
def test_digest_check_fails_after_memory_is_freed(number: int) -> None:
    model = Model()
    digests = MemoryDigests.of_target(model)
    list(model.parameters())[number].untyped_storage().resize_(0)
    assert not digests.is_same()
