"""Which method proves the upper bound of a comparison."""

from dataclasses import replace

from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.causal_proof import CausalProof
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.deletion import Deletion, deletion_applies
from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.expansion_proof import ExpansionProof, OneToken, layers_of
from depthgauge.theory.certificates.forward_rounding import EvaluatedIn
from depthgauge.theory.certificates.method import Method
from depthgauge.theory.certificates.parallel_blocks import WideBlock
from depthgauge.theory.certificates.token_set import Tokens
from depthgauge.theory.linalg.bound_arithmetic import Outward


def method_of(
    comparison: Comparison, effort: str = "default", S: ExpansionLayers | None = None, progress: Step = silent
) -> Method:
    """Return a proof by the method that applies to the two networks, or by the better one of two.

    `effort` is "default" or "high"; `S` are the layer bounds of the network from an earlier proof over the same inputs.
    """
    if comparison.evaluated_in is not None:
        return EvaluatedIn(method_of(replace(comparison, evaluated_in=None), effort, S, progress), comparison)
    if comparison.is_one_token:
        return OneToken(comparison)
    if comparison.is_wide_block:
        return WideBlock(comparison, progress)
    if comparison.network.causal and comparison.network.skip and not comparison.has_mlp:
        proof: Method = CausalProof(comparison, progress)
        if isinstance(comparison.inputs, Tokens) or not deletion_applies(comparison.network, comparison.surrogate):
            return proof
        return min(proof, Deletion(comparison), key=lambda one: float(one.value.max()))
    if not comparison.expands:
        return Deletion(comparison)
    return expansion_proof(comparison, effort, S or layers_of(comparison, Outward(), progress=progress))


def expansion_proof(comparison: Comparison, effort: str, S: ExpansionLayers) -> ExpansionProof:
    """Return a proof by the expansion.

    The bounds of the intermediate states are plain at first. If much of the joint bound on a box lies beyond its
    leading and linear terms, the proof is repeated with joint bounds of all states, and the smaller result is kept.
    """
    proof = ExpansionProof(comparison, S, effort=effort)
    if not (proof.is_refinable and S.region.squares and S.region.by_coordinate and not S.prefixes):
        return proof
    refined = ExpansionProof(comparison, layers_of(comparison, Outward(), prefixes=True), effort=effort)
    return refined if bool(refined.value.amax() < proof.value.amax()) else proof
