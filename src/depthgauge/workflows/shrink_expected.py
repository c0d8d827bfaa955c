"""`shrink --estimate`: what a run would take, from the configuration and the options alone."""

from collections.abc import Callable

import torch

from depthgauge.checkpoints.given_inputs import load_reader, read_given
from depthgauge.checkpoints.harness import task_tokens
from depthgauge.checkpoints.input_kinds import TEXT, read_kind
from depthgauge.checkpoints.load import Placement, load_config, load_tokenizer
from depthgauge.checkpoints.model_class import loader_of
from depthgauge.checkpoints.source import Source, weight_files
from depthgauge.checkpoints.stored_weights import stored_dtype
from depthgauge.results.estimate_record import GGUF, EstimateRecord
from depthgauge.results.evaluate_options import EvaluateOptions
from depthgauge.results.shrink_options import ShrinkOptions
from depthgauge.results.shrink_record import PlanRecord
from depthgauge.surgery.block_sizes import describe_model
from depthgauge.surgery.gguf_layout import GgufLayout, read_layout
from depthgauge.surgery.open_model import calibration_sizes
from depthgauge.workflows.evaluate_models import prepare_evaluation
from depthgauge.workflows.shrink_estimate import estimate_shrink


def expected_of(
    source: Source, settings: ShrinkOptions, plan: PlanRecord | None, makes: str, message: Callable[[str], None]
) -> EstimateRecord:
    """Estimate a run of `shrink`. Texts are not read; images, pairs and recordings are, because their sizes count."""
    placement = Placement.of(settings)
    config = load_config(source, placement, read_kind(settings))
    kind, objective = loader_of(config, source)
    settings.check_model(objective == "loss", source.target)
    given = None
    if read_kind(settings) != TEXT:
        reader, wanted = load_reader(source, placement, settings, None), calibration_sizes(settings).total
        given = read_given(settings, reader, config, source.target, wanted=wanted, seed=settings.seed)
    tasks = 0
    if settings.evaluate is not None:
        work = prepare_evaluation(EvaluateOptions(tasks=settings.evaluate), message)
        tasks = task_tokens(work.tasks, load_tokenizer(source, placement), work.settings.limit)
    stored: torch.dtype | GgufLayout | None = None
    if makes == GGUF:
        stored = read_layout(source, settings.gguf_type, source.target)
    elif settings.dtype == "auto" and source.gguf is None and weight_files(source):
        stored = stored_dtype(config, source)
    whole = describe_model(source, config, kind, objective, placement)
    return estimate_shrink(whole, given, settings, placement, plan, stored, makes, tasks)
