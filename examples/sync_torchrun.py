"""A transformers model trains with FSDP2, and the same model serves with tensor parallelism, step after step.

    torchrun --nproc-per-node 4 examples/sync_torchrun.py

The first half of the ranks trains, and each rank publishes its shards. The second half serves, and each rank reads the
slices that it computes with. After every step, the logits are compared bit for bit with those of weights that were
gathered and broadcast the usual way. The two halves share a process group only for this comparison.
"""

from __future__ import annotations

import os
import subprocess
import sys
from datetime import timedelta

import penstock as ps

try:
    import torch
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor import DTensor, distribute_tensor
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("skipped: this example needs transformers (pip install transformers)")
    sys.exit(0)

RANKS, STEPS, BATCH = 4, 3, (4, 16)
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)
COLUMNS = "self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj"
ROWS = "self_attn.o_proj", "mlp.down_proj"


def train(model: LlamaForCausalLM, mesh: DeviceMesh, device: torch.device) -> None:
    for layer in model.model.layers:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    torch.manual_seed(dist.get_rank())  # each trainer rank has a separate part of the data
    with ps.publisher("policy", model, mode="live", rank=(mesh.get_local_rank(), mesh.size())) as publisher:
        publisher.wait_subscribers(dist.get_world_size() - mesh.size(), timeout_s=60)
        for step in range(1, STEPS + 1):
            tokens = torch.randint(0, CONFIG.vocab_size, BATCH, device=device)
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            report = publisher.publish(step)  # receivers read the shards directly, and have them when this returns
            for param in model.parameters():
                assert isinstance(param, DTensor)
                dist.broadcast(param.full_tensor(), src=0)
            if dist.get_rank() == 0:
                print(f"step {step}: loss {loss.item():.3f}; {report.summary()}", flush=True)


def serve(model: LlamaForCausalLM, mesh: DeviceMesh, device: torch.device) -> None:
    served, reference = parallel(model, mesh), parallel(LlamaForCausalLM(CONFIG).to(device), mesh)
    tokens = torch.arange(BATCH[0] * BATCH[1], device=device).reshape(BATCH) % CONFIG.vocab_size
    before = logits(served, tokens)
    with ps.subscriber(
        "policy", dict(served.named_parameters()), rank=(mesh.get_local_rank(), mesh.size())
    ) as subscriber:
        for step in range(1, STEPS + 1):
            subscriber.wait(step, timeout_s=60)
            report = subscriber.update(step)
            gather(reference, device)
            made, true = logits(served, tokens), logits(reference, tokens)
            assert torch.equal(made, true) and not torch.equal(made, before)
            before = made
            print(f"rank {dist.get_rank()}: logits equal to the reference's; {report.summary()}", flush=True)


def parallel(model: LlamaForCausalLM, mesh: DeviceMesh) -> LlamaForCausalLM:
    """Shard the model for tensor parallelism. Each rank has some heads and a part of the intermediate size."""
    plan = {f"model.layers.*.{name}": ColwiseParallel() for name in COLUMNS}
    plan |= {f"model.layers.*.{name}": RowwiseParallel() for name in ROWS}
    parallelize_module(model, mesh, plan)
    return model.eval()


def gather(model: LlamaForCausalLM, device: torch.device) -> None:
    """Broadcast the trainer's whole weights. Each rank keeps its slices."""
    with torch.no_grad():
        for param in model.parameters():
            whole = torch.empty(param.shape, dtype=param.dtype, device=device)
            dist.broadcast(whole, src=0)
            if isinstance(param, DTensor):
                whole = distribute_tensor(whole, param.device_mesh, param.placements, src_data_rank=None)
            param.copy_(whole)


def logits(model: LlamaForCausalLM, tokens: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        found = model(input_ids=tokens).logits
    assert isinstance(found, torch.Tensor)
    return found


def main() -> None:
    on_gpus = torch.cuda.device_count() >= int(os.environ["LOCAL_WORLD_SIZE"])
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpus else torch.device("cpu")
    if on_gpus:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpus else "gloo", timeout=timedelta(seconds=90))
    half = dist.get_world_size() // 2
    halves = [dist.new_group(list(range(start, start + half))) for start in (0, half)]
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG).to(device)
    is_trainer = dist.get_rank() < half
    mesh = DeviceMesh.from_group(halves[0 if is_trainer else 1], device.type)
    (train if is_trainer else serve)(model, mesh, device)
    dist.destroy_process_group()


if __name__ == "__main__":
    if "LOCAL_RANK" in os.environ:
        main()
    else:  # started without torchrun, so start it
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={RANKS}"]
        sys.exit(subprocess.run([*command, *sys.argv], check=False, timeout=140).returncode)
