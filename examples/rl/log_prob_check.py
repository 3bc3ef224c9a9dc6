"""A check of new versions for language models: their log-probabilities must be close to the trainer's.

Pass it to a subscriber as `ps.Hooks(check=log_prob_check(0.05))`. The trainer sends the values with the version:
`publisher.publish(version, check={"tokens": tokens, "log_probs": log_probs})`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from penstock.errors import ConfigError
from penstock.sync import StagedVersion


def log_prob_check(
    max_difference: float, log_probs: Callable[[StagedVersion], torch.Tensor] | None = None
) -> Callable[[int, StagedVersion], str]:
    """Return a check for `Hooks.check`: all staged values are finite, and log-probabilities are close to the trainer's.

    Without `publish(..., check={"tokens": ..., "log_probs": ...})` in the trainer, only finiteness is checked.

    Args:
        max_difference: Largest allowed difference of a log-probability from the trainer's, in nats.
        log_probs: Returns the log-probabilities of the staged weights, in the shape of the trainer's. None means those
            of each token after the first, `[rows, length - 1]`, from a causal language model. The model is called with
            the tokens `[rows, length]`, and returns logits or an output with `logits`.
    """
    if not max_difference >= 0:
        raise ConfigError(f"max_difference is {max_difference}", hint="give nats, 0 or more")

    def check(version: int, staged: StagedVersion) -> str:
        for name, tensor in staged.tensors.items():
            # torch has no `isfinite` for codes of 8 bits or less.
            if tensor.is_floating_point() and tensor.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
                return f"{name} has values that are not finite"
        if "log_probs" not in staged.expected:
            return ""
        wanted = staged.expected["log_probs"].float()
        ours = (log_probs or _token_log_probs)(staged).detach().float().cpu()
        if ours.shape != wanted.shape:
            return f"log-probabilities of shape {list(ours.shape)}, the trainer's have {list(wanted.shape)}"
        difference = float((ours - wanted).abs().max()) if ours.numel() else 0.0
        # This form also fails if the difference is NaN.
        if not difference <= max_difference:
            return f"a log-probability differs from the trainer's by {difference:.4g}, above {max_difference:g}"
        return ""

    return check


def _token_log_probs(staged: StagedVersion) -> torch.Tensor:
    """Return the log-probability of each token after the first, given the tokens before it."""
    tokens = staged.expected["tokens"].long()
    device = next(iter(staged.tensors.values())).device
    output = staged.call(tokens.to(device))
    logits = getattr(output, "logits", output)[:, :-1].float()
    chosen = tokens[:, 1:, None].to(device)
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
    return log_probs
