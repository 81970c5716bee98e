"""Reasons for exposed collectives, reports and traces."""
