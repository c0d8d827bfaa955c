"""Training with a monitor is bit-identical to training without one."""

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tiny_training import batches, probe_ids, tiny_llama
from torch import nn

import depthgauge as dg
from depthgauge.monitor.undisturbed import undisturbed

STEPS = 3
pytestmark = pytest.mark.filterwarnings(
    "ignore:.*bf16.*:UserWarning",  # on a CPU without bfloat16 instructions, torch uses a slower path
    "ignore:.*mkldnn.*:UserWarning",
    "ignore:.*not a leaf Tensor.*:UserWarning",  # raised and suppressed inside dynamo
)


def run(
    log: Path | None,
    *,
    prepare: Callable[[Any], Any] = lambda model: model,
    autocast: bool = False,
    accumulate: int = 1,
    options: dg.results.MonitorOptions | None = None,
) -> tuple[list[float], list[torch.Tensor], float]:
    """Train a model with dropout; return the losses, the weights, and the next random number."""
    model = tiny_llama(3, layers=2, attention_dropout=0.2)
    trained = prepare(model)
    monitor = None
    if log is not None:
        monitor = dg.Monitor(trained, probe_ids(), 1, log, action="log", options=options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data, losses = batches(1), []
    torch.manual_seed(7)
    for step in range(STEPS):
        for _ in range(accumulate):
            ids = next(data)
            with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                loss = trained(input_ids=ids, labels=ids).loss
                if monitor is not None and accumulate > 1:
                    monitor.step(step, loss)  # between the forward and the backward pass, and inside autocast
            loss.backward()
            losses.append(float(loss.detach()))
        if monitor is not None and accumulate == 1:
            monitor.step(step, loss)  # while the gradients are still there
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return losses, [weight.detach().clone() for weight in model.parameters()], float(torch.rand(()))


def checkpointed(model: Any) -> Any:
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def compiled_frames() -> int:
    """Return how many frames were compiled since the last reset."""
    return int(torch._dynamo.utils.counters["frames"]["ok"])


def reset() -> None:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()


def compiled(model: Any) -> Any:
    reset()
    return torch.compile(model, backend="eager")


def compiled_blocks(model: Any) -> Any:
    reset()
    for block in model.model.layers:
        block.compile(backend="eager")
    return model


def eager(model: Any) -> Any:
    model.set_attn_implementation("eager")
    return model


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"prepare": eager},
        {"prepare": checkpointed},
        {"accumulate": 2, "autocast": True},
        {"prepare": compiled},
        {"prepare": compiled_blocks},
    ],
    ids=["plain", "eager", "checkpointed", "accumulated and autocast", "compiled", "compiled blocks"],
)
def test_losses_and_weights_are_bit_identical(tmp_path: Path, settings: dict[str, Any]) -> None:
    losses, weights, draw = run(None, **settings)
    frames = compiled_frames()
    options = None if settings else dg.results.MonitorOptions(what_if_every=2, depth=0.1)
    same, same_weights, same_draw = run(tmp_path, **settings, options=options)
    assert compiled_frames() == frames  # nothing was compiled again because of the probes
    assert same == losses
    assert all(map(torch.equal, weights, same_weights))
    assert same_draw == draw
    probes = dg.results.read_log(tmp_path).probes
    assert [probe.step for probe in probes] == list(range(STEPS))
    assert all(probe.layers[0].heads is not None for probe in probes)
    assert len(set(losses)) == len(losses)  # the losses change, so that equality means something


class Restless(nn.Module):
    """A module whose forward pass changes its state, as a dynamic rotary embedding does."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("changed", torch.zeros(3))
        self.register_buffer("replaced", torch.zeros(3))
        self.longest = 4
        self.dropout, self.frozen = nn.Dropout(0.5), nn.Dropout(0.5).eval()

    def forward(self, x: torch.Tensor, fail: bool = False) -> torch.Tensor:
        self.changed += 1
        self.replaced = torch.ones(3)
        self.longest, self.cache = 9, x
        random.random(), np.random.random(), torch.rand(())
        if fail:
            raise ZeroDivisionError
        return self.dropout(x * self.weight)


def test_the_state_of_every_module_and_generator_is_put_back() -> None:
    model = Restless()
    model.weight.grad = torch.full((2,), 3.0)
    replaced = model.replaced
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    expected = [random.random(), np.random.random(), float(torch.rand(()))]
    random.seed(1), np.random.seed(1), torch.manual_seed(1)
    with torch.autocast("cpu", torch.bfloat16), undisturbed(model):
        assert not model.training
        assert not torch.is_autocast_enabled("cpu")
        made = model(torch.ones(2))
        assert not made.requires_grad
        assert torch.equal(made, torch.ones(2))
    assert torch.is_grad_enabled()
    assert torch.equal(model.changed, torch.zeros(3))
    assert model.replaced is replaced
    assert (model.longest, hasattr(model, "cache")) == (4, False)
    assert (model.training, model.dropout.training, model.frozen.training) == (True, True, False)
    assert torch.equal(model.weight.grad, torch.full((2,), 3.0))
    assert [random.random(), np.random.random(), float(torch.rand(()))] == expected


def test_the_state_is_put_back_after_an_error() -> None:
    model = Restless()
    with pytest.raises(ZeroDivisionError), undisturbed(model):
        model(torch.ones(2), fail=True)
    assert model.training
    assert model.longest == 4
    assert torch.is_grad_enabled()


def test_a_model_with_weights_of_several_dtypes_keeps_its_autocast() -> None:
    model = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2).bfloat16())
    with torch.autocast("cpu", torch.bfloat16), undisturbed(model):
        assert model(torch.ones(1, 2)).dtype == torch.bfloat16


def test_the_implementation_of_the_attention_is_put_back(tmp_path: Path) -> None:
    model = tiny_llama(layers=2)
    before = model.config._attn_implementation, [sorted(vars(module)) for module in model.modules()]
    dg.Monitor(model, probe_ids(), 1, tmp_path, action="log").step(0)
    assert (model.config._attn_implementation, [sorted(vars(module)) for module in model.modules()]) == before
    assert all(not module._forward_hooks and not module._forward_pre_hooks for module in model.modules())
