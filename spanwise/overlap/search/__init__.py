"""Orders of a dag: list schedules within limits."""
