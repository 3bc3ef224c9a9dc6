"""Collectives of a torch.distributed group: each has a deadline, and all ranks succeed or all raise."""
