"""Masks as key intervals of each query row: SpanMask and the array functions under it."""
