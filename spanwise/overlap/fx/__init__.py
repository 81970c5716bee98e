"""fx graphs to dags and back; captured graphs, and graphs in files."""
