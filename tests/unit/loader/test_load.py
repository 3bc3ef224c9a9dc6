"""`load` on the CPU: tensors equal those of safetensors and belong to the caller."""

from __future__ import annotations

import gc
import json
import os
import re
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors import safe_open as theirs_open
from safetensors.torch import load_file, save_file
from tests.support.compare import assert_same, bits, by_safetensors
from tests.support.every_dtype import every_dtype
from tests.support.moe import write_moe

import penstock
from penstock.testing.checkpoints import write_llama
from penstock.types import MIB, Box

KIB = 1 << 10
FREED = 3 * MIB


def split(shape: tuple[int, ...], dim: int, part: int, num_parts: int) -> Box:
    """Return the box of one of nearly equal shards of a dim, as in tensor parallelism."""
    edges = [shape[dim] * part // num_parts, shape[dim] * (part + 1) // num_parts]
    start = tuple(edges[0] if d == dim else 0 for d in range(len(shape)))
    return Box(start=start, stop=tuple(edges[1] if d == dim else n for d, n in enumerate(shape)))


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sharded")
    write_llama(directory, num_layers=2, hidden=256, shards=3)
    return directory


@pytest.fixture(scope="module")
def stacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save tensors of one to four dims with odd sizes."""
    path = tmp_path_factory.mktemp("stacked") / "model.safetensors"
    torch.manual_seed(0)
    shapes = {
        "experts": (8, 96, 130),
        "wide": (64, 2048),
        "tall": (2048, 68),
        "line": (100_003,),
        "four": (6, 4, 10, 20),
        "tiny": (3, 5),
    }
    save_file({name: torch.randn(shape).to(torch.bfloat16) for name, shape in shapes.items()}, path)
    return path


@pytest.mark.parametrize("copy", [True, False])
@pytest.mark.parametrize("aligned", [True, False])
def test_tensors_of_every_dtype_are_loaded(tmp_path: Path, aligned: bool, copy: bool) -> None:
    path = tmp_path / "model.safetensors"
    made = every_dtype(path, aligned=aligned)
    held = [name for name in made if not name.startswith("f6")]
    with theirs_open(path, "pt") as file:
        wanted = {name: file.get_tensor(name) for name in held}
    found = penstock.load(path, names=held, settings=penstock.ReadSettings(copy=copy))
    assert_same(found, wanted)
    assert [bits(tensor)[2] for tensor in found.values()] == [made[name][2] for name in found]
    assert all(tensor.is_contiguous() for tensor in found.values())
    assert all(tensor.data_ptr() % tensor.element_size() == 0 for tensor in found.values())


def test_dtype_unsupported_by_torch_raises_unless_skipped(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    made = every_dtype(path)
    with pytest.raises(penstock.PlanError, match="F6") as caught:
        penstock.load(path)
    assert not caught.value.mutated and "names=" in str(caught.value)
    assert penstock.load(path, names=lambda name: not name.startswith("f6")).keys() == {
        name for name in made if not name.startswith("f6")
    }


@pytest.mark.parametrize("copy", [None, True, False])
@pytest.mark.parametrize("memory_bytes", [None, "1M", 256 << 10])
def test_sharded_checkpoint_loads_with_any_memory_budget(
    sharded: Path, copy: bool | None, memory_bytes: int | str | None
) -> None:
    weights = penstock.load(sharded, settings=penstock.ReadSettings(copy=copy, memory_bytes=memory_bytes))
    assert_same(weights, by_safetensors(sharded))
    assert weights.report.peak_staging_bytes <= MIB or memory_bytes is None
    assert {file.path for file in weights.report.files} <= ({"page-cache", "direct"} if copy else {"mmap"})


@pytest.mark.parametrize("what", ["directory", "index", "glob", "list", "file URI"])
def test_every_checkpoint_uri_form_is_loaded(sharded: Path, what: str) -> None:
    uris: dict[str, Any] = {
        "directory": str(sharded) + "/",
        "index": sharded / "model.safetensors.index.json",
        "glob": str(sharded / "*.safetensors"),
        "list": sorted(sharded.glob("*.safetensors")),
        "file URI": f"file://{sharded}",
    }
    assert_same(penstock.load(uris[what]), by_safetensors(sharded))


@pytest.mark.parametrize("copy", [True, False])
def test_small_tensors_share_allocations_without_overlap(tmp_path: Path, copy: bool) -> None:
    write_moe(tmp_path, num_tensors=900, tensor_bytes=4096, shards=2)
    weights = penstock.load(tmp_path, settings=penstock.ReadSettings(copy=copy))
    wanted = by_safetensors(tmp_path)
    assert_same(weights, wanted)
    victim = next(iter(weights))
    weights[victim].fill_(1)
    assert [name for name in wanted if bits(weights[name]) != bits(wanted[name])] == [victim]


def test_loaded_tensors_follow_file_order_of_manifest(sharded: Path) -> None:
    weights = penstock.load(sharded)
    table = weights.manifest.tensors
    order = sorted(range(len(table)), key=lambda row: (int(table.file_index[row]), int(table.offset[row])))
    assert list(weights) == [table.names[row] for row in order]
    assert len(weights.manifest.files) == 3
    assert weights.report.num_tensors == len(weights)
    assert weights.report.nbytes == weights.manifest.nbytes == sum(tensor.nbytes for tensor in weights.values())
    assert weights.report.revision == weights.manifest.revision


def test_names_option_accepts_every_selector_kind(sharded: Path) -> None:
    wanted = by_safetensors(sharded)
    norms = {name for name in wanted if "norm" in name}
    some = sorted(wanted)[3:7]
    for names, chosen in [
        ("*norm*", norms),
        (["*norm*", some[0]], norms | {some[0]}),
        (some, set(some)),
        (re.compile("norm"), norms),
        (lambda name: "norm" in name, norms),
        ((), set()),
        (re.compile("nothing like it"), set()),
    ]:
        found = penstock.load(sharded, names=names)  # type: ignore[arg-type]
        assert_same(found, {name: wanted[name] for name in chosen})
        assert found.report.read_bytes <= found.report.nbytes + (1 << 20)


def test_unknown_tensor_name_raises_plan_error(sharded: Path) -> None:
    with pytest.raises(penstock.PlanError, match=r"model\.nothing"):
        penstock.load(sharded, names=["model.nothing", "model.norm.weight"])
    with pytest.raises(penstock.PlanError, match=r"nothing like it\*"):
        penstock.load(sharded, names="nothing like it*")


@pytest.mark.parametrize("name", ["experts", "wide", "tall", "line", "four", "tiny"])
@pytest.mark.parametrize("num_parts", [1, 2, 3, 7])
def test_slice_along_each_dim_is_loaded(stacked: Path, name: str, num_parts: int) -> None:
    whole = load_file(stacked)[name]
    for dim in range(whole.dim()):
        for rank in range(num_parts):
            box = split(tuple(whole.shape), dim, rank, num_parts)
            found = penstock.load(
                stacked, names=[name], boxes={name: box}, settings=penstock.ReadSettings(memory_bytes="1M")
            )
            part = whole[tuple(slice(a, b) for a, b in zip(box.start, box.stop, strict=True))]
            assert_same(found, {name: part.contiguous()})
            assert found.report.nbytes == part.nbytes


def test_slice_function_reads_few_extra_bytes(stacked: Path) -> None:
    wanted = load_file(stacked)

    def half(name: str, shape: tuple[int, ...]) -> Box | None:
        return split(shape, 0, 1, 2) if len(shape) > 1 else None

    found = penstock.load(stacked, boxes=half)
    assert_same(found, {name: t if t.dim() == 1 else t[len(t) // 2 :].contiguous() for name, t in wanted.items()})
    assert found.report.nbytes <= found.report.read_bytes <= found.report.nbytes + len(wanted) * (64 << 10)


def test_slice_along_all_dims_is_loaded(stacked: Path) -> None:
    whole = load_file(stacked)["four"]
    box = Box(start=(1, 1, 3, 5), stop=(5, 3, 8, 17))
    found = penstock.load(stacked, names="four", boxes={"four": box})
    assert_same(found, {"four": whole[1:5, 1:3, 3:8, 5:17].contiguous()})


@pytest.mark.parametrize(
    "boxes",
    [
        {"nobody": Box(start=(0,), stop=(1,))},
        {"tiny": Box(start=(0, 0), stop=(4, 5))},
        {"tiny": Box(start=(0,), stop=(3,))},
    ],
)
def test_mismatched_slice_raises_plan_error(stacked: Path, boxes: dict[str, Box]) -> None:
    with pytest.raises(penstock.PlanError, match=next(iter(boxes))):
        penstock.load(stacked, boxes=boxes)


def test_empty_slice_returns_empty_tensor(stacked: Path) -> None:
    found = penstock.load(stacked, names="tiny", boxes={"tiny": Box(start=(1, 0), stop=(1, 5))})
    assert tuple(found["tiny"].shape) == (0, 5) and found["tiny"].dtype == torch.bfloat16


def mapped_bytes(path: Path) -> int:
    """Return the size of the address space that maps the file."""
    spans = [
        line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines() if str(path) in line
    ]
    return sum(int(stop, 16) - int(start, 16) for start, stop in spans)


@pytest.fixture
def big(tmp_path: Path) -> Path:
    path = tmp_path / "model.safetensors"
    torch.manual_seed(1)
    save_file({f"t{i}": torch.randint(0, 1 << 62, (FREED // 8,)) for i in range(4)}, path)
    return path


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("verify", [True, False])
def test_dropping_weights_unmaps_file_without_garbage_collector(big: Path, verify: bool) -> None:
    if verify:
        digest(big)
    weights = penstock.load(big)
    assert weights.report.verified == verify
    assert mapped_bytes(big) >= 4 * FREED
    del weights["t1"], weights["t0"], weights["t3"]
    kept = weights.pop("t2")
    del weights
    assert FREED <= mapped_bytes(big) <= FREED + 64 * KIB, "but for the pages that tensors share"
    del kept
    assert mapped_bytes(big) == 0


@pytest.mark.usefixtures("no_collector")
@pytest.mark.parametrize("failing", [False, True])
def test_copied_weights_are_freed_without_garbage_collector(
    big: Path, failing: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from penstock.engine.place import HostPlace

    made: list[weakref.ref[Any]] = []
    original = HostPlace.slab

    def slab(self: HostPlace, index: int) -> Any:
        found = original(self, index)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(HostPlace, "slab", slab)
    if failing:
        digest(big)
        flip_a_bit(big)
        with pytest.raises(penstock.IntegrityError) as caught:
            penstock.load(big, settings=penstock.ReadSettings(copy=True))
        del caught
    else:
        weights = penstock.load(big, settings=penstock.ReadSettings(copy=True))
        assert all(ref() is not None for ref in made)
        del weights
    assert made and all(ref() is None for ref in made)


def test_changing_loaded_tensor_does_not_affect_file_or_other_loads(big: Path) -> None:
    before = big.read_bytes()
    for copy in (True, False):
        first, second = (
            penstock.load(big, settings=penstock.ReadSettings(copy=copy)),
            penstock.load(big, settings=penstock.ReadSettings(copy=copy)),
        )
        first["t0"].zero_()
        assert not torch.equal(first["t0"], second["t0"])
    assert big.read_bytes() == before


def test_loaded_weights_outlive_deleted_file(big: Path) -> None:
    wanted = {name: tensor.clone() for name, tensor in load_file(big).items()}
    mapped, copied = penstock.load(big), penstock.load(big, settings=penstock.ReadSettings(copy=True))
    big.unlink()
    assert_same(mapped, wanted)
    assert_same(copied, wanted)


def digest(path: Path) -> None:
    from penstock.config import Settings
    from penstock.storage import weight_set

    with weight_set.open_weights(str(path), settings=Settings.read()) as weights:
        raw = weight_set.encode(weight_set.build(weights))
    Path(weight_set.sidecar_uri(str(path))).write_bytes(raw)


def flip_a_bit(path: Path, at: int = -100) -> None:
    """Flip a bit, keeping the file's size and times, so that only digests can detect it."""
    before = path.stat()
    with path.open("r+b") as file:
        file.seek(at, os.SEEK_END if at < 0 else os.SEEK_SET)
        byte = file.read(1)[0]
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte ^ 0x10]))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("copy", [True, False])
def test_flipped_bit_anywhere_is_detected(sharded: Path, tmp_path: Path, copy: bool) -> None:
    for path in sharded.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    digest(tmp_path)
    good = penstock.load(tmp_path, settings=penstock.ReadSettings(copy=copy))
    assert good.report.verified and "leaf digests" in good.report.why
    shard = sorted(tmp_path.glob("*.safetensors"))[1]
    body = 8 + int.from_bytes(shard.read_bytes()[:8], "little")
    rng = np.random.default_rng(0)
    for at in [body, shard.stat().st_size - 1, *rng.integers(body, shard.stat().st_size, 6).tolist()]:
        flip_a_bit(shard, at)
        with pytest.raises(penstock.IntegrityError) as caught:
            penstock.load(tmp_path, settings=penstock.ReadSettings(copy=copy))
        assert caught.value.tensor is not None and not caught.value.mutated
        assert caught.value.uri == str(shard)
        start, stop = caught.value.byte_range or (0, 0)
        assert start <= at < stop
        assert not penstock.load(tmp_path, verify=False, settings=penstock.ReadSettings(copy=copy)).report.verified
        flip_a_bit(shard, at)
    assert penstock.load(tmp_path, settings=penstock.ReadSettings(copy=copy)).report.verified


