"""If one of an engine's workers fails, all workers raise the reason, over vLLM's own groups."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from tests.support.ports import free_ports

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(400),
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed"),
]

WORKER = """
import json, sys

from vllm.config import VllmConfig, set_current_vllm_config
from vllm.distributed import init_distributed_environment, initialize_model_parallel

from penstock.errors import PenstockError, SourceStalled
from penstock_vllm.weight_transfer import _agreed, _all

if __name__ == "__main__":
    rank, port, tp, pp = map(int, sys.argv[1:])
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(tp * pp, rank, f"tcp://127.0.0.1:{port}", rank, backend="gloo")
        initialize_model_parallel(tp, pp)
    said = [_all(True), _all(rank == 1)]
    with _agreed():
        pass
    try:
        with _agreed():
            if rank == 1:
                raise SourceStalled("no byte came " + 2000 * "\\u00fc")
    except PenstockError as error:
        said.append(f"{type(error).__name__} {error.message[:40]}")
    with _agreed():  # in step again
        said.append("done")
    print(json.dumps(said))
"""


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_failure_on_one_rank_raises_on_all_ranks(tp: int, pp: int, tmp_path: Path) -> None:
    script = tmp_path / "worker.py"
    script.write_text(WORKER)
    (port,) = free_ports(1)
    environ = {**os.environ, "VLLM_LOGGING_LEVEL": "ERROR", "VLLM_CACHE_ROOT": str(tmp_path / "cache")}
    workers = [
        subprocess.Popen(
            [sys.executable, str(script), str(rank), str(port), str(tp), str(pp)],
            env=environ,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        answers = [worker.communicate(timeout=300) for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.communicate()
    first, second = (json.loads(out.splitlines()[-1]) if out else pytest.fail(err[-4000:]) for out, err in answers)
    assert first == [True, False, "PeerLost worker 1: no byte came üüüüüüüüüüüüüüüüü", "done"]
    assert second == [True, False, "SourceStalled no byte came üüüüüüüüüüüüüüüüüüüüüüüüüüü", "done"]
