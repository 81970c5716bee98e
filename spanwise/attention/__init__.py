"""Execution on one rank: rank plans, exchanges, kernels, and the attention call itself."""
