"""Proved upper bounds, attained lower bounds, and an independent verification of the upper bounds."""
