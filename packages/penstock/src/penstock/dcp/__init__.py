"""torch.distributed.checkpoint (DCP) through Penstock: `CheckpointReader` for `dcp.load`, `CheckpointWriter` for saves.

dcp.load(state, storage_reader=CheckpointReader("s3://bucket/model"))
dcp.save(state, storage_writer=CheckpointWriter("checkpoints/step-1000"))
"""

from penstock.dcp.reader import CheckpointReader
from penstock.dcp.writer import CheckpointWriter

__all__ = ["CheckpointReader", "CheckpointWriter"]
