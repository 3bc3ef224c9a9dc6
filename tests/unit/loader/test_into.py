"""`load_into` on the CPU: live parameters are filled in place or not touched, and errors report touched targets."""

from __future__ import annotations

import gc
import os
import weakref
from collections import UserDict
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import penstock
from penstock.config import Settings
from penstock.errors import PlanError, SourceUnavailable
from penstock.memory.memfd import shared_at
from penstock.storage import weight_set
from penstock.storage.files import FileSource
from penstock.types import MIB

VERBS = {"load_into": penstock.load_into, "load_in_background": penstock.modules.load_in_background}


class Model(torch.nn.Module):
    """A model with tied layers, a persistent and a non-persistent buffer, a scalar and an empty parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(300, 40)
        self.hidden = torch.nn.Linear(40, 40, dtype=torch.bfloat16)
        self.head = torch.nn.Linear(40, 300, bias=False)
        self.head.weight = self.embed.weight
        self.scale = torch.nn.Parameter(torch.zeros(()))
        self.none = torch.nn.Parameter(torch.zeros(0, 4))
        self.register_buffer("mean", torch.zeros(7))
        self.register_buffer("scratch", torch.zeros(7), persistent=False)


def tensors_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: t.detach() for name, t in model.state_dict(keep_vars=True).items() if name != "head.weight"}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """Save a trained `Model` with tied weights stored once."""
    torch.manual_seed(4)
    model = Model()
    trained = {name: torch.randn(t.shape).to(t.dtype) for name, t in tensors_of(model).items()}
    save_file(trained, tmp_path / "model.safetensors")
    return tmp_path / "model.safetensors"


def state(targets: Mapping[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: t.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes() for name, t in targets.items()}


def test_module_is_filled_in_place(path: Path) -> None:
    model = Model()
    model.embed.weight.requires_grad_(True)
    before = {name: (t, t.data_ptr()) for name, t in model.state_dict(keep_vars=True).items()}
    report = penstock.load_into(model, path)
    wanted = load_file(path)
    assert state(tensors_of(model)) == state(wanted)
    for name, tensor in model.state_dict(keep_vars=True).items():
        assert tensor is before[name][0] and tensor.data_ptr() == before[name][1]
    assert model.head.weight is model.embed.weight and model.embed.weight.requires_grad
    assert not model.scratch.any()
    assert report.num_tensors == len(wanted) and report.nbytes == sum(t.nbytes for t in wanted.values())
    assert sum(report.phases.values()) == pytest.approx(report.wall_s)


@pytest.mark.parametrize("memory_bytes", [None, "1M"])
def test_dict_with_large_tensors_is_filled(tmp_path: Path, memory_bytes: str | None) -> None:
    wanted = {f"t{i}": torch.randint(0, 1 << 62, (MIB // 4 + i,)) for i in range(4)}
    save_file(wanted, tmp_path / "m.safetensors")
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    penstock.load_into(targets, tmp_path, settings=penstock.ReadSettings(memory_bytes=memory_bytes))
    assert state(targets) == state(wanted)


def test_tied_weights_saved_under_two_names_are_written_once(tmp_path: Path, path: Path) -> None:
    wanted = load_file(path)
    save_file({**wanted, "head.weight": wanted["embed.weight"].clone()}, tmp_path / "both.safetensors")
    model = Model()
    report = penstock.load_into(model, tmp_path / "both.safetensors")
    assert torch.equal(model.head.weight, wanted["embed.weight"]) and report.num_tensors == len(wanted)


def stored_twice(tmp_path: Path, *, with_manifest: bool, differ_at: int | None) -> Path:
    """Save a tied `Model` with its tied weights under both names. Return the directory."""
    model = Model()
    wanted = {name: torch.randn(t.shape).to(t.dtype) for name, t in tensors_of(model).items()}
    head = wanted["embed.weight"].clone()
    if differ_at is not None:
        head.view(-1)[differ_at] += 1
    save_file({**wanted, "head.weight": head}, tmp_path / "model.safetensors")
    if with_manifest:
        penstock.manifest(tmp_path)
    return tmp_path


@pytest.mark.parametrize("with_manifest", [True, False])
@pytest.mark.parametrize("differ_at", [0, -1])
@pytest.mark.parametrize("verb", ["load_into", "load_in_background"])
def test_tied_target_with_different_source_tensors_raises(
    tmp_path: Path, with_manifest: bool, differ_at: int, verb: str
) -> None:
    source = stored_twice(tmp_path, with_manifest=with_manifest, differ_at=differ_at)
    model = Model()
    before = state(tensors_of(model))
    with pytest.raises(PlanError, match=r"embed.weight and head.weight are one memory .* sources differ") as raised:
        VERBS[verb](model, source)
    assert not raised.value.mutated and state(tensors_of(model)) == before
    penstock.load_into(model, source, names=lambda name: name != "head.weight")
    assert torch.equal(model.head.weight, load_file(source / "model.safetensors")["embed.weight"])


@pytest.mark.parametrize("with_manifest", [True, False])
def test_tied_dict_entries_with_equal_sources_are_filled(tmp_path: Path, with_manifest: bool) -> None:
    source = stored_twice(tmp_path, with_manifest=with_manifest, differ_at=None)
    shared = torch.zeros(300, 40)
    penstock.load_into({"embed.weight": shared, "head.weight": shared}, source, strict=False)
    assert torch.equal(shared, load_file(source / "model.safetensors")["embed.weight"])


def test_overlapping_targets_raise_before_writing(tmp_path: Path) -> None:
    save_file({"a": torch.ones(48), "b": torch.full((6,), 2.0)}, tmp_path / "m.safetensors")
    memory = torch.zeros(60)
    for a, b in ((memory[:48], memory[45:51]), (torch.zeros(1).expand(48), memory[:6])):
        with pytest.raises(PlanError, match="share") as raised:
            penstock.load_into({"a": a, "b": b}, tmp_path)
        assert not raised.value.mutated and not memory.any()


def test_overlapping_target_without_source_tensor_is_accepted(tmp_path: Path) -> None:
    save_file({"fused": torch.ones(9, 4)}, tmp_path / "m.safetensors")
    fused = torch.zeros(9, 4)
    penstock.load_into({"fused": fused, "first": fused[:3]}, tmp_path, strict=False)
    assert bool((fused == 1).all())


@pytest.mark.parametrize("verb", ["load_into", "load_in_background"])
def test_lazy_module_raises_plan_error(tmp_path: Path, verb: str) -> None:
    save_file({"weight": torch.ones(6, 8), "bias": torch.ones(6)}, tmp_path / "m.safetensors")
    with pytest.raises(PlanError, match="no shape yet") as raised:
        VERBS[verb](torch.nn.LazyLinear(6), tmp_path)
    assert "forward pass" in str(raised.value.hint)


@pytest.mark.parametrize("strided", [False, True])
def test_backward_through_overwritten_weight_raises(tmp_path: Path, strided: bool) -> None:
    save_file({"w": torch.full((4, 4), 3.0)}, tmp_path / "m.safetensors")
    weight = torch.ones(4, 4).t() if strided else torch.ones(4, 4)
    weight.requires_grad_(True)
    loss = (weight * weight).sum()
    penstock.load_into({"w": weight}, tmp_path)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
    (weight * weight).sum().backward()
    assert weight.grad is not None and bool((weight.grad == 6).all())


def test_non_contiguous_targets_are_filled(tmp_path: Path) -> None:
    wanted = {"a": torch.randn(30, 50), "b": torch.randn(20, 6)}
    save_file(wanted, tmp_path / "m.safetensors")
    memory = torch.zeros(20, 12)
    targets = {"a": torch.zeros(50, 30).t(), "b": memory[:, ::2]}
    penstock.load_into(targets, tmp_path)
    assert torch.equal(targets["a"], wanted["a"]) and torch.equal(memory[:, ::2], wanted["b"])
    assert not memory[:, 1::2].any(), "what lies between stays"


@pytest.mark.parametrize("kind", ["mapping", "function"])
def test_renamed_tensors_are_filled(path: Path, kind: str) -> None:
    wanted = load_file(path)
    targets = {f"model.{name}": torch.zeros_like(tensor) for name, tensor in wanted.items()}
    rename: Any = {name: f"model.{name}" for name in wanted} if kind == "mapping" else "model.{}".format
    penstock.load_into(targets, path, rename=rename)
    assert state(targets) == {f"model.{name}": data for name, data in state(wanted).items()}


def test_renaming_to_none_skips_tensor(path: Path) -> None:
    targets = {"mean": torch.zeros(7)}
    penstock.load_into(targets, path, rename=lambda name: name if name == "mean" else None)
    penstock.load_into(targets, path, rename={"mean": "mean"})
    penstock.load_into(targets, path, names="mean")
    assert torch.equal(targets["mean"], load_file(path)["mean"])


def test_error_before_writing_lists_all_mismatched_tensors(path: Path) -> None:
    targets = {
        "mean": torch.zeros(8),
        "hidden.weight": torch.zeros(40, 40),
        "hidden.bias": torch.zeros(40, dtype=torch.bfloat16),
        "extra": torch.zeros(3),
        "scale": torch.zeros(()),
        "none": torch.zeros(0, 4),
    }
    with pytest.raises(penstock.PlanError) as caught:
        penstock.load_into(targets, path)
    message = caught.value.message
    assert "4 tensors" in message and not caught.value.mutated
    for offender in ("mean", "hidden.weight", "extra", "embed.weight"):
        assert offender in message
    assert "hidden.bias" not in message and "strict" not in (caught.value.hint or "")
    with pytest.raises(penstock.PlanError) as caught:
        penstock.load_into({"extra": torch.zeros(3), "mean": torch.zeros(7)}, path)
    assert caught.value.hint == "pass strict=False to fill the tensors that match"
    assert "tensors do not fit: the weight set has no tensor for extra; " in caught.value.message
    assert not any(tensor.any() for tensor in targets.values())


def test_non_strict_load_fills_only_common_names(path: Path) -> None:
    targets = {"mean": torch.zeros(7), "extra": torch.zeros(3)}
    report = penstock.load_into(targets, path, strict=False)
    assert torch.equal(targets["mean"], load_file(path)["mean"]) and not targets["extra"].any()
    assert report.num_tensors == 1
    with pytest.raises(penstock.PlanError):
        penstock.load_into({"mean": torch.zeros(8)}, path, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_target_without_common_names_raises_plan_error(path: Path, strict: bool) -> None:
    target = {"a.mean": torch.zeros(7), "extra": torch.zeros(3)}
    with pytest.raises(penstock.PlanError, match="do not fit" if strict else "no name matches") as caught:
        penstock.load_into(target, path, strict=strict)
    assert "rename=" in (caught.value.hint or "") and "a.mean" in caught.value.message
    assert not any(tensor.any() for tensor in target.values())


def test_dtype_mismatch_of_many_tensors_is_summarised(tmp_path: Path) -> None:
    save_file({f"layer.{i}": torch.zeros(4) for i in range(300)}, tmp_path / "m.safetensors")
    targets = {f"layer.{i}": torch.zeros(4, dtype=torch.bfloat16) for i in range(300)}
    with pytest.raises(PlanError) as raised:
        penstock.load_into(targets, tmp_path)
    assert "300 tensors differ in dtype only: " in raised.value.message and "and 297 more" in raised.value.message
    assert len(str(raised.value)) < 400 and 'dtype="target"' in str(raised.value.hint)


@pytest.mark.parametrize("dtype", ["target", torch.bfloat16])
@pytest.mark.parametrize("verb", ["load_into", "load_in_background"])
@pytest.mark.parametrize("memory_bytes", [None, "1M"])
def test_tensors_are_cast_to_target_dtype(tmp_path: Path, dtype: Any, verb: str, memory_bytes: str | None) -> None:
    stored = {"a": torch.randn(700, 900), "b": torch.randn(9).bfloat16(), "n": torch.arange(5)}
    save_file(stored, tmp_path / "m.safetensors")
    penstock.manifest(tmp_path)
    module = torch.nn.Module()
    module.a = torch.nn.Parameter(torch.zeros(700, 900, dtype=torch.bfloat16))
    module.b = torch.nn.Parameter(torch.zeros(9, dtype=torch.bfloat16))
    module.register_buffer("n", torch.zeros(5, dtype=torch.int64))
    settings = penstock.ReadSettings(memory_bytes=memory_bytes)
    loaded = VERBS[verb](module, tmp_path, dtype=dtype, settings=settings)
    report = loaded.wait() if verb == "load_in_background" else loaded
    for name, tensor in module.state_dict().items():
        assert torch.equal(tensor, stored[name].to(tensor.dtype)), name
    assert report.verified


@pytest.mark.parametrize(
    ("stored", "target", "dtype"),
    [
        (torch.float32, torch.float16, torch.bfloat16),
        (torch.int64, torch.float32, "target"),
        (torch.float32, torch.int64, "target"),
        (torch.float8_e4m3fn, torch.bfloat16, "target"),
    ],
)
def test_unsupported_cast_raises_plan_error(
    tmp_path: Path, stored: torch.dtype, target: torch.dtype, dtype: Any
) -> None:
    save_file({"w": torch.zeros(4).to(stored)}, tmp_path / "m.safetensors")
    with pytest.raises(PlanError, match="dtype"):
        penstock.load_into({"w": torch.zeros(4, dtype=target)}, tmp_path, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.int8, "bfloat16", 3, torch.float8_e4m3fn])
def test_invalid_dtype_argument_raises_config_error(path: Path, dtype: Any) -> None:
    for verb in (penstock.load_into, penstock.modules.load_in_background):
        with pytest.raises(penstock.ConfigError, match="cannot be cast"):
            verb(Model(), path, dtype=dtype)


@pytest.mark.parametrize("kind", [dict, UserDict])
def test_empty_mapping_receives_new_tensors(path: Path, kind: type[Any]) -> None:
    wanted, target = load_file(path), kind()
    report = penstock.load_into(target, path, rename=lambda name: None if name == "mean" else f"m.{name}")
    assert report.nbytes == sum(tensor.nbytes for tensor in wanted.values())
    assert state(target) == state({f"m.{name}": tensor for name, tensor in wanted.items() if name != "mean"})
    cast: dict[str, torch.Tensor] = {}
    penstock.load_into(cast, path, names="hidden*", dtype=torch.float32, settings=penstock.ReadSettings(arena=True))
    assert {tensor.dtype for tensor in cast.values()} == {torch.float32} and len(cast) == 2


def test_empty_mapping_stays_empty_after_failed_load(path: Path) -> None:
    target: dict[str, torch.Tensor] = {}
    with pytest.raises(PlanError, match="another tensor to x"):
        penstock.load_into(target, path, rename=lambda name: "x")
    with pytest.raises(penstock.PenstockError):
        penstock.load_into(target, path, verify=True)
    assert not target


@pytest.mark.parametrize("target", [torch.nn.ReLU(), MappingProxyType({})])
def test_target_without_tensors_raises(path: Path, target: Any) -> None:
    with pytest.raises(PlanError, match="no tensors to fill"):
        penstock.load_into(target, path)
    if isinstance(target, torch.nn.Module):
        with pytest.raises(PlanError, match="no tensors to fill"):
            penstock.modules.load_in_background(target, path)


def test_two_tensors_for_one_target_raise(path: Path) -> None:
    with pytest.raises(penstock.PlanError, match="both go to x"):
        penstock.load_into({"x": torch.zeros(7)}, path, rename=lambda name: "x", strict=False)


def test_meta_device_target_error_mentions_to_empty(path: Path) -> None:
    with torch.device("meta"):
        model = Model()
    with pytest.raises(penstock.PlanError, match="to_empty"):
        penstock.load_into(model, path)


def digest(path: Path) -> None:
    with weight_set.open_weights(str(path), settings=Settings.read()) as weights:
        raw = weight_set.encode(weight_set.build(weights))
    Path(weight_set.sidecar_uri(str(path))).write_bytes(raw)


def test_flipped_bit_error_reports_mutated_target(path: Path) -> None:
    digest(path)
    assert penstock.load_into(Model(), path).verified
    before = path.stat()
    data = bytearray(path.read_bytes())
    data[-1] ^= 0x10
    path.write_bytes(data)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(penstock.IntegrityError) as caught:
        penstock.load_into(Model(), path)
    assert caught.value.mutated and "TOUCHED" in str(caught.value)
    assert not penstock.load_into(Model(), path, verify=False).verified


def test_missing_manifest_is_reported_before_writing(path: Path) -> None:
    model = Model()
    before = state(tensors_of(model))
    with pytest.raises(penstock.NotFound) as caught:
        penstock.load_into(model, path, verify=True)
    assert not caught.value.mutated and state(tensors_of(model)) == before


@pytest.mark.parametrize("after", [0, 2])
def test_failed_source_reports_whether_target_is_mutated(
    path: Path, after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    original, count = FileSource.readv, [0]

    def readv(self: FileSource, offset: int, buffers: Any) -> str:
        if offset:
            count[0] += 1
            if count[0] > after:
                raise SourceUnavailable("the disk is gone", uri=self.uri)
        return original(self, offset, buffers)

    monkeypatch.setattr(FileSource, "readv", readv)
    monkeypatch.setenv("PENSTOCK_FETCH_THREADS", "1")
    monkeypatch.setenv("PENSTOCK_CHUNK_BYTES", "64K")
    monkeypatch.setenv("PENSTOCK_IO_URING", "0")
    wanted = {f"t{i}": torch.ones(MIB // 8, dtype=torch.int64) for i in range(4)}
    save_file(wanted, path)
    targets = {name: torch.zeros_like(tensor) for name, tensor in wanted.items()}
    with pytest.raises(SourceUnavailable) as caught:
        penstock.load_into(targets, path)
    assert caught.value.mutated == (after > 0) == any(bool(tensor.any()) for tensor in targets.values())


def test_loaded_target_is_freed_without_garbage_collector(path: Path) -> None:
    gc.collect()
    gc.disable()
    try:
        model = Model()
        held = [weakref.ref(model), *(weakref.ref(p) for p in model.parameters())]
        penstock.load_into(model, path)
        targets = {name: torch.empty_like(t) for name, t in load_file(path).items()}
        held.extend(weakref.ref(t) for t in targets.values())
        penstock.load_into(targets, path)
        with pytest.raises(penstock.PlanError) as caught:
            penstock.load_into({**targets, "more": torch.zeros(1)}, path)
        del model, targets, caught
        assert [ref() is None for ref in held] == [True] * len(held)
    finally:
        gc.enable()


def test_module_is_moved_into_arena_and_filled(path: Path) -> None:
    model = Model()
    objects = {name: id(t) for name, t in model.named_parameters()}
    penstock.load_into(model, path, settings=penstock.ReadSettings(arena=True))
    assert state(tensors_of(model)) == state(load_file(path))
    assert {name: id(t) for name, t in model.named_parameters()} == objects
    assert model.head.weight is model.embed.weight
    first = shared_at(model.embed.weight.data_ptr(), model.embed.weight.nbytes)
    assert first is not None
    assert all(shared_at(t.data_ptr(), t.nbytes) is first for t in tensors_of(model).values() if t.numel())


def test_mismatched_target_is_not_moved_to_arena(path: Path) -> None:
    targets = {"embed.weight": torch.zeros(300, 41)}
    address = targets["embed.weight"].data_ptr()
    with pytest.raises(PlanError):
        penstock.load_into(targets, path, settings=penstock.ReadSettings(arena=True))
    assert targets["embed.weight"].data_ptr() == address
