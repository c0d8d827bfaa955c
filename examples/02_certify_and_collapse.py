# %% [markdown]
# # Certify and collapse a network
#
# A network with small weights can be replaced by one layer. This example constructs the one-layer networks, proves how
# far they can be off over *all* inputs, and finds the effective depth.

# %%
import torch

import depthgauge as dg

net = dg.random_network(layers=4, heads=2, dim=6, eta=0.01, seed=0)
print(f"{len(net)} layers, width {net.dim}, largest weight {net.eta}")

# %% [markdown]
# ## Five ways to keep one layer
#
# `lower` is the error at an input that an attack found. `upper` is proved for every input with entries up to 1 and any
# number of tokens. The largest error is between the two.

# %%
print("\nmethod      attained     proved   ratio")
for method in ("identity", "last-layer", "parallel", "mean-field", "corrected"):
    cert = dg.certify(net, dg.collapse(net, method=method), radius=1.0)
    print(f"{method:10s}  {cert.lower:8.2e}   {cert.upper:8.2e}   {cert.ratio:5.2f}")

# %% [markdown]
# ## Verify a certificate
#
# `verify` proves the upper bound a second time, by the same function in interval arithmetic. `witness` is the
# input that attains the lower bound.

# %%
small = dg.collapse(net, method="mean-field")
cert = dg.certify(net, small, radius=1.0)
x = cert.witness
error = (net(x) - small(x)).abs().max().item()
print(f"\nverified a second time: {cert.verify()}")
print(f"error at the witness of {len(x)} tokens: {error:.2e}, not below {cert.lower:.2e} (up to rounding)")

# %% [markdown]
# ## Effective depth
#
# How many layers are needed for an error of at most `tolerance`, proved for every input?

# %%
print("\ntolerance   layers   kept")
for tolerance in (1e-2, 1e-5):
    depth = dg.effective_depth(net, radius=1.0, tolerance=tolerance)
    print(f"{tolerance:9.0e}   {depth.layers} of {len(net)}   {list(depth.kept)}")

# %% [markdown]
# ## Small weights matter
#
# The same network with larger weights: the proved bound grows quickly, and one layer is not enough any more.

# %%
print("\nη       mean-field: attained     proved")
for eta in (0.03, 0.3):
    larger = net.rescale(eta)
    cert = dg.certify(larger, dg.collapse(larger, method="mean-field"), radius=1.0)
    print(f"{eta:<5}   {cert.lower:20.2e}   {cert.upper:8.2e}")

# %%
inputs = 2 * torch.rand(4, 32, net.dim, dtype=torch.float64) - 1
seen = dg.effective_depth(net.rescale(0.1), tolerance=1e-2, certified=False, x=inputs)
print(f"\nη = 0.1: on four random inputs {seen.layers} of {len(net)} layers are enough within 0.01")
