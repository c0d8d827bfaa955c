"""The outputs of models in what-ifs, computed in one pass over the blocks."""

from collections.abc import Sequence

import torch
from torch import Tensor

from depthgauge.checkpoints.blocks.attention_calls import Session
from depthgauge.checkpoints.blocks.block_runner import BlockRunner
from depthgauge.checkpoints.blocks.what_if import DenseStates, Edit, edited_states
from depthgauge.checkpoints.inputs.windows import Inputs
from depthgauge.checkpoints.weights.load import Checkpoint


@torch.no_grad()
def edited_outputs(
    checkpoint: Checkpoint, inputs: Inputs, kind: str, layers: Sequence[int], session: Session | None = None
) -> list[Tensor]:
    """Return the output of the model in the what-if `kind` on each of the layers."""
    runner = BlockRunner(checkpoint, inputs[:1], session)
    states = edited_states(DenseStates(runner, inputs), [(Edit(layer, kind),) for layer in layers])
    return [runner.output(states[(Edit(layer, kind),)], inputs) for layer in layers]
