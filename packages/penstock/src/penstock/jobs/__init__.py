"""The convert journey: any weight set to any other, through compute, out of core, on workers that may die.

`request` has arguments and opened sources, `job` all decisions before the first byte. `coordinator` runs `workers/`
(launchers, a fork server, executors of CPU and GPU) by `messages`. `observer` and `watch` show its states to
others. `result` writes journal, manifest and sidecar files. `operations/` has merge, lora, reshard, delta, formats,
gguf and a user's function; `spec` makes them.
"""

from penstock.exports import MODULES, lazily

__all__ = [*MODULES["jobs"]]
__getattr__ = lazily(__name__, MODULES["jobs"])


def __dir__() -> list[str]:
    return sorted(__all__)
