"""Launches of Triton kernels, as far as no device is needed; copies of compiled ones are tested in `tests/gpu`."""

from __future__ import annotations

import sys

import pytest

pytest.importorskip("torch")

import torch

from penstock.cuda.kernel_cache import launch
from penstock.errors import MissingExtra


def test_no_program_is_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    launch("penstock.cuda.pack_triton", "copy_tiles", 0, (torch.zeros(1),), {})


def test_who_has_no_triton_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, "penstock.cuda.pack_triton", raising=False)
    with pytest.raises(MissingExtra, match="need Triton"):
        launch("penstock.cuda.pack_triton", "copy_tiles", 1, (torch.zeros(1),), {})
