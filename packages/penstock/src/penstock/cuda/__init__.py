"""The CUDA driver: its calls, streams, compiled kernels, and kernels for many short copies.

`driver` calls CUDA through ctypes, and `device_memory` separates memory from its addresses. `events` has waits with a
deadline. `kernel_cache` keeps compiled Triton kernels on disk. `gather` and `pack` combine many short copies in one
kernel.
"""
