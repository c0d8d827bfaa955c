"""Typed records of everything a verb returns, with the labels and verdicts shown to people."""
