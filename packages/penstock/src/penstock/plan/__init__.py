"""Planning: pure functions on values, without torch, clocks or I/O, so that a transfer can be proven on a CPU.

`schedule` plans the reads of a load and the chunks of a fetch. `relay` and `relay_parents` plan chains and trees of
members. `sync`, `intersect` and `packing` plan a sync, `tasks` and `placement` a conversion. `tensor_parallel` gives
the part of each tensor that belongs to a rank. `simulate_convert` predicts how long a conversion takes on a described
cluster.
"""
