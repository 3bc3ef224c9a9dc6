"""The sync journey: from a trainer's ranks to the inference ranks, a whole version or none.

`shards` is what a rank declares and `placed` whether it has moved since. `membership` and `request_handler` are
questions between ranks. `planner` plans, `local_version` holds, `digester` and `memory_digests` compare,
`copy_plan` flips, `packer` packs short runs. `commit_rules` has the rules of a two-phase commit,
`check` a staged version as a check sees it. `publish/` and `receive/` are the two sides. `recording/` finds which
published element each parameter needs, by running the model's own loader over tensors without storage.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["sync"]]
__getattr__ = lazily(__name__, MODULES["sync"])


def __dir__() -> list[str]:
    return sorted(__all__)
