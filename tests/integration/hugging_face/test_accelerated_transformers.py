"""transformers loads the same models bit for bit inside `patched_libraries()`, from a hub and from directories."""

from __future__ import annotations

import contextlib
import hashlib
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest
import safetensors
import torch
import transformers
from safetensors import SafetensorError
from safetensors.torch import load_file
from tests.support.hugging_face import assert_same_model, files_of, serving, use_cache
from tests.support.servers.http_server import Faults, RangeServer
from tests.support.servers.hugging_face import HuggingFaceServer
from tests.support.tiny_models import save_llama

from penstock.config import Settings
from penstock.errors import ConfigError, IntegrityError, PenstockError, PermissionDenied, SourceError
from penstock.storage import MemorySource, source
from penstock.storage.source import glob_pattern
from penstock_hf.patched_libraries import directory
from penstock_hf.transformers import from_pretrained, patched_libraries

AutoModelForCausalLM = transformers.AutoModelForCausalLM


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    return {
        "org/one": save_llama(root / "one"),
        "org/sharded": save_llama(root / "sharded", dtype=torch.bfloat16, max_shard_size="60KB"),
        "org/tied": save_llama(root / "tied", tie_word_embeddings=True),
    }


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    # A permanent fault must not make a test wait for another attempt.
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    monkeypatch.setenv("PENSTOCK_STALL_S", "5")
    with serving(models, tmp_path / "hf", monkeypatch) as server:
        yield server


