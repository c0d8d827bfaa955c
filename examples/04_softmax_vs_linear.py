# %% [markdown]
# # Softmax versus linear attention
#
# Deng, Song and Zhou ("Superiority of Softmax", arXiv 2310.11685) construct two data sets that softmax attention should
# tell apart and linear attention should not. depthgauge computes the probability of this exactly and by simulation.

# %%
import depthgauge as dg

result = dg.papers.separate(kind="self", x="identity", n=200, d=22, models=500, seed=0)
found = result.to_json()
low, high = found["interval"]
print(f"probability of success: {found['exact']:.4f} exact, {found['ratio']:.4f} drawn, 95 % [{low:.4f}, {high:.4f}]")

# %% [markdown]
# Success means four conditions with the same random signs.

# %%
names = ("F_exp(D₁) > 0", "F_lin(D₁) = 0", "F_exp(D₀) = 0", "F_lin(D₀) = 0")
for name, exact, drawn in zip(names, found["exact_parts"], found["parts"], strict=True):
    print(f"{name}   {exact:.4f} exact   {drawn:.4f} drawn")

# %% [markdown]
# ## The width matters
#
# At small d the separation mostly fails: the random signs alone exceed the threshold.

# %%
print("\n   d     n   probability")
for d in (4, 6, 12, 22, 42):
    n = 200 // (d - 2) * (d - 2)
    probability = dg.papers.separate(kind="self", x="identity", n=n, d=d, models=10).to_json()["exact"]
    print(f"{d:4d}  {n:4d}   {probability:.3f}")

# %% [markdown]
# ## Polynomials instead of exp
#
# A truncated exponential of low degree does not separate. The degree that is needed grows with log n.

# %%
print("\ndegree   probability")
for degree in (1, 2, 3, 4, 6, 8):
    found = dg.papers.separate(kind="self", x="identity", attention=f"poly:{degree}", models=10).to_json()
    print(f"{degree:6d}   {found['exact']:.3f}")
