"""Recording of a loader: the parts of published tensors that each parameter needs."""
