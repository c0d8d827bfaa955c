"""Reproduce the figures of both papers and of this project."""
