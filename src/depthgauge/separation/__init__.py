"""Softmax against linear attention: data sets on which a network with the one tells D₁ from D₀ and the other does not.

Three ways to the same decisions, each checked against the others:

- `naive`: dense matrices, exactly the formulas of the definitions;
- `structured`: the attention output has a handful of distinct rows, so a model costs O(d·m), whatever n is;
- `exact`: the probability of success in closed form, for self- and cross-attention.
"""
