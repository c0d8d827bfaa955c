"""A one-screen glossary of the terms in tables and verdicts; docs/glossary.md explains all of them."""

from collections.abc import Mapping

TERMS: Mapping[str, str] = {
    "paper A": "Only Large Weights (And Not Skip Connections) Can Prevent the Perils of Rank Collapse",
    "paper B": "Superiority of Softmax: Unveiling the Performance Edge Over Linear Attention",
    "η, φ": "largest |weight| of a network; largest |entry| of its inputs (radius)",
    "residual": "‖Res X‖/‖X‖: what remains of a state after its common row is removed; 0: all tokens equal",
    "TV to uniform": "distance of attention from plain averaging: 0 averages, 1 selects one token",
    "attained": "at least one input is off by this (attacked lower bound, evaluated rigorously)",
    "proved": "no input is off by more (upper bound; the rounding of its proof is included)",
    "Theorem D.1": "the bound that paper A prints; (…): its conditions fail; false: an input exceeds it",
    "joint": "proof: all heads and layers bounded together",
    "plain": "proof: every head bounded alone, and the bounds added",
    "pairs": "proof: all heads are bounded together, over pairs of tokens (--tokens)",
    "squares": "proof: the joint bound sharpened by sums of squares (--effort high)",
    "deletion": "proof: attention removed layer by layer; causal networks and networks with MLPs",
    "refuted": "for every shallower network tried, an input was found on which it exceeds the tolerance",
    "undecided": "neither proved nor refuted; for statements: hidden constants, or no time left",
    "fold": "a run of layers replaced by one averaging layer",
    "what-if": "the loss added when a part of one layer is skipped, with its 95 % interval",
    "static error": "relative error of a head's output with the best fixed attention pattern",
    "repair": "a change of output maps, gains and biases of the kept blocks, after blocks were removed",
    "certify windows": "text that nothing was fitted or selected on; the numbers of shrink are measured on it",
    "guarantee": "bound on the increase of the loss for future windows exchangeable with the certify windows",
    "rank correlation": "Spearman's correlation of a layer score with the measured cost; 1: same order",
    "F_exp(D₁), F_lin(D₀)": "output of paper B's network on a data set, with softmax or linear attention",
    "1⁻": "the largest ratio found is below 1 and rounds to 1",
}
"""Term → meaning, one line each."""
