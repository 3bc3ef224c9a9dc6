"""Support for torch.distributed.checkpoint (DCP): `CheckpointReader` for `dcp.load`, `CheckpointWriter` for saves.

dcp.load(state, storage_reader=CheckpointReader("s3://bucket/model"))
dcp.save(state, storage_writer=CheckpointWriter("checkpoints/step-1000"))

- `reader` reads a `checkpoint` in safetensors or in DCP's own format (`distcp`). `reader` splits a load into `parts`,
  and `local_files` copies the parts of local files.
- `pickled` decodes pickles without executing them.
- `writer` writes whole tensors (`stored`), with `staging` for asynchronous saves.
"""

from penstock.entry_points import require_package

require_package("torch")


from penstock_dcp.reader import CheckpointReader  # noqa: E402 - after what it needs
from penstock_dcp.writer import CheckpointWriter  # noqa: E402 - after what it needs

__all__ = ["CheckpointReader", "CheckpointWriter"]
