"""A check of a new version for language models: its log-probabilities are near those of the trainer.

Give it to a subscriber as `ps.Hooks(check=log_prob_check(0.05))`. The trainer gives the values with the version:
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
    """Return a check for `Hooks.check`: all staged values are finite, and log-probabilities are near the trainer's own.

    Args:
        max_difference: the largest difference of one log-probability from the trainer's, in nats.
        log_probs: returns the log-probabilities of the staged weights, in the shape of the trainer's; None: of each
            token after the first, `[rows, length - 1]`, by a causal language model that is called with the tokens
            `[rows, length]`, and returns logits, or an output with `logits`.

    The trainer gives `publish(..., check={"tokens": ..., "log_probs": ...})`. Without that only finiteness is checked.
    """
    if not max_difference >= 0:
        raise ConfigError(f"max_difference is {max_difference}", hint="give nats, 0 or more")

    def check(version: int, staged: StagedVersion) -> str:
        for name, tensor in staged.tensors.items():
            # Codes of 8 bits and less have no `isfinite` in torch.
            if tensor.is_floating_point() and tensor.itemsize > 1 and not bool(torch.isfinite(tensor).all()):
                return f"{name} has values that are not finite"
        if "log_probs" not in staged.expected:
            return ""
        wanted = staged.expected["log_probs"].float()
        ours = (log_probs or _token_log_probs)(staged).detach().float().cpu()
        if ours.shape != wanted.shape:
            return f"log-probabilities of shape {list(ours.shape)}, the trainer's have {list(wanted.shape)}"
        difference = float((ours - wanted).abs().max()) if ours.numel() else 0.0
        # Written so that a difference that is no number fails too.
        if not difference <= max_difference:
            return f"a log-probability differs from the trainer's by {difference:.4g}, above {max_difference:g}"
        return ""

    return check


def _token_log_probs(staged: StagedVersion) -> torch.Tensor:
    """Return the log-probability of each token after the first, given those before it."""
    tokens = staged.expected["tokens"].long()
    device = next(iter(staged.tensors.values())).device
    output = staged.call(tokens.to(device))
    logits = getattr(output, "logits", output)[:, :-1].float()
    chosen = tokens[:, 1:, None].to(device)
    log_probs: torch.Tensor = logits.log_softmax(-1).gather(-1, chosen)[..., 0]
    return log_probs
