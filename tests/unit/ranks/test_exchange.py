"""The rounds of an exchange: all ranks receive all bytes, or all raise after the same round, with the rank's reason."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Outcome, run_ranks

from penstock.errors import DestinationError, FormatError
from penstock.ranks.agreement import RankWords
from penstock.ranks.exchange import ROUND_BYTES, STATUS_BYTES, RankExchange, reads_per_turn

STALL_S = 20.0
TURN_NBYTES = [5, 700, 0, 3, 3, 1024, 9, 1, 512, 64, 2]


def ranks(stall_s: float = STALL_S) -> RankWords:
    return RankWords(dist.group.WORLD, torch.device("cpu"), stall_s)


def bytes_of(turn: int) -> torch.Tensor:
    return torch.full((TURN_NBYTES[turn],), turn + 1, dtype=torch.uint8)


class Part:
    """Sends bytes whose value depends on their turn, and keeps everything. One step may fail."""

    def __init__(self, exchange: RankExchange, fault: str = "", busy: int = 0) -> None:
        self.exchange = exchange
        self.fault = fault
        self.num_busy = busy
        self.rounds: list[int] = []
        self.kept: dict[int, torch.Tensor] = {}

    def begin(self) -> None:
        if self.fault == "begin":
            raise FormatError("cannot begin")

    def fill(self, k: int, payload: torch.Tensor, timeout_s: float) -> bool:
        if self.fault == "fill" and k == 1:
            raise FormatError("cannot read")
        if self.fault == "die" and k == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        self.num_busy -= 1
        if self.num_busy >= 0:
            return False
        turn = self.exchange.turns(k)[dist.get_rank()]
        if turn < len(TURN_NBYTES):
            payload[: TURN_NBYTES[turn]] = bytes_of(turn)
        return True

    def keep(self, k: int, payloads: torch.Tensor) -> None:
        if self.fault == "keep":
            raise RuntimeError("cannot keep")
        for turn, row in zip(self.exchange.turns(k), payloads, strict=True):
            if turn < len(TURN_NBYTES):
                self.kept[turn] = row[: TURN_NBYTES[turn]].clone()

    def arrived(self, k: int) -> None:
        self.rounds.append(k)


def exchange_all(rank: int, world_size: int, in_flight: int, faults: dict[int, str], stall_s: float) -> list[int]:
    exchange = RankExchange(ranks(stall_s), TURN_NBYTES)
    exchange.prepare(b"same", num_payloads=in_flight, num_in_flight=in_flight)
    part = Part(exchange, faults.get(rank, ""), busy=3 if faults.get(rank) == "busy" else 0)
    exchange.carry_out(part)
    turns = range(len(TURN_NBYTES))
    assert all(torch.equal(part.kept[turn], bytes_of(turn)) for turn in turns)
    return part.rounds


def prepare_other(rank: int, world_size: int) -> None:
    RankExchange(ranks(), TURN_NBYTES).prepare(bytes([rank]), num_payloads=1)


def prepare_too_much(rank: int, world_size: int) -> None:
    # Only rank 1 fails, because it wants the memory of all payloads at once.
    RankExchange(ranks(), [1 << 60]).prepare(b"same", num_payloads=rank, num_in_flight=0)


def describe(rank: int, world_size: int) -> Any:
    exchange = RankExchange(ranks(), [1000, 1030, 20])
    return exchange.width, exchange.num_rounds


def run(world_size: int, *, in_flight: int = 1, stall_s: float = STALL_S, **faults: str) -> Any:
    by_rank = {int(name.removeprefix("rank_")): fault for name, fault in faults.items()}
    return run_ranks(exchange_all, world_size, in_flight, by_rank, stall_s)


def ended(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error or outcome.ended for outcome in outcomes]


@pytest.mark.parametrize(("world_size", "in_flight"), [(1, 1), (2, 1), (2, 2), (3, 2)])
def test_all_ranks_receive_all_turns(world_size: int, in_flight: int) -> None:
    rounds = list(range(-(-len(TURN_NBYTES) // world_size)))
    outcomes = run(world_size, in_flight=in_flight)
    assert [one.value for one in outcomes] == [rounds] * world_size, outcomes


@pytest.mark.parametrize("in_flight", [1, 2])
def test_busy_rank_makes_ranks_repeat_round(in_flight: int) -> None:
    outcomes = run(2, in_flight=in_flight, rank_1="busy")
    assert [one.value for one in outcomes] == [list(range(6))] * 2, outcomes


@pytest.mark.parametrize("in_flight", [1, 2])
@pytest.mark.parametrize(
    ("fault", "error", "reason"),
    [
        ("begin", "FormatError", "cannot begin"),
        ("fill", "FormatError", "cannot read"),
        ("keep", "RuntimeError", "cannot keep"),
    ],
)
def test_failed_step_raises_on_all_ranks(fault: str, error: str, reason: str, in_flight: int) -> None:
    outcomes = run(3, in_flight=in_flight, rank_1=fault)
    assert ended(outcomes) == ["PeerLost", error, "PeerLost"]
    assert all(f"rank 1: {reason}" in str(outcomes[rank].value) for rank in (0, 2))
    # The ranks do not wait for a deadline.
    assert all(one.seconds < STALL_S / 2 for one in outcomes)


def test_two_failed_ranks_raise_own_errors() -> None:
    outcomes = run(3, rank_0="begin", rank_2="begin")
    assert ended(outcomes) == ["FormatError", "PeerLost", "FormatError"]
    assert all(f"rank {rank}: cannot begin" in str(outcomes[1].value) for rank in (0, 2))


def test_dead_rank_raises_peer_lost_on_others() -> None:
    outcomes = run(3, stall_s=3.0, rank_1="die")
    assert ended(outcomes) == ["PeerLost", "died", "PeerLost"]


def test_different_digests_raise_before_first_round() -> None:
    assert ended(run_ranks(prepare_other, 2)) == ["PlanError"] * 2


def test_rank_without_memory_fails_all_ranks() -> None:
    outcomes = run_ranks(prepare_too_much, 2)
    assert ended(outcomes) == ["PeerLost", DestinationError.__name__]
    assert "cannot allocate the buffers" in str(outcomes[0].value)


def test_turn_on_device_has_limited_size() -> None:
    cuda, cpu = torch.device("cuda"), torch.device("cpu")
    assert reads_per_turn(cpu, 8 << 20) == 1
    assert reads_per_turn(cuda, 8 << 20) == ROUND_BYTES // (8 << 20)
    assert reads_per_turn(cuda, 8 << 20, limit_bytes=20 << 20) == 2
    assert reads_per_turn(cuda, 2 * ROUND_BYTES) == 1


def test_width_is_largest_turn_and_status() -> None:
    outcomes = run_ranks(describe, 2)
    assert [one.value for one in outcomes] == [(3 * 512 + STATUS_BYTES, 2)] * 2
