"""Draw networks of every kind, certify and attack them, compare float32 with its bound, and verify some certificates.

    python scripts/certificate_campaign.py --networks 100000
    python scripts/certificate_campaign.py --networks 2000 --verified 1

Network i is drawn from the seed i and is of kind i modulo the number of kinds, so a campaign can be cut into parts and
continued: every line says with which `--first` to go on, and the last one counts the kinds. The campaign ends with
status 1 at the first violation or failed verification, and prints its seed; `--first SEED --networks 1` repeats it.
"""

import argparse
import sys
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

import depthgauge as dg
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.theory.certificates.forward_rounding import ForwardPass
from depthgauge.theory.depth.certificate import Certificate
from depthgauge.theory.linalg.bound_arithmetic import Outward
from depthgauge.theory.suprema.exact_supremum import Shares
from depthgauge.theory.suprema.network_on_shares import difference_below

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests" / "support"))
from drawn_networks import CHARACTERS, Case, Recipe
from gpt_networks import drawn, gpt

METHODS = ("identity", "last-layer", "parallel", "mean-field", "corrected")
EVERY = 100
"""Networks between two lines of progress."""


def recipe(random: Random, **fixed: Any) -> Case:
    """Draw a case over a box or a ball, with the skips, masks, MLPs and surrogates that `fixed` says."""
    settings: dict[str, Any] = {
        "dim": random.choice([1, 2, 3, 4, 4, 6, 8, 12]),
        "layers": random.randint(1, 4),
        "log_eta": random.uniform(-4, 0),
        "characters": tuple(random.choices(CHARACTERS, k=random.randint(1, 2))),
        "surrogate": "closed",
        "kind": random.choice(["radius", "ball"]),
        "log_radius": random.uniform(-1, 0.5),
        "tokens": random.choice([None, random.randint(1, 64)]),
        "effort": "default",
        "seed": random.getrandbits(32),
    }
    return Recipe(**settings | fixed).case()


def vocabulary(random: Random, dim: int) -> dg.Tokens:
    """Draw a set of tokens, with positions or without."""
    seed, size = random.getrandbits(32), 10 ** random.uniform(-1, 0.7)
    embeddings, length = drawn(random.randint(1, 5), dim, seed=seed, size=size), random.randint(1, 6)
    positions = drawn(length, dim, seed=seed + 1, size=size / 2) if random.random() < 0.5 else None
    return dg.Tokens(embeddings, positions, random.choice([None, length]))


def over_tokens(random: Random) -> Case:
    """Draw a network with the exact expansion over tokens."""
    case = recipe(random, surrogate=random.choice(["closed", "folded", "arbitrary"]), dim=random.randint(1, 5))
    return Case(case.network, case.surrogate, {"inputs": vocabulary(random, case.network.dim)})


def causal(random: Random) -> Case:
    """Draw a causal network and a closed form with patterns, over a box, a ball or tokens."""
    network, length = recipe(random, causal=True, dim=random.randint(1, 5)).network, random.randint(1, 8)
    small = dg.collapse(network, random.choice(METHODS), length=length)
    inputs = dg.Tokens(vocabulary(random, network.dim).embeddings, length=length)
    request = random.choice([{"radius": 1.0, "tokens": length}, {"ball": 1.0, "tokens": length}, {"inputs": inputs}])
    return Case(network, small, request)


def wide_block(random: Random) -> Case:
    """Draw a network with LayerNorm or RMSNorm, or neither, with biases and MLPs or without them, over tokens.

    Half of them have weights ±η, as training under a bound makes them.
    """
    norm, mlp = random.choice(["pre", "pre", "pre-rms", "none"]), random.choice([None, 1, 4, 7])
    is_biased = random.random() < 0.5 or (norm == "none" and mlp is None)
    network = gpt(
        random.getrandbits(32), 10 ** random.uniform(-4, 0), biases=is_biased, norm=norm, mlp=mlp,
        layers=random.randint(1, 4), heads=random.randint(1, 3), dim=random.randint(2, 5),
        activation=random.choice(["relu", "gelu"]), causal=random.random() < 0.5,
        distribution=random.choice(["uniform", "sign"]),
    )  # fmt: skip
    inputs = vocabulary(random, network.dim)
    return Case(network, dg.collapse(network, "parallel"), {"inputs": inputs})


