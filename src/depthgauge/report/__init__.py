"""Render a result as one HTML page. This package computes nothing and reads result records only."""
