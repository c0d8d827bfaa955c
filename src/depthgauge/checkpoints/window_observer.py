"""What is observed on a window: the loss, the residuals of the states, the heads, and the scores of the layers."""

import math
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.progress import Step
from depthgauge.checkpoints.dense_states import DenseStates
from depthgauge.checkpoints.head_statistics import head_statistics
from depthgauge.checkpoints.interface import AttentionCall
from depthgauge.checkpoints.layers import Stack, unusual_states
from depthgauge.checkpoints.load import BY_TARGETS
from depthgauge.checkpoints.model_output import accuracy, window_losses
from depthgauge.checkpoints.registered_attention import layer_plan
from depthgauge.checkpoints.samples import Inputs
from depthgauge.checkpoints.scores import SublayerScores, angular_distance, block_influence
from depthgauge.theory.measures.quantities import residual_sizes


class WindowObserver:
    """One window while it is observed.

    - `sublayers`: the scores of sublayers
    - `record`: what was observed, as JSON
    """

    def __init__(self, stack: Stack, plans: bool) -> None:
        """Prepare for a pass over the blocks; `plans`: make attention plans."""
        self.checkpoint, self.plans = stack.checkpoint, plans
        self.sublayers = SublayerScores(stack.blocks, stack.checkpoint.families)
        self.record: dict[str, Any] = {"heads": [], "fast": []}

    def watch(self, call: AttentionCall) -> Tensor:
        """Observe the attention of the next layer and return its output."""
        if self.plans:
            self.record["fast"].append(layer_plan(call).to_json())
        output, statistics = head_statistics(call)
        self.record["heads"].append(statistics.to_json())
        return output

    def finish(self, window: Inputs, states: tuple[Tensor, ...], output: Tensor) -> None:
        """Add the loss, and what the states X_0 … X_L show."""
        objective, steps = self.checkpoint.objective, list(pairwise(states))
        losses = window_losses(objective, output, window, output) if objective in BY_TARGETS else None
        self.record["loss"] = None if losses is None else float(losses.mean())
        if objective == "labels":
            self.record["accuracy"] = accuracy(output, window)
        self.record["residuals"] = [
            {
                center: {norm: [float(size.value), float(size.ratio)] for norm, size in sizes.items()}
                for center, sizes in residual_sizes(state.float()).items()
            }
            for state in states
        ]
        by_sublayer = {"attention_cosine": self.sublayers.attention, "mlp_cosine": self.sublayers.mlp}
        self.record["scores"] = {
            "block_influence": [block_influence(x, y) for x, y in steps],
            "angular_distance": [angular_distance(x, y) for x, y in steps],
            **{name: found for name, found in by_sublayer.items() if not all(map(math.isnan, found))},
        }


def observe_window(stack: Stack, window: Inputs, *, plans: bool) -> WindowObserver:
    """Observe one window in passes of the model itself, whose blocks cannot be called one by one."""
    observer, base = WindowObserver(stack, plans), stack.full(window)
    with observer.sublayers.listening():
        stack.run(window, watch=observer.watch)
    observer.finish(window, () if unusual_states(base.states, window) else base.states, base.output)
    return observer


@torch.no_grad()
def observe_blocks(dense: DenseStates, *, plans: bool, progress: Step) -> list[WindowObserver]:
    """Observe several windows block by block; `plans`: make attention plans for the first one."""
    runner, windows = dense.runner, [dense.inputs[place : place + 1] for place in range(len(dense.inputs))]
    observers = [WindowObserver(runner, plans and not place) for place in range(len(windows))]
    for layer in range(len(runner)):
        progress(layer, len(runner), f"heads, layer {layer}")
        with runner.checkpoint.resident(layer):
            for place, observer in enumerate(observers):
                runner.session.begin(watch=observer.watch)
                with observer.sublayers.listening([layer]):
                    runner.through([layer], dense.at(layer)[place : place + 1], windows[place])
    for place, observer in enumerate(observers):
        states = tuple(dense.at(k)[place : place + 1] for k in range(len(runner) + 1))
        output = runner.output(runner.on_device(states[-1]), windows[place])
        observer.finish(windows[place], states, output)
    return observers
