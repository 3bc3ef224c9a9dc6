"""`boxes=` of a load: regions are cut from verified leaves by boxes, slices or tensor-parallel rules."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock as ps
from penstock.digest.leaf import LEAF_BYTES
from penstock.errors import ConfigError, IntegrityError, PenstockError, PlanError

SHAPES = {"a": (700, 300), "b": (40,), "c": (3, 250, 260), "d": (), "e": (2, 150_000), "f": (0, 4), "g": (6, 200_000)}


def flip(file: Path, name: str, at: int) -> None:
    """Flip a bit in one byte of a tensor in a file."""
    raw = bytearray(file.read_bytes())
    header = json.loads(raw[8 : 8 + int.from_bytes(raw[:8], "little")])
    raw[8 + int.from_bytes(raw[:8], "little") + header[name]["data_offsets"][0] + at] ^= 1
    file.write_bytes(raw)


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    directory = tmp_path_factory.mktemp("source")
    tensors = {name: torch.randn(shape) for name, shape in SHAPES.items()}
    tensors["bytes"] = torch.randint(0, 255, (3000, 401), dtype=torch.uint8)
    save_file(tensors, directory / "m.safetensors")
    ps.manifest(directory)
    return directory


@pytest.mark.parametrize("verify", [None, False])
@pytest.mark.parametrize("seed", range(4))
def test_loaded_random_regions_match_tensor_slices(source: Path, verify: bool | None, seed: int) -> None:
    chance, wanted = random.Random(seed), load_file(source / "m.safetensors")
    boxes = {}
    for name, tensor in wanted.items():
        ends = [
            sorted(chance.choices(range(size + 1), k=2)) if chance.random() < 0.7 else (0, size)
            for size in tensor.shape
        ]
        boxes[name] = tuple(slice(*end) for end in ends)
    loaded = ps.load(source, boxes=boxes, verify=verify)
    for name, tensor in wanted.items():
        assert torch.equal(loaded[name], tensor[boxes[name]]) and loaded[name].is_contiguous(), name
    assert loaded.report.verified == (verify is None)
    assert list(loaded) == list(ps.load(source))
    with ps.stream(source, boxes=boxes, verify=verify) as tensors:
        assert all(torch.equal(tensor, loaded[name]) for name, tensor in tensors)
    assert tensors.report.verified == loaded.report.verified


@pytest.mark.parametrize("at", [0, LEAF_BYTES + 5, 2 * LEAF_BYTES - 1])
def test_flipped_bit_in_leaf_of_loaded_region_is_detected(tmp_path: Path, at: int) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(16, LEAF_BYTES // 8, dtype=torch.int16)}, file)
    ps.manifest(tmp_path)
    # Rows 1 to 5 lie in the first two leaves.
    box = {"w": np.s_[1:5]}
    flip(file, "w", at)
    for verb in (ps.load, lambda *args, **options: list(ps.stream(*args, **options))):
        with pytest.raises(IntegrityError, match="digest") as raised:
            verb(tmp_path, boxes=box, verify=True)
        assert raised.value.tensor == "w"
    assert ps.load(tmp_path, boxes=box, verify=False)["w"].shape == (4, LEAF_BYTES // 8)


def test_flipped_bit_outside_leaves_of_loaded_region_is_ignored(tmp_path: Path) -> None:
    file = tmp_path / "m.safetensors"
    save_file({"w": torch.zeros(16, LEAF_BYTES // 8, dtype=torch.int16)}, file)
    ps.manifest(tmp_path)
    flip(file, "w", 2 * LEAF_BYTES)
    loaded = ps.load(tmp_path, boxes={"w": ps.Box((1, 0), (5, LEAF_BYTES // 8))}, verify=True)
    assert loaded.report.verified and "2 leaf digests" in loaded.report.why
    assert loaded.report.read_bytes == 2 * LEAF_BYTES


def test_leaves_outside_requested_region_are_not_read(tmp_path: Path) -> None:
    # One of four leaves is needed for each of 3 experts.
    experts = torch.arange(3 * LEAF_BYTES, dtype=torch.int32).view(3, 4, LEAF_BYTES // 4)
    save_file({"experts": experts}, tmp_path / "m.safetensors")
    ps.manifest(tmp_path)
    loaded = ps.load(tmp_path, boxes={"experts": (..., slice(2, 3), slice(None))}, verify=True)
    assert torch.equal(loaded["experts"], experts[:, 2:3])
    assert loaded.report.read_bytes == 3 * LEAF_BYTES


@pytest.mark.parametrize(
    ("box", "wanted"),
    [
        (ps.Box((2, 3), (5, 8)), np.s_[2:5, 3:8]),
        (ps.Box.of(slice(2, 5), slice(3, 8)), np.s_[2:5, 3:8]),
        (np.s_[2:5], np.s_[2:5]),
        (slice(-3, None), np.s_[-3:]),
        (np.s_[..., 3:8], np.s_[:, 3:8]),
        (np.s_[5:2, :], np.s_[0:0]),
        (np.s_[:, :], np.s_[:]),
        (None, np.s_[:]),
    ],
)
def test_slices_and_ellipsis_select_region(tmp_path: Path, box: Any, wanted: Any) -> None:
    tensor = torch.arange(60.0).view(6, 10)
    save_file({"w": tensor}, tmp_path / "m.safetensors")
    for boxes in ({"w": box}, lambda name, shape: box):
        assert torch.equal(ps.load(tmp_path, boxes=boxes)["w"], tensor[wanted])


@pytest.mark.parametrize(
    ("box", "error"),
    [
        (np.s_[::2], PlanError),
        (np.s_[1:2, 1:2, 1:2], PlanError),
        (np.s_[..., ..., 0:1], PlanError),
        ((3, slice(None)), ConfigError),
        (slice("a", "b"), ConfigError),
        ([0, 4], ConfigError),
        (ps.Box((0, 0), (7, 10)), PlanError),
        (ps.Box((0,), (4,)), PlanError),
    ],
)
@pytest.mark.parametrize("with_manifest", [True, False])
def test_malformed_region_raises_typed_error(
    tmp_path: Path, box: Any, error: type[PenstockError], with_manifest: bool
) -> None:
    save_file({"w": torch.zeros(6, 10)}, tmp_path / "m.safetensors")
    if with_manifest:
        ps.manifest(tmp_path)
    with pytest.raises(error, match="w"):
        ps.load(tmp_path, boxes={"w": box})


def test_slice_without_stop_raises_value_error() -> None:
    with pytest.raises(ValueError, match="size of the dim is unknown"):
        ps.Box.of(slice(0, None))


LLAMA = {
    "model.embed_tokens.weight": (64, 16),
    "model.layers.0.self_attn.q_proj.weight": (32, 16),
    "model.layers.0.self_attn.k_proj.weight": (8, 16),
    "model.layers.0.self_attn.v_proj.weight": (8, 16),
    "model.layers.0.self_attn.o_proj.weight": (16, 32),
    "model.layers.0.mlp.gate_up_proj.weight": (48, 16),
    "model.layers.0.mlp.down_proj.weight": (16, 24),
    "model.layers.0.input_layernorm.weight": (16,),
}


@pytest.fixture(params=[True, False], ids=["manifest", "bare"])
def llama(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    source = tmp_path / "llama"
    source.mkdir()
    save_file({name: torch.randn(shape) for name, shape in LLAMA.items()}, source / "model.safetensors")
    config = {"num_attention_heads": 8, "num_key_value_heads": 2, "hidden_size": 16}
    (source / "config.json").write_text(json.dumps(config))
    if request.param:
        ps.manifest(source)
    return source


@pytest.mark.parametrize("size", [1, 2, 4])
def test_tensor_parallel_load_matches_resharded_checkpoint(llama: Path, tmp_path: Path, size: int) -> None:
    ps.convert(llama, tmp_path / "out", operations={"op": "reshard", "to": size}, workers=1, devices="cpu")
    for rank in range(size):
        mine = ps.load(llama, boxes=ps.tensor_parallel(rank=rank, size=size))
        folder = tmp_path / "out" / (f"rank-{rank:05d}-of-{size:05d}" if size > 1 else "")
        wanted = ps.load(folder)
        assert mine.keys() == wanted.keys()
        assert all(torch.equal(mine[name], tensor) for name, tensor in wanted.items())
        assert mine.report.verified == (llama / "penstock.manifest").exists()
        with ps.stream(llama, boxes=ps.tensor_parallel(rank=rank, size=size), verify=False) as tensors:
            assert all(torch.equal(tensor, wanted[name]) for name, tensor in tensors)


def test_tensor_without_rule_raises(tmp_path: Path) -> None:
    save_file({"odd.thing": torch.zeros(4, 4), "x.up_proj.weight": torch.zeros(6, 4)}, tmp_path / "m.safetensors")
    with pytest.raises(PlanError, match="no rule says how to split 1 tensors: odd"):
        ps.load(tmp_path, boxes=ps.tensor_parallel(rank=0, size=2))
    mine = ps.load(tmp_path, boxes=ps.tensor_parallel(rank=1, size=2, rules=[("odd", "1")]))
    assert mine["odd.thing"].shape == (4, 2) and mine["x.up_proj.weight"].shape == (3, 4)
    with pytest.raises(PlanError, match="cannot be divided among 4 ranks"):
        ps.load(tmp_path, boxes=ps.tensor_parallel(rank=1, size=4, rules=[("odd", "1")]))


@pytest.mark.parametrize(
    "options",
    [
        {"rank": 4, "size": 4},
        {"rank": -1, "size": 4},
        {"rank": "1", "size": 4},
        {"rank": 0, "size": 2, "heads": (8,)},
        {"rank": 0, "size": 2, "heads": 8},
        {"rank": 0, "size": 2, "heads": "88"},
        {"rank": 0, "size": 2, "heads": (8.0, 2)},
        {"rank": 0, "size": 2, "rules": None},
        {"rank": 0, "size": 2, "rules": ["w"]},
        {"rank": 0, "size": 2, "rules": {"w": "0"}},
        {"rank": 0, "size": 2, "rules": [(None, "0")]},
        {"rank": 0, "size": 2, "rules": [("(", "0")]},
        {"rank": 0, "size": 2, "rules": [("a", "x")]},
    ],
)
def test_invalid_tensor_parallel_option_raises_config_error(options: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        ps.tensor_parallel(**options)
