"""How long a test waits for an event before it counts as a hang; no test expects this to pass."""

HANG = 600.0  # seconds, less than the timeout of a test in pyproject.toml
