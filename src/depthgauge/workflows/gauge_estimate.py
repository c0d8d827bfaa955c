"""How long `gauge` takes on a checkpoint, and how much memory it needs, before its weights are loaded."""

from typing import Any

import torch
from torch import Tensor

from depthgauge.checkpoints.block_lists import blocks_of
from depthgauge.checkpoints.circuits import circuit_sizes, head_weights
from depthgauge.checkpoints.experts import expert_layers
from depthgauge.checkpoints.given_inputs import load_reader, prepared, read_given
from depthgauge.checkpoints.given_windows import GivenWindows
from depthgauge.checkpoints.head_statistics import head_statistics
from depthgauge.checkpoints.input_kinds import TEXT, read_kind
from depthgauge.checkpoints.interface import AttentionCall, attending
from depthgauge.checkpoints.layers import Stack
from depthgauge.checkpoints.load import Checkpoint, Placement, context_length, load_config
from depthgauge.checkpoints.model_class import loader_of, objective_of
from depthgauge.checkpoints.probe import probe
from depthgauge.checkpoints.samples import Inputs
from depthgauge.checkpoints.sentence_pooling import longest_window
from depthgauge.checkpoints.what_if import passes
from depthgauge.checkpoints.windows import usual_window
from depthgauge.results.estimate_record import EstimateRecord
from depthgauge.results.gauge_options import SAMPLES
from depthgauge.results.labels import EXPERT
from depthgauge.surgery.block_sizes import describe_model
from depthgauge.surgery.part_costs import LIBRARIES, FewBlocks, PartCosts, few_blocks, measure_costs
from depthgauge.workflows.gauge_request import GaugeRequest


def estimate_gauge(
    request: GaugeRequest,
    config: Any = None,
    given: GivenWindows | None = None,
    placement: Placement | None = None,
) -> EstimateRecord:
    """Estimate a run on a checkpoint.

    Args:
        request: the checked options.
        config: the configuration of the model; by default it is loaded.
        given: the images, pairs or recordings that the model reads; by default they are read.
        placement: how the weights are loaded; by default as the options say.

    Raises:
        CheckpointError: no small model can be built from the configuration, or it cannot be run.
    """
    asked, source, model = request.asked, request.source, request.target.model
    placement, reads = placement or Placement.of(asked), read_kind(asked)
    if source is None:
        whole = describe_model(None, model.config, type(model), objective_of(type(model).__name__), placement)
    else:
        config = load_config(source, placement, reads) if config is None else config
        whole = describe_model(source, config, *loader_of(config, source), placement)
        if reads != TEXT and given is None:
            wanted, reader = asked.samples or SAMPLES, load_reader(source, placement, asked, None)
            given = read_given(asked, reader, config, source.target, wanted=wanted, seed=asked.seed or 0)
    example: Inputs
    if given is not None:
        whole, example, windows = prepared(whole, given, asked), given.inputs[:1], len(given.inputs)
    else:
        folder = None if source is None or source.gguf is not None else source.folder
        context, tokens = longest_window(folder, context_length(whole.config)), asked.tokens or 0
        if request.text is not None and request.text.path is not None:  # a token has at least one byte
            tokens = min(tokens, request.text.path.stat().st_size or tokens)
        window = usual_window(tokens, context) if asked.window is None else asked.window
        example, windows = torch.zeros(1, window, dtype=torch.long), max(1, tokens // window)
    parts = few_blocks(whole, placement)
    costs = measure_costs(parts, example, together=False, streams=placement.stream)
    seconds = {"loading": costs.load + 4 * costs.window, "weights": _weights(parts)}
    reads_of = {"loading": 1, "weights": 1}
    if not asked.weights_only:
        experts = len(expert_layers(blocks_of(parts.few), parts.few.families)) / len(parts.counts)
        on = {kind: [*range(whole.layers)] * (round(experts) if kind == EXPERT else 1) for kind in request.kinds}
        reruns = sum(
            passes(kind, layers, whole.layers) * costs.blocks + len(layers) * costs.head for kind, layers in on.items()
        )
        seconds["heads"] = windows * (costs.window + _observing(parts, example))
        seconds["what-ifs"] = windows * reruns
        reads_of |= {"heads": windows, "what-ifs": len(request.kinds)}
    seconds = {name: value for name, value in seconds.items() if value}
    streamed = {}
    if source is not None:
        streamed = {name: value + reads_of[name] * costs.passed for name, value in seconds.items()}
    on_cpu = parts.few.device.type == "cpu"
    weights, held = costs.parameters * costs.itemsize, _held(costs, whole)
    if placement.stream:  # one block is in memory, and the next one
        weights -= round((1 - 2 / whole.layers) * costs.block_parameters * costs.itemsize)
    libraries = LIBRARIES["cpu" if on_cpu else "cuda"]
    return EstimateRecord(
        **costs.described(parts),
        parts=streamed if placement.stream else seconds,
        streamed=streamed,
        gpu=0 if on_cpu else round(weights + held),
        ram=round(libraries + weights + (held if on_cpu else 0)),
        disk=0,
    )


def _held(costs: PartCosts, whole: Checkpoint) -> float:
    """Return the bytes beside the weights: the states of a window, its output, and the attention of a layer."""
    states = (costs.layers + 1) * costs.tokens * costs.width * costs.itemsize
    return states + 3 * costs.output + 6 * whole.heads * costs.tokens**2 * 4


def _weights(parts: FewBlocks) -> float:
    """Return how long the sizes of the weights take; one head of a block stands for all."""
    few, family = parts.few, parts.few.family
    if family is None or family.projections is None:
        return 0.0
    block = next(iter(parts.counts))
    return (
        few.heads
        * sum(parts.counts.values())
        * sum(parts.seconds(lambda: circuit_sizes(next(iter(head_weights(few, block))))))
    )


def _observing(parts: FewBlocks, example: Inputs) -> float:
    """Return how long the heads of one window take; 0 if the attention cannot be observed."""
    if probe(parts.few, example).attention is not None:
        return 0.0

    def watch(call: AttentionCall) -> Tensor:
        return head_statistics(call)[0]

    with attending(parts.few.model) as session:
        stack = Stack(parts.few, session)
        return sum(parts.seconds(lambda: stack.run(example, watch=watch)))
