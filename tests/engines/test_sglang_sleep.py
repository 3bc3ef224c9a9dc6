"""Weights are back before SGLang's scheduler continues: because they were kept, sent in between, or read again."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.engines.sglang_loads import environment
from tests.support.sources import source_path

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(600),
    pytest.mark.skipif(importlib.util.find_spec("sglang") is None, reason="SGLang is not installed"),
]

ROOT = Path(__file__).parents[2]


def test_waking_restores_weights_or_exits_scheduler(
    llama: Path, make_llama: Callable[..., Path], tmp_path: Path
) -> None:
    other = make_llama(tmp_path / "other", seed=5)
    environ = {**os.environ, **environment(tmp_path, "http://127.0.0.1:9"), "PYTHONPATH": f"{ROOT}:{source_path()}"}
    program = Path(__file__).with_name("sglang_sleeps.py")
    done = subprocess.run(
        [sys.executable, str(program), str(llama), str(other), str(tmp_path / "gone")],
        env=environ,
        capture_output=True,
        text=True,
        timeout=500,
        cwd=ROOT,
    )
    said = [line for line in done.stdout.splitlines() if line.split(" ")[0].isupper()]
    assert said == [
        "BACK True",
        "KEPT True",
        "BETWEEN False True",
        "SENT True False",
        "BEFORE THE LAST TAG False",
        "BACK True",
        "CACHE True",
        "GONE SourceUnavailable",
    ], done.stdout[-2000:] + done.stderr[-4000:]
