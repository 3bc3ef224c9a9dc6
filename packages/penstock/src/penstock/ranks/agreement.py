"""Agreement of all ranks on a step: all of them take the step, or all raise an error after the same collective."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist

from penstock.errors import PeerLost, PenstockError, PlanError
from penstock.ranks.collectives import GroupCollectives

READY, BUSY, FAILED, BEGIN, END = 1, 2, 3, 4, 5
"""The words that a rank may send before a step. The ranks take the step only if all send the same word."""

DIGEST_BYTES = 32
"""Length in bytes of the digest that ranks compare. Without a digest, a rank sends zeros."""

REASON_BYTES = 1024
"""Length in bytes of the reason of a failure. Collectives require the same length on all ranks."""


class RankWords(GroupCollectives):
    """The collectives by which ranks agree that all of them can continue."""

    def agree(
        self,
        word: int = READY,
        digest: bytes = b"",
        *,
        error: BaseException | None = None,
        hint: str = "see the errors of these ranks",
    ) -> bool:
        """Send `word` to the other ranks. Return whether all ranks sent the same word, or False if some are BUSY.

        A rank that passes an error sends FAILED and raises the error. Then the others raise PeerLost with its text and
        with `hint`. All ranks raise PlanError if their words or digests differ.
        """
        word = word if error is None else FAILED
        sent = bytes([word]) + digest.ljust(DIGEST_BYTES, b"\0") + encoded_reason(reason_of(error))
        words = self.gather_bytes(sent)
        if error is not None:
            raise error
        if failed := [f"rank {rank}: {decoded_reason(sent)}" for rank, sent in enumerate(words) if sent[0] == FAILED]:
            raise PeerLost("; ".join(failed), hint=hint)
        if any(sent[0] == BUSY for sent in words):
            return False
        if odd := [rank for rank, sent in enumerate(words) if sent != words[0]]:
            raise PlanError(
                f"ranks {odd} load different weights from rank 0, or with different options",
                hint="use the same model, revision and options on all ranks, and make the same calls on all ranks",
            )
        return True

    @contextmanager
    def reports_failure(self) -> Iterator[None]:
        """Report an error in the block to the other ranks, which call `agree` after their block, and raise it."""
        try:
            yield
        except PenstockError as error:
            self.agree(error=error)


def reasons_of(groups: Sequence[dist.ProcessGroup], why: str, *, stall_s: float) -> list[str]:
    """Return the texts of all ranks of a grid, whose dims are these groups on the CPU. Collective in each group."""
    texts = encoded_reason(why)
    for group in groups:
        texts = b"".join(RankWords(group, torch.device("cpu"), stall_s).gather_bytes(texts))
    return [decoded_reason(texts[at : at + REASON_BYTES]) for at in range(0, len(texts), REASON_BYTES)]


def reason_of(error: BaseException | None) -> str:
    """Return why a rank failed, as text for the other ranks. The text is empty only without an error."""
    return "" if error is None else str(error) or type(error).__name__


def encoded_reason(why: str) -> bytes:
    """Return a text in `REASON_BYTES` bytes."""
    return why.encode()[:REASON_BYTES].ljust(REASON_BYTES, b"\0")


def decoded_reason(raw: bytes) -> str:
    """Return the text in the last `REASON_BYTES` bytes."""
    return raw[-REASON_BYTES:].rstrip(b"\0").decode(errors="replace")
