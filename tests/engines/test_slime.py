"""slime's updater sends versions from two trainer ranks, and engines receive them as SGLang's plug-in does.

slime is not on PyPI, and SGLang's server needs a GPU. The engine here therefore uses the plug-in's own receiver.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from penstock_sglang.plugin import SYNC

pytestmark = [
    pytest.mark.engines,
    pytest.mark.timeout(300),
    pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed"),
]

SHAPES = {"model.embed_tokens.weight": (9, 4), "model.layers.0.mlp.up_proj.weight": (5, 4), "model.norm.weight": (4,)}


def weights(version: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(version)
    return {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}


class TrainerRank:
    """A rank with half of the rows of each tensor."""

    def __init__(self, rank: int, engines: list[Any]) -> None:
        from examples.rl.slime_updater import PenstockUpdater

        from penstock import Shard

        self.rows = {name: slice(shape[0] * rank // 2, shape[0] * (rank + 1) // 2) for name, shape in SHAPES.items()}
        self.mine = {name: tensor[self.rows[name]].clone() for name, tensor in weights(-1).items()}
        shards = {
            name: Shard(
                tensor=tensor,
                global_shape=SHAPES[name],
                offset=(self.rows[name].start, *(0 for _ in SHAPES[name][1:])),
            )
            for name, tensor in self.mine.items()
        }
        args = SimpleNamespace(rank=rank, world_size=2)
        self.updater = PenstockUpdater(args, [], model_name="llama", shards=lambda args, model: shards)
        self.updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1], engine_gpu_offsets=[0])

    def update(self, version: int) -> int:
        for name, tensor in weights(version).items():
            self.mine[name].copy_(tensor[self.rows[name]])
        self.updater.update_weights()
        return self.updater.weight_version


class Engine:
    """The functions of an engine that slime calls. It receives with the function that SGLang's plug-in calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.state: dict[str, torch.Tensor] = {}
        self.version = ""

    def pause_generation(self) -> None:
        self.calls.append("pause")

    def flush_cache(self) -> None:
        self.calls.append("flush")

    def continue_generation(self) -> None:
        self.calls.append("continue")

    def update_weights_from_disk(self, model_path: str, weight_version: str) -> None:
        from penstock.config import ConnectionSettings
        from penstock.spi.version_receiver import VersionReceiver

        assert model_path.startswith(SYNC)
        name, _, version = model_path.removeprefix(SYNC).partition("/")
        self.calls.append("update")
        with VersionReceiver(name, connection=ConnectionSettings()) as receiver:
            self.state = {key: tensor.clone() for key, tensor in receiver.receive(int(version)).items()}
        self.version = weight_version

    def look(self) -> tuple[dict[str, torch.Tensor], str, list[str]]:
        return self.state, self.version, self.calls


@pytest.fixture
def cluster(runtime: str) -> Iterator[Any]:
    import ray

    names = {"PENSTOCK_RUNTIME_DIR": runtime, "PYTHONPATH": os.environ.get("PYTHONPATH", ""), "OMP_NUM_THREADS": "1"}
    ray.init(num_cpus=4, include_dashboard=False, runtime_env={"env_vars": names}, log_to_driver=False)
    yield ray
    ray.shutdown()


def test_engines_receive_weights_of_each_version(cluster: Any) -> None:
    engines = [cluster.remote(Engine).remote() for _ in range(2)]
    ranks = [cluster.remote(TrainerRank).remote(rank, engines) for rank in range(2)]
    for version in range(3):
        assert cluster.get([rank.update.remote(version) for rank in ranks]) == [version, version]
        for state, shown, calls in cluster.get([engine.look.remote() for engine in engines]):
            true = weights(version)
            assert state.keys() == true.keys()
            assert all(torch.equal(state[name], true[name]) for name in true)
            assert shown == str(version)
            assert calls == ["pause", "flush", "update", "continue"] * (version + 1)


def test_disk_transport_writes_manifest(tmp_path: Path) -> None:
    from examples.rl.slime_updater import write_manifest
    from safetensors.torch import save_file

    import penstock as ps

    save_file(weights(0), tmp_path / "model.safetensors")
    write_manifest(SimpleNamespace(), str(tmp_path), [])
    damaged = bytearray((tmp_path / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(damaged)
    with pytest.raises(ps.IntegrityError):
        ps.load(tmp_path)
    # A restarted trainer writes a version with the same number.
    write_manifest(SimpleNamespace(), str(tmp_path), [])
    assert ps.load(tmp_path).report.verified
