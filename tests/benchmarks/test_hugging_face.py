"""The kinds of run of `benchmarks/bench_hugging_face.py`, against a small repository, in this process."""

from __future__ import annotations

import json

import pytest
from huggingface_hub import constants
from tests.integration.hugging_face.test_hugging_face import hub, sharded
from tests.support.servers.hugging_face import HuggingFaceServer

from benchmarks import bench_hugging_face

__all__ = ["hub"]


@pytest.mark.parametrize("kinds", [("stock", "penstock"), ("stock fills", "penstock fills")])
def test_penstock_and_stock_loader_read_equal_bytes(
    hub: HuggingFaceServer,
    kinds: tuple[str, str],
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    hub.commit("org/model", sharded())
    # The library reads it once, at its import.
    for name in ("HUGGINGFACE_CO_URL_TEMPLATE", "ENDPOINT"):
        monkeypatch.setattr(constants, name, getattr(constants, name).replace(constants.ENDPOINT, hub.url))
    answers = []
    for kind in kinds:
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path_factory.mktemp("cache")))
        bench_hugging_face.run(kind)
        answers.append(json.loads(capfd.readouterr().out.splitlines()[-1]))
    assert answers[0]["total"] == answers[1]["total"] > 0
