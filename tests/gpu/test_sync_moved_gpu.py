"""A sync follows tensors that are moved to a different GPU memory or offloaded between two versions."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import pytest
from tests.integration.sync.test_moved import MOVES, fill, has, model, share_memory
from torch import nn

import penstock as ps

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]


@pytest.fixture
def stack(own_runtime: None) -> Iterator[ExitStack]:
    with ExitStack() as found:
        yield found


def to_host(module: nn.Module) -> None:
    module.cpu()


def to_host_and_back(module: nn.Module) -> None:
    module.cpu()
    module.cuda()


GPU_MOVES = [*(move for move in MOVES if move is not share_memory), to_host, to_host_and_back]


@pytest.mark.parametrize("side", ["publisher", "subscriber"])
@pytest.mark.parametrize("move", GPU_MOVES, ids=lambda move: move.__name__)
def test_moved_gpu_tensors_still_sync(stack: ExitStack, move: Callable[[Any], None], side: str) -> None:
    trained, served = model().cuda(), model().cuda()
    publisher = stack.enter_context(ps.publisher("moved", trained, mode="snapshot"))
    subscriber = stack.enter_context(ps.subscriber("moved", served))
    for version in range(1, 4):
        fill(trained, version)
        publisher.publish(version)
        assert subscriber.update().version == version
        assert has(served, version)
        if side == "publisher":
            move(trained)
        else:
            move(served)
            # No transport reads a GPU's memory into a target on the host.
            served.cuda()
