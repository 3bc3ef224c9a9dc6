"""Penstock's implementation of the Run:ai Model Streamer's Python API.

Import `penstock_hf.runai_streamer` instead of `runai_model_streamer`. Alternatively, call `install()` before an engine
is imported, so that the engine's own import finds this package. docs/serve/runai.md lists the differences.
"""

from __future__ import annotations

import importlib
import sys

from penstock.errors import ConfigError
from penstock.spi import extras_named

with extras_named():
    from penstock_hf.runai_streamer import files, objects, safetensors
    from penstock_hf.runai_streamer.files import DistributedStreamer, FileChunks, FileStreamer
    from penstock_hf.runai_streamer.objects import ObjectStorageModel, S3Credentials, list_safetensors, pull_files
    from penstock_hf.runai_streamer.safetensors import SafetensorsStreamer

__all__ = [
    "DistributedStreamer",
    "FileChunks",
    "FileStreamer",
    "ObjectStorageModel",
    "S3Credentials",
    "SafetensorsStreamer",
    "install",
    "list_safetensors",
    "pull_files",
]

_NAME = "runai_model_streamer"

_MODULES = {
    "s3_utils": objects,
    "s3_utils.s3_utils": objects,
    "file_streamer": files,
    "file_streamer.file_streamer": files,
    "file_streamer.requests_iterator": files,
    "distributed_streamer": files,
    "distributed_streamer.distributed_streamer": files,
    "safetensors_streamer": safetensors,
    "safetensors_streamer.safetensors_pytorch": safetensors,
    "safetensors_streamer.safetensors_streamer": safetensors,
}
"""The modules of the original package. Some code imports a name from the module that defines it."""


def install() -> None:
    """Let `import runai_model_streamer` find this package in this process. Call this before the engine is imported.

    A second call does nothing. Spawned processes must call `install` themselves. Raise ConfigError if the original
    runai_model_streamer is already imported, because other modules may refer to its objects.
    """
    here = importlib.import_module(__name__)
    if sys.modules.setdefault(_NAME, here) is not here:
        raise ConfigError(f"{_NAME} is already imported", hint="call install() before the first import of this package")
    for name, module in _MODULES.items():
        sys.modules.setdefault(f"{_NAME}.{name}", module)
        # `from package import module` reads the module as an attribute of the package, which is Penstock's package
        # here.
        parent, _, child = name.rpartition(".")
        package = _MODULES[parent] if parent else here
        sys.modules.setdefault(f"{package.__name__}.{child}", module)
