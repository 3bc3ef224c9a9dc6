"""A Hugging Face hub on loopback with models that a test saved, for libraries that use huggingface_hub here."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from huggingface_hub import constants, hf_api
from tests.support.servers.hugging_face import HuggingFaceServer


def files_of(directory: Path) -> dict[str, bytes]:
    """Return the files of a directory by their relative names."""
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@contextmanager
def serving(
    repositories: Mapping[str, Path], cache: Path, monkeypatch: pytest.MonkeyPatch, **options: object
) -> Iterator[HuggingFaceServer]:
    """Serve directories as repositories. Make huggingface_hub use this hub and an empty cache in `cache`."""
    content = {name: files_of(directory) for name, directory in repositories.items()}
    with HuggingFaceServer(content, **options) as server:
        use_hub(server.url, monkeypatch)
        use_cache(cache, monkeypatch)
        yield server


def use_hub(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub use the hub at `url`, as if HF_ENDPOINT had been set from the start."""
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_TELEMETRY", True)
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
    # Its functions for models and files are methods of one object, which keeps the endpoint from the import.
    monkeypatch.setattr(hf_api.api, "endpoint", url)
    # The object in transformers, created at its first use, also keeps the endpoint.
    monkeypatch.setattr("transformers.utils.hub._hf_api", None)
    # Each test has its own storage, because it caches the listings of commits.
    monkeypatch.setattr("penstock.storage.source._storages", {})


def use_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Make huggingface_hub keep files in `cache`."""
    monkeypatch.setattr(constants, "HF_HOME", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache / "hub"))


def assert_same_model(mine: torch.nn.Module, true: torch.nn.Module) -> None:
    """Compare all parameters, buffers and ties."""
    ours, theirs = mine.state_dict(), true.state_dict()
    assert list(ours) == list(theirs)
    for name, tensor in theirs.items():
        assert ours[name].dtype == tensor.dtype, name
        assert torch.equal(ours[name], tensor), name
    for model in (mine, true):
        for name, buffer in model.named_buffers():
            assert torch.equal(buffer, dict(true.named_buffers())[name]), name
    assert [len(list(m.parameters())) for m in (mine, true)] == [len(list(true.parameters()))] * 2
