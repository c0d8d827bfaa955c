"""Tiny models of every family after a short training: random weights say nothing about which blocks matter."""

import copy
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from tiny_models import ENCODERS, tiny_model
from tiny_training import VOCABULARY, batches

from depthgauge.checkpoints.blocks.model_output import model_output, window_losses
from depthgauge.surgery.student import Student

LAYERS, STEPS = 5, 60
FIRST = 3
"""The smallest token id that is not special."""


def sequences(seed: int, count: int, length: int = 24) -> torch.Tensor:
    """Return sequences whose second half repeats the first."""
    return next(batches(seed, batch=count, tokens=length)) + FIRST


def trained_model(name: str) -> Any:
    """Return a model that was trained to predict the next token; an encoder, to find the original of noisy tokens."""
    return copy.deepcopy(_trained(name))


@cache
def _trained(name: str) -> Any:
    torch.manual_seed(0)  # of the dropout
    model = tiny_model(name, spread=0.15, layers=LAYERS).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-3)
    noise = torch.Generator().manual_seed(1)
    for ids in _stream():
        if name in ENCODERS:
            is_noisy = torch.rand(ids.shape, generator=noise) < 0.2
            drawn = torch.randint(FIRST, FIRST + VOCABULARY, ids.shape, generator=noise)
            states = model(input_ids=torch.where(is_noisy, drawn, ids)).last_hidden_state
            logits, wanted = states @ model.get_input_embeddings().weight.T, ids
        else:
            logits, wanted = model(input_ids=ids).logits[:, :-1], ids[:, 1:]
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), wanted.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    return model.eval()


def _stream() -> Iterator[torch.Tensor]:
    for step, ids in enumerate(batches(0, batch=16, tokens=24)):
        if step == STEPS:
            return
        yield ids + FIRST


def objective_of(student: Student, model: Any) -> float:
    """Return the mean objective of a complete transformers model on the selection windows."""
    runner, inputs = student.runner, student.select.inputs
    checkpoint = replace(runner.checkpoint, model=model)
    with torch.no_grad():
        output = model_output(checkpoint, inputs)
        dense = runner.output(runner.on_device(student.select.final), inputs)
    return float(window_losses(checkpoint.objective, output, inputs, dense).mean())
