"""Result documents of `shrink`: a decoder with a guarantee, an encoder without one, a limit that was not reached."""

import copy
from typing import Any

HOSTILE = "</script><script>alert(1)</script>"

_SETTINGS = {
    "remove": "7", "remove_layers": None, "max_bytes": None, "max_increase": None, "keep": None,
    "confidence": 0.95, "effort": "default", "recover": "2M", "general": None, "evaluate": None,
    "text": ["corpus.txt", "more text.txt"],
    "stack": None, "sampled": 0.5, "window": 512, "bos": "auto", "seed": 0,
    "dtype": "float32", "device": "cpu", "tokenizer": None,
    "allow": None,
}  # fmt: skip
_REMOVED = [10, 12, 13, 14, 16, 21, 25]


def _search() -> list[dict[str, Any]]:
    order = [13, 14, 12, 16, 21, 10, 25]
    return [{"layer": layer, "objective": 3.5 + 0.11 * k} for k, layer in enumerate(order)]


def _candidates() -> list[dict[str, Any]]:
    measured = {"increase": 0.95, "error": 0.031, "repaired": 0.44, "repaired_error": 0.014}
    return [
        {"methods": ["greedy search"], "removed": _REMOVED, **measured, "chosen": True},
        {
            "methods": ["angular distance (UIDL)", "best run of adjacent blocks"], "removed": list(range(12, 19)),
            **measured, "increase": 0.87, "repaired": None, "repaired_error": None, "chosen": False,
        },
    ]  # fmt: skip


def _stages() -> list[dict[str, Any]]:
    return [
        {"name": "least squares", "before": 4.37, "after": 3.95, "error": 0.02, "kept": True},
        {"name": "distillation", "before": 3.95, "after": 3.96, "error": 0.004, "kept": False},
    ]


def _curve() -> list[dict[str, Any]]:
    ours = [{"method": "depthgauge", "removed": 7, "increase": 0.44}]
    ours += [{"method": "greedy search", "removed": count, "increase": 0.12 * count**1.1} for count in range(1, 8)]
    peers = {"block influence (ShortGPT)": 0.22, "angular distance (UIDL)": 0.19}
    return ours + [
        {"method": method, "removed": count, "increase": factor * count**1.1}
        for method, factor in peers.items()
        for count in (3, 5, 7)
    ]


def _recovery() -> dict[str, Any]:
    ways = ((0, None, 3.8124, 4.02), (1_000_000, 0.61, 3.7715, 3.99), (2_000_000, 0.55, 3.7611, 3.98))
    return {
        "tokens": 2_000_000, "steps": 488, "rate": 6e-4, "seconds": 118.0, "memory": None,
        "how": ["1 window at a time, gradients of 8 added"],
        "data": {"corpus.txt": 600_000, "more text.txt": 400_000, "continued by SmolLM2-135M": 1_000_000},
        "before": 3.8124, "after": 3.7611, "error": 0.004, "kept": True, "ended": "all tokens",
        "curve": [dict(zip(("tokens", "train", "select", "apart"), way, strict=True)) for way in ways],
    }  # fmt: skip


def _text(kind: str, name: str, windows: int, dense: float, increase: float) -> dict[str, Any]:
    return {
        "kind": kind, "name": name, "windows": windows, "dense": dense, "shrunk": dense + increase,
        "increase": increase, "low": increase - 0.041, "high": increase + 0.0437,
    }  # fmt: skip


def _calibration(window: int, bos: bool | None) -> dict[str, Any]:
    return {
        "window": window, "bos": bos, "bos_reason": "the loss is lower with it",
        "sources": [
            {"kind": "text", "name": "corpus.txt", "sha256": "ab" * 32, "fit": 16, "select": 8, "certify": 80},
            {"kind": "text", "name": "more text.txt", "sha256": "a1" * 32, "fit": 8, "select": 4, "certify": 40},
            {"kind": "sampled", "name": "samples", "sha256": "cd" * 32, "fit": 24, "select": 12, "certify": 24},
            {"kind": "built-in", "name": "built-in text", "sha256": "ef" * 32, "fit": 0, "select": 0, "certify": 5},
        ],
        "sha256": "01" * 32,
    }  # fmt: skip


