"""Typed records of what each verb returns, with the labels shown to people."""
