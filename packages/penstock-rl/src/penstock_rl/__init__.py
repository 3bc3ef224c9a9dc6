"""Penstock for trainers of reinforcement learning: TRL, verl, Megatron, and engines that serve adapters.

The package imports no module, because each module needs the package that it adapts.
"""

from penstock.spi import require_package

require_package("torch")
