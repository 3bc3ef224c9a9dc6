"""Planning: pure functions on values, without torch, clocks or I/O, so that a transfer can be proven on a CPU."""
