"""Digests of device memory match the xxhash library, at every length and alignment."""

from __future__ import annotations

import numpy as np
import pytest
import xxhash

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

from penstock.digest import cuda  # noqa: E402
from penstock.types import I64, U64  # noqa: E402

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda")


class Bytes:
    """Return random bytes, on the host and on the device."""

    def __init__(self, nbytes: int) -> None:
        self.host = np.random.default_rng(3).integers(0, 256, nbytes, dtype=np.uint8)
        self.device = torch.from_numpy(self.host).to(DEVICE)

    def expected(self, offsets: I64, nbytes: I64) -> U64:
        view = memoryview(self.host)
        digests = [
            xxhash.xxh3_64_intdigest(view[o : o + n]) for o, n in zip(offsets.tolist(), nbytes.tolist(), strict=True)
        ]
        return np.array(digests, dtype=np.uint64)

    def plan(self, offsets: I64, nbytes: I64, **tuning: int) -> cuda.LeafTable:
        return cuda.plan_leaves(self.device.data_ptr() + offsets, nbytes, DEVICE, tuning=cuda.Tuning(**tuning))

    def check(self, offsets: I64, nbytes: I64, **tuning: int) -> None:
        wrong = differing(self.plan(offsets, nbytes, **tuning).digest(), self.expected(offsets, nbytes))
        assert not wrong, [(int(offsets[i]), int(nbytes[i])) for i in wrong[:8]]


def differing(got: torch.Tensor, expected: U64) -> list[int]:
    return np.flatnonzero(got.cpu().numpy().view(np.uint64) != expected).tolist()


@pytest.fixture(scope="module")
def data() -> Bytes:
    return Bytes(64 << 20)


@pytest.mark.parametrize("shift", [0, 8, 1, 2, 13])
def test_digests_up_to_length_1100_match_xxhash(data: Bytes, shift: int) -> None:
    lengths = np.arange(1, 1101)
    data.check(lengths * 16 + shift, lengths)


@pytest.mark.parametrize("kind", ["aligned", "any"])
def test_digests_of_random_large_leaves_match_xxhash(data: Bytes, kind: str) -> None:
    rng = np.random.default_rng(11)
    nbytes = rng.integers(241, (1 << 20) + 1, 300)
    offsets = rng.integers(0, (63 << 20) // 16, 300) * 16
    data.check(offsets if kind == "aligned" else offsets + rng.integers(0, 16, 300), nbytes)


@pytest.mark.parametrize("leaf_bytes", [4096, 65536, 262144, 1 << 20])
def test_digests_at_leaf_and_block_edges_match_xxhash(data: Bytes, leaf_bytes: int) -> None:
    nbytes = np.repeat(leaf_bytes + np.array([0, -1, 1, -64, 64, -1023, -1024]), 4)
    data.check(np.tile([0, 16, 64, 7], 7), nbytes)


@pytest.mark.parametrize(
    "tuning",
    [
        {"slab_blocks": 512},
        {"tile_blocks": 16, "tile_warps": 2, "run_stripes": 2},
        {"tile_blocks": 64, "tile_warps": 8, "finish_unroll": 8},
        {"finish_leaves": 8, "finish_unroll": 32, "short_warps": 1},
    ],
)
def test_launch_shape_does_not_change_digests(data: Bytes, tuning: dict[str, int]) -> None:
    rng = np.random.default_rng(5)
    nbytes = rng.integers(1, 100_000, 400) >> rng.integers(0, 17, 400)
    data.check(rng.integers(0, 60 << 20, 400), np.maximum(nbytes, 1), **tuning)


def test_digests_of_60_000_expert_leaves_match_xxhash(data: Bytes) -> None:
    """Weights alternate with 4-byte scales. Many leaves share bytes, so that the host's part stays short."""
    distinct = np.where(np.arange(600) % 2, 4, 8192 + 64 * np.arange(600))
    offsets = np.arange(600, dtype=np.int64) * 65536
    expected = np.tile(data.expected(offsets, distinct), 100)
    got = data.plan(np.tile(offsets, 100), np.tile(distinct, 100)).digest()
    assert not differing(got, expected)


def test_flipped_bit_is_located_in_its_row() -> None:
    data = Bytes(1 << 20)
    offsets = np.arange(16, dtype=np.int64) * 65536
    nbytes = np.array([65536, 65535, 240, 241, 4, 16, 100, 1024, 1025, 3, 1, 8, 9, 129, 17, 60000], dtype=np.int64)
    table = data.plan(offsets, nbytes)
    before = table.digest()
    rng = np.random.default_rng(1)
    for row in range(16):
        at = int(offsets[row] + rng.integers(0, nbytes[row]))
        data.device[at] ^= 1 << int(rng.integers(0, 8))
        after = table.digest()
        assert torch.nonzero(after != before).flatten().tolist() == [row]
        before = after


def test_digests_on_separate_cuda_stream_are_correct(data: Bytes) -> None:
    offsets, nbytes = np.arange(64, dtype=np.int64) * 262144, np.full(64, 262144)
    out = torch.zeros(64, dtype=torch.int64, device=DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        assert data.plan(offsets, nbytes).digest(out=out) is out
        wrong = differing(out, data.expected(offsets, nbytes))
    assert not wrong


def test_empty_leaves_and_mismatched_columns_raise() -> None:
    none = np.empty(0, dtype=np.int64)
    assert cuda.leaf_digests_cuda(none, none, DEVICE).shape == (0,)
    with pytest.raises(ValueError, match="leaf 1 is empty"):
        cuda.plan_leaves(np.array([16, 32]), np.array([4, 0]), DEVICE)
    with pytest.raises(ValueError, match="columns"):
        cuda.plan_leaves(np.array([16, 32]), np.array([4]), DEVICE)
