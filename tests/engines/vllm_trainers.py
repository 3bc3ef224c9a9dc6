"""Trainers that publish versions of a Llama, for the tests of vLLM's updates.

    python vllm_trainers.py module MODEL MODE [NAME]
    torchrun --nproc-per-node 2 vllm_trainers.py ranks MODEL MODE URL shards|gather

Each line of the standard input is a verb and a version. The trainer gives its model the weights of the version, sends
it, and prints the verb and the result. Models are on the GPU if there is one, also those of several ranks.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers

import penstock as ps

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def weights(directory: str | Path, version: int | None = None) -> Any:
    """Return the model with the weights of a version, on the CPU. None means the weights in the files."""
    model = transformers.LlamaForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if version is not None:
        change(model, version)
    return model


@torch.no_grad()
def change(model: Any, version: int) -> None:
    """Give a model the weights of a version. They are the same on every device."""
    torch.manual_seed(version)
    for parameter in model.parameters():
        parameter.copy_(torch.empty(parameter.shape).normal_(0, 0.3))


def publish(directory: str, mode: str, name: str = "policy") -> None:
    """Publish a model from one process."""
    from penstock.sync.local_version import LocalVersion

    model = weights(directory, 0).to(DEVICE)
    with ps.publisher(name, model, mode=mode, connection=ps.ConnectionSettings(stall_s=10.0)) as publisher:
        print("LATEST", publisher.latest, flush=True)
        for line in sys.stdin:
            verb, version = line.split()
            if verb == "die":  # when a receiver has read, and asks what it should have read
                LocalVersion.digests = lambda *_, **__: os.kill(os.getpid(), signal.SIGKILL)
            change(model, int(version))
            print(verb, publisher.publish(int(version)).summary(), flush=True)


def exported(model: Any) -> Any:
    """Return a source as of a framework's exporter in vLLM 0.32. It gives whole tensors, and has no module."""
    from vllm.distributed.weight_transfer.base import ModuleSource, WeightSource

    class Export(WeightSource):  # type: ignore[misc]
        def __init__(self, model: Any) -> None:
            self._held = ModuleSource(model)

        def metadata(self) -> Any:
            return self._held.metadata()

        def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
            return iter(self._held)

    return Export(model)


def send(directory: str, mode: str, url: str, gather: str) -> None:
    """Send the FSDP2 shards of several ranks through vLLM's interface for trainers."""
    import torch.distributed as dist
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import distribute_tensor
    from vllm.distributed.weight_transfer import WeightTransferTrainerFactory
    from vllm.distributed.weight_transfer.base import ModuleSource
    from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

    from penstock_vllm.trainer import PenstockTrainerInitInfo

    if DEVICE == "cuda":
        torch.cuda.set_device(0)
    # NCCL refuses two ranks on one GPU.
    dist.init_process_group("gloo")
    rank, whole = dist.get_rank(), weights(directory, 0).to(DEVICE)
    model = weights(directory, 0).to(DEVICE)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    info = PenstockTrainerInitInfo(
        name=f"sharded-{mode}-{gather}", rank=rank, world_size=2, mode=mode, gather=gather == "gather", stall_s=10.0
    )
    source = exported(model) if gather == "gather" else ModuleSource(model)
    engine = WeightTransferTrainerFactory.trainer_init(info, client=HTTPVLLMWeightSyncClient(url), source=source)
    while True:
        words = [sys.stdin.readline().split() if rank == 0 else None]
        dist.broadcast_object_list(words)
        if not words[0]:
            break
        verb, version = words[0][0], int(words[0][1])
        change(whole, version)
        with torch.no_grad():
            for mine, new in zip(model.parameters(), whole.parameters(), strict=True):
                # Every rank has the whole tensor, so no rank sends it.
                mine.copy_(distribute_tensor(new, mine.device_mesh, mine.placements, src_data_rank=None))
        said = "sent"
        try:
            engine.stage(version) if verb == "stage" else engine.send_weights(version)
        except (ps.PenstockError, OSError) as error:
            said = f"{type(error).__name__} {error} {getattr(error, '__notes__', [])}".replace("\n", " ")
        if rank == 0:
            print(verb, version, said, flush=True)
    engine.shutdown()
    dist.destroy_process_group()


if __name__ == "__main__":
    what, *arguments = sys.argv[1:]
    (publish if what == "module" else send)(*arguments)
