"""The logger of the vLLM integration: `penstock.vllm`, shown as vLLM shows its own lines.

In: vLLM's logger, perhaps configured. Out: ours, with its handlers.
Not here: what is logged (`vllm`, `vllm_sync`).
"""

from __future__ import annotations

import logging

NAME = "penstock.vllm"


def vllm_logger() -> logging.Logger:
    """Return the logger, with the handlers and level of vLLM's where the application gave it none.

    vLLM configures `vllm` alone, so a line of another logger below a warning would be seen nowhere.
    """
    logger, theirs = logging.getLogger(NAME), logging.getLogger("vllm")
    if theirs.handlers and not logger.hasHandlers():
        for handler in theirs.handlers:
            logger.addHandler(handler)
        if logger.level == logging.NOTSET:
            logger.setLevel(theirs.level)
    return logger
