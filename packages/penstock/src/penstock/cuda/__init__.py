"""The CUDA driver: its calls, streams, compiled kernels, and kernels for many short copies.

`driver` calls CUDA through ctypes; `device_memory` is memory apart from its addresses; `events` are waited for with
a deadline. `kernel_cache` keeps compiled Triton kernels on disk. `gather` and `pack` make one kernel of many short
copies.
"""
