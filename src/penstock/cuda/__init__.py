"""Everything that touches the CUDA driver: calls, streams, compiled kernels, gathers of short copies."""
