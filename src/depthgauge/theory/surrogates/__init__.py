"""Closed-form shallower networks, the expansion they come from, and head matching."""
