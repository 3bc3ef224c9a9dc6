"""Memory: staging buffers that bytes pass through, arenas in which they stay, tiers between which they move.

`targets` checks the tensors that a verb fills, and `local_shards` has a rank's part of a DTensor. `memfd` is shared
memory, and `arena` lays tensors out on it. `tier*` moves blocks between device, host and disk.
"""
