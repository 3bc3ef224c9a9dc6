"""GRPO of a tiny language model with FSDP2 ranks. A vLLM server samples, and Penstock sends it every step's weights.

    torchrun --nproc-per-node 2 examples/rl/torchrun_grpo.py --url http://127.0.0.1:8000 --work DIRECTORY

`run.py torchrun_grpo` starts the server and these ranks. Every rank trains on its part of the samples and publishes its
shards of the weights. Only the first rank talks to the server. For each step it prints a line for `run.py`, which
compares the server's log-probabilities for its samples with those of the weights that it should have.

A checkpoint is saved after every step. If a rank dies, start any number of ranks again, and they continue from it. If
the server dies, start it again, and it has the newest version after one update.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import penstock as ps

try:
    import torch
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import save_file
    from torch.distributed.checkpoint.state_dict import (
        StateDictOptions,
        get_model_state_dict,
        get_state_dict,
        set_state_dict,
    )
    from torch.distributed.fsdp import fully_shard
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError:
    print("skipped: this example needs transformers (pip install transformers)")
    sys.exit(0)

from vllm_routes import GONE, Client

from penstock_dcp import CheckpointReader, CheckpointWriter

CONFIG = LlamaConfig.from_pretrained(Path(__file__).with_name("tiny_llama"))
"""Sizes of a model with two layers. Its heads have 32 elements, because vLLM on a CPU supports no smaller ones."""

PROMPTS, GROUP, PROMPT_TOKENS, NEW_TOKENS = 16, 8, 4, 8
EPOCHS, CLIP, LEARNING_RATE = 2, 0.2, 3e-3

ROUNDING = 2 * CONFIG.hidden_size * torch.finfo(torch.float32).eps
"""Largest difference of two log-probabilities, per unit of the largest logit. A logit is a sum of `hidden_size`
products, which the two sides add in different orders. Each addition rounds by at most half an eps of the sum, so two
logits differ by at most `hidden_size` eps. A log-probability is a logit minus the logarithm of a sum, so it doubles."""

ENGINE_START_S = 500.0
"""A vLLM server starts in 20 s on two idle cores, and in minutes on busy ones."""


# -- GRPO


def prompts_of(step: int) -> torch.Tensor:
    """Return the prompts of a step, [PROMPTS, PROMPT_TOKENS]. They are the same if the step is repeated."""
    return torch.randint(0, CONFIG.vocab_size, (PROMPTS, PROMPT_TOKENS), generator=torch.Generator().manual_seed(step))


def reward_of(task: str, prompts: torch.Tensor, completions: torch.Tensor) -> torch.Tensor:
    wanted = prompts[:, -1:] % 2 if task == "parity" else 0
    return (completions % 2 == wanted).float().mean(1)


def advantages_of(rewards: torch.Tensor) -> torch.Tensor:
    """Compare each completion with the others for the same prompt."""
    groups = rewards.view(-1, GROUP)
    spread = groups.std(1, keepdim=True) + 1e-4
    return ((groups - groups.mean(1, keepdim=True)) / spread).view(-1, 1)


def logprobs_of(model: Any, prompts: torch.Tensor, completions: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the log-probabilities of the completions' tokens, and the largest logit."""
    logits = model(input_ids=torch.cat([prompts, completions], 1)).logits[:, PROMPT_TOKENS - 1 : -1]
    return logits.log_softmax(-1).gather(2, completions[..., None])[..., 0], logits.detach().abs().max()


def grpo(model: Any, optimizer: Any, prompts: Any, completions: Any, served: Any, advantages: Any) -> dict[str, float]:
    """Train on one batch. Compare the server's log-probabilities with those of the weights before the training."""
    first = None
    for _ in range(EPOCHS):
        logprobs, largest = logprobs_of(model, prompts, completions)
        if first is None:
            first, bound = logprobs.detach(), ROUNDING * largest
        ratio = (logprobs - served).exp()
        loss = -torch.min(ratio * advantages, ratio.clamp(1 - CLIP, 1 + CLIP) * advantages).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    facts = torch.stack([(first - served).abs().max(), bound, (logprobs.detach() - first).abs().max()])
    dist.all_reduce(facts, dist.ReduceOp.MAX)
    return dict(zip(("difference", "bound", "moved"), facts.tolist(), strict=True))


# -- the server, as the first rank sees it


