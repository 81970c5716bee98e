"""Reports of a plan or of optimized graphs: one text, one self-contained HTML page without script, and JSON."""
