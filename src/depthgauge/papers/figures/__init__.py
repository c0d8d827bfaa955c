"""Drawings: numbers in, matplotlib figures out. Nothing is computed here."""
