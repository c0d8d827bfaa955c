# %% [markdown]
# # Fast attention with a guaranteed error
#
# `dg.attention` has the arguments of torch's `scaled_dot_product_attention` and a tolerance. Where the scores are small
# enough it uses a polynomial instead of exp, in time linear in the number of tokens. Elsewhere it is exact.

# %%
import time

import torch
import torch.nn.functional as F

import depthgauge as dg

torch.manual_seed(0)
q, k, v = (0.1 * torch.randn(1, 2, 4096, 16) for _ in range(3))

# %% [markdown]
# ## The plan
#
# The plan shows the decision for each head: the proved bound B on the scores, the degree of the polynomial, the
# predicted cost and the guaranteed error.

# %%
print(dg.attention_plan(q, k, v, tolerance=1e-3))

# %% [markdown]
# ## The guarantee
#
# Every output entry is within `tolerance` × range(v) of exact attention, where range(v) is the largest minus the
# smallest value in the column.

# %%
out = dg.attention(q, k, v, tolerance=1e-3)
exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double())
error = (out - exact).abs()
span = v.amax(dim=-2, keepdim=True) - v.amin(dim=-2, keepdim=True)
print(f"\nlargest error / range(v): {(error / span).max().item():.1e}, guaranteed: 1e-3")


# %%
def seconds(function):
    """Return the best time of three calls."""
    times = []
    for _ in range(3):
        begun = time.perf_counter()
        function()
        times.append(time.perf_counter() - begun)
    return min(times)


ours = seconds(lambda: dg.attention(q, k, v, tolerance=1e-3))
theirs = seconds(lambda: F.scaled_dot_product_attention(q, k, v))
print(f"4096 tokens: {ours * 1e3:.0f} ms, torch {theirs * 1e3:.0f} ms, {theirs / ours:.1f} times as fast")

# %% [markdown]
# ## Large scores
#
# For larger scores the polynomial would need a high degree. The plan then chooses exact attention and states why.

# %%
large = 30 * q
print()
print(dg.attention_plan(large, k, v, tolerance=1e-3))

# %% [markdown]
# ## Bounds for every row
#
# `return_bound` also returns a bound on the error of each row, which is often much smaller than the tolerance.

# %%
out, bound = dg.attention(q, k, v, tolerance=1e-3, return_bound=True)
print(f"\nlargest proved row bound: {bound.max().item():.1e}; largest error: {error.max().item():.1e}")
