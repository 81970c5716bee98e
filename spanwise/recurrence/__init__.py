"""Layers that carry a state along the sequence."""

from spanwise.recurrence.conv import causal_conv
from spanwise.recurrence.layers import gated_delta, gated_linear
from spanwise.recurrence.route import RecurrenceRoute, recurrence_route

__all__ = ["RecurrenceRoute", "causal_conv", "gated_delta", "gated_linear", "recurrence_route"]