def exact(random: Random) -> Case:
    """Draw a network as `over_tokens` or `wide_block` do, and enclose the supremum itself."""
    case = random.choice([over_tokens, wide_block])(random)
    tokens = case.request["inputs"]
    if case.network.causal and tokens.length is None:
        tokens = dg.Tokens(tokens.embeddings, length=4)
    return Case(case.network, case.surrogate, {"inputs": tokens, "effort": "exact", "tolerance": 0.1, "seconds": 0.5})


def smaller(case: Case) -> Case:
    """Return a case of `exact` with at most 3 tokens and 3 positions, for arb.

    A sequence more or a token more is the same computation again, which in arb takes minutes for thousands of them.
    """
    tokens = case.request["inputs"]
    positions = None if tokens.positions is None else tokens.positions[:3]
    length = None if tokens.length is None else min(tokens.length, 3)
    few = dg.Tokens(tokens.embeddings[:3], positions, length)
    return Case(case.network, case.surrogate, case.request | {"inputs": few, "tolerance": 0.5})


def without_skips(random: Random) -> Case:
    """Draw a network without skip connections, over a box."""
    return recipe(random, skip=False, kind="radius", surrogate=random.choice(["closed", "folded", "arbitrary"]))


def deleted(random: Random) -> Case:
    """Draw a causal network or one with MLPs, and delete the attention of some of its layers."""
    is_causal = random.random() < 0.5
    has_mlp = not is_causal or random.random() < 0.5
    is_skipping = not has_mlp or random.random() < 0.7
    settings: dict[str, Any] = {} if is_skipping else {"kind": "radius"}
    return recipe(random, causal=is_causal, mlp=has_mlp, skip=is_skipping, surrogate="deleted", **settings)


KINDS: dict[str, Callable[[Random], Case]] = {
    "one layer": recipe,
    "folded": lambda random: recipe(random, surrogate="folded"),
    "arbitrary": lambda random: recipe(random, surrogate="arbitrary"),
    "no skips": without_skips,
    "deleted": deleted,
    "high effort": lambda random: recipe(random, effort="high", dim=random.randint(1, 3), layers=random.randint(1, 3)),
    "tokens": over_tokens,
    "causal": causal,
    "wide block": wide_block,
    "exact": exact,
}


