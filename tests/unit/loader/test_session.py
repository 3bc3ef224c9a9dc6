"""The intake of a load: its staging is given back also where the system allows no more threads."""

from __future__ import annotations

import threading

import pytest
import torch

from penstock.config import Settings
from penstock.loader.session import Intake


class Registrar:
    """Notes what is pinned."""

    def __init__(self) -> None:
        self.pinned: set[int] = set()

    def register(self, address: int, nbytes: int) -> None:
        self.pinned.add(address)

    def unregister(self, address: int) -> None:
        self.pinned.remove(address)


@pytest.mark.parametrize("has_threads", [True, False])
def test_closing_unpins_the_staging(monkeypatch: pytest.MonkeyPatch, has_threads: bool) -> None:
    registrar = Registrar()
    intake = Intake(Settings.read(), torch.device("cpu"))
    pool = intake.open_pool(registrar)
    pool.release(pool.acquire(stall_s=1))
    assert len(registrar.pinned) == 1

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", refuse)
    intake.close()
    for thread in threading.enumerate():
        if thread.name == "penstock-unpin":
            thread.join(5)
    assert registrar.pinned == set()
