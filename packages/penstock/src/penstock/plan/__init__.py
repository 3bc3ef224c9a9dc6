"""Planning: pure functions on values. No torch, no clock, no I/O; a move is proven here on a CPU."""
