"""Checks that write to a staged version or hold its tensors: the published bytes go live."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import penstock as ps


class Net(torch.nn.Module):
    """A module whose forward pass writes to buffers, and if requested to a parameter."""

    def __init__(self, *, writes: str = "") -> None:
        super().__init__()
        self.embed = torch.nn.Embedding(8, 4, max_norm=0.1 if writes == "renorm" else None)
        self.norm = torch.nn.BatchNorm1d(4)
        self.head = torch.nn.Linear(4, 8, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("seen", torch.zeros(1), persistent=False)
        self.writes = writes

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        self.seen += 1
        if self.writes == "data":
            self.norm.weight.data.view(2, 2)[0] = 9.0
        return self.head(self.norm(self.embed(tokens)))


def call(version: int, staged: ps.sync.StagedVersion) -> None:
    staged.call(torch.arange(8))


def write_all(version: int, staged: ps.sync.StagedVersion) -> None:
    for tensor in staged.tensors.values():
        tensor.data.view(-1)[:1] += 1
        tensor.zero_()


def call_and_write(version: int, staged: ps.sync.StagedVersion) -> None:
    call(version, staged)
    write_all(version, staged)


@pytest.mark.parametrize("commit", ["each", "all"])
@pytest.mark.parametrize("check", [call, write_all, call_and_write])
def test_check_hook_writes_do_not_reach_live_weights(
    check: Callable[[int, ps.sync.StagedVersion], object], commit: str
) -> None:
    trained, served = Net(), Net()
    with (
        ps.publisher("writes", trained.state_dict(), mode="snapshot") as publisher,
        ps.subscriber("writes", served, hooks=ps.Hooks(check=check)) as subscriber,
    ):
        publisher.wait_subscribers(1)
        publisher.publish(1, commit=commit)
        assert subscriber.update().version == 1
    wanted = trained.state_dict()
    assert all(torch.equal(tensor, wanted[name]) for name, tensor in served.state_dict().items())
    assert served.seen.item() == 0, "a buffer that no version fills"


@pytest.mark.parametrize("writes", ["data", "renorm"])
def test_check_hook_that_changes_parameters_raises_version_refused(writes: str) -> None:
    trained, served = Net(), Net(writes=writes)
    before = {name: tensor.clone() for name, tensor in served.state_dict().items()}
    with (
        ps.publisher("parameters", trained.state_dict(), mode="snapshot") as publisher,
        ps.subscriber("parameters", served, hooks=ps.Hooks(check=call)) as subscriber,
    ):
        publisher.publish(1)
        name = "norm.weight" if writes == "data" else "embed.weight, head.weight"
        with pytest.raises(ps.VersionRefused, match=f"check changed the staged weights of {name}") as refused:
            subscriber.update()
        assert (refused.value.mutated, subscriber.version) == (False, -1)
    assert all(torch.equal(tensor, before[name]) for name, tensor in served.state_dict().items())


class Bare(torch.nn.Module):
    def __init__(self, value: float) -> None:
        super().__init__()
        self.w = torch.nn.Parameter(torch.full((4,), value))

    def forward(self) -> torch.Tensor:
        return self.w.detach().view(2, 2)


def test_tensor_writes_after_check_hook_are_not_committed() -> None:
    kept: list[torch.Tensor] = []
    served = {"w": torch.zeros(4)}
    hooks = ps.Hooks(check=lambda version, staged: kept.append(staged.tensors["w"].view(2, 2)))
    with (
        ps.publisher("kept", {"w": torch.full((4,), 2.0)}, mode="snapshot") as publisher,
        ps.subscriber("kept", served, hooks=hooks) as subscriber,
    ):
        for version in (1, 2):
            publisher.publish(version)
            subscriber.stage()
            kept[-1].fill_(99)
            kept[0].fill_(99)
            subscriber.commit()
            assert served["w"].tolist() == [2.0] * 4


def test_write_to_check_hook_output_fails_commit() -> None:
    kept: list[torch.Tensor] = []
    served = Bare(0.0)
    hooks = ps.Hooks(check=lambda version, staged: kept.append(staged.call()))
    with (
        ps.publisher("output", Bare(2.0), mode="snapshot") as publisher,
        ps.subscriber("output", served, hooks=hooks) as subscriber,
    ):
        publisher.publish(1)
        subscriber.stage()
        kept[0].fill_(99)
        with pytest.raises(ps.ConfigError, match="weights of w changed after the check of version 1") as caught:
            subscriber.commit()
        assert (caught.value.mutated, served.w.tolist(), subscriber.version) == (False, [0.0] * 4, -1)
        # The next update reads the bytes again.
        assert subscriber.update().version == 1
        assert served.w.tolist() == [2.0] * 4
