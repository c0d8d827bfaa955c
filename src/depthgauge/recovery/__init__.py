"""Distil a smaller model towards its source."""
