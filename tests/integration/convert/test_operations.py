"""Operations with real workers and files: adapters, ranks, deltas, and the files next to the weights."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path

import msgspec
import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.support.long_running import long_running
from tests.support.servers.s3 import SwiftServer, Unavailable

import penstock
from penstock.errors import ConfigError, PlanError
from penstock_convert.convert import WorkerSettings, convert
from penstock_convert.operations.spec import function_of
from penstock_convert.testing import check_rows

pytestmark = pytest.mark.usefixtures("launcher_fork_servers")

CONFIG = {"architectures": ["LlamaForCausalLM"], "num_attention_heads": 4, "num_key_value_heads": 2}


def write(directory: Path, tensors: dict[str, torch.Tensor], **beside: object) -> Path:
    directory.mkdir()
    save_file(tensors, directory / "model.safetensors")
    for name, said in beside.items():
        (directory / f"{name}.json").write_text(json.dumps(said))
    return directory


def read(directory: Path) -> dict[str, torch.Tensor]:
    return {name: one for path in sorted(directory.glob("*.safetensors")) for name, one in load_file(path).items()}


def are_equal(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> bool:
    return found.keys() == wanted.keys() and all(torch.equal(found[name], wanted[name]) for name in wanted)


@pytest.fixture
def model() -> dict[str, torch.Tensor]:
    chance = torch.Generator().manual_seed(5)
    return {
        "model.layers.0.self_attn.qkv_proj.weight": torch.randn(64, 512, generator=chance),
        "model.layers.0.self_attn.o_proj.weight": torch.randn(512, 32, generator=chance),
        "model.norm.weight": torch.randn(512, generator=chance),
        "lm_head.weight": torch.randn(1024, 512, generator=chance),
    }


def one_by_one(
    sources: list[Path] | Path,
    into: Path,
    *words: dict[str, object],
    scratch: Path | None = None,
    storage_options: Mapping[str, str] | None = None,
    **more,
):
    workers = WorkerSettings(num_workers=1, scratch=scratch, task_bytes="256K", storage_options=storage_options)
    return convert(sources, into, operations=words, devices="cpu", workers=workers, **more)


def test_adapter_conversion_reads_adapter_config(model, tmp_path):
    base = write(tmp_path / "base", model, config=CONFIG)
    a, b = torch.randn(4, 512), torch.randn(1024, 4)
    pair = {"base_model.model.lm_head.lora_A.weight": a, "base_model.model.lm_head.lora_B.weight": b}
    adapter = write(tmp_path / "adapter", pair, adapter_config={"r": 4, "lora_alpha": 6, "peft_type": "LORA"})
    for i, place in enumerate((adapter, adapter / "model.safetensors")):
        one_by_one([base, place], tmp_path / f"out{i}", {"op": "lora-merge"})
        found = read(tmp_path / f"out{i}")["lm_head.weight"]
        assert torch.allclose(found, model["lm_head.weight"] + 1.5 * (b @ a), atol=1e-4)
    (adapter / "adapter_config.json").write_text('{"peft_type": "IA3"}')
    with pytest.raises(ConfigError, match="IA3"):
        one_by_one([base, adapter], tmp_path / "out", {"op": "lora-merge"})
    (adapter / "adapter_config.json").unlink()
    with pytest.raises(PlanError, match="no adapter_config"):
        one_by_one([base, adapter], tmp_path / "out", {"op": "lora-merge"})
    assert not (tmp_path / "out").exists()


def test_resharded_ranks_reassemble_to_source(model, tmp_path):
    base = write(tmp_path / "base", model, config=CONFIG)
    report = one_by_one(base, tmp_path / "two", {"op": "reshard", "to": 2}, shard_bytes="1M")
    ranks = sorted(path for path in (tmp_path / "two").iterdir() if path.is_dir())
    assert [path.name for path in ranks] == ["rank-00000-of-00002", "rank-00001-of-00002"]
    for path in ranks:
        assert penstock.verify(path).verified
        assert (path / "model.safetensors.index.json").exists() and len(list(path.glob("*.safetensors"))) > 1
        assert msgspec.json.decode((path / "config.json").read_bytes()) == CONFIG
    assert torch.equal(read(ranks[1])["model.norm.weight"], model["model.norm.weight"])
    assert read(ranks[1])["lm_head.weight"].shape == (512, 512)
    assert report.read_bytes == sum(tensor.nbytes for tensor in model.values())
    back = one_by_one(ranks, tmp_path / "back", {"op": "reshard", "to": 1})
    assert are_equal(read(tmp_path / "back"), model)
    one_by_one(base, tmp_path / "copy")
    assert back.revision == penstock.verify(tmp_path / "copy").revision


def test_wrong_rank_order_or_count_is_rejected(model, tmp_path):
    base = write(tmp_path / "base", model, config=CONFIG)
    one_by_one(base, tmp_path / "two", {"op": "reshard", "to": 2})
    first, second = sorted(path for path in (tmp_path / "two").iterdir() if path.is_dir())
    for sources, why in (
        ([second, first], "is rank 1"),
        ([first, first], "is rank 0"),
        ([first, second, second], "rank"),
    ):
        with pytest.raises(PlanError, match=why):
            one_by_one(sources, tmp_path / "out", {"op": "reshard", "to": 1})
    for name, path in (("a", first), ("b", first)):
        shutil.copytree(path, tmp_path / name)
    with pytest.raises(PlanError, match="same bytes"):
        one_by_one([tmp_path / "a", tmp_path / "b"], tmp_path / "out", {"op": "reshard", "to": 1})
    assert not (tmp_path / "out").exists()


def test_resharded_ranks_match_vllm_layout(model, tmp_path):
    base = write(tmp_path / "base", model, config=CONFIG)
    into = tmp_path / "out"
    one_by_one(base, into, {"op": "reshard", "to": 2, "layout": "vllm"})
    assert (into / "config.json").exists()
    for rank in range(2):  # what its loader does
        paths = list(into.glob(f"model-rank-{rank}-part-*.safetensors"))
        found = {name: tensor for path in paths for name, tensor in load_file(path).items()}
        assert found.keys() == model.keys()
        assert torch.equal(found["lm_head.weight"], model["lm_head.weight"].chunk(2)[rank])
        assert all(penstock.verify(path).verified for path in paths)


@pytest.mark.parametrize("digested", [True, False])
def test_applied_delta_equals_new_version(model, tmp_path, digested):
    base = write(tmp_path / "base", model, config=CONFIG)
    changed = {**model, "lm_head.weight": model["lm_head.weight"].clone(), "more": torch.ones(3)}
    changed["lm_head.weight"][700, 5] += 1
    del changed["model.norm.weight"]
    new = write(tmp_path / "new", changed, config={**CONFIG, "version": 2})
    if digested:
        for path in (base, new):
            one_by_one(path, tmp_path / f"{path.name}-copy")
        base, new = tmp_path / "base-copy", tmp_path / "new-copy"
    made = one_by_one([base, new], tmp_path / "delta", {"op": "delta"})
    assert made.nbytes == (256 << 10) + 12
    applied = one_by_one([base, tmp_path / "delta"], tmp_path / "out", {"op": "delta-apply"})
    assert are_equal(read(tmp_path / "out"), changed)
    assert penstock.verify(tmp_path / "out").revision == applied.revision
    assert msgspec.json.decode((tmp_path / "out" / "config.json").read_bytes())["version"] == 2
    assert not (tmp_path / "out" / "penstock.delta").exists()
    with pytest.raises(PlanError, match="the delta is for revision"):
        one_by_one([new, tmp_path / "delta"], tmp_path / "other", {"op": "delta-apply"})
    same_again = one_by_one([base, base], tmp_path / "nothing", {"op": "delta"})
    assert same_again.nbytes == 0
    one_by_one([base, tmp_path / "nothing"], tmp_path / "again", {"op": "delta-apply"})
    assert are_equal(read(tmp_path / "again"), model)


def test_documented_operation_converts_model(tmp_path, monkeypatch):
    root = Path(__file__).resolve().parents[3]
    source = (root / "examples" / "fold_norms.py").read_text()
    assert source.partition("\n\n")[2] in (root / "docs" / "convert" / "convert-functions.md").read_text()
    monkeypatch.syspath_prepend(str(root / "examples"))
    monkeypatch.setenv("PYTHONPATH", str(root / "examples"))
    at = "model.layers.0"
    tensors = {
        f"{at}.input_layernorm.weight": torch.rand(64).bfloat16(),
        f"{at}.post_attention_layernorm.weight": torch.rand(64).bfloat16(),
        f"{at}.self_attn.q_proj.weight": torch.randn(128, 64).bfloat16(),
        f"{at}.self_attn.k_proj.weight": torch.randn(4096, 64).bfloat16(),
        f"{at}.self_attn.v_proj.weight": torch.randn(128, 64).bfloat16(),
        f"{at}.mlp.gate_proj.weight": torch.randn(100, 64).bfloat16(),
        f"{at}.mlp.up_proj.weight": torch.randn(100, 64).bfloat16(),
        f"{at}.mlp.down_proj.weight": torch.randn(64, 100).bfloat16(),
    }
    word = {"op": "function", "function": "fold_norms:FoldNorms"}
    check_rows(function_of("fold_norms:FoldNorms"), tensors)
    one_by_one(write(tmp_path / "base", tensors), tmp_path / "out", word)
    found = read(tmp_path / "out")
    for name, norm in (("self_attn.k_proj", "input_layernorm"), ("mlp.up_proj", "post_attention_layernorm")):
        wanted = tensors[f"{at}.{name}.weight"].float() * tensors[f"{at}.{norm}.weight"].float()
        assert torch.equal(found[f"{at}.{name}.weight"], wanted.bfloat16())
        assert torch.equal(found[f"{at}.{norm}.weight"], torch.ones(64).bfloat16())
    assert torch.equal(found[f"{at}.mlp.down_proj.weight"], tensors[f"{at}.mlp.down_proj.weight"])
    # A norm of ones before an unfolded layer changes the model, as with FP8 MLPs and other names of experts.
    fp8 = {name: t.to(torch.float8_e4m3fn) if ".mlp." in name else t for name, t in tensors.items()}
    experts = {name.replace(".mlp.", ".mlp.experts.0."): tensor for name, tensor in tensors.items()}
    for kind, wrong in (("fp8", fp8), ("experts", experts)):
        with pytest.raises(PlanError, match=r"2 layers after a norm are missing or no floats: .*gate_proj"):
            one_by_one(write(tmp_path / kind, wrong), tmp_path / f"{kind} out", word)
        assert not (tmp_path / f"{kind} out").exists()


@long_running
def test_small_files_are_read_from_object_store(model, tmp_path):
    try:
        SwiftServer.check()
    except Unavailable as why:
        pytest.skip(str(why))
    pair = {
        "base_model.model.lm_head.lora_A.weight": torch.randn(4, 512),
        "base_model.model.lm_head.lora_B.weight": torch.randn(1024, 4),
    }
    base = write(tmp_path / "base", model, config=CONFIG)
    adapter = write(tmp_path / "adapter", pair, adapter_config={"r": 4, "lora_alpha": 6})
    one_by_one([base, adapter], tmp_path / "merged", {"op": "lora-merge"})
    folder = Path(tempfile.mkdtemp(prefix="ps-s3-"))
    try:
        with SwiftServer(folder) as server:
            server.make_bucket("weights")
            store, told = server.store("weights"), {"storage_options": server.storage_options, "scratch": tmp_path}
            for directory in (base, adapter):
                for path in directory.iterdir():
                    store.put(f"{directory.name}/{path.name}", path.read_bytes())
            at = [f"s3://weights/{name}" for name in ("base", "adapter", "merged", "ranks")]
            merged = one_by_one(at[:2], at[2], {"op": "lora-merge"}, **told)
            assert merged.revision == penstock.verify(tmp_path / "merged").revision
            one_by_one(at[2], at[3], {"op": "reshard", "to": 2}, **told)
            ranks = [f"{at[3]}/rank-0000{rank}-of-00002" for rank in range(2)]
            assert all(penstock.verify(rank, storage_options=server.storage_options).verified for rank in ranks)
            whole = one_by_one(ranks, tmp_path / "whole", {"op": "reshard", "to": 1}, **told)
            assert whole.revision == merged.revision
            assert (tmp_path / "whole" / "config.json").exists()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def test_destination_with_unrelated_weights_is_refused(tmp_path: Path) -> None:
    source = write(tmp_path / "source", {"a": torch.randn(8, 8)}, config=CONFIG)
    folder = Path(tempfile.mkdtemp(prefix="ps-s3-"))
    try:
        with SwiftServer(folder) as server:
            server.make_bucket("weights")
            store, told = server.store("weights"), {"storage_options": server.storage_options, "scratch": tmp_path}
            store.put("other/model.safetensors", b"precious")
            store.put("failed/model.safetensors", b"half")
            store.put("failed/penstock.uploading", b"")
            for _ in range(2):
                with pytest.raises(ConfigError, match=r"did not write.*model\.safetensors"):
                    one_by_one([source], "s3://weights/other", {"op": "store", "format": "cast:BF16"}, **told)
            assert bytes(store.get("other/model.safetensors").bytes()) == b"precious"
            # Leftovers of an incomplete upload are overwritten.
            one_by_one([source], "s3://weights/failed", {"op": "store", "format": "cast:BF16"}, **told)
            assert penstock.verify("s3://weights/failed", storage_options=server.storage_options).verified
            names = {one["path"] for page in store.list("failed/") for one in page}
            assert "failed/model.safetensors" in names and "failed/penstock.uploading" not in names
    finally:
        shutil.rmtree(folder, ignore_errors=True)
