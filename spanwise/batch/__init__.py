"""Batches, losses and per-token tensors of a sharded sequence."""
