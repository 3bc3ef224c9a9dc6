"""The convert journey: converts weight sets between formats and layouts, out of core, on workers that may fail.

- `request` opens the sources and `job` plans the conversion, before any weights are read.
- `coordinator` runs the workers of `workers/` and exchanges `messages` with them.
- `watch` reports the state of a running conversion to an observer, and `job_reporter` to a hub.
- `result` writes the journal, the manifest and the sidecar files.
- `operations/` contains the operations (merge, lora, reshard, delta, formats, gguf, user functions), which `spec`
  creates.

`penstock.convert` is the function that users call.
"""

from penstock.exports import lazily

TABLE = {
    "HubReporter": "penstock_convert.job_reporter",
    "WorkerSettings": "penstock_convert.convert",
}
"""The module that defines each name. It is imported on first use, so `penstock --help` does not import torch."""

__all__ = [*TABLE]
__getattr__ = lazily(__name__, TABLE)


def __dir__() -> list[str]:
    return sorted(__all__)
