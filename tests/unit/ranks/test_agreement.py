"""All ranks of a group take a step, or all raise an error that names the rank at fault."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from tests.support.ranks import Outcome, run_ranks

from penstock.errors import FormatError
from penstock.ranks.agreement import BEGIN, BUSY, FAILED, READY, RankWords, reason_of, reasons_of

STALL_S = 20.0


def words() -> RankWords:
    return RankWords(dist.group.WORLD, torch.device("cpu"), STALL_S)


def send(rank: int, world_size: int, sent: list[tuple[int, bytes]]) -> bool:
    return words().agree(*sent[rank])


def fail_on(rank: int, world_size: int, failing: list[int]) -> bool:
    return words().agree(error=FormatError(f"bad bytes of {rank}") if rank in failing else None)


def fail_in_two_dims(rank: int, world_size: int) -> list[str]:
    """Gather over the rows and then over the columns of a grid of 2 x 2 ranks."""
    pairs = [dist.new_group(ranks) for ranks in ([0, 1], [2, 3], [0, 2], [1, 3])]
    return reasons_of([pairs[rank // 2], pairs[2 + rank % 2]], f"reason {rank}", stall_s=STALL_S)


def fail_silently(rank: int, world_size: int) -> Any:
    ranks = RankWords(dist.group.WORLD, torch.device("cpu"), 1.0)
    return ranks.agree() if rank else None


def ended(outcomes: list[Outcome]) -> list[str]:
    return [outcome.error or outcome.ended for outcome in outcomes]


def test_same_words_let_all_ranks_continue() -> None:
    assert [one.value for one in run_ranks(send, 2, [(BEGIN, b"same"), (BEGIN, b"same")])] == [True, True]


def test_busy_rank_makes_all_ranks_ask_again() -> None:
    assert [one.value for one in run_ranks(send, 2, [(READY, b""), (BUSY, b"")])] == [False, False]


@pytest.mark.parametrize("sent", [[(READY, b"a"), (READY, b"b")], [(READY, b""), (BEGIN, b"")]], ids=["digest", "word"])
def test_different_words_raise_on_all_ranks(sent: list[tuple[int, bytes]]) -> None:
    outcomes = run_ranks(send, 2, sent)
    assert ended(outcomes) == ["PlanError", "PlanError"]
    assert all("ranks [1] load different weights" in str(one.value) for one in outcomes)


def test_failed_rank_raises_own_error_and_others_its_reason() -> None:
    outcomes = run_ranks(fail_on, 3, [1])
    assert ended(outcomes) == ["PeerLost", "FormatError", "PeerLost"]
    assert all("rank 1: bad bytes of 1" in str(outcomes[rank].value) for rank in (0, 2))


def test_all_failed_ranks_raise_own_errors() -> None:
    assert ended(run_ranks(fail_on, 2, [0, 1])) == ["FormatError", "FormatError"]


def test_silent_rank_raises_at_deadline() -> None:
    outcomes = run_ranks(fail_silently, 2)
    assert ended(outcomes) == ["returned", "PeerLost"]


def test_reasons_of_grid_arrive_in_order() -> None:
    outcomes = run_ranks(fail_in_two_dims, 4)
    assert [one.value for one in outcomes] == [[f"reason {rank}" for rank in range(4)]] * 4


def test_error_without_text_has_reason() -> None:
    assert reason_of(KeyboardInterrupt()) == "KeyboardInterrupt"
    assert reason_of(None) == ""
    assert FAILED not in {READY, BUSY}
