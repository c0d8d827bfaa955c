"""A complete description of one polynomial attention, as a backend receives it."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from depthgauge.fast_attention.problem import Problem
from depthgauge.fast_attention.theory.bounds import Survey

ROUNDING = 2.0**-11
"""Centred norms below this share of the norm itself count as this share: those of equal tokens are rounding errors of
their mean, and balanced against them the other side would leave the range of float16."""


@dataclass(frozen=True)
class Spec:
    """Everything a backend needs besides q, k and v. Nothing in it has a gradient; tensors are created on first use.

    `coefficients` holds the coefficients of p for every head. `members` are the indices of these heads in the survey.
    `centrings` is 0 for a head that is not centred, 1 if its keys are centred, 2 if its keys and queries are centred.
    `exact_rows` [N, G, n] marks rows that are computed exactly elsewhere.
    """

    degree: int
    coefficients: tuple[tuple[float, ...], ...]
    members: tuple[int, ...]
    centrings: tuple[int, ...]
    exact_rows: Tensor | None
    survey: Survey
    problem: Problem
    keep: Tensor | None

    @property
    def scale(self) -> float:
        """The factor s of q·k."""
        return self.problem.scale

    @property
    def causal(self) -> bool:
        """Whether row i attends to keys j ≤ i only."""
        return self.problem.causal

    @property
    def is_centred(self) -> bool:
        """Whether any head is centred."""
        return any(self.centrings)

    @cached_property
    def is_alike(self) -> bool:
        """Whether all heads have the same polynomial."""
        return self.coefficients.count(self.coefficients[0]) == len(self.coefficients)

    @property
    def is_weighted(self) -> bool:
        """Whether the keys of some head have different weights w_j, which is so if its queries are centred."""
        return 2 in self.centrings

    def _per_head(self, values: list[float]) -> Tensor:
        return torch.tensor(values, dtype=torch.float64, device=self.survey.query_centre.device)

    def _where(self, least: int, centre: Tensor) -> Tensor:
        is_used = torch.tensor([c >= least for c in self.centrings], device=centre.device)
        return torch.where(is_used[:, None], centre[list(self.members)], 0).to(self.problem.working)

    @cached_property
    def query_centre(self) -> Tensor:
        """μ [N, d] in the working dtype, 0 where queries are not centred."""
        return self._where(2, self.survey.query_centre)

    @cached_property
    def key_centre(self) -> Tensor:
        """c [N, d] in the working dtype, 0 where keys are not centred."""
        return self._where(1, self.survey.key_centre)

    @cached_property
    def factors(self) -> tuple[Tensor, Tensor]:
        """The factors [N] of q − μ and of k − c. Their product is the scale, and the factor of k is a power of two."""
        s, pairs = self.survey, []
        # Norms of zero vectors are rounded up to this number. Balanced against it, the other side would leave float16.
        lost = 2 * math.sqrt(self.problem.q.shape[-1] * torch.finfo(self.problem.working).tiny) * (1 + 2.0**-20)
        for head, centring in zip(self.members, self.centrings, strict=True):
            query = max(s.query_centred[head], ROUNDING * s.query[head]) if centring == 2 else s.query[head]
            key = max(s.key_centred[head], ROUNDING * s.key[head]) if centring else s.key[head]
            pairs.append(balance(query, key, self.scale) if min(query, key) > lost else (self.scale, 1.0))
        return self._per_head([q for q, _ in pairs]), self._per_head([k for _, k in pairs])

    @property
    def query_factor(self) -> Tensor:
        """The factor of q − μ: [N]."""
        return self.factors[0]

    @property
    def key_factor(self) -> Tensor:
        """The factor of k − c: [N]."""
        return self.factors[1]

    @cached_property
    def middle(self) -> Tensor:
        """The midpoint of the range of every value column: [N, e]."""
        return self.survey.middle(self.problem)[list(self.members)]


def centred(spec: Spec, at: slice, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
    """Return q̃ and k̃ of the heads `at` in the working dtype, with q̃_i·k̃_j = s (q_i − μ)·(k_j − c).

    q is [N, G, n, d] and k is [N, m, d], already restricted to these heads. Exact rows and padding keys become 0.
    """
    work = spec.problem.working
    qt = (q.to(work) - spec.query_centre[at, None, None]) * spec.query_factor[at, None, None, None].to(work)
    kt = (k.to(work) - spec.key_centre[at, None]) * spec.key_factor[at, None, None].to(work)
    if spec.exact_rows is not None:
        qt = qt.masked_fill(spec.exact_rows[at, ..., None], 0)
    if spec.keep is not None:
        kt = kt.masked_fill(~spec.keep[at, ..., None], 0)
    return qt, kt


def weights(spec: Spec, at: slice, k: Tensor) -> Tensor | None:
    """Return w_j = exp(s μ·(k_j − c)) divided by the largest kept weight: [N, m], or None if every weight is 1.

    `k` [N, m, d] holds the keys of the heads `at`. Padding keys have weight 0. The exponent is summed in float64.
    """
    keep = None if spec.keep is None else spec.keep[at]
    if not spec.is_weighted:
        return None if keep is None else keep.to(spec.problem.working)
    shifted = k.double() - spec.key_centre[at, None].double()
    log_w = spec.scale * (shifted @ spec.query_centre[at, :, None].double()).squeeze(-1)
    if keep is not None:
        log_w = log_w.masked_fill(~keep, -torch.inf)
    return torch.exp(log_w - log_w.amax(dim=1, keepdim=True)).to(spec.problem.working)


def balance(query_norm: float, key_norm: float, scale: float) -> tuple[float, float]:
    """Return factors of q and k whose product is `scale` and which make both norms about √B.

    The factor of k is a power of two.

    >>> balance(4.0, 1.0, 1.0)
    (0.5, 2.0)
    """
    if scale == 0 or query_norm == 0 or key_norm == 0:
        return scale, 1.0
    power = math.floor((math.log2(abs(scale)) + math.log2(query_norm) - math.log2(key_norm)) / 2)
    return math.ldexp(scale, -power), math.ldexp(1.0, power)
