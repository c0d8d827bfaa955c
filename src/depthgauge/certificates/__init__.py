"""Proved upper bounds, attacked lower bounds, and the independent verification of both."""
