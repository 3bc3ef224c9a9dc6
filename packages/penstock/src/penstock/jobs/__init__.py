"""The convert journey: it converts any weight set to any other, out of core, on workers that may fail.

- `request` opens the sources and `job` plans the conversion, before any weights are read.
- `coordinator` runs the workers of `workers/` and exchanges `messages` with them.
- `watch` reports the state of a running conversion to an observer.
- `result` writes the journal, the manifest and the sidecar files.
- `operations/` has the operations (merge, lora, reshard, delta, formats, gguf, a user's function), which `spec`
  creates.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["jobs"]]
__getattr__ = lazily(__name__, MODULES["jobs"])


def __dir__() -> list[str]:
    return sorted(__all__)
