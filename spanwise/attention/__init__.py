"""One rank's part of a plan, run: rank plans, exchanges, kernels, and the attention call itself."""

from spanwise._moved import forward

__getattr__ = forward("spanwise.attention", "spanwise.attention.attention")
