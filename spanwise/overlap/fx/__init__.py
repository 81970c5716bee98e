"""From fx graphs to dags and back; capture and files of graphs."""
