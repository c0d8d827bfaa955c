"""A result document small enough to reason about, its page, and a real browser to open it in."""

import copy
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from depthgauge.report.write import write_report

HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(2)>"
BREAKING = "</script><script>alert(3)</script><!-- \"'&amp; $title %{x} @blue"
CHROMIUM = shutil.which("chromium")
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
    """A subject of the other kind, with a head measure of its own and states without residuals."""
    heads = [{"index": h, "first_token_mass": 0.25 * h, "label": "text", "eta": 0.3} for h in range(3)]
    return {"kind": "model", "name": name, "layers": [{"index": ell, "heads": heads} for ell in range(2)]}


DOCUMENT = {
    "schema": "depthgauge.gauge/1",
    "version": "0.1.0",
    "settings": {"target": f"a {BREAKING}", "samples": 4, "tokens": 128, "radius": 1.0, "seed": 0, "input": None},
    "subjects": [network(HOSTILE), network(BREAKING), model("a checkpoint")],
}


@pytest.fixture
def document() -> dict[str, Any]:
    return copy.deepcopy(DOCUMENT)


@pytest.fixture(scope="session")
def page_file(tmp_path_factory) -> Path:
    return write_report(copy.deepcopy(DOCUMENT), tmp_path_factory.mktemp("report") / "page.html").resolve()


@pytest.fixture(scope="session")
def browser():
    if CHROMIUM is None:
        if os.environ.get("CI") == "true":
            pytest.fail("chromium is not installed: apt-get install chromium")
        pytest.skip("chromium is not installed, so the page cannot be opened")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()
