"""`python -m sglang.launch_server`, also on a CPU.

    python sglang_launch.py ARGUMENTS

SGLang's kernels exist only for GPUs. Without a GPU a package whose functions raise replaces them, and attention,
sampling and layers are those of torch.
"""

import sys
from pathlib import Path

# This is at module level, because a spawned process imports this module again.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from tests.engines import sglang_loads  # noqa: F401 - it replaces the kernels

if __name__ == "__main__":
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args

    load_plugins()
    run_server(prepare_server_args(sys.argv[1:]))
