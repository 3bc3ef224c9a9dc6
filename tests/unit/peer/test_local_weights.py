from __future__ import annotations

import random
import threading
import time

import numpy as np
import torch

from penstock.holding.weight_layout import WeightLayout, layout_of_tensors, tabulate
from penstock.hub.messages import Identity
from penstock.peer.local_weights import LocalWeights
from penstock.types import DType


def make(count: int = 5) -> LocalWeights:
    """Return weights with `count` tensors of 64 bytes, leaves of 16 bytes and chunks of 32 bytes."""
    tensors = {f"t{i}": torch.full((64,), i, dtype=torch.uint8) for i in range(count)}
    _, rows = layout_of_tensors(tensors)
    table = tabulate(sorted(tensors), [DType.U8] * count, [(64,)] * count)
    return LocalWeights(Identity(model="m"), WeightLayout.of(table, leaf_bytes=16, chunk_bytes=32), rows)


def mark_verified(holding: LocalWeights, *chunks: int) -> None:
    at = np.array(chunks, np.int64)
    holding.mark_verified(at, holding.memory.digest(at))


def test_chunk_log_lists_chunks_in_order_of_arrival() -> None:
    holding = make()
    mark_verified(holding, 3)
    mark_verified(holding, 0, 1)
    reply = holding.log_after(0, 0.0)
    assert np.frombuffer(reply.chunks, "<u4").tolist() == [3, 0, 1] and reply.serial == 3
    assert np.frombuffer(reply.leaves, "<u8").tolist() == holding.memory.digest(np.array([3, 0, 1])).tolist()
    assert holding.log_after(3, 0.0).chunks == b""
    assert holding.log_after(99, 0.0).serial == 3


def test_chunk_verified_twice_is_logged_once() -> None:
    holding = make()
    mark_verified(holding, 1)
    mark_verified(holding, 1, 2)
    assert np.frombuffer(holding.log_after(0, 0.0).chunks, "<u4").tolist() == [1, 2]


def test_new_chunk_wakes_waiting_log_reader() -> None:
    holding = make()
    threading.Timer(0.05, mark_verified, (holding, 0)).start()
    begun = time.monotonic()
    assert holding.log_after(0, 30.0).serial == 1
    assert time.monotonic() - begun < 10


def test_weights_status_lists_verified_ranges() -> None:
    holding = make()
    mark_verified(holding, 0, 1, 4)
    state = holding.status()
    assert state.have == ((0, 2), (4, 5)) and state.key == holding.identity.key()
    assert state.nbytes == 320 and state.num_chunks == 10


def test_spot_check_detects_changed_bytes() -> None:
    holding = make()
    chance = random.Random(1)
    assert holding.spot_check(chance) is None
    mark_verified(holding, 0, 1, 2)
    assert all(holding.spot_check(chance) is None for _ in range(10))
    holding.memory.rows[0][5] ^= 1
    assert {holding.spot_check(chance) for _ in range(40)} == {None, 0}
