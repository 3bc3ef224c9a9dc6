"""Penstock: model weights to GPUs at the speed of the link, verified, in bounded memory.

`__all__` lists the public names. Each name, and torch if the name needs it, is imported on first use.
"""

from penstock.entry_points import own_version
from penstock.exports import GUESSES, MODULES, PUBLIC, lazily

__version__ = own_version()
__all__ = [*PUBLIC, "__version__"]
__getattr__ = lazily(__name__, PUBLIC, submodules=["errors", *MODULES], guesses=GUESSES)


def __dir__() -> list[str]:
    return sorted(__all__)
