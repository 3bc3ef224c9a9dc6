"""One Ray actor trains, and two serve. After each step the servers take the new weights, and generate the same text.

    python examples/sync_ray.py

Ray only starts the actors and passes numbers. Weights go from actor to actor without the object store. The trainer
publishes a snapshot, and keeps training while the servers read it. On several hosts, run `penstock hub` on one of them,
and pass `connection=ps.ConnectionSettings(hub=, listen=)` to `publisher` and `subscriber`.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import penstock as ps

try:
    import ray
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
except ImportError as error:
    print(f"skipped: this example needs {error.name} (pip install ray transformers)")
    sys.exit(0)

STEPS, SERVERS = 3, 2
PROMPT = [[1, 5, 9, 200, 17, 33, 2, 8]]
CONFIG = LlamaConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    tie_word_embeddings=False,
)


def generate(model: LlamaForCausalLM) -> list[int]:
    with torch.no_grad():
        made = model.generate(torch.tensor(PROMPT), max_new_tokens=16, do_sample=False, pad_token_id=0)
    tokens: list[int] = made[0].tolist()
    return tokens


class Trainer:
    def __init__(self) -> None:
        torch.manual_seed(0)
        self.model = LlamaForCausalLM(CONFIG)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-2)
        self.publisher = ps.publisher("policy", self.model, mode="snapshot", snapshot_device="cpu")

    def step(self, version: int) -> tuple[float, list[int]]:
        """Make a training step. Return its loss, and the text that the published weights generate."""
        tokens = torch.randint(0, CONFIG.vocab_size, (4, 16))
        loss = self.model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.publisher.publish(version)
        return loss.item(), generate(self.model)

    def close(self) -> None:
        self.publisher.close()


class Server:
    def __init__(self, rank: int) -> None:
        self.model = LlamaForCausalLM(CONFIG).eval()
        self.subscriber = ps.subscriber("policy", self.model, rank=(rank, SERVERS))

    def update(self, version: int) -> tuple[str, list[int]]:
        report = self.subscriber.update(version, timeout_s=60)
        return report.summary(), generate(self.model)

    def close(self) -> None:
        self.subscriber.close()


def main() -> int:
    options: dict[str, Any] = {"num_cpus": 0.5}
    trainer = ray.remote(**options)(Trainer).remote()
    servers = [ray.remote(**options)(Server).remote(rank) for rank in range(SERVERS)]
    said: list[list[int]] = []
    for version in range(1, STEPS + 1):
        loss, true = ray.get(trainer.step.remote(version), timeout=60)
        print(f"step {version}: loss {loss:.3f}")
        for rank, (report, made) in enumerate(ray.get([one.update.remote(version) for one in servers], timeout=60)):
            print(f"server {rank}: tokens equal to the trainer's: {made == true}; {report}", flush=True)
            if made != true:
                return 1
        said.append(true)
    ray.get([one.close.remote() for one in (*servers, trainer)], timeout=60)
    print(f"{len({tuple(tokens) for tokens in said})} texts in {STEPS} steps")
    return 0


if __name__ == "__main__":
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False)
    try:
        sys.exit(main())
    finally:
        ray.shutdown()
