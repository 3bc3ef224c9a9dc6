"""Recordings of a model's loader: the boxes of checkpoint tensors that each parameter needs."""
