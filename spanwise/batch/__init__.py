"""Batches, losses and per-token tensors of a sharded sequence."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.batch", "spanwise.batch.sharding", "spanwise.batch.loss")