PLAN: dict[str, Any] = {
    "schema": "depthgauge.plan/1", "version": "0.2.0", "model": "models/SmolLM2-135M", "family": "llama",
    "files": {"model.safetensors": "23" * 32}, "layers": 30, "removed": _REMOVED, "search": _search(),
    "candidates": _candidates(), "settings": _SETTINGS, "calibration": _calibration(512, True),
    "hub": None,
}  # fmt: skip
"""The plan of `DOCUMENT`, as `shrink --out plan.json` writes it."""

ASSUMPTION = (
    "This holds for text like the certify windows: it assumes that these windows and future windows are exchangeable."
)

DOCUMENT: dict[str, Any] = {
    "schema": "depthgauge.shrink/1", "version": "0.2.0", "name": "SmolLM2-135M", "objective": "loss",
    "layers_before": 30, "layers_after": 23, "removed": _REMOVED, "repaired": True,
    "loss": {"dense": 3.4231, "shrunk": 3.8542, "low": 3.7917, "high": 3.9158},
    "accuracy": None,
    "texts": [
        _text("text", "corpus.txt", 80, 3.5112, 0.4011),
        _text("text", "more text.txt", 40, 3.2469, 0.4911),
        _text("sampled", "samples", 24, 2.8113, 0.3877),
        _text("built-in", "built-in text", 5, 3.0542, 0.5129),
    ],
    "guarantee": {
        "quantile": {"increase": 0.6127, "share": 0.95, "confidence": 0.95, "windows": 120},
        "about": "text", "assumption": ASSUMPTION, "limit": None, "tested": [],
    },
    "speed": {
        "prefill": 1.2801, "decode": 1.2934, "prefill_low": 1.2502, "prefill_high": 1.3107, "decode_low": 1.2541,
        "decode_high": 1.3333, "prefill_before": 0.8121, "prefill_after": 0.6344, "decode_before": 0.04113,
        "decode_after": 0.0318,
        "what": "prefill of 512 tokens in 16 pairs of runs, decode of one token at a time in 64 pairs of runs, on cpu",
    },
    "parameters": {"before": 134515008, "after": 109741248}, "bytes": {"before": 538090408, "after": 438994712},
    "memory": {"before": 546060032, "after": 445104192}, "curve": _curve(), "stages": _stages(),
    "durations": {"loading": 12.5, "search": 600.0, "repair and comparison": 700.0},
    "recovery": _recovery(), "evaluation": None,
    "reload": {
        "difference": 3.1e-7, "layers": 23, "generation": "equal with and without cache", "program": "transformers",
        "source_difference": None,
    },
    "plan": PLAN, "notes": ["the source is a quantized GGUF file; its weights were dequantized"],
    "versions": {"depthgauge": "0.2.0", "torch": "2.8.0", "transformers": "5.0.0"}, "seconds": 1312.5,
    "out": "smaller",
}  # fmt: skip
"""A decoder of 30 layers with 7 removed, with every field filled in."""


def with_limit(passed: int = 3) -> dict[str, Any]:
    """Return the result of `--max-increase 0.25`: three sizes passed and the fourth did not."""
    document = copy.deepcopy(DOCUMENT)
    bounds = (0.1431, 0.1823, 0.2377, 0.3519)
    document["guarantee"]["limit"] = 0.25
    document["guarantee"]["tested"] = [
        {"removed": k + 1, "bound": bound, "passed": k < passed} for k, bound in enumerate(bounds[: passed + 1])
    ]
    document["guarantee"]["quantile"]["increase"] = 0.25
    removed = [12, 13, 14][:passed]
    document["loss"] = {"dense": 3.4231, "shrunk": 3.5844, "low": 3.5131, "high": 3.6552}
    document["texts"] = [_text("text", "corpus.txt", 120, 3.4231, 0.1613)]
    document["curve"] = [point for point in document["curve"] if point["removed"] <= 3]
    sources = document["plan"]["calibration"]["sources"]
    sources[0] |= {"fit": 24, "select": 12, "certify": 120}
    del sources[1]
    document |= {"removed": removed, "layers_after": 30 - len(removed)}
    document["plan"] |= {"removed": removed}
    document["plan"]["settings"] |= {"remove": None, "max_increase": 0.25, "text": ["corpus.txt"]}
    return document


