"""HTTP/1.1 for data: range requests into buffers, serving of memory, and retries that depend on progress."""
