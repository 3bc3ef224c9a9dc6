"""Nested `patched_libraries()` blocks, with their tokens and directories, in threads, contexts and processes."""

from __future__ import annotations

import contextvars
import os
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import huggingface_hub
import numpy
import pytest
import safetensors
import torch
from safetensors.torch import load_file, save
from tests.support.hugging_face import files_of, use_cache, use_hub
from tests.support.servers.hugging_face import HuggingFaceServer, _Handler

from penstock.errors import NotFound
from penstock_hf.patched_libraries import context, patched_libraries

WEIGHTS = save({"weight": torch.arange(1000.0)})
FILES = {"config.json": b"{}", "model.safetensors": WEIGHTS, "sub/config.json": b"{}"}


@pytest.fixture
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[HuggingFaceServer]:
    repositories = {"org/open": FILES, "org/private": FILES}
    with HuggingFaceServer(repositories, token="secret", private=("org/private",)) as server:
        use_hub(server.url, monkeypatch)
        use_cache(tmp_path / "cache", monkeypatch)
        yield server


def download(name: str = "org/open", **options: object) -> str:
    return huggingface_hub.hf_hub_download(name, "model.safetensors", **options)


def test_call_without_token_sends_no_authorization_header(
    hub: HuggingFaceServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret")
    sent = []
    answer = _Handler._answer
    monkeypatch.setattr(_Handler, "_answer", lambda self: (sent.append(self.headers["Authorization"]), answer(self)))
    with patched_libraries():
        load_file(download(token=False))
        assert len(sent) >= 3 and set(sent) == {None}
        load_file(download("org/private"))
        assert sent[-1] == "Bearer secret"


def test_token_is_sent_only_inside_with_block(hub: HuggingFaceServer) -> None:
    with patched_libraries():
        with patched_libraries(storage_options={"token": "secret"}):
            assert load_file(download("org/private"))["weight"][-1] == 999
            copied = contextvars.copy_context()
        # A task that starts in the block continues with a copy of the context.
        with pytest.raises(huggingface_hub.errors.RepositoryNotFoundError):
            copied.run(download, "org/private")


def test_patches_are_undone_from_different_context_variables(hub: HuggingFaceServer) -> None:
    stock = huggingface_hub.hf_hub_download
    block = patched_libraries()
    contextvars.copy_context().run(block.__enter__)
    assert huggingface_hub.hf_hub_download is not stock
    block.__exit__(None, None, None)
    assert huggingface_hub.hf_hub_download is stock and not context._blocks


def test_forked_child_does_not_delete_parent_files(hub: HuggingFaceServer) -> None:
    with patched_libraries():
        path = download()
        child = os.fork()
        if not child:
            try:
                context._leave(context._current.get())
            finally:
                os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        assert load_file(path)["weight"][-1] == 999


def test_model_loads_from_cache_with_long_path(
    hub: HuggingFaceServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    use_cache(tmp_path.joinpath(*["x" * 100] * 3), monkeypatch)
    with patched_libraries():
        assert load_file(download())["weight"][-1] == 999


def test_verified_tensor_supports_slicing(hub: HuggingFaceServer) -> None:
    with patched_libraries(verify=True), safetensors.safe_open(download(), "pt") as file:
        part = file.get_slice("weight")
        assert [part[:10].sum(), part[990:].sum()] == [45, 9945]
        part[:10].zero_()
        assert torch.equal(file.get_tensor("weight"), torch.arange(1000.0))


def test_verified_file_returns_numpy_arrays(hub: HuggingFaceServer) -> None:
    with patched_libraries(verify=True), safetensors.safe_open(download(), "np") as file:
        assert isinstance(file.get_tensor("weight"), numpy.ndarray)


def test_error_cause_chain_has_no_cycle() -> None:
    with pytest.raises(NotFound) as raised, patched_libraries():
        try:
            raise NotFound("no such file")
        except NotFound as error:
            raise OSError("cannot load the model") from error
    chain: list[BaseException | None] = [raised.value]
    while chain[-1] is not None and chain[-1] not in chain[:-1]:
        chain.append(chain[-1].__cause__)
    assert [type(error) for error in chain] == [NotFound, OSError, NotFound, type(None)]


def test_nested_with_blocks_share_directory_per_commit(hub: HuggingFaceServer) -> None:
    def load() -> Path:
        directory = Path(huggingface_hub.snapshot_download("org/open"))
        assert load_file(directory / "model.safetensors")["weight"][-1] == 999
        return directory

    with patched_libraries():
        first = load()
        with patched_libraries():
            assert load() == first
        # The inner block's end leaves the outer block's pointer.
        assert load() == first
    # Tokenizers read their files again when they are saved.
    assert sorted(files_of(first)) == ["config.json", "sub/config.json"]
    with patched_libraries():
        assert load() == first
        path = Path(download("org/open", revision=hub.commit("org/open", FILES, branch="next")))
        assert path.is_file()
    assert not path.parent.exists()
    assert sorted(files_of(first)) == ["config.json", "sub/config.json"]


def test_concurrent_threads_download_complete_repository(hub: HuggingFaceServer) -> None:
    start = threading.Barrier(8)

    def whole(_: int) -> dict[str, bytes]:
        start.wait()
        directory = Path(huggingface_hub.snapshot_download("org/open"))
        assert load_file(directory / "model.safetensors")["weight"][-1] == 999
        return files_of(directory)

    with patched_libraries(), ThreadPoolExecutor(8) as pool:
        for files in pool.map(whole, range(8)):
            assert sorted(files) == sorted(FILES)
