"""Trainer ranks that publish a LoRA adapter, and the process next to a vLLM server that loads it.

    torchrun --nproc-per-node 2 adapter_syncs.py serve MODEL URL
    torchrun --nproc-per-node 2 adapter_syncs.py merge MODEL
    python adapter_syncs.py llm MODEL OPTIONS

After each version, rank 0 compares the server's log-probabilities with those of a whole model, or the merged weights
with PEFT's own, and prints the differences.
"""

from __future__ import annotations

import copy
import json
import sys
import threading
import urllib.error
import urllib.request
from typing import Any

import peft
import torch
import torch.distributed as dist
import transformers
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from vllm.distributed.weight_transfer.clients import HTTPVLLMWeightSyncClient

import penstock as ps
from penstock_hf.lora_merge import merged_publisher
from penstock_hf.peft import adapter_publisher, adapter_tensors
from penstock_rl.lora_server import ServedAdapter, VllmEngine, VllmServer, serve_adapter

PROMPT = [1, *(4 + at % 27 for at in range(80))]
"""The prompt covers more than two blocks of the cache, so a wrong reuse of keys and values would be noticed."""
MODULES = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]
CONNECTION = ps.ConnectionSettings(stall_s=30.0)


def make(directory: str, rank: int = 8) -> Any:
    """Return the model with a new adapter."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    return peft.get_peft_model(model, peft.LoraConfig(r=rank, lora_alpha=16, target_modules=MODULES))


@torch.no_grad()
def fill(model: Any, version: int) -> None:
    """Give the adapter the values of a version, on this rank's shards."""
    torch.manual_seed(version)
    for tensor in adapter_tensors(model).values():
        whole = torch.randn(tensor.shape) * 0.2
        mesh = getattr(tensor, "device_mesh", None)
        tensor.copy_(whole if mesh is None else distribute_tensor(whole, mesh, tensor.placements))


