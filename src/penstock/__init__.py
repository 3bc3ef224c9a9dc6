"""Penstock: model weights to GPUs at the speed of the link, verified, in bounded memory."""
