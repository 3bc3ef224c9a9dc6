"""Operations that conversions apply to the tensors of a checkpoint."""
