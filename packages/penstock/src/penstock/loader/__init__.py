"""The load journey: from any storage into memory, as whole tensors, regions, streams or live parameters."""
