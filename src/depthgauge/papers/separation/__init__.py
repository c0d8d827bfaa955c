"""Softmax against linear attention (paper B).

The paper defines pairs of data sets D₀, D₁ on which a network with softmax attention separates D₁ from D₀ and a network
with linear attention does not. Three implementations compute the same decisions and are tested against each other:

- `dense`: dense matrices and the formulas of the definitions;
- `structured`: the attention output has few distinct rows, so one model costs O(d·m) operations for every n;
- `exact`: the probability of success in closed form, for self-attention and cross-attention.
"""
