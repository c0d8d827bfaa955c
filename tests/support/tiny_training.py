"""Tiny training runs: a Llama of a few thousand weights, and what can go wrong with it."""

import math
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import depthgauge as dg

VOCABULARY = 32
RATE, WARM_UP = 3e-3, 50
"""The learning rate and the number of warm-up steps of a healthy run."""


def tiny_llama(seed: int = 0, layers: int = 4, **settings: Any) -> Any:
    """Return a Llama in training mode with its usual initialization."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from transformers import LlamaConfig, LlamaForCausalLM
    torch.manual_seed(seed)
    chosen = {
        "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": layers, "num_attention_heads": 4,
        "num_key_value_heads": 2, "vocab_size": VOCABULARY, "max_position_embeddings": 64,
    } | settings  # fmt: skip
    return LlamaForCausalLM(LlamaConfig(**chosen)).train()


def batches(seed: int, batch: int = 8, tokens: int = 32) -> Iterator[torch.Tensor]:
    """Yield sequences whose second half repeats the first; the first half is a chain with a few likely successors."""
    draw = torch.Generator().manual_seed(seed)
    successors = torch.randint(VOCABULARY, (VOCABULARY, 4), generator=torch.Generator().manual_seed(99))
    while True:
        ids = torch.empty(batch, tokens // 2, dtype=torch.long)
        ids[:, 0] = torch.randint(VOCABULARY, (batch,), generator=draw)
        for k in range(1, tokens // 2):
            ids[:, k] = successors[ids[:, k - 1], torch.randint(4, (batch,), generator=draw)]
        yield torch.cat([ids, ids], dim=1)


def probe_ids(tokens: int = 32) -> torch.Tensor:
    """Return the fixed probe batch of two sequences."""
    return next(batches(12345, batch=2, tokens=tokens))


def without_skips(model: Any) -> Any:
    """Remove both skip connections of every block."""

    def forward(self: Any, hidden_states: torch.Tensor, **others: Any) -> torch.Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(hidden_states), **others)
        made: torch.Tensor = self.mlp(self.post_attention_layernorm(attended))
        return made

    for block in model.model.layers:
        block.forward = types.MethodType(forward, block)
    return model


def with_scaled_residuals(model: Any, factor: float = 0.05) -> Any:
    """Scale what the sublayers of layer ℓ add by factor^ℓ, a mistaken form of scaling by depth."""
    for index, block in enumerate(model.model.layers):
        for module in (block.self_attn.o_proj, block.mlp.down_proj):
            module.register_forward_hook(lambda module, args, out, scale=factor**index: out * scale)
    return model


def train(
    model: Any,
    steps: int,
    *,
    seed: int = 0,
    optimizer: str = "adamw",
    rate: float = RATE,
    warm_up: int = WARM_UP,
    monitor: dg.Monitor | None = None,
    ceiling: float = math.inf,
) -> list[float]:
    """Train with AdamW, or with SGD and momentum. Return the losses.

    The training stops where the loss is not finite or exceeds `ceiling` times the first loss.
    """
    weights = model.parameters()
    if optimizer == "adamw":
        chosen: torch.optim.Optimizer = torch.optim.AdamW(weights, lr=rate, betas=(0.9, 0.95), weight_decay=0.0)
    else:
        chosen = torch.optim.SGD(weights, lr=rate, momentum=0.9)
    data, losses = batches(seed), []
    for step in range(steps):
        for group in chosen.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / warm_up) if warm_up else rate
        ids = next(data)
        loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        chosen.step()
        chosen.zero_grad()
        losses.append(float(loss.detach()))
        if monitor is not None:
            monitor.step(step, loss)
        if not math.isfinite(losses[-1]) or losses[-1] > ceiling * losses[0]:
            break
    return losses


def watched(model: Any, log: Path, every: int = 10, **settings: Any) -> dg.Monitor:
    """Return a monitor that only logs its alarms."""
    return dg.Monitor(model, probe_ids(), every, log, action="log", **settings)
