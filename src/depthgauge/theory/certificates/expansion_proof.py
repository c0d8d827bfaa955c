"""Proofs for networks with the exact expansion (docs/math.md §3.1): not causal, and neither norms, MLPs nor biases.

Subtracting the expansions of both networks gives

    S(X) − S'(X) = 1·mean(X)·(Z_{0:L} − Z'_{0:L'}) + Σ (terms of the heads of S) − Σ (terms of the heads of S').

The plain bound bounds every head alone. The joint bound bounds the leading terms of all heads of both networks
together, where equal heads cancel, and only what is beyond them head by head.
"""

from collections.abc import Callable

from torch import Tensor

from depthgauge.base.errors import VerificationError
from depthgauge.base.progress import Step, silent
from depthgauge.theory.certificates.compared_networks import Comparison
from depthgauge.theory.certificates.difference import MatchedHeads, free_heads
from depthgauge.theory.certificates.expansion_layers import ExpansionLayers
from depthgauge.theory.certificates.lead import STEPS, Rank1Sum, sharpened
from depthgauge.theory.certificates.method import Bound, Method
from depthgauge.theory.certificates.regions import LastRow, region_of
from depthgauge.theory.linalg.arb_arithmetic import ArbArithmetic
from depthgauge.theory.linalg.bound_arithmetic import BoundArithmetic, Enclosed, total
from depthgauge.theory.surrogates.expansion import Expansion, match_heads

WORTHWHILE = 0.03
"""The share of a bound beyond its leading and linear terms above which intermediate states are bounded jointly too."""


def layers_of(
    comparison: Comparison, A: BoundArithmetic, *, joint: bool = True, prefixes: bool = False, progress: Step = silent
) -> ExpansionLayers:
    """Return the layer bounds of S."""
    region = region_of(A, comparison.inputs, comparison.network.dim)
    X = Expansion(comparison.network, A)
    return ExpansionLayers(X, region, joint=joint and region.alone is None, prefixes=prefixes, progress=progress)


