"""Planning: pure functions on values. No torch, no clock, no I/O; a move is proven here on a CPU.

`schedule`: reads of a load, chunks of a fetch. `relay`, `relay_parents`: chains and trees of members. `sync`,
`intersect`, `packing`: parts of a sync. `tasks`, `placement`: a conversion. `tensor_parallel`: the part of each
tensor that a rank has. `simulate_*`: how long each takes on a described cluster.
"""
