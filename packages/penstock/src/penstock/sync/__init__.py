"""The sync journey: each version moves from a trainer's ranks to the inference ranks, completely or not at all.

`publish/` is the trainer's side, and `receive/` is the side of the engines. `commit/` has the rules by which a version
becomes visible, is withdrawn, or stays unknown. `recording/` runs a model's loader over tensors without storage, to
find out which published elements each parameter needs.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["sync"]]
__getattr__ = lazily(__name__, MODULES["sync"])


def __dir__() -> list[str]:
    return sorted(__all__)
