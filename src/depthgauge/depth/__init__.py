"""Collapse a network to fewer layers, and find its effective depth."""