class ExpansionProof(Method):
    """A proof on a region; S and S' are not causal.

    Args:
        comparison: what is compared.
        S: the layer bounds of S, which several proofs may share.
        effort: "high" sharpens the leading term on a box or a ball by sums of squares.
        steps: optimisation steps for the scalings of the leading term.
        readout: returns a matrix R, [d, m], in an arithmetic; then the bound is on |(S − S') R| in the last row alone,
            over all sequences of tokens that fill all positions.
        enough: bounds from which on the proof is of no use, so that it need not be sharpened.
    """

    def __init__(
        self,
        comparison: Comparison,
        S: ExpansionLayers,
        *,
        effort: str = "default",
        steps: int = STEPS,
        readout: Callable[[BoundArithmetic], Enclosed] | None = None,
        enough: Tensor | None = None,
    ) -> None:
        self.S, self.effort, self.steps, self.readout, self.enough = S, effort, steps, readout, enough
        super().__init__(comparison)

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        network, surrogate, inputs, S = comparison.network, comparison.surrogate, comparison.inputs, self.S
        if A is not self.arithmetic:
            S = layers_of(comparison, ArbArithmetic(S.A.record), joint=S.joint, prefixes=S.prefixes)
        R = None if self.readout is None else self.readout(A)
        region = region_of(A, inputs, network.dim) if R is None else LastRow(A, inputs)
        # Without skips the inputs of a head in S and in S' are unrelated, so matching heads gives nothing.
        matches = match_heads(network, surrogate) if network.skip else []
        is_apart = region.matches and len(surrogate) > 1  # the heads of S' that are not matched are bounded alone
        other = ExpansionLayers(Expansion(surrogate, A), region, joint=S.joint and not is_apart)
        matched = MatchedHeads(region, S, other, matches if region.matches else [])
        mine, theirs = range(S.X.depth), range(other.X.depth)

        drift = S.X.drift(0, S.X.depth) - other.X.drift(0, other.X.depth)
        linear = region.largest((drift if R is None else drift @ R)[None])[0]
        parts = [part * matched.mask(0, k) for k, part in enumerate(S.added(R))]
        by_other = total(*((part * matched.mask(1, k)).sum(0) for k, part in enumerate(other.added(R))))
        by_matched = [matched.added(match) for match in matched.matches]
        plain = total(linear, by_other, *(part.sum(0) for part in parts), *by_matched)
        if R is None:
            # |S(X)| ≤ state_L and |S'(X)| ≤ state'_L' hold for every attention, so |S − S'| ≤ state_L + state'_L'.
            plain = plain.least(S.states[-1].state + other.states[-1].state)
        for match in matched.matches:
            parts[match.k] = parts[match.k] + matched.spread_out(match)
        notes = () if region.alone is None else (region.alone,)
        if A is self.arithmetic:
            self.drift = drift.floats()
        if not S.joint:
            return Bound(plain, parts, ("plain",), notes)

        # For S' of one layer, Tᵐ' = 0. If the heads of S' are bounded apart, those matched have no leading terms.
        free = [free_heads(network, k, matches, 0) for k in mine]
        led = free if is_apart else [list(range(S.X.V[k].shape[0])) for k in mine]
        T = [S.terms(k).heads(free[k]) for k in mine]
        Tm = [terms.heads(led[k]) for k in mine for terms in S.drifts(k)]
        rests = [(part * matched.mask(0, k) if is_apart else part).sum(0) for k, part in enumerate(S.beyond(R))]
        if is_apart:
            beyond = total(linear, by_other, *by_matched, *rests)
        else:
            T += [other.terms(k).heads(free_heads(surrogate, k, matches, 1)).negated() for k in theirs]
            Tm += [terms.negated() for k in theirs for terms in other.drifts(k)]
            beyond = total(linear, *rests, *(part.sum(0) for part in other.beyond(R)))
        tensors = [Rank1Sum.join(A, network.dim, terms).read(R) for terms in (T, Tm)]
        leads = region.lead(*tensors, is_sharp=self.effort == "high", steps=self.steps)
        joint, squared = sharpened(A, plain, beyond, leads, self.enough)
        value = plain.least(joint)
        a = int(value.floats().argmax())
        is_joint = bool(joint.floats()[a] < plain.floats()[a])
        names = (region.joint, *(["squares"] if region.squares and a in squared else [])) if is_joint else ("plain",)
        if A is self.arithmetic:
            self.T = tensors[0]
            avoidable = float((beyond.floats() - linear.floats())[a])
            is_promising = float(joint.floats()[a]) - avoidable < float(plain.floats()[a])
            self.is_refinable = is_promising and avoidable > WORTHWHILE * float(value.floats()[a])
        return Bound(value, parts, names, notes)

    is_refinable = False
    """Whether joint bounds of the intermediate states may help: much of the bound is beyond its leading terms."""

    @property
    def lost_at(self) -> int:
        """The first layer whose output has no finite bound; the last layer if all states have one."""
        finite = [bool(states.state.floats().isfinite().all()) for states in self.S.states]
        return max((finite.index(False) if False in finite else self.S.X.depth) - 1, 0)


class OneToken(Method):
    """A proof for one token, whose attention is the identity: |S − S'| = |x (Z_{0:L} − Z'_{0:L'})|, causal or not."""

    lost_at = 0

    def bound(self, comparison: Comparison, A: BoundArithmetic) -> Bound:
        """As in the base class."""
        if comparison.tokens != 1:
            raise VerificationError("the proof is for inputs of one token, and these may have more")
        X, Y = (Expansion(net, A, one_token=True) for net in (comparison.network, comparison.surrogate))
        drift = X.drift(0, X.depth) - Y.drift(0, Y.depth)
        if A is self.arithmetic:
            self.drift = drift.floats()
        parts = [A.zeros(layer.heads, X.dim) for layer in comparison.network]
        value = region_of(A, comparison.inputs, X.dim).largest(drift[None])[0]
        return Bound(value, parts, ("plain",), ("one token: attention is the identity",))
