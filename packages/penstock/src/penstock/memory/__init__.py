"""Memory: staging buffers that bytes pass through, arenas in which they stay, tiers between which they move.

`targets` checks the tensors that a verb fills, and `local_shards` gives a rank's part of a DTensor. `memfd` is shared
memory, and `arena` places tensors in it. `tier*` moves blocks between device, host and disk.
"""