class Rollouts:
    """Samples and updates of a server. If the server is killed and restarted, it gets the newest weights again."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._load: Callable[[], float] = lambda: 0.0
        self._newest = ""

    def join(self) -> None:
        """Wait for the server, and make it subscribe if it has not."""
        self._client.wait_up(ENGINE_START_S)
        if self._client.weight_version() == "default":
            self._client.subscribe()

    def serve(self, version: int, load: Callable[[], float]) -> float:
        """Make the server serve new weights. `load` does so, and returns the seconds of the pause."""
        self._load, self._newest = load, str(version)
        return self._insist(load)

    def sample(self, prompts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        tokens, logprobs = self._insist(lambda: self._client.sample(prompts.tolist(), NEW_TOKENS))
        return torch.tensor(tokens), torch.tensor(logprobs)

    def _insist(self, work: Callable[[], Any]) -> Any:
        while True:
            try:
                return work()
            except GONE:
                self.join()
                self._load()
                say(event="engine is back", version=self._client.weight_version(), newest=self._newest)


class Transfers:
    """Two ways to send a version to the server. All ranks call them."""

    def __init__(self, model: Any, files: Path, client: Client, rollouts: Rollouts) -> None:
        self._model, self._files, self._client, self._rollouts = model, files, client, rollouts
        self._publisher = ps.publisher("policy", model, mode="snapshot", connection=ps.ConnectionSettings(stall_s=30.0))
        self._is_first = dist.get_rank() == 0
        if self._is_first:
            self._publisher.wait_ranks()
        # A restarted trainer continues from the server's version number.
        newest = torch.tensor(self._publisher.latest)
        dist.broadcast(newest, 0)
        self._version = int(newest)

    def send(self, way: str) -> dict[str, Any]:
        """Make the server serve the current weights, and return the measurements."""
        began = time.perf_counter()
        self._version += 1
        load = self._publish() if way == "penstock" else self._save()
        waited_s = time.perf_counter() - began
        pause_s = self._rollouts.serve(self._version, load) if self._is_first else 0.0
        served_s = time.perf_counter() - began
        return {"version": self._version, "waited_s": waited_s, "served_s": served_s, "pause_s": pause_s}

    def _publish(self) -> Callable[[], float]:
        """Publish this rank's shards. The server may serve while it receives them, and pauses to install them."""
        version = self._version
        self._publisher.publish(version)

        def load() -> float:
            self._client.receive(version)
            return self._client.install(version)

        return load

    def _save(self) -> Callable[[], float]:
        """Gather the weights on the first rank, and write a checkpoint into memory, which vLLM reloads.

        vLLM's own weight transfers (NCCL, CUDA IPC) need GPUs, so this is the way for a CPU server without Penstock.
        """
        version = self._version
        whole = get_model_state_dict(self._model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self._is_first:
            self._files.mkdir(exist_ok=True)
            save_file({name: tensor.contiguous() for name, tensor in whole.items()}, self._files / "model.safetensors")
        return lambda: self._client.reload(self._files, version)

    def close(self) -> None:
        self._publisher.close()


# -- the ranks


def train(args: argparse.Namespace) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(seconds=2 * ENGINE_START_S))
    rank, world_size = dist.get_rank(), dist.get_world_size()
    write_line({"event": "rank", "rank": rank, "pid": os.getpid()})
    torch.manual_seed(0)
    model = LlamaForCausalLM(CONFIG)
    for layer in model.model.layers:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.Adam(model.parameters(), lr=LEARNING_RATE)
    checkpoint = args.work / "checkpoint"
    step = load_checkpoint(model, optimizer, checkpoint)

    client = Client(args.url, "policy")
    rollouts = Rollouts(client)
    if rank == 0:
        rollouts.join()
    # Publishers wait for each other only until their stall deadline, but a server may take longer to start.
    dist.barrier()
    transfers = Transfers(model, args.work / "files", client, rollouts)
    say(event="started", step=step, ranks=world_size, **transfers.send("penstock"))

    mine = slice(rank * PROMPTS * GROUP // world_size, (rank + 1) * PROMPTS * GROUP // world_size)
    while step < args.steps:
        began = time.perf_counter()
        step += 1
        prompts = prompts_of(step).repeat_interleave(GROUP, 0)
        completions = torch.empty(PROMPTS * GROUP, NEW_TOKENS, dtype=torch.long)
        served = torch.empty(PROMPTS * GROUP, NEW_TOKENS)
        if rank == 0:
            completions, served = rollouts.sample(prompts)
        dist.broadcast(completions, 0)
        dist.broadcast(served, 0)
        sampled = time.perf_counter()
        rewards = reward_of(args.task, prompts, completions)
        advantages = advantages_of(rewards)
        facts: dict[str, Any] = grpo(model, optimizer, prompts[mine], completions[mine], served[mine], advantages[mine])
        trained = time.perf_counter()
        way = ("penstock", "stock")[step % 2] if args.transfer == "alternate" else args.transfer
        facts |= transfers.send(way)
        # The step ends here. The rest may also run only every tenth step.
        facts |= {"sample_s": sampled - began, "train_s": trained - sampled, "step_s": time.perf_counter() - began}
        save_checkpoint(model, optimizer, checkpoint, step)
        say(step=step, way=way, reward=float(rewards.mean()), **facts)
    transfers.close()
    dist.destroy_process_group()


def say(**facts: Any) -> None:
    """Send a report to the process that started the ranks."""
    if dist.get_rank() == 0:
        write_line(facts | {"time": time.time()})


def write_line(facts: dict[str, Any]) -> None:
    """Write a line in one call. All ranks write to one pipe, and `print` writes the end of a line separately."""
    sys.stdout.write(json.dumps(facts) + "\n")
    sys.stdout.flush()


def save_checkpoint(model: Any, optimizer: Any, directory: Path, step: int) -> None:
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": step}
    dcp.save(state, storage_writer=CheckpointWriter(directory, replace=True))


def load_checkpoint(model: Any, optimizer: Any, directory: Path) -> int:
    """Return the number of finished steps. The checkpoint may come from another number of ranks."""
    if not directory.exists():
        return 0
    weights, states = get_state_dict(model, optimizer)
    state = {"model": weights, "optimizer": states, "step": 0}
    dcp.load(state, storage_reader=CheckpointReader(directory))
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return int(state["step"])


def arguments(description: str | None, checkpoints: str) -> argparse.Namespace:
    """Return the arguments for a trainer that `run.py` starts."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="of the server")
    parser.add_argument("--work", type=Path, default=Path("grpo"), help=f"the directory of the {checkpoints}")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--task", choices=["parity", "even"], default="parity")
    parser.add_argument("--transfer", choices=["penstock", "stock", "alternate"], default="penstock")
    parser.add_argument("--write", type=Path, metavar="DIRECTORY", help="only write a model of other random weights")
    return parser.parse_args()


def main() -> None:
    args = arguments(__doc__, "checkpoint")
    if args.write:
        torch.manual_seed(1)
        LlamaForCausalLM(CONFIG).save_pretrained(args.write)
    else:
        train(args)


if __name__ == "__main__":
    main()
