"""Every rank of a torchrun job fetches the same weights, and together they read storage only once, in parts.

    torchrun --nproc-per-node 4 examples/fetch_torchrun.py [CHECKPOINT]

A rank that starts late or again joins the running fleet. The fleet is independent of the process group, which here
only tells every rank the checkpoint's path and compares the results. On several hosts, pass a `ConnectionSettings` with
`hub` and `listen` to `join`.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from datetime import timedelta

import torch
import torch.distributed as dist
from blake3 import blake3

import penstock as ps
from penstock.testing.checkpoints import write_llama

RANKS = 2


def main() -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, local_rank = dist.get_rank(), int(os.environ["LOCAL_RANK"])
    device = f"cuda:{local_rank}" if torch.cuda.is_available() else "cpu"
    with tempfile.TemporaryDirectory() as directory:
        chosen = [sys.argv[1] if len(sys.argv) > 1 else directory]
        if rank == 0 and chosen[0] == directory:
            write_llama(directory, total_bytes=128 << 20, shards=2)
        dist.broadcast_object_list(chosen, src=0)

        weights: dict[str, torch.Tensor] = {}
        with ps.join("torchrun-example") as fleet:
            report = fleet.fetch(weights, fallback=chosen[0], device=device)
            # Leave together, because others may still read from this rank. A rank that is gone only costs a retry.
            dist.barrier()

        mine = torch.tensor([report.nbytes, report.storage_bytes])
        total = mine.clone()
        dist.all_reduce(total)
        digests: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(digests, digest(weights))
    print(f"rank {rank}: {report.summary()}", flush=True)
    assert len(set(digests)) == 1, digests
    if rank == 0:
        read = int(total[1]) / report.nbytes
        print(
            f"all {dist.get_world_size()} ranks have equal bits; storage was read {read:.2f} times in all", flush=True
        )
    dist.destroy_process_group()


def digest(weights: dict[str, torch.Tensor]) -> str:
    found = blake3()
    for name in sorted(weights):
        found.update(name.encode())
        found.update(weights[name].cpu().contiguous().view(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main()
    else:  # started without torchrun, so start it
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        sys.exit(subprocess.run([*command, *sys.argv], check=False, timeout=140).returncode)
