"""Penstock for reinforcement-learning trainers (TRL, verl, Megatron), and for engines that serve adapters.

The package imports none of its modules, because each module requires the library that it adapts.
"""

from penstock.spi import require_package

require_package("torch")
