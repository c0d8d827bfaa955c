"""`attention` inside torch.compile with fullgraph, in a process of its own.

The test suite checks the types of all arguments of all functions, and torch.compile cannot trace these checks.
"""

import subprocess
import sys

import pytest

SCRIPT = """
import sys, torch, torch.nn.functional as F
import depthgauge as dg

def draw(seed, size=0.06, n=70):
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(1, 2, n, 16, generator=generator) for _ in range(3))
    return (size / 4) ** 0.5 * q, (size / 4) ** 0.5 * k, v

def compiled(function, backend=sys.argv[1]):
    return torch.compile(function, backend=backend, fullgraph=True)

without_gradients = "eager" if sys.argv[1] == "aot_eager" else sys.argv[1]

for is_causal in (False, True):
    for _ in range(4):
        dg.attention(*draw(0), is_causal=is_causal)  # calls of the same kind that are not compiled
    twice = compiled(lambda q, k, v: dg.attention(q, k, v, is_causal=is_causal) * 2)
    given = [x.requires_grad_() for x in draw(0)]
    wanted = 2 * F.scaled_dot_product_attention(*given, is_causal=is_causal)
    found = twice(*given)
    torch.testing.assert_close(found, wanted)
    for one, other in zip(*(torch.autograd.grad(x.square().sum(), given) for x in (found, wanted))):
        torch.testing.assert_close(one, other)
masked = compiled(lambda q, k, v, m: dg.attention(q, k, v, attn_mask=m), without_gradients)
mask = torch.ones(70, 70).tril().bool()
torch.testing.assert_close(masked(*draw(0), mask), F.scaled_dot_product_attention(*draw(0), is_causal=True))
padding = torch.arange(70)[None] > 60
padded = compiled(lambda q, k, v: dg.attention(q, k, v, key_padding=padding), without_gradients)
q, k, v = draw(1)
torch.testing.assert_close(padded(q, k, v), F.scaled_dot_product_attention(q, k[..., :61, :], v[..., :61, :]))
negative = compiled(lambda q, k, v: dg.attention(q, k, v, is_causal=True, scale=-0.5), without_gradients)
torch.testing.assert_close(negative(q, k, v), F.scaled_dot_product_attention(-q, k, v, is_causal=True, scale=0.5))
print("exact attention compiled")

options = {"tolerance": 1e-2, "scale": 1.0}
plan = dg.attention_plan(*draw(0), **options, force="polynomial")
planned = compiled(lambda q, k, v: dg.attention(q, k, v, **options, plan=plan) + 1)
given = draw(7)
torch.testing.assert_close(planned(*given), dg.attention(*given, **options, plan=plan) + 1, rtol=0, atol=0)
assert not torch.equal(planned(*given) - 1, F.scaled_dot_product_attention(*given, scale=1.0))
plan.check()
planned(given[0] * 1e3, *given[1:])
try:
    plan.check()
except dg.DepthgaugeError as error:
    print(error)

forced = compiled(lambda q, k, v: dg.attention(q, k, v, **options, force="polynomial"))
try:
    forced(*draw(0))
except Exception as error:
    assert "not possible inside torch.compile" in str(error), error
    print("forced attention refused")
"""


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compiled_code_has_one_graph(backend: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, backend], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    first, second, third = done.stdout.splitlines()
    assert first == "exact attention compiled"
    assert second.startswith("1 call that followed this plan may have scores beyond")
    assert third == "forced attention refused"
