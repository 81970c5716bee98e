"""Execution on one rank: rank plans, exchanges, kernels, and the attention call itself."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.attention", "spanwise.attention.attention")