def test_unverified_load_reports_reason(big: Path) -> None:
    report = penstock.load(big).report
    assert not report.verified and "no manifest at" in report.why
    with pytest.raises(penstock.NotFound, match="penstock manifest"):
        penstock.load(big, verify=True)
    digest(big)
    assert penstock.load(big, verify=True).report.verified
    report = penstock.load(big, verify=False).report
    assert not report.verified and report.why == "verify=False"
    part = penstock.load(big, boxes={"t0": Box(start=(0,), stop=(10,))}).report
    assert part.verified and "leaf digests compared" in part.why


@pytest.mark.parametrize("copy", [True, False])
def test_report_phases_sum_to_wall_time(sharded: Path, copy: bool, tmp_path: Path) -> None:
    weights = penstock.load(sharded, settings=penstock.ReadSettings(copy=copy, trace=tmp_path / "trace.json"))
    report = weights.report
    assert sum(report.phases.values()) == pytest.approx(report.wall_s)
    assert set(report.phases) <= {"open", "plan", "allocate", "move", "finish"}
    assert sum(file.nbytes for file in report.files) == report.read_bytes >= report.nbytes
    assert {file.uri for file in report.files} == {str(path) for path in sharded.glob("*.safetensors")}
    assert report.gb_per_s > 0 and report.device == "cpu" and report.peak_device_bytes == 0
    assert "not verified" in report.summary() and len(report.summary().splitlines()) == 3
    spans = [event for event in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert sum(span["args"]["bytes"] for span in spans) >= report.nbytes


def test_progress_bar_is_hidden_without_terminal(sharded: Path, capfd: pytest.CaptureFixture[str]) -> None:
    penstock.load(sharded)
    assert capfd.readouterr() == ("", "")
    penstock.load(sharded, progress=True)
    out, err = capfd.readouterr()
    assert out == "" and err.startswith(f"{sharded.name} ") and "100 % of" in err


@pytest.mark.parametrize("device", ["cuda:99", "mps", "nonsense", "cpu:-2", 99, "meta"])
def test_missing_device_raises_config_error(sharded: Path, device: str | int) -> None:
    with pytest.raises(penstock.ConfigError):
        penstock.load(sharded, device=device)


@pytest.mark.parametrize("memory_bytes", ["a lot", 0, -1, "-1M", ""])
def test_invalid_memory_bytes_raises_config_error(sharded: Path, memory_bytes: int | str) -> None:
    with pytest.raises(penstock.ConfigError):
        penstock.load(sharded, settings=penstock.ReadSettings(memory_bytes=memory_bytes))


def test_error_for_too_small_budget_states_minimum(sharded: Path) -> None:
    with pytest.raises(penstock.errors.BudgetTooSmall) as caught:
        penstock.load(sharded, settings=penstock.ReadSettings(copy=True, memory_bytes=4096))
    assert_same(
        penstock.load(sharded, settings=penstock.ReadSettings(copy=True, memory_bytes=caught.value.minimum_bytes)),
        by_safetensors(sharded),
    )


def test_repeated_and_concurrent_loads_return_equal_tensors(sharded: Path) -> None:
    wanted = by_safetensors(sharded)
    for _ in range(3):
        assert_same(penstock.load(sharded), wanted)
    with ThreadPoolExecutor(4) as pool:
        for found in pool.map(
            lambda n: penstock.load(sharded, settings=penstock.ReadSettings(copy=bool(n % 2))), range(12)
        ):
            assert_same(found, wanted)
    assert gc.isenabled(), "the collector is as it was"


def test_report_explains_why_io_uring_is_unused(stacked: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.loader.session.refusal", lambda: "this kernel has none")
    found = penstock.load(stacked, names="wide", boxes={"wide": Box(start=(0, 8), stop=(64, 16))})
    assert found["wide"].shape == (64, 8)
    whys = {file.path: file.why for file in found.report.files}
    assert whys.get("page-cache", "by threads: this kernel has none") == "by threads: this kernel has none"


def test_second_load_of_remote_file_reports_cache(big: Path, tmp_path: Path, monkeypatch) -> None:
    from tests.support.servers.http_server import RangeServer

    monkeypatch.setenv("PENSTOCK_CACHE_DIR", str(tmp_path / "cache"))
    with RangeServer(big.parent) as server:
        for _ in range(2):
            report = penstock.load(f"{server.url}/{big.name}").report
            assert all(file.why == "" for file in report.files)
    assert {file.path for file in report.files} == {"cache"}
