"""Polynomial attention in plain torch, on any device."""
