"""Penstock for trainers of reinforcement learning: TRL, verl, Megatron, and engines that serve adapters.

No module is imported here: each needs the package that it adapts.
"""

from penstock.spi import require_package

require_package("torch")
