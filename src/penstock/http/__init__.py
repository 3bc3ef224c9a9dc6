"""One HTTP/1.1 data plane: range requests into buffers, serving of memory, retries by progress."""
