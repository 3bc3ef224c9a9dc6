"""The CUDA driver: its calls, streams, compiled kernels, and kernels for many short copies."""
