"""What becomes of values on their way: casts and block formats, with the same bits on the CPU and on a device."""
