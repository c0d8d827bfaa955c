"""A small result document with every kind of subject, and hostile names in it."""

from typing import Any

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
BREAKING = "</script><script>alert(3)</script><!-- \"'&amp; $title %{x} @blue"
MEASURES = (
    "tv_mean", "tv_max", "entropy", "score_range", "balance", "contraction", "contraction_bound", "eta", "value_col",
    "l1", "dong_beta",
)  # fmt: skip


def residual(ratio: float) -> dict[str, Any]:
    return {
        center: {norm: {"ratio": ratio * (k + 1), "ratio_std": 0.01} for k, norm in enumerate(norms)}
        for center, norms in {
            "midrange": ("max", "frobenius", "composite"),
            "mean": ("max", "frobenius", "composite"),
        }.items()
    }


def head(layer: int, index: int) -> dict[str, Any]:
    return {"index": index, **{name: (layer + 1) * (index + 2) * 10.0**-k for k, name in enumerate(MEASURES)}}


def bounds(method: str, lower: float, upper: float | None) -> dict[str, Any]:
    return {
        "method": method, "layers_after": 1, "upper": upper, "lower": lower, "ratio": upper and upper / lower,
        "methods": ["joint"], "notes": ["a note"], "share": [[0.2, 0.3], [0.25], [0.25, 0.0]],
        "lost_at": 2 if upper is None else None, "seconds": 0.5, "attack_seconds": 1.5,
    }  # fmt: skip


def network(name: str) -> dict[str, Any]:
    """Three layers of 2, 1 and 2 heads; one method is refused and one bound is infinite."""
    layers = [
        {"index": ell, "residual": residual(0.3 / 10**ell), "heads": [head(ell, h) for h in range(heads)]}
        for ell, heads in enumerate((2, 1, 2))
    ]
    layers[0]["heads"][1]["contraction"] = None
    depth = [
        {"tolerance": tolerance, "certified": certified, "layers": count, "kept": list(range(count - 1)),
         "folded": [list(range(count - 1, 3))], "error": tolerance / 2}
        for tolerance, count in ((0.1, 1), (1e-6, 2))
        for certified in (True, False)
    ]  # fmt: skip
    return {
        "kind": "network", "name": name, "verdict": f"3 layers; 1 is enough within 5e-02 for {name}", "radius": 1.0,
        "network": {
            "layers": 3, "heads": [2, 1, 2], "dim": 4, "key_dim": [4, 4, 4], "mlp": [None, 8, None], "scale": 0.5,
            "skip": True, "causal": False, "activation": "relu", "norm": "none", "mlp_skip": True, "eta": 0.01,
            "dtype": "float64",
        },
        "input": {"residual": residual(0.9)}, "layers": layers, "depth": depth,
        "collapse": [
            bounds("identity", 0.01, 0.02), bounds("last-layer", 0.3, 0.5), bounds("mean-field", 0.001, None),
            {"method": BREAKING, "refused": f"not for {HOSTILE}"},
        ],
        "printed": {"printed_bound": 0.25, "printed_log10": -0.602, "printed_applies": True},
    }  # fmt: skip


def model(name: str) -> dict[str, Any]:
    """A checkpoint of which only a few head measures are known."""
    heads = [{"index": h, "first_mass": 0.25 * h, "eta": 0.3} for h in range(3)]
    layers = [{"index": ell, "heads": heads, "scores": {}, "fast": None, "what_if": {}} for ell in range(2)]
    return {
        "kind": "model", "name": name, "verdict": "2 layers", "text": None, "regime": None, "baseline": None,
        "model": {
            "architecture": "LlamaForCausalLM", "objective": "loss", "layers": 2, "heads": 3, "kv_heads": 3, "dim": 6,
            "parameters": 1000, "dtype": "float32",
        },
        "input": {}, "layers": layers, "scores": [],
    }  # fmt: skip


DOCUMENT = {
    "schema": "depthgauge.gauge/1",
    "version": "0.1.0",
    "settings": {"target": f"a {BREAKING}", "samples": 4, "tokens": 128, "radius": 1.0, "seed": 0, "input": None},
    "subjects": [network(HOSTILE), network(BREAKING), model("a checkpoint")],
}