def limit_not_reached() -> dict[str, Any]:
    """Return the result of a limit that no size stays within: nothing was removed and nothing was written."""
    document = with_limit(passed=0)
    document["guarantee"] |= {
        "limit": 0.1,
        "tested": [{"removed": 1, "bound": 0.1431, "passed": False}, {"removed": 2, "bound": None, "passed": False}],
    }
    document["plan"]["settings"]["max_increase"] = 0.1
    document["loss"] |= {"shrunk": None, "low": None, "high": None}
    for name in ("parameters", "bytes"):
        document[name]["after"] = None
    nothing = dict.fromkeys(("speed", "memory", "reload", "recovery", "out"))
    return document | nothing | {"texts": [], "stages": [], "repaired": False}


def encoder() -> dict[str, Any]:
    """Return an encoder of 6 layers with one removed: states instead of losses, no generation."""
    document = copy.deepcopy(DOCUMENT)
    states = {"dense": 0.0, "shrunk": 0.3127, "low": 0.2911, "high": 0.3342}
    text = {"kind": "text", "name": "corpus.txt", "windows": 120, **states, "increase": 0.3127}
    built_in = {"kind": "built-in", "name": "built-in text", "windows": 1, **states, "increase": 0.3512}
    built_in |= {"low": None, "high": None}
    calibration = _calibration(128, None)
    calibration["sources"] = [calibration["sources"][0], calibration["sources"][3]]
    plan = document["plan"] | {
        "model": "minilm", "family": "bert", "layers": 6, "removed": [3], "candidates": [], "calibration": calibration,
        "search": [{"layer": 3, "objective": 0.52}],
        "settings": _SETTINGS | {"remove": "1", "recover": None, "text": ["corpus.txt"]},
    }  # fmt: skip
    quantile = {"increase": 0.3911, "share": 0.95, "confidence": 0.95, "windows": 120}
    return document | {
        "name": "minilm", "objective": "states", "layers_before": 6, "layers_after": 5, "removed": [3],
        "loss": states, "texts": [text, built_in],
        "guarantee": document["guarantee"] | {"quantile": quantile},
        "speed": {
            "prefill": 1.1932, "decode": None, "prefill_low": 1.16, "prefill_high": 1.22, "decode_low": None,
            "decode_high": None, "prefill_before": 0.021, "prefill_after": 0.0176, "decode_before": None,
            "decode_after": None, "what": "prefill of 4 × 128 tokens in 8 pairs of runs, on cpu",
        },
        "memory": None, "curve": [{"method": "depthgauge", "removed": 1, "increase": 0.3}],
        "stages": [{"name": "distillation", "before": 0.52, "after": 0.31, "error": 0.01, "kept": True}],
        "recovery": None,
        "reload": {
            "difference": 0.0, "layers": 5, "generation": "not applicable", "program": "transformers",
            "source_difference": None,
        },
        "plan": plan,
        "notes": ["the model is an encoder: no perplexity is claimed"],
    }  # fmt: skip


def too_few_windows() -> dict[str, Any]:
    """Return a result whose certify part is too small for a bound."""
    document = copy.deepcopy(DOCUMENT)
    document["guarantee"]["quantile"] |= {"increase": None, "windows": 20}
    return document


def not_certified() -> dict[str, Any]:
    """Return a result without a guarantee."""
    return copy.deepcopy(DOCUMENT) | {"guarantee": None}
