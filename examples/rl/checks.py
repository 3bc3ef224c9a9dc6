"""Check a run from the lines that its steps wrote: the served weights, the reward, and that every step ran once.

The checks print a few lines, or raise AssertionError. Restarts of servers and ranks differ between the programs, so
`run` and `verl_grpo` check them.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from typing import Any

Step = Mapping[str, Any]


def check_steps(steps: Sequence[Step], num_steps: int, rise: float) -> None:
    """Check log-probabilities and reward, and print them.

    Args:
        steps: One mapping for each step. `difference` is the largest difference between the server's and the trainer's
            log-probabilities, and `bound` is the limit that rounding allows. `moved` is the difference that another
            step's weights would have made, and `reward` is the mean reward.
        num_steps: Number of steps in the whole run.
        rise: Minimum rise of the mean reward.

    Raises:
        AssertionError: A check failed.
    """
    wrong = [step for step in steps if step["difference"] > step["bound"]]
    assert not wrong, f"the server had other weights: {wrong[:3]}"
    # Otherwise the comparison could not distinguish two consecutive versions.
    num_moved = sum(step["moved"] > step["bound"] for step in steps)
    assert 2 * num_moved >= len(steps), f"older weights would have been noticed in only {num_moved} steps"
    # Compare few steps, because a long run learns most in its first tenth.
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
    """Check that every step ran, and only once.

    Raises:
        AssertionError: A step is missing, or ran twice.
    """
    done = [step["step"] for step in steps]
    assert len(done) == len(set(done)), f"some steps ran twice: {done}"
    # A killed process may end after it saved the step's checkpoint, and before it writes the step's line.
    missing = set(range(1, num_steps + 1)) - set(done)
    assert missing <= {start["step"] for start in starts}, f"steps {missing} did not run"


def print_medians(steps: Sequence[Step], names: Sequence[str]) -> None:
    """Print the medians of these seconds for each way of sending weights. Leave out figures that a way lacks."""
    for way in sorted({step["way"] for step in steps}):
        # The first versions with each way also plan, record and compile.
        some = [step for step in steps if step["way"] == way][2:]
        medians = (
            f"{name.removesuffix('_s')} {statistics.median(step[name] for step in some) * 1e3:.1f} ms"
            for name in names
            if some and some[0].get(name) is not None
        )
        print(f"{way}, medians of {len(some)} steps: {', '.join(medians)}")
