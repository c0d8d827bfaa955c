"""Prove that a written model works: a fresh process loads it and computes what the model in memory computes."""

import json
import math
import os
import subprocess
import sys
import tempfile
from contextlib import nullcontext
from dataclasses import replace
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from depthgauge.base.errors import InputError, VerificationError
from depthgauge.base.format import counted, number
from depthgauge.checkpoints.load import OF_HEAD, Checkpoint, context_length, wrap
from depthgauge.checkpoints.model_output import model_output, no_cache, pooled
from depthgauge.checkpoints.samples import Inputs, as_samples
from depthgauge.results.shrink_record import ReloadRecord
from depthgauge.surgery.certify import as_dtype
from depthgauge.surgery.fresh_process import digests, generations, prompt_of

PROMPT = 32
"""Tokens of the prompt in the test of the key–value cache; shorter if the model's context is."""
COMPARED, POSITIONS = 2, 64
"""Windows whose outputs are compared, and tokens of each, evenly spaced: all logits of a window can take 0.5 GB."""
AS_SOURCE, PROMPTS = 2.0, 8
"""How much more than in the source model the logits with and without cache may differ, where both exceed rounding. The
source is measured on so many prompts, because rounding that is amplified differs tenfold between prompts."""
_PRECISIONS = {torch.float64: 2**16, torch.float32: 2**10, torch.float16: 2**4, torch.bfloat16: 2**3}
"""Tolerance of a comparison, as a multiple of the dtype's epsilon. Rounding accumulates over the layers."""


class FreshProcess:
    """A new Python process without depthgauge. It imports transformers at once, which takes seconds, and then waits.

    Use it as a context manager, which ends the process. It checks one model, of the class of `model`.
    """

    def __init__(self, model: Any) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="depthgauge-")
        self.exchange = Path(self._folder.name)
        script = resources.files("depthgauge.surgery").joinpath("fresh_process.py").read_text("utf-8")
        offline = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TRANSFORMERS_VERBOSITY": "error"}
        with open(self.exchange / "errors", "w", encoding="utf-8") as errors:
            command = [sys.executable, "-I", "-c", script, self._folder.name, type(model).__module__]
            self._process = subprocess.Popen(
                [*command, *filter(None, sys.path)],
                env=os.environ | offline,
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=errors,
            )

    def __enter__(self) -> "FreshProcess":
        return self

    def __exit__(self, *error: object) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()

    def check(self, request: dict[str, Any], windows: dict[str, Tensor]) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Let the process do what is requested; return its result and its outputs."""
        from safetensors.torch import load_file, save_file

        (self.exchange / "request.json").write_text(json.dumps(request), "utf-8")
        save_file(windows, self.exchange / "windows.safetensors")
        self._process.communicate(b"go\n")
        if self._process.returncode != 0 or not (self.exchange / "result.json").is_file():
            lines = (self.exchange / "errors").read_text("utf-8", "replace").splitlines()
            said = [line.strip() for line in lines if line.strip()]
            reason = said[-1][:300] if said else f"exit code {self._process.returncode}"
            raise VerificationError(f"a fresh process cannot run {request['out']}: {reason}")
        result: dict[str, Any] = json.loads((self.exchange / "result.json").read_text("utf-8"))
        return result, load_file(self.exchange / "outputs.safetensors")


@torch.no_grad()
def verify_reload(
    out: str | Path,
    inputs: Inputs,
    model: Any,
    *,
    device: str = "cpu",
    like: Checkpoint | None = None,
    new_tokens: int = 16,
    compute: torch.dtype | None = None,
    process: FreshProcess | None = None,
) -> tuple[ReloadRecord, Tensor]:
    """Load a written model in a fresh process without depthgauge and compare it with the model in memory.

    The process loads `out` with `AutoModelForCausalLM` or `AutoModel`. These must hold:

    - every tensor is equal bit for bit, none is missing, and the number of layers is equal
    - the outputs of the first `COMPARED` windows are equal to the precision of the dtype, at up to `POSITIONS` tokens
    - greedy generation with the key–value cache gives the tokens and logits of generation without it; where the logits
      of two tokens are equal to the precision of the dtype, either token may follow. State spaces round differently
      step by step; where the logits differ by more, they may differ `AS_SOURCE` times as much as those of `like` do on
      one of `PROMPTS` prompts

    Args:
        out: the directory.
        inputs: windows of token ids, images or samples; the losses of all of them are computed.
        model: the model in memory, which was written to `out`.
        device: the device of the fresh process; `auto` distributes the model over all devices.
        like: the source model, which says what is measured; by default what the model's class says.
        new_tokens: number of tokens to generate; 0 skips the comparison.
        compute: the dtype in which both models compute, by default the stored one.
        process: a process that was started before and has checked nothing yet; by default, one is started.

    Returns:
        What the process found, and the losses of a reloaded causal language model per window, in nats per token, or
        the outputs of another model.

    Raises:
        VerificationError: anything differs, or the process fails. The message says what.
        InputError: there is no window.
    """
    if len(inputs) < 1:
        raise InputError("at least one window must be compared, got none")
    model = as_dtype(model, compute or model.dtype)
    checkpoint = wrap(model)
    if like is not None:
        checkpoint = replace(checkpoint, objective=like.objective, stack=like.stack, layer_keys=like.layer_keys)
    ours = [model_output(checkpoint, inputs[index : index + 1])[0] for index in range(min(COMPARED, len(inputs)))]
    is_loss = checkpoint.objective == "loss"
    rows = ours[0].shape[0]
    positions = torch.linspace(0, rows - 1, min(POSITIONS, rows)).round().long() if is_loss else torch.arange(rows)
    lengths = _generation(checkpoint, rows, new_tokens)
    request = {
        "out": str(Path(out).resolve()), "device": device, "compared": COMPARED,
        "is_causal": is_loss and checkpoint.stack is None, "layer_keys": checkpoint.layer_keys,
        "is_loss": is_loss, "has_head": checkpoint.objective in OF_HEAD,
        "is_whole": checkpoint.measured is checkpoint.model,
        "positions": positions.tolist(), "threads": torch.get_num_threads(), "call": no_cache(checkpoint.measured),
        "class": type(model).__name__, "dtype": None if compute is None else str(compute).removeprefix("torch."),
        **lengths,
    }  # fmt: skip
    samples = as_samples(inputs, checkpoint.reads)
    windows = {name: value.cpu().contiguous() for name, value in samples.inputs.items()}
    if is_loss and samples.targets is not None:
        windows["targets"] = samples.targets.contiguous()
    with FreshProcess(model) if process is None else nullcontext(process) as fresh:
        found, outputs = fresh.check(request, windows)
    _check_structure(out, checkpoint, found)
    tolerance = tolerance_of(model.dtype)
    differences = [
        _relative(outputs[str(index)], one[positions.to(one.device)].cpu()) for index, one in enumerate(ours)
    ]
    difference = float(torch.tensor(differences, dtype=torch.float64).max())  # NaN if one of them is
    if not difference <= tolerance:
        raise VerificationError(
            f"{out} does not compute what the model in memory computes: the outputs differ by {number(difference)} of "
            f"the largest output, more than {number(tolerance)}"
        )
    if like is not None and not found.get("cache_difference", 0.0) <= tolerance:
        length = lengths["prompt"] if samples.targets is None else None
        prompts = [prompt_of(samples[index:].inputs, length) for index in range(min(PROMPTS, len(samples)))]
        theirs = [generations(like.model, prompt, lengths["new_tokens"])["cache_difference"] for prompt in prompts]
        tolerance = max(tolerance, AS_SOURCE * max(theirs))
    record = ReloadRecord(
        difference=difference, layers=sum(found["layers"]), generation=_check_cache(out, found, tolerance)
    )
    if is_loss:
        return record, torch.tensor(found["losses"], dtype=torch.float64)
    made = torch.stack([outputs[str(index)].float() for index in range(len(inputs))])
    return record, made if like is None else pooled(made, like.pooling)


def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest |difference| ÷ max |output| that counts as equal in a dtype."""
    return _PRECISIONS[dtype] * torch.finfo(dtype).eps