def inputs_to_try(certificate: Certificate, seed: int) -> list[Tensor]:
    """Return inputs of the set, some at a time: random ones, and one token against many equal ones."""
    generator, inputs = torch.Generator().manual_seed(seed), certificate.inputs
    tried = []
    if isinstance(inputs, dg.Tokens):
        places = inputs.at_positions()
        for n in {1, 2, 5, 33} if inputs.length is None else {1, (inputs.length + 1) // 2, inputs.length}:
            place, chosen = (
                torch.arange(n) % len(places),
                torch.randint(0, places.shape[1], (30, n), generator=generator),
            )
            chosen[:10, 1:] = chosen[:10, :1]
            tried += [places[place, chosen], places[place, chosen.flip(1)]]
        return tried
    for n in {1, 2, 3, 6} if certificate.tokens is None else {certificate.tokens}:
        normal = torch.randn(20, n, certificate.network.dim, generator=generator, dtype=torch.float64)
        mostly = normal[:, :1].expand(-1, n, -1).clone()
        mostly[:, : max(1, n // 5)] = -normal[:, : max(1, n // 5)]
        tried += [inputs.extreme(normal), inputs.extreme(mostly), inputs.project(normal * inputs.radius / 2)]
    return tried


def violation(certificate: Certificate, seed: int) -> str | None:
    """Return what is wrong with a certificate, or None. Differences near the bound are evaluated in intervals."""
    upper, lower = certificate.upper, certificate.lower
    if upper is None:
        return None
    if not 0 <= lower <= upper:
        return f"lower is {lower}, upper is {upper}"
    for batch in inputs_to_try(certificate, seed):
        with torch.no_grad():
            apart = (certificate.network(batch) - certificate.surrogate(batch)).abs().flatten(1).amax(1)
        if float(apart.max()) > 0.9 * upper:
            found = difference_below(certificate.network, certificate.surrogate, batch[int(apart.argmax())])
            if found > upper:
                return f"an input differs by {found}, upper is {upper}"
    return None


def contradiction(certificate: Certificate, seed: int) -> str | None:
    """Return how an exact supremum contradicts the default certificate of the same networks, or None."""
    if certificate.effort != "exact" or not isinstance(certificate.inputs, dg.Tokens):
        return None
    compared = certificate.network, certificate.surrogate
    usual = dg.certify(*compared, inputs=certificate.inputs, starts=2, steps=6, seed=seed)
    attained = certificate.method.attained if isinstance(certificate.method, Shares) else certificate.lower
    if usual.upper is not None and attained > usual.upper:
        return f"the supremum is at least {attained}, the default upper is {usual.upper}"
    if certificate.upper is not None and certificate.upper < usual.lower:
        return f"the supremum is at most {certificate.upper}, the attacked lower is {usual.lower}"
    return None


def rounding_violation(certificate: Certificate, seed: int) -> str | None:
    """Return which network rounds by more in float32 than its bound for computed outputs says, or None."""
    for net in (certificate.network, certificate.surrogate):
        bounds = []
        for dtype in (torch.float32, torch.float64):  # the reference is computed, too
            comparison = replace(certificate.comparison, evaluated_in=dtype)
            bounds.append(ForwardPass(Outward(), net, comparison).error().floats())
        held = net.copy().to(torch.float32)
        for batch in inputs_to_try(certificate, seed):
            x = (batch * (1 - 1e-6)).to(torch.float32)  # inside the set, also after rounding
            x = x if certificate.inputs.kind != "tokens" else batch.to(torch.float32)
            exact = x.double() if certificate.inputs.kind != "tokens" else batch
            with torch.no_grad():
                apart = (held(x).double() - net(exact)).abs().amax((0, 1))
            if bool((apart > bounds[0] + bounds[1]).any()):
                return f"float32 is off by {apart.tolist()} in {net}, the bound is {bounds[0].tolist()}"
    return None


def outcome(case: Case, seed: int, *, is_verified: bool) -> tuple[list[str], str | None]:
    """Certify and attack a case; return what to count, and what is wrong or None."""
    try:
        certificate = dg.certify(case.network, case.surrogate, **case.request, starts=2, steps=6, seed=seed)
    except InputError:  # a surrogate that no method covers, such as all heads side by side with MLPs
        return ["refused"], None
    wrong = violation(certificate, seed) or contradiction(certificate, seed)
    if wrong is None and certificate.tokens is not None:
        wrong = rounding_violation(certificate, seed)
    if certificate.upper is None or wrong is not None:
        return ["certified"], wrong
    try:
        return ["certified", "finite", *(["verified"] if is_verified and certificate.verify() else [])], None
    except VerificationError as error:
        return ["certified", "finite"], f"not verified: {error}"


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--networks", type=int, default=100_000, help="how many to draw")
    parser.add_argument("--first", type=int, default=0, help="the seed of the first one")
    parser.add_argument("--verified", type=int, default=50, help="verify every certificate of so many; 0: none")
    given = parser.parse_args()
    counts, by_kind, end = Counter[str](), Counter[str](), given.first + given.networks
    torch.set_num_threads(1)
    for i in range(given.first, end):
        kind = list(KINDS)[i % len(KINDS)]
        is_verified = given.verified > 0 and i // len(KINDS) % given.verified == 0
        case = KINDS[kind](Random(i))
        case = smaller(case) if is_verified and kind == "exact" else case
        found, wrong = outcome(case, i, is_verified=is_verified)
        counts.update(found)
        by_kind[kind] += 1
        if wrong is not None:
            print(f"WRONG: seed {i}, {kind}: {wrong}")  # noqa: T201
            return 1
        if (i + 1) % EVERY == 0 or i + 1 == end:
            done = ", ".join(f"{counts[name]:,} {name}" for name in ("certified", "finite", "verified", "refused"))
            print(f"{done}, {time.process_time():.0f} s of CPU; continue with --first {i + 1}", flush=True)  # noqa: T201
    print("no violation:", ", ".join(f"{count:,} {kind}" for kind, count in by_kind.items()))  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main())
