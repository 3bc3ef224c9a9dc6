"""Operations of conversions: what is made of the tensors of a checkpoint."""
