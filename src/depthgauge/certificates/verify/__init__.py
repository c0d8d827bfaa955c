"""Every upper bound once more, in ball arithmetic and from the mathematics alone: nothing of the first proof is used
but its claims and its scalings."""
