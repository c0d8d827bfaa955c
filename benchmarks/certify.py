"""Claim: the certificates are tighter than interval and linear bound propagation, and take less than two seconds.

The benchmark compares `certify` (any number of tokens) with interval bound propagation, implemented below, on the same
networks: mean-field surrogate, box of radius 1, weights uniform in [−η, η]. The ratio is upper bound over attained
lower bound, median of three seeds. The column `best peer` is not measured here: it is the best ratio that auto_LiRPA
0.7.1, built from source, reached on such networks with any of its options. Every bound is checked against the attack.

    python benchmarks/certify.py [--tightness]

`--tightness` prints the ratio of `certify` by size and η instead, including sizes at which it is useless.
"""

import argparse
import json
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor

from depthgauge import SelfAttentionNetwork, certify, collapse, random_network

# n, d, H, L, η and the best ratio of auto_LiRPA with any of its options.
ROWS = [
    (8, 4, 1, 2, 0.01, 4.0),
    (8, 4, 1, 2, 0.1, 5.2),
    (8, 4, 1, 2, 0.5, 36.0),
    (8, 4, 1, 4, 0.05, 9.6),
    (8, 4, 1, 4, 0.2, 48.0),
    (8, 4, 2, 4, 0.1, 26.0),
    (16, 8, 1, 2, 0.05, 8.6),
    (16, 8, 1, 2, 0.2, 83.0),
]
SIZES = [(4, 1, 2), (8, 2, 4), (16, 2, 4), (32, 2, 6), (64, 2, 6)]
ETAS = [0.001, 0.01, 0.05, 0.1, 0.2, 0.5]

Interval = tuple[Tensor, Tensor]


def product(a: Interval, b: Interval) -> Interval:
    """Bound the product of two interval matrices, with midpoints and radii."""
    mid_a, rad_a = (a[0] + a[1]) / 2, (a[1] - a[0]) / 2
    mid_b, rad_b = (b[0] + b[1]) / 2, (b[1] - b[0]) / 2
    mid = mid_a @ mid_b
    rad = mid_a.abs() @ rad_b + rad_a @ mid_b.abs() + rad_a @ rad_b
    return mid - rad, mid + rad


def softmax(scores: Interval) -> Interval:
    """Bound a softmax: an entry is smallest if its own score is smallest and all others are largest."""
    low, high = scores
    n = low.shape[-1]
    others = 1 - torch.eye(n, dtype=low.dtype)

    def share(own: Tensor, other: Tensor) -> Tensor:
        gaps = other[..., None, :] - own[..., :, None]
        return 1 / (1 + (gaps.exp() * others).sum(-1))

    return share(low, high), share(high, low)


def interval_bound(network: SelfAttentionNetwork, surrogate: SelfAttentionNetwork, n: int, radius: float) -> float:
    """Bound |S − S'| over the box for n tokens by interval bound propagation."""
    start = torch.full((n, network.dim), radius, dtype=torch.float64)

    def run(net: SelfAttentionNetwork) -> Interval:
        x = (-start, start)
        for layer in net:
            y = x
            for h in range(layer.heads):
                weights = [(w.detach(), w.detach()) for w in (layer.query[h], layer.key[h], layer.value[h])]
                q, k, v = (product(x, w) for w in weights)
                scores = product(q, (k[0].mT, k[1].mT))
                mixed = product(softmax((scores[0] * net.scale, scores[1] * net.scale)), v)
                y = (y[0] + mixed[0], y[1] + mixed[1])
            x = y
        return x

    mine, theirs = run(network), run(surrogate)
    # Intervals do not know that both networks add the same X. Subtracting its width 2φ favours interval propagation.
    return float(torch.maximum((mine[1] - theirs[0]).abs(), (mine[0] - theirs[1]).abs()).max()) - 2 * radius


def compare() -> list[dict[str, object]]:
    """Return one row per setting: the lower bound, and the ratios of both methods with the time of `certify`."""
    rows: list[dict[str, object]] = []
    for n, d, H, L, eta, peer in ROWS:
        ours, ibp, seconds, lowers = [], [], [], []
        for seed in range(3):
            network = random_network(layers=L, heads=H, dim=d, eta=eta, seed=seed)
            surrogate = collapse(network, "mean-field")
            certificate = certify(network, surrogate, radius=1.0)
            assert certificate.upper is not None
            assert certificate.lower <= certificate.upper, "the upper bound is below the attained lower bound"
            begun = time.perf_counter()
            certify(network, surrogate, radius=1.0, starts=1, steps=1)
            elapsed = time.perf_counter() - begun
            ours.append(certificate.upper / certificate.lower)
            seconds.append(max(certificate.seconds, elapsed - certificate.attack_seconds))
            lowers.append(certificate.lower)
            ibp.append(interval_bound(network, surrogate, n, 1.0) / certificate.lower)
        rows.append(
            {
                "n,d,H,L": f"{n},{d},{H},{L}",
                "eta": eta,
                "lower": statistics.median(lowers),
                "intervals": statistics.median(ibp),
                "best peer": peer,
                "ours": statistics.median(ours),
                "seconds": statistics.median(seconds),
            }
        )
        print(_line(rows[-1]))
    return rows


def tightness() -> list[dict[str, object]]:
    """Return the ratio by size and η at default effort; ratios above 100 are marked useless."""
    rows: list[dict[str, object]] = []
    for d, H, L in SIZES:
        for eta in ETAS:
            found = []
            for seed in range(3 if d <= 16 else 1):
                network = random_network(layers=L, heads=H, dim=d, eta=eta, seed=seed)
                certificate = certify(network, collapse(network, "mean-field"), radius=1.0)
                found.append((certificate.ratio or float("inf"), certificate.seconds))
            ratio, seconds = (statistics.median(column) for column in zip(*found, strict=True))
            verdict = "useless" if ratio > 100 else ""
            rows.append({"d,H,L": f"{d},{H},{L}", "eta": eta, "ratio": ratio, "seconds": seconds, "": verdict})
            print(_line(rows[-1]))
    return rows


def _line(row: dict[str, object]) -> str:
    return "  ".join(
        f"{key} {value:.4g}" if isinstance(value, float) else f"{key} {value}" for key, value in row.items()
    )


def main() -> None:
    """Run the benchmark, print its rows and save them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tightness", action="store_true", help="print the ratio by size and η")
    arguments = parser.parse_args()
    rows = tightness() if arguments.tightness else compare()
    out = Path("results") / ("tightness.json" if arguments.tightness else "certify.json")
    out.parent.mkdir(exist_ok=True)
    out.write_text(json.dumps(rows, indent=2), encoding="utf-8")
    if not arguments.tightness:
        tighter = all(float(str(row["ours"])) < float(str(row["best peer"])) for row in rows)
        quick = all(float(str(row["seconds"])) < 2.0 for row in rows)
        print(f"tighter than the best peer on every row: {tighter}; under two seconds on every row: {quick}")
        raise SystemExit(0 if tighter and quick else 1)


if __name__ == "__main__":
    main()
