"""Models that stay in memory (`WeightCache`), and processes that attach to them.

`weight_cache` keeps a `resident_model` and moves it between tiers. `attached` is the reader's side, which holds a
`lease`. `engine_parameters` takes parameters from an engine (`cache_parameters`).
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["cache"]]
__getattr__ = lazily(__name__, MODULES["cache"])


def __dir__() -> list[str]:
    return sorted(__all__)
