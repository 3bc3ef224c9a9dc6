"""HTTP/1.1 for data: range requests into buffers, serving of memory, retries by progress."""
