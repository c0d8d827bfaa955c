"""Attention with a guaranteed error: polynomial where the scores are small, exact where they are not."""
