"""The ranks of a torch.distributed group: each collective has a deadline, and all ranks succeed or all raise.

`collectives` bounds the waits, `agreement` lets all ranks take a step, and `exchange` moves the bytes that they read.
"""
