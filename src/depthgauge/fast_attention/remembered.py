"""`Attention`: the function `attention` as an object that remembers where looking at numbers did not help."""

from torch import Tensor

from depthgauge.base.errors import require_positive
from depthgauge.fast_attention.attention import Output, attend
from depthgauge.fast_attention.decide.refusals import Refusals
from depthgauge.fast_attention.plan import AttentionPlan
from depthgauge.fast_attention.problem import Options


class Attention:
    """Attention with a guaranteed error that remembers decisions by shape. It is called like `attention`.

    A call whose numbers of tokens are too small for a polynomial to pay is exact, and its numbers are not examined. Any
    other call is examined as in `attention`, and a polynomial is used only where the numbers prove the tolerance. If
    exact attention was chosen for all heads, the next calls with the same shapes, dtype and options are exact without
    being examined: 1 call, and twice as many after every further such choice, up to 1,024; `reset` ends this.

    Args:
        tolerance: The largest error of an output entry, as a fraction of the range of its values.

    Raises:
        InputError: The tolerance is not a positive number.

    >>> import torch
    >>> attend = Attention(tolerance=1e-3)
    >>> q = k = v = torch.eye(4)
    >>> exact = torch.nn.functional.scaled_dot_product_attention(q, k, v)
    >>> bool((attend(q, k, v) - exact).abs().max() < 1e-3)
    True
    """

    def __init__(self, tolerance: float = 1e-3) -> None:
        self.tolerance = require_positive(
            "tolerance", tolerance, "the largest error of an output entry, as a fraction of the range of its values"
        )
        self._refusals = Refusals()

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        *,
        scale: float | None = None,
        key_padding: Tensor | None = None,
        enable_gqa: bool = False,
        force: str | None = None,
        return_bound: bool = False,
        plan: AttentionPlan | None = None,
    ) -> Output:
        """Compute softm(s q kᵀ) v within the tolerance. The arguments and errors are those of `attention`."""
        options = Options(attn_mask, dropout_p, is_causal, self.tolerance, scale, key_padding, enable_gqa, force)
        return attend(q, k, v, options, return_bound, plan, self._refusals)

    def reset(self) -> None:
        """Forget all decisions: the next call of every shape is examined again."""
        self._refusals.clear()

    def __repr__(self) -> str:
        return f"Attention(tolerance={self.tolerance:g})"
