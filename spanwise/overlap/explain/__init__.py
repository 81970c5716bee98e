"""Reports: reasons, text, traces."""
