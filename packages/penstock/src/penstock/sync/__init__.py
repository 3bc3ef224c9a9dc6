"""The sync journey: from a trainer's ranks to the inference ranks, either a whole version or nothing.

- `shards` declares a rank's tensors, and `placed` notices when they move.
- `membership` and `request_handler` exchange requests between ranks.
- `planner` plans, `local_version` holds memory, `digester` and `memory_digests` compute digests.
- `copy_plan` makes a staged version live, and `packer` packs short runs.
- `commit_rules` has the rules for a version that a fleet commits as a whole, and `check` presents a staged version to a
  user's check.
- `publish/` and `receive/` are the two sides.
- `recording/` runs a model's loader over tensors without storage, to find out which published element each parameter
  needs.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["sync"]]
__getattr__ = lazily(__name__, MODULES["sync"])


def __dir__() -> list[str]:
    return sorted(__all__)
