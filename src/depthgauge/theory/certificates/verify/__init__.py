"""A second, independent proof of every upper bound, in arb interval arithmetic (docs/math.md §3.10).

From the first proof it takes only numbers that need no trust: claims, which it proves, and scalings, which are sound
whatever they are.
"""
