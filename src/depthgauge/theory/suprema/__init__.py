"""Exact suprema over prompts: functions on the simplex of token shares, enclosed, and branch and bound over them."""
