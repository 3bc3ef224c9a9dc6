"""What a run promised, checked from the lines that its steps wrote: the served weights, the reward, every step once.

In: a mapping for each step. Out: a few lines on stdout, or an AssertionError.
Not here: restarts of servers and ranks, which differ between the programs (`run`, `verl_grpo`).
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Step = Mapping[str, Any]


def check_steps(steps: Sequence[Step], num_steps: int, rise: float) -> None:
    """Check log-probabilities and reward, and print them.

    Args:
        steps: each with `difference`, the largest between the server's log-probabilities and the trainer's; `bound`,
            what rounding allows; `moved`, the difference that weights of another step would have made; `reward`.
        num_steps: of the whole run.
        rise: how much the mean reward must rise at least.

    Raises:
        AssertionError: it is not so.
    """
    wrong = [step for step in steps if step["difference"] > step["bound"]]
    assert not wrong, f"the server had other weights: {wrong[:3]}"
    # Otherwise the comparison could not tell one version from the next.
    num_moved = sum(step["moved"] > step["bound"] for step in steps)
    assert 2 * num_moved >= len(steps), f"older weights would have been found in {num_moved} steps only"
    # Few, because a long run learns most in its first tenth.
    few = max(1, min(num_steps // 10, 5))
    before, after = (statistics.fmean(step["reward"] for step in some) for some in (steps[:few], steps[-few:]))
    assert after > before + rise, f"the reward went from {before:.3f} to {after:.3f}"
    print(f"reward {before:.3f} -> {after:.3f} (means of {few} steps)")
    largest = max(step["difference"] for step in steps)
    print(
        f"log-probabilities equal in {len(steps)} steps, largest difference {largest:.1e};"
        f" older weights would differ by more than is allowed in {num_moved}"
    )


def check_once(steps: Sequence[Step], starts: Sequence[Step], num_steps: int) -> None:
    """Check that every step was done, and none twice.

    Raises:
        AssertionError: it is not so.
    """
    done = [step["step"] for step in steps]
    assert len(done) == len(set(done)), f"steps were done twice: {done}"
    # What is killed may end when its step is in the checkpoint, and before it writes the step's line.
    missing = set(range(1, num_steps + 1)) - set(done)
    assert missing <= {start["step"] for start in starts}, f"steps {missing} were not done"


def print_medians(steps: Sequence[Step], names: Sequence[str]) -> None:
    """Print the medians of these seconds for each way of sending weights; a way without a figure leaves it out."""
    for way in sorted({step["way"] for step in steps}):
        # The first versions of each way plan, record and compile.
        some = [step for step in steps if step["way"] == way][2:]
        medians = (
            f"{name.removesuffix('_s')} {statistics.median(step[name] for step in some) * 1e3:.1f} ms"
            for name in names
            if some and some[0].get(name) is not None
        )
        print(f"{way}, medians of {len(some)} steps: {', '.join(medians)}")
