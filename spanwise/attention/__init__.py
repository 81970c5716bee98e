"""One rank's part of a plan, run: rank plans, exchanges, kernels, and the attention call itself."""
