"""Polynomial attention in plain torch."""
