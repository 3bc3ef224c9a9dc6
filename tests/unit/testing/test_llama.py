"""The small Llama computes the same as the trained model, on one rank and on two."""

from __future__ import annotations

import threading

import pytest

pytest.importorskip("torch")

import torch
from tests.support.llama import Llama, LlamaRank, Sizes

SIZES = Sizes(num_layers=2, hidden=32, inner=48, num_heads=4, num_kv_heads=2, vocab=64)
TOKENS = torch.arange(24).reshape(2, 12) % SIZES.vocab


def trained() -> Llama:
    torch.manual_seed(0)
    return Llama(SIZES)


@torch.no_grad()
def test_llama_rank_has_logits_of_trained_model() -> None:
    model, served = trained(), LlamaRank(SIZES)
    served.load_weights(model.state_dict().items())
    torch.testing.assert_close(served(TOKENS), model(TOKENS))
    assert sum(one.numel() for one in model.parameters()) == SIZES.num_params


@torch.no_grad()
def test_two_llama_ranks_have_logits_of_trained_model() -> None:
    model, parts, meet = trained(), dict[int, torch.Tensor](), threading.Barrier(2, timeout=60)
    made: dict[int, torch.Tensor] = {}

    def serve(rank: int) -> None:
        def reduce(part: torch.Tensor) -> torch.Tensor:
            parts[rank] = part
            meet.wait()
            total = parts[0] + parts[1]
            meet.wait()
            return total

        with torch.no_grad():
            served = LlamaRank(SIZES, rank, 2, reduce)
            served.load_weights(model.state_dict().items())
            made[rank] = served(TOKENS)

    threads = [threading.Thread(target=serve, args=(rank,)) for rank in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    torch.testing.assert_close(torch.cat([made[0], made[1]], dim=-1), model(TOKENS))
