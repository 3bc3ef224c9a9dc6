"""Deltas: the changed leaves and nothing else, and the new version again, bit for bit, whatever changed."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.digest.leaf import leaf_digests, num_leaves, revision
from penstock.errors import FormatError, IntegrityError, PlanError
from penstock.types import Manifest
from penstock_convert.operations.delta import ApplyDelta, MakeDelta, decoded, delta_of, encoded
from penstock_convert.testing import check_rows, table_of

LEAF_BYTES = 64
DTYPES = [torch.bfloat16, torch.float32, torch.uint8, torch.bool, torch.float8_e4m3fn]


def raw(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.reshape(-1).view(torch.uint8)


def manifest(tensors: dict[str, torch.Tensor]) -> Manifest:
    table = table_of(tensors)
    leaves = []
    for name, count in zip(table.names, num_leaves(table.nbytes, LEAF_BYTES).tolist(), strict=True):
        digests = np.zeros(count, np.uint64)
        leaf_digests(raw(tensors[name]).numpy().data, LEAF_BYTES, digests)
        leaves.append(digests)
    joined = np.concatenate([*leaves, np.zeros(0, np.uint64)])
    return Manifest(
        files=(), tensors=table, leaf_bytes=LEAF_BYTES, leaves=joined, revision=revision(table, LEAF_BYTES, joined)
    )


def tensor(seed: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed)
    return torch.randint(0, 2, shape, generator=chance).to(dtype)


SHAPES = st.sampled_from([(), (1,), (300,), (40, 7), (3, 5, 16), (0, 4), (4, 0), (129, 3)])


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_applied_delta_equals_new_version(data):
    base, new = {}, {}
    for i in range(data.draw(st.integers(1, 6))):
        shape, dtype = data.draw(SHAPES), data.draw(st.sampled_from(DTYPES))
        old = tensor(i, shape, dtype)
        what = data.draw(st.sampled_from(["same", "touched", "other", "added", "removed"]))
        name = f"t{i}"
        if what != "added":
            base[name] = old
        if what == "touched" and old.numel():
            changed = raw(old).clone()
            for at in data.draw(st.lists(st.integers(0, len(changed) - 1), max_size=4)):
                changed[at] ^= 1
            new[name] = changed.view(dtype).reshape(shape)
        elif what == "other":
            new[name] = tensor(i + 9, data.draw(SHAPES), data.draw(st.sampled_from(DTYPES)))
        elif what != "removed":
            new[name] = old
    base.setdefault("kept", torch.ones(3))
    new.setdefault("kept", torch.ones(3))
    told = delta_of(manifest(base), manifest(new))
    words = encoded(told)
    assert decoded(words) == told
    delta = check_rows(MakeDelta(words), base, new)
    unchanged = {name for name in new if name in base and new[name].dtype == base[name].dtype}
    for name in unchanged:
        if new[name].shape == base[name].shape and torch.equal(raw(new[name]), raw(base[name])):
            assert name not in delta
    found = check_rows(ApplyDelta(words), base, delta)
    assert found.keys() == new.keys()
    for name, one in new.items():
        assert found[name].dtype == one.dtype and found[name].shape == one.shape
        assert torch.equal(raw(found[name]), raw(one)), name
    ApplyDelta(words).check(manifest(found))


def test_changed_byte_adds_one_leaf_to_delta():
    base = {"w": torch.zeros(1000, 16)}
    new = {"w": base["w"].clone()}
    new["w"][500, 3] = 1
    told = delta_of(manifest(base), manifest(new))
    assert {name: part.nbytes for name, part in check_rows(MakeDelta(encoded(told)), base, new).items()} == {
        "w": LEAF_BYTES
    }


def test_delta_result_with_wrong_digest_raises():
    base, new = {"w": torch.zeros(64)}, {"w": torch.ones(64)}
    operation = ApplyDelta(encoded(delta_of(manifest(base), manifest(new))))
    with pytest.raises(IntegrityError, match="but the delta expects"):
        operation.check(manifest(base))


def test_wrong_base_or_delta_file_is_refused():
    base, new = {"w": torch.zeros(64), "x": torch.zeros(2)}, {"w": torch.ones(64), "x": torch.zeros(2)}
    operation = ApplyDelta(encoded(delta_of(manifest(base), manifest(new))))
    for parts in (
        {},
        {"w": torch.zeros(255, dtype=torch.uint8)},
        {"w": torch.zeros(256, dtype=torch.uint8), "y": torch.ones(1)},
    ):
        with pytest.raises(PlanError, match="delta"):
            operation.recipes([table_of(base), table_of(parts)])
    new["w"][:32] = 0
    operation = ApplyDelta(encoded(delta_of(manifest(base), manifest(new))))
    with pytest.raises(PlanError, match="base does not have"):
        operation.recipes([table_of({"x": base["x"]}), table_of({"w": torch.zeros(128, dtype=torch.uint8)})])
    for bad in (b"{", b"{}", encoded(delta_of(manifest(base), manifest(new))).replace(b'"version":1', b'"version":2')):
        with pytest.raises(FormatError):
            decoded(bad)
