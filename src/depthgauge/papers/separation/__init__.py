"""Softmax against linear attention (paper B).

The paper defines pairs of data sets D₀, D₁ on which a network with softmax attention separates D₁ from D₀ and a network
with linear attention does not. `decisions` decides one model in O(d·m) operations, because the attention output has
few distinct rows. `exact` computes the probability of success in closed form. Tests compare both with dense matrices.
"""
