"""One polynomial attention, fixed to the last number: what a backend is handed."""

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from depthgauge.fast_attention.decide.bounds import Survey
from depthgauge.fast_attention.problem import Problem


@dataclass(frozen=True)
class Spec:
    """Everything a backend needs besides q, k and v; nothing in it has a gradient, and tensors are made when asked for.

    `coefficients` are p's for every head; `members` are the heads of the survey, `centrings` says for each whether
    nothing (0), the keys (1) or the queries too (2) are centred; `exact_rows` [N, G, n] marks rows computed elsewhere.
    """

    degree: int
    coefficients: tuple[tuple[float, ...], ...]
    members: tuple[int, ...]
    centrings: tuple[int, ...]
    scale: float
    causal: bool
    keep: Tensor | None
    exact_rows: Tensor | None
    survey: Survey
    problem: Problem

    @property
    def is_centred(self) -> bool:
        """Whether any head is centred."""
        return any(self.centrings)

    @property
    def is_weighted(self) -> bool:
        """Whether keys weigh differently because the queries of some head are centred."""
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
        """What q − μ and k − c are multiplied by, two [N] whose product is the scale; the key's a power of two."""
        s, pairs = self.survey, []
        for head, centring in zip(self.members, self.centrings, strict=True):
            query = s.query_centred[head] if centring == 2 else s.query[head]
            key = s.key_centred[head] if centring else s.key[head]
            pairs.append(balance(query, key, self.scale))
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
        """The middle of every value column's range: [N, e]."""
        return self.survey.middle(self.problem)[list(self.members)]


def weights(spec: Spec, at: slice, k: Tensor) -> Tensor | None:
    """w_j = exp(s μ·(k_j − c)) over the largest kept one, 0 where a key is padding: [N, m]; None where all are 1.

    `k` [N, m, d] holds the keys of the heads `at`; the exponent is summed in float64.
    """
    keep = None if spec.keep is None else spec.keep[at]
    if not spec.is_weighted:
        return None if keep is None else keep.to(spec.problem.working)
    centred = k.double() - spec.key_centre[at, None].double()
    log_w = spec.scale * (centred @ spec.query_centre[at, :, None].double()).squeeze(-1)
    if keep is not None:
        log_w = log_w.masked_fill(~keep, -torch.inf)
    return torch.exp(log_w - log_w.amax(dim=1, keepdim=True)).to(spec.problem.working)


def balance(query_norm: float, key_norm: float, scale: float) -> tuple[float, float]:
    """Factors of q and k with the product `scale`: the key's a power of two, so that both become about √B long.

    >>> balance(4.0, 1.0, 1.0)
    (0.5, 2.0)
    """
    if scale == 0 or query_norm == 0 or key_norm == 0:
        return scale, 1.0
    power = math.floor((math.log2(abs(scale)) + math.log2(query_norm) - math.log2(key_norm)) / 2)
    return math.ldexp(scale, -power), math.ldexp(1.0, power)