def _generation(checkpoint: Checkpoint, window: int, new_tokens: int) -> dict[str, int]:
    """Return the lengths of the prompt and of what is generated after it, which must fit the model's context."""
    context, prompt = context_length(checkpoint.config), min(PROMPT, window)
    if context is not None:
        new_tokens = max(0, min(new_tokens, context - 1))
        prompt = min(prompt, context - new_tokens)
    return {"prompt": prompt, "new_tokens": new_tokens}


def _check_structure(out: str | Path, checkpoint: Checkpoint, found: dict[str, Any]) -> None:
    """Raise unless the reloaded model has the class, the layers and the tensors of the model in memory."""
    model = checkpoint.model
    for what, here in {"class": type(model).__name__, "layers": list(map(len, checkpoint.spans))}.items():
        if found[what] != here:
            raise VerificationError(f"{out} has the wrong {what} after loading: {found[what]} instead of {here}")

    def ignored(name: str) -> bool:  # transformers adds a random pooler to an encoder that has none
        return "pooler" in name and getattr(checkpoint.model.base_model, "pooler", None) is None

    absent = [name for name in found["missing"] if not ignored(name)]
    if absent or found["unexpected"]:
        raise VerificationError(
            f"{out} does not contain the tensors of its model: {len(absent)} are missing and "
            f"{len(found['unexpected'])} are not used, such as {(absent + found['unexpected'])[0]}"
        )
    ours, theirs = digests(model), {name: entry for name, entry in found["digests"].items() if not ignored(name)}
    for name in [*ours, *(name for name in theirs if name not in ours)]:
        mine, other = ours.get(name), theirs.get(name)
        offloaded = mine is not None and other is not None and None in (mine[2], other[2])
        if mine is None or other is None or mine[:2] != other[:2] or (mine != other and not offloaded):
            raise VerificationError(f"the tensor {name} of {out} is not the one in memory")


def _relative(reloaded: Tensor, ours: Tensor) -> float:
    """Return max |reloaded − ours| ÷ max |ours|, or NaN if the shapes differ or a number is not finite."""
    if reloaded.shape != ours.shape or not bool(torch.isfinite(ours).all()):
        return math.nan
    return float((reloaded.double() - ours.double()).abs().max() / ours.double().abs().max())


def _check_cache(out: str | Path, found: dict[str, Any], tolerance: float) -> str:
    """Raise unless generation with cache equals generation without; return what was found as a phrase."""
    if "cached" not in found:
        return "not applicable"
    difference, gap = found["cache_difference"], found["gap"]
    if not difference <= tolerance or (gap is not None and not gap <= tolerance):
        raise VerificationError(
            f"{out} generates other text with the key–value cache than without it: the logits differ by "
            f"{number(difference)} of the largest logit, more than {number(tolerance)}"
        )
    if gap is None:
        return "equal with and without cache"
    pairs = zip(found["cached"], found["uncached"], strict=True)
    step = next(k for k, (a, b) in enumerate(pairs) if a != b)
    return (
        f"generation with and without cache agrees for {counted(step, 'token')}; then two tokens have logits that "
        f"differ by {number(gap)} of the largest logit, which is within the precision of the dtype"
    )