@pytest.mark.parametrize("name", ["org/one", "org/sharded", "org/tied"])
@pytest.mark.parametrize("dtype", ["auto", torch.float16])
def test_hub_model_is_streamed(
    name: str, dtype: Any, hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with patched_libraries() as report:
        mine = AutoModelForCausalLM.from_pretrained(name, dtype=dtype)
    commit = hub.files_of(name, "main")[0]
    assert report.streamed and all(uri.startswith(f"hf://{name}@{commit}/") for uri in report.streamed)
    # No large file was written to the cache or next to it.
    assert not [path for path in (tmp_path / "hf").rglob("*.safetensors") if path.stat().st_size]
    use_cache(tmp_path / "stock", monkeypatch)
    assert_same_model(mine, AutoModelForCausalLM.from_pretrained(name, dtype=dtype))


def test_uri_selects_revision_and_folder(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    tied = files_of(models["org/tied"])
    hub.commit("org/one", {f"sub/{name}": data for name, data in tied.items()} | tied, branch="next")
    true = AutoModelForCausalLM.from_pretrained("org/tied")
    for name in ("org/one@next", "hf://org/one@next", "hf://org/one@next/sub"):
        assert_same_model(from_pretrained(AutoModelForCausalLM, name), true)
    for name, options, what in [
        ("hf://org/one@next", {"revision": "main"}, "revision= differs"),
        ("hf://org/one/sub/model.safetensors", {}, "a folder, not a file"),
        ("hf://datasets/org/one", {}, "a dataset is not a model"),
    ]:
        with pytest.raises(ConfigError, match=what):
            from_pretrained(AutoModelForCausalLM, name, **options)


def test_cached_files_are_not_downloaded_again(hub: HuggingFaceServer) -> None:
    true = AutoModelForCausalLM.from_pretrained("org/sharded")
    num_bytes = hub.storage.num_bytes_sent
    with patched_libraries() as report:
        assert_same_model(AutoModelForCausalLM.from_pretrained("org/sharded"), true)
    assert not report.streamed and len(report.local) > 1
    assert hub.storage.num_bytes_sent == num_bytes


def test_patches_are_undone_after_with_block(hub: HuggingFaceServer) -> None:
    stock = (huggingface_hub.hf_hub_download, transformers.modeling_utils.safe_open, load_file)
    with pytest.raises(RuntimeError, match="mine"), patched_libraries():
        assert huggingface_hub.hf_hub_download is not stock[0]
        assert transformers.modeling_utils.safe_open is not stock[1]
        with patched_libraries():
            pass
        assert transformers.utils.hub.hf_hub_download is huggingface_hub.hf_hub_download is not stock[0]
        raise RuntimeError("mine")
    assert (huggingface_hub.hf_hub_download, transformers.modeling_utils.safe_open, load_file) == stock
    assert safetensors.safe_open is stock[1] and transformers.utils.hub.hf_hub_download is stock[0]


def test_placeholder_file_is_invalid_outside_with_block(hub: HuggingFaceServer) -> None:
    with patched_libraries():
        path = huggingface_hub.hf_hub_download("org/one", "model.safetensors")
        assert os.path.getsize(path) < 4096
    assert not os.path.exists(path)
    with patched_libraries():
        path = huggingface_hub.hf_hub_download("org/one", "model.safetensors")
        data = Path(path).read_bytes()
        with pytest.raises(SafetensorError):
            safetensors.torch.load(data)


def test_patches_in_concurrent_threads_are_independent(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    # Load one at a time, because transformers sets torch's default dtype and its tying of weights for all threads.
    both, one_at_a_time, results = threading.Barrier(2), threading.Lock(), {}

    def load(name: str) -> None:
        with patched_libraries() as report:
            both.wait(30)
            with one_at_a_time:
                results[name] = AutoModelForCausalLM.from_pretrained(name), report
            both.wait(30)

    threads = [threading.Thread(target=load, args=(name,)) for name in ("org/one", "org/tied")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, (model, report) in results.items():
        assert_same_model(model, AutoModelForCausalLM.from_pretrained(models[name]))
        assert {uri.partition("@")[0] for uri in report.streamed} == {f"hf://{name}"}


def test_streamed_files_can_be_verified(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    with patched_libraries(verify=True) as report:
        mine = AutoModelForCausalLM.from_pretrained("org/sharded")
    assert_same_model(mine, AutoModelForCausalLM.from_pretrained(models["org/sharded"]))
    assert all(file.is_verified for file in report.files) and "verified" in str(report)


def test_content_differing_from_hub_is_refused(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    shard = sorted(models["org/sharded"].glob("*.safetensors"))[1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    hub.storage.replace(hashlib.sha256(shard.read_bytes()).hexdigest(), bytes(data))
    with pytest.raises(IntegrityError, match=shard.name), patched_libraries(verify=True):
        AutoModelForCausalLM.from_pretrained("org/sharded")


def test_gated_repository_raises_permission_denied(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(models, tmp_path / "hf", monkeypatch, token="secret", gated=("org/one",)):
        with pytest.raises(PermissionDenied, match=r"org/one.*config\.json") as caught, patched_libraries():
            AutoModelForCausalLM.from_pretrained("org/one")
        assert isinstance(caught.value, OSError), "what transformers raises"
        with patched_libraries():
            mine = AutoModelForCausalLM.from_pretrained("org/one", token="secret")
    assert_same_model(mine, AutoModelForCausalLM.from_pretrained(models["org/one"]))


def test_missing_shard_error_contains_file_name(models: dict[str, Path], hub: HuggingFaceServer) -> None:
    files = files_of(models["org/sharded"])
    missing = sorted(name for name in files if name.endswith(".safetensors"))[1]
    del files[missing]
    commit = hub.commit("org/sharded", files)
    with pytest.raises(OSError, match=missing), patched_libraries():
        AutoModelForCausalLM.from_pretrained("org/sharded", revision=commit)


def test_load_never_mixes_revisions_if_branch_moves(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    with patched_libraries() as report:
        path = huggingface_hub.snapshot_download("org/one", allow_patterns=["*.safetensors"])
        hub.commit("org/one", files_of(models["org/tied"]))
        mine, true = load_file(Path(path, "model.safetensors")), load_file(models["org/one"] / "model.safetensors")
        assert mine.keys() == true.keys()
    assert len({uri.partition("@")[2][:40] for uri in report.streamed}) == 1


def test_expired_links_are_renewed(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_RETRIES", "1")
    with serving(models, tmp_path / "hf", monkeypatch, signed_s=0.2) as hub:
        with patched_libraries():
            mine = AutoModelForCausalLM.from_pretrained("org/sharded")
        assert_same_model(mine, AutoModelForCausalLM.from_pretrained(models["org/sharded"]))
        # The URL is expired from the start, and so is every renewal.
        use_cache(tmp_path / "other", monkeypatch)
        hub.signed_s = -10
        with pytest.raises(PenstockError, match="safetensors"), patched_libraries():
            AutoModelForCausalLM.from_pretrained("org/sharded")


def test_truncated_responses_raise_source_error(hub: HuggingFaceServer) -> None:
    hub.storage.faults = Faults(truncate_after=0)
    with pytest.raises(SourceError, match="safetensors"), patched_libraries():
        AutoModelForCausalLM.from_pretrained("org/one")


@pytest.mark.parametrize("dtype", ["no such dtype", {"": "float99"}])
def test_wrong_dtype_raises_same_error_as_transformers(dtype: Any, hub: HuggingFaceServer) -> None:
    raised = []
    for block in (patched_libraries(), contextlib.nullcontext()):
        with pytest.raises(Exception) as caught, block:
            AutoModelForCausalLM.from_pretrained("org/one", dtype=dtype)
        raised.append((type(caught.value), str(caught.value)))
    assert raised[0] == raised[1]


class _Bucket:
    """A storage that behaves like an object store."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}

    def open(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> MemorySource:
        return MemorySource(self.objects[uri], uri=uri)

    def list(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> list[str]:
        return sorted(filter(glob_pattern(uri).fullmatch, self.objects))

    def read_small(self, uri: str, *, settings: Settings, storage_options: Mapping[str, str]) -> bytes | None:
        return self.objects.get(uri)


def test_object_store_prefix_is_loaded(models: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    bucket = _Bucket()
    bucket.objects = {f"bucket://models/one/{name}": data for name, data in files_of(models["org/one"]).items()}
    monkeypatch.setitem(source._factories, "bucket", lambda: bucket)
    with patched_libraries() as report:
        mine = AutoModelForCausalLM.from_pretrained(directory("bucket://models/one"))
    assert report.streamed == ["bucket://models/one/model.safetensors"]
    assert_same_model(mine, AutoModelForCausalLM.from_pretrained(models["org/one"]))
    with pytest.raises(ConfigError, match="inside patched_libraries"):
        directory("bucket://models/one")


def test_placeholder_directory_for_url_is_loaded(models: dict[str, Path]) -> None:
    with RangeServer(models["org/sharded"]) as server, patched_libraries() as report:
        mine = AutoModelForCausalLM.from_pretrained(directory(server.url))
    assert len(report.streamed) > 1 and all(uri.startswith("http://") for uri in report.streamed)
    assert_same_model(mine, AutoModelForCausalLM.from_pretrained(models["org/sharded"]))


def test_repository_uri_is_loaded(hub: HuggingFaceServer, models: dict[str, Path]) -> None:
    with patched_libraries():
        mine = AutoModelForCausalLM.from_pretrained(directory("hf://org/sharded"))
    assert_same_model(mine, AutoModelForCausalLM.from_pretrained(models["org/sharded"]))


def test_documented_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    page = Path(__file__).parents[3] / "docs" / "serve" / "from-pretrained.md"
    example = page.read_text().partition("```python\n")[2].partition("```")[0]
    save_llama(tmp_path / "llama")
    monkeypatch.chdir(tmp_path)
    exec(example, {})
    assert "1 files read from disk" in capsys.readouterr().out
