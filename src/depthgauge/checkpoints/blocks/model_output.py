"""The output of a model that is measured, in batches that fit into memory, and the numbers that compare two outputs."""

import gc
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import functional

from depthgauge.base.errors import is_out_of_memory
from depthgauge.checkpoints.inputs.windows import IGNORED, Inputs, Samples, as_samples, shortened
from depthgauge.checkpoints.source.library import CheckpointError, attempt
from depthgauge.checkpoints.weights.load import OF_HEAD, Checkpoint
from depthgauge.checkpoints.weights.stored_weights import free_memory

Made = TypeVar("Made")
SMALLER = 4
"""The factor by which batches become smaller."""


class WindowBatches:
    """How many windows are computed together: `size`, and a quarter of it from the first failed allocation on.

    The second failure is raised: then the weights, or a single window, are too large.
    """

    def __init__(self, size: int) -> None:
        self.size = size
        self._is_smaller = False

    def map(self, compute: Callable[[slice], Made], windows: int) -> list[Made]:
        """Return what `compute` returns for each batch of this many windows.

        A failed batch is computed again, so `compute` must not change anything before its last allocation.
        """
        found: list[Made] = []
        start = 0
        while start < windows:
            found.append(self.again(partial(self._one, compute, start, windows), windows - start))
            start += self.size
        return found

    def _one(self, compute: Callable[[slice], Made], start: int, windows: int) -> Made:
        return compute(slice(start, min(windows, start + self.size)))

    def again(self, compute: Callable[[], Made], windows: int) -> Made:
        """Return what `compute` returns for this many windows in batches of `size`; call it again if memory runs out.

        A second call must undo what the first one did.
        """
        try:
            return compute()
        except Exception as error:
            together = min(self.size, windows)
            if self._is_smaller or together == 1 or not is_out_of_memory(error):
                raise
            self.size, self._is_smaller = max(1, together // SMALLER), True
        # Only here, the error does not refer to the tensors of the failed batch any more.
        gc.collect()
        torch.cuda.empty_cache()
        return compute()


# --- The output of a model that is measured, and the numbers that compare two outputs --------------------------------

_ENTRIES = {"cpu": 2**22, "cuda": 2**26}
"""Largest number of logits converted to float32 at once: 16 MB, which a cache holds; 256 MB on a GPU, where each piece
costs several launches."""

_TRIED = 32
"""Tokens on which a model is tried."""


def no_cache(model: Any) -> dict[str, bool]:
    """Return the keyword arguments with which a model keeps no key–value cache."""
    taken = inspect.signature(model.forward).parameters
    others = any(one.kind is one.VAR_KEYWORD for one in taken.values()) and getattr(model.config, "use_cache", False)
    return {"use_cache": False} if "use_cache" in taken or others else {}


def decoded(
    model: Any, ids: Int[Tensor, "batch n"], cache: Mapping[str, Any], **keywords: Any
) -> tuple[Any, Mapping[str, Any]]:
    """Run a causal language model on the next tokens; return its output, and the cache for the tokens after them.

    The cache is a set of keyword arguments, empty for the first tokens: what the model returns under the name of one of
    its arguments, such as `past_key_values`, or `cache_params` of Mamba. It stays empty if the model returns none.
    """
    takes = inspect.signature(model.forward).parameters
    keywords |= dict.fromkeys(no_cache(model), True)
    out = model(input_ids=ids, **cache, **keywords)
    return out, {name: value for name, value in out.items() if name in takes and value is not None}


def cached_tensors(cache: Mapping[str, Any]) -> list[Tensor]:
    """Return the tensors of a cache: a list of tensors, or the states of every layer."""
    found: list[Any] = []
    for one in cache.values():
        found += one if isinstance(one, list | tuple) else [v for layer in one.layers for v in vars(layer).values()]
    values = [value for one in found for value in (one.values() if isinstance(one, Mapping) else [one])]
    return [value for value in values if isinstance(value, Tensor)]


def model_output(checkpoint: Checkpoint, inputs: Inputs) -> Float[Tensor, "batch *n out"]:
    """Return the logits of a model, or the final states or embeddings of the model without its head."""
    part = checkpoint.measured
    given = as_samples(inputs, checkpoint.reads).keywords(checkpoint.device, checkpoint.model.dtype)
    out = part(**given, **no_cache(part))
    if checkpoint.objective in OF_HEAD:
        logits: Tensor = out.logits
        return logits
    return pooled(out.last_hidden_state, checkpoint.pooling)


def pooled(states: Float[Tensor, "batch ... d"], modes: Sequence[str]) -> Float[Tensor, "batch ... out"]:
    """Return one embedding per window, as sentence-transformers computes it; without a mode, the states themselves.

    `modes` are names of pooling modes. With several of them, the embeddings are joined. Windows have no padding.
    """
    return torch.cat([POOLING[mode](states) for mode in modes], dim=-1) if modes else states


def _weighted_mean(states: Float[Tensor, "batch n d"]) -> Float[Tensor, "batch d"]:
    weights = torch.arange(1, states.shape[1] + 1, device=states.device, dtype=states.dtype)[:, None]
    return (states * weights).sum(dim=1) / weights.sum()


POOLING: Mapping[str, Callable[[Float[Tensor, "batch n d"]], Float[Tensor, "batch d"]]] = {
    "cls": lambda states: states[:, 0],
    "lasttoken": lambda states: states[:, -1],
    "max": lambda states: states.amax(dim=1),
    "mean": lambda states: states.mean(dim=1),
    "mean_sqrt_len_tokens": lambda states: states.sum(dim=1) / states.shape[1] ** 0.5,
    "weightedmean": _weighted_mean,
}
"""Pooling mode of sentence-transformers → the embedding of windows without padding."""


def window_losses(
    objective: str, output: Float[Tensor, "batch *n out"], inputs: Inputs, reference: Tensor
) -> Float[Tensor, " batch"]:
    """Return one number per window; smaller is better. `reference` is the output of the dense model.

    - `loss`: the mean over tokens of −log p(next token), in nats
    - `labels`: −log p(label), in nats
    - `states`, `logits`: ‖output − reference‖F / ‖reference‖F
    - `embedding`: 1 − cos(output, reference)
    """
    if objective == "loss":
        return _target_losses(output, inputs) if isinstance(inputs, Samples) else _mean_losses(output, inputs)
    if objective == "labels":
        return functional.cross_entropy(output.double(), labels_of(inputs).to(output.device), reduction="none")
    if objective == "embedding":
        return 1 - functional.cosine_similarity(output.double(), reference.double(), dim=-1)
    return relative_distance(output, reference)


def _mean_losses(logits: Float[Tensor, "batch n vocabulary"], ids: Int[Tensor, "batch n"]) -> Float[Tensor, " batch"]:
    return token_losses(logits, ids).double().mean(dim=1)


def _target_losses(logits: Float[Tensor, "batch n vocabulary"], samples: Samples) -> Float[Tensor, " batch"]:
    """Return the mean over the tokens of each target of −log p(token)."""
    targets = labels_of(samples).to(logits.device)
    losses = [
        functional.cross_entropy(rows.float(), wanted, ignore_index=IGNORED)  # the mean over those that count
        for rows, wanted in zip(logits, targets, strict=True)
    ]
    return torch.stack(losses).double()


def labels_of(inputs: Inputs) -> Int[Tensor, " windows *n"]:
    """Return the label, or the target tokens, of every window."""
    assert isinstance(inputs, Samples)
    assert inputs.targets is not None
    return inputs.targets


def accuracy(output: Float[Tensor, "windows labels"], inputs: Inputs) -> float:
    """Return the share of windows whose largest logit is that of the label."""
    return float((output.argmax(dim=-1).cpu() == labels_of(inputs).cpu()).double().mean())


@torch.no_grad()
def require_output(checkpoint: Checkpoint, inputs: Inputs) -> None:
    """Run a model on a window, or on a few of its tokens; raise if it cannot run, or if its output is NaN."""

    def run() -> Tensor:
        return model_output(checkpoint, shortened(inputs, _TRIED))

    if bool(attempt(checkpoint.name, "output", run, "compute").isnan().any()):
        raise CheckpointError(
            f"the output of {checkpoint.name} is NaN; use --dtype float32 if the dtype is too narrow, otherwise "
            "correct its configuration, or download it again"
        )


def token_losses(
    logits: Float[Tensor, "batch n vocabulary"], ids: Int[Tensor, "batch n"]
) -> Float[Tensor, "batch n-1"]:
    """Return −log p(next token) for every token but the first, in nats.

    The logits are converted to float32 a few rows at a time, so that they are never copied as a whole.
    """
    count = max(1, _ENTRIES.get(logits.device.type, _ENTRIES["cpu"]) // logits.shape[-1])
    parts = [
        part.float().logsumexp(dim=-1) - part.float().gather(-1, target[:, None])[:, 0]
        for rows, targets in zip(logits[:, :-1], ids[:, 1:].to(logits.device), strict=True)
        for part, target in zip(torch.split(rows, count), torch.split(targets, count), strict=True)
    ]
    return torch.cat(parts).reshape(len(ids), -1)


def relative_distance(
    output: Float[Tensor, "batch ..."], reference: Float[Tensor, "batch ..."]
) -> Float[Tensor, " batch"]:
    """Return ‖output − reference‖F / ‖reference‖F for every window."""
    wanted = reference.double().flatten(1)
    distance: Tensor = (output.double().flatten(1) - wanted).norm(dim=1) / wanted.norm(dim=1)
    return distance


_LOGIT_BYTES = {"cpu": 2**28, "cuda": 2**31}
"""Largest size of the logits of one batch, by type of device."""


_OF_FREE = 16
"""The logits of one batch take at most one part of so many of the free memory: several tensors of their size exist."""


def batch_size(model: Any, window: int, loss: bool) -> int:
    """Return how many windows fit into one batch; the logits are the largest tensor, or else the MLP's activations."""
    config = model.config.get_text_config()
    wide = max(config.vocab_size if loss else 1, 8 * config.hidden_size)
    most = min(_LOGIT_BYTES.get(model.device.type, 2**28), free_memory(model.device) // _OF_FREE)
    return max(1, most // (4 * window * int(wide)))