def ask(url: str, model: str, prompt: list[int], num_tokens: int = 8) -> tuple[list[int], list[float]]:
    """Return the server's most likely tokens and their log-probabilities."""
    body = {"model": model, "prompt": prompt, "max_tokens": num_tokens, "temperature": 0, "logprobs": 0}
    request = urllib.request.Request(
        f"{url}/v1/completions",
        json.dumps(body | {"return_token_ids": True, "ignore_eos": True}).encode(),
        {"content-type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=120) as answer:
        choice = json.loads(answer.read())["choices"][0]
    return choice["token_ids"], choice["logprobs"]["token_logprobs"]


def difference(whole: Any, url: str, model: str, prompt: list[int] | None = None, num_tokens: int = 8) -> float:
    """Return the largest difference between the log-probabilities of the server's answer and those of `whole`."""
    prompt = PROMPT if prompt is None else prompt
    tokens, theirs = ask(url, model, prompt, num_tokens)
    return gap(whole, prompt, tokens, theirs)


def gap(whole: Any, prompt: list[int], tokens: list[int], theirs: list[float]) -> float:
    """Return the largest difference between the given log-probabilities of tokens and those of `whole`."""
    with torch.no_grad():
        logits = whole(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    mine = logits.float().log_softmax(-1).gather(1, torch.tensor(tokens)[:, None])[:, 0]
    return float((mine - torch.tensor(theirs)).abs().max())


def failure(served: ServedAdapter) -> str:
    """Return the error of an update as text."""
    try:
        served.update()
    except ps.PenstockError as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def say(**seen: Any) -> None:
    print(json.dumps(seen), flush=True)


def watch(directory: str, url: str, served: ServedAdapter, version: int) -> None:
    """Load a version, and compare the server's answers under each of its names."""
    whole, before, base = make(directory), make(directory), make(directory)
    fill(whole, version)
    fill(before, version - 1)
    running: list[float] = []
    if version > 1:
        # This long request runs on the previous version while the next one is loaded.
        other = [1, *(4 + at % 5 for at in range(40))]
        long = threading.Thread(target=lambda: running.append(difference(before, url, "policy", other, 60)))
        long.start()
    report = served.update(version)
    new = difference(whole, url, "policy")
    pinned = difference(whole, url, f"policy@{version}")
    if version > 1:
        long.join()
        running.append(difference(before, url, f"policy@{version - 1}"))
    with base.disable_adapter():
        plain = difference(base, url, directory)
    other_values = difference(before, url, "policy")
    say(
        version=version,
        nbytes=report.nbytes,
        new=new,
        pinned=pinned,
        before=max(running, default=0.0),
        base=plain,
        other=other_values,
    )


def sharded(directory: str) -> Any:
    """Return the model with an adapter, sharded over the ranks."""
    model = make(directory)
    for layer in model.base_model.model.model.layers:
        fully_shard(layer)
    return fully_shard(model)


def move_base(directory: str, url: str) -> None:
    """Update the server's own weights, and then serve an adapter for the new base."""
    model = transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(7)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.02)
    client = HTTPVLLMWeightSyncClient(url)
    with ps.publisher("base", model, connection=CONNECTION, mode="snapshot", rank=(0, 1)) as base:
        base.publish(5)
        client.init_weight_transfer_engine({"name": "base", "stall_s": 30.0})
        client.start_weight_update()
        client.update_weights({"version": 5})
        client.finish_weight_update(weight_version="5")
        new = difference(model, url, directory)
        adapted = peft.get_peft_model(model, peft.LoraConfig(r=8, lora_alpha=16, target_modules=MODULES))
        fill(adapted, 9)
        server = VllmServer(url)
        here = server.synced_base("base")
        with (
            adapter_publisher("on base", adapted, base=base, connection=CONNECTION, rank=(0, 1)) as publisher,
            serve_adapter("on base", server, base=here, served_name="moved", connection=CONNECTION) as served,
        ):
            publisher.publish(1)
            served.update()
            say(base=served.received.base, new=new, adapter=difference(adapted, url, "moved"))


def merge(directory: str) -> None:
    """Publish merged weights from the shards of all ranks. Rank 0 compares them with PEFT's."""
    rank, model, whole = dist.get_rank(), sharded(directory), make(directory)
    publisher = merged_publisher("merged", model, connection=CONNECTION, mode="snapshot")
    received = {name: torch.zeros_like(one) for name, one in make(directory).unload().state_dict().items()}
    for version in (1, 2):
        fill(model, version)
        publisher.publish(version)
        dist.barrier()
        if rank == 0:
            with ps.subscriber("merged", received, connection=CONNECTION, rank=(0, 1)) as subscriber:
                subscriber.update(version)
            fill(whole, version)
            true = copy.deepcopy(whole).merge_and_unload().state_dict()
            say(version=version, merged=max(float((true[name] - received[name]).abs().max()) for name in true))
        dist.barrier()
    publisher.close()


def in_process(directory: str, options: str) -> None:
    """Load versions into vLLM's `LLM` in this process, and compare its log-probabilities."""
    from vllm import LLM, SamplingParams

    model, before = make(directory), make(directory)
    llm = LLM(**json.loads(options))
    engine = VllmEngine(llm)
    asked = SamplingParams(temperature=0, max_tokens=8, logprobs=0, detokenize=False, ignore_eos=True)
    with (
        adapter_publisher("in-process", model, base="base 1", connection=CONNECTION) as publisher,
        serve_adapter("in-process", engine, base="base 1", connection=CONNECTION) as served,
    ):
        for version in (1, 2, 3):
            fill(model, version)
            fill(before, version - 1)
            publisher.publish(version)
            served.update()
            request = engine.requests[served.name]
            prompt = [{"prompt_token_ids": PROMPT}]
            (answer,) = llm.generate(prompt, asked, lora_request=request, use_tqdm=False)
            tokens = list(answer.outputs[0].token_ids)
            theirs = [step[token].logprob for step, token in zip(answer.outputs[0].logprobs, tokens, strict=True)]
            differences = {name: gap(one, PROMPT, tokens, theirs) for name, one in (("new", model), ("other", before))}
            say(version=version, loaded=list(engine.requests), **differences)


def main() -> None:
    what, *arguments = sys.argv[1:]
    if what == "llm":
        in_process(*arguments)
        return
    dist.init_process_group("gloo")
    (serve if what == "serve" else merge)(*arguments)
    dist.destroy_process_group()


def serve(directory: str, url: str) -> None:
    """Publish versions from all ranks. Rank 0 makes the server load them, and compares."""
    rank, model = dist.get_rank(), sharded(directory)
    bases = ["base 1"]
    publisher = adapter_publisher("adapter", model, base=lambda: bases[0], connection=CONNECTION)
    served = None
    if rank == 0:
        served = serve_adapter(
            "adapter", VllmServer(url), base=lambda: "base 1", served_name="policy", connection=CONNECTION
        )
    for version in (1, 2, 3):
        fill(model, version)
        publisher.publish(version)
        if served is not None:
            watch(directory, url, served, version)
        dist.barrier()
    # An adapter for another base is refused, and the server keeps its newest version.
    bases[0] = "base 2"
    publisher.publish(4)
    if served is not None:
        whole = make(directory)
        fill(whole, 3)
        say(refused=failure(served), version=served.version, kept=difference(whole, url, "policy"))
    dist.barrier()
    publisher.close()
    if served is not None:
        # The engine itself refuses this adapter, because its rank is above --max-lora-rank.
        large = make(directory, rank=64)
        with (
            adapter_publisher("large", large, base="base 1", connection=CONNECTION, rank=(0, 1)) as other,
            serve_adapter("large", VllmServer(url), base="base 1", connection=CONNECTION) as refused,
        ):
            other.publish(1)
            say(refused=failure(refused), version=refused.version, kept=difference(whole, url, "policy"))
        served.close()
        try:
            ask(url, "policy", PROMPT)
            say(closed="still served")
        except urllib.error.HTTPError as error:
            say(closed=error.code)
        move_base(directory, url)
    dist.barrier()


if __name__ == "__main__":
    main()
