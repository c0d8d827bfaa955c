"""Rows in, matplotlib figures out: nothing here computes."""
