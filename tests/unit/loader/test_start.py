"""The stream on which `load_in_background` works, with a fake GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from safetensors.torch import save_file

from penstock.loader import start
from penstock.loader.session import LoadSession, ReadOptions

CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)


def test_background_load_uses_cuda_stream_of_caller(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    streams: dict[int, str] = {threading.get_ident(): "the caller's"}

    def current_stream(device: torch.device) -> str:
        return streams.get(threading.get_ident(), "the default")

    @contextmanager
    def stream(entered: str) -> Iterator[None]:
        streams[threading.get_ident()] = entered
        yield
        del streams[threading.get_ident()]

    def open_for_cuda(uri: Any, options: ReadOptions, *args: Any) -> LoadSession:
        session = open_session(uri, options, *args)
        session.options = msgspec.structs.replace(options, device=CUDA)
        return session

    def on_cpu(session: LoadSession, *args: Any) -> int:
        used.append(current_stream(CUDA))
        session.options = msgspec.structs.replace(session.options, device=CPU)
        return fill(session, *args)

    used: list[str] = []
    open_session, fill = start.open_session, start.fill
    monkeypatch.setattr(start, "open_session", open_for_cuda)
    monkeypatch.setattr(start, "fill", on_cpu)
    monkeypatch.setattr(torch.cuda, "current_stream", current_stream)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    module = torch.nn.Linear(4, 4)
    save_file(dict(module.state_dict()), tmp_path / "model.safetensors")
    with start.load_in_background(module, str(tmp_path)) as loading:
        loading.wait()
    assert used == ["the caller's"]
