"""Context parallelism for PyTorch, planned from the attention mask."""
