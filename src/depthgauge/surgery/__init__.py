"""Shrink a checkpoint: remove blocks, repair the rest, and bound what it costs."""
