"""A module under FSDP2 in an arena continues training with its own weights."""

from __future__ import annotations

import pytest
from tests.support.ranks import run_ranks


def _losses(rank: int, world_size: int, moved: bool, width: int) -> list[float]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    from penstock.sync.shards import to_arenas

    torch.manual_seed(1)
    mesh = init_device_mesh("cpu", (world_size,))
    model = torch.nn.Sequential(torch.nn.Linear(6, width), torch.nn.Linear(width, 4))
    for layer in [*model, model]:
        fully_shard(layer, mesh=mesh)
    optimiser, x, seen = torch.optim.SGD(model.parameters(), lr=0.02), torch.ones(3, 6), []
    for step in range(4):
        if moved and step in (0, 2):
            to_arenas(model)
        loss = model(x).square().sum()
        loss.backward()
        optimiser.step()
        optimiser.zero_grad()
        seen.append(loss.item())
    return seen


@pytest.mark.parametrize("width", [8, 7])
def test_training_continues_with_weights_in_arena(width: int) -> None:
    stayed, moved = (run_ranks(_losses, 2, which, width) for which in (False, True))
    assert [one.ended for one in [*stayed, *moved]] == ["returned"] * 4, moved
    assert [one.value for one in moved] == [one.value for one in stayed]
    assert len(set(stayed[0].value)) == 4
