"""Prove that a written model works: a fresh process loads it and computes what the model in memory computes.

A directory is loaded by transformers alone, a GGUF file by llama.cpp, which also times two files.
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.base.errors import InputError, VerificationError, install_command
from depthgauge.base.format import counted, number, one_line
from depthgauge.checkpoints.blocks.model_output import decoded, model_output, no_cache, pooled
from depthgauge.checkpoints.inputs.windows import Inputs, as_samples
from depthgauge.checkpoints.source.model_class import context_length
from depthgauge.checkpoints.weights.load import OF_HEAD, Checkpoint, wrap
from depthgauge.results.shrink_record import ReloadRecord, SpeedRecord
from depthgauge.surgery import speed
from depthgauge.surgery.certify import as_dtype
from depthgauge.surgery.fresh_process import PairedTimes, digests, generations, prompt_of

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
        report, outputs = fresh.check(request, windows)
    _check_structure(out, checkpoint, report)
    tolerance = tolerance_of(model.dtype)
    differences = [
        _relative(outputs[str(index)], output[positions.to(output.device)].cpu()) for index, output in enumerate(ours)
    ]
    difference = float(torch.tensor(differences, dtype=torch.float64).max())  # NaN if one of them is
    if not difference <= tolerance:
        raise VerificationError(
            f"{out} does not compute what the model in memory computes: the outputs differ by {number(difference)} of "
            f"the largest output, more than {number(tolerance)}"
        )
    if like is not None and not report.get("cache_difference", 0.0) <= tolerance:
        length = lengths["prompt"] if samples.targets is None else None
        prompts = [prompt_of(samples[index:].inputs, length) for index in range(min(PROMPTS, len(samples)))]
        theirs = [generations(like.model, prompt, lengths["new_tokens"])["cache_difference"] for prompt in prompts]
        tolerance = max(tolerance, AS_SOURCE * max(theirs))
    record = ReloadRecord(
        difference=difference, layers=sum(report["layers"]), generation=_check_cache(out, report, tolerance)
    )
    if is_loss:
        return record, torch.tensor(report["losses"], dtype=torch.float64)
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


def _check_structure(out: str | Path, checkpoint: Checkpoint, report: dict[str, Any]) -> None:
    """Raise unless the reloaded model has the class, the layers and the tensors of the model in memory."""
    model = checkpoint.model
    for what, here in {"class": type(model).__name__, "layers": list(map(len, checkpoint.spans))}.items():
        if report[what] != here:
            raise VerificationError(f"{out} has the wrong {what} after loading: {report[what]} instead of {here}")

    def ignored(name: str) -> bool:  # transformers adds a random pooler to an encoder that has none
        return "pooler" in name and getattr(checkpoint.model.base_model, "pooler", None) is None

    absent = [name for name in report["missing"] if not ignored(name)]
    if absent or report["unexpected"]:
        raise VerificationError(
            f"{out} does not contain the tensors of its model: {len(absent)} are missing and "
            f"{len(report['unexpected'])} are not used, such as {(absent + report['unexpected'])[0]}"
        )
    ours, theirs = digests(model), {name: entry for name, entry in report["digests"].items() if not ignored(name)}
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


def _check_cache(out: str | Path, report: dict[str, Any], tolerance: float) -> str:
    """Raise unless generation with cache equals generation without; return what was found as a phrase."""
    if "cached" not in report:
        return "not applicable"
    difference, gap = report["cache_difference"], report["gap"]
    if not difference <= tolerance or (gap is not None and not gap <= tolerance):
        raise VerificationError(
            f"{out} generates other text with the key–value cache than without it: the logits differ by "
            f"{number(difference)} of the largest logit, more than {number(tolerance)}"
        )
    if gap is None:
        return "equal with and without cache"
    pairs = zip(report["cached"], report["uncached"], strict=True)
    step = next(k for k, (a, b) in enumerate(pairs) if a != b)
    return (
        f"generation with and without cache agrees for {counted(step, 'token')}; then two tokens have logits that "
        f"differ by {number(gap)} of the largest logit, which is within the precision of the dtype"
    )


# --- GGUF files in llama.cpp ------------------------------------------------------------------------------------------

LLAMA_PROMPT, NEW_TOKENS, LIKELY = 256, 32, 10
"""Tokens of the prompt, tokens that are generated after it, and log-probabilities that are compared at each."""
FACTOR, LEAST, MOST, TIE = 2.0, 0.02, 0.5, 5.0
"""A file may differ from transformers by this times as much as its source does, or by so many nats in any case.
llama.cpp rounds the inputs of a quantized map, which transformers does not. A source that differs by more than `MOST`
is refused: the comparison would find no error. Two tokens are tied if their log-probabilities differ by at most `TIE`
times what is allowed on average."""
SECONDS, SECONDS_PER_GB = 120, 60
"""Time limit of the process: so much, and so much per gigabyte of the file."""


@dataclass(frozen=True)
class LlamaComparison:
    """What llama.cpp and transformers make of the same weights, after a prompt and each token that follows it.

    - `difference`: mean of Σ p |Δ log p| over the tokens that llama.cpp finds most likely, in nats
    - `agreed`, `steps`: how often both find the same token most likely, and how often they were compared
    - `gap`: where they do not, the largest difference of log p in transformers between the two tokens
    """

    difference: float
    agreed: int
    steps: int
    gap: float

    @property
    def sentence(self) -> str:
        """How the generated tokens agree, as a phrase."""
        if self.agreed == self.steps:
            return f"equal to transformers for {counted(self.steps, 'token')}"
        return (
            f"{self.agreed} of {counted(self.steps, 'token')} are those of transformers; the others have "
            f"log-probabilities there that differ by at most {number(self.gap, 2)} from the largest"
        )


def has_llama() -> bool:
    """Return whether llama.cpp is installed (the extra `gguf`)."""
    return find_spec("xllamacpp") is not None


def not_checked() -> str:
    """Return the note of a result that llama.cpp has not checked."""
    return (
        "the file was read back and is complete, but not run in llama.cpp, which is not installed; to check and "
        f"time it, install the extra `gguf`: {install_command('gguf')}"
    )


@torch.no_grad()
def compare_with_llama(path: Path, model: Any, window: Int[Tensor, " n"]) -> LlamaComparison:
    """Continue the beginning of a window greedily with a model, and let llama.cpp predict each token of it.

    The GGUF file and the transformers model have the same weights.

    Raises:
        VerificationError: llama.cpp cannot load the file, or fails; the message says why.
    """
    context = context_length(model.config) or LLAMA_PROMPT + NEW_TOKENS
    new = max(1, min(NEW_TOKENS, context // 2))
    prompt = window[: min(LLAMA_PROMPT, context - new)].tolist()
    chosen, ours = _greedy(model, prompt, new)
    prompts = [prompt + chosen[:step] for step in range(new)]
    request = {
        "path": str(path), "prompts": prompts, "likely": LIKELY,
        "context": len(prompt) + new + 8, "threads": torch.get_num_threads(),
    }  # fmt: skip
    answers = _run(request, SECONDS + SECONDS_PER_GB * path.stat().st_size / 1e9)
    differences, gaps = [], []
    for asked, answer, row in zip(prompts, answers, ours, strict=True):
        if answer["prompt_tokens"] != len(asked):
            raise VerificationError(
                f"llama.cpp read {answer['prompt_tokens']} instead of {len(asked)} tokens as a prompt of {path}"
            )
        if answer["likely"]:
            tokens, theirs = (torch.tensor(part) for part in zip(*answer["likely"], strict=True))
            theirs = theirs.double()
            differences.append(float((theirs.exp() * (theirs - row[tokens.long()]).abs()).sum()))
            gaps.append(float(row.max() - row[int(tokens[0])]))
    if not gaps:
        raise VerificationError(f"llama.cpp predicts no token after a prompt of {path}")
    agreed = sum(gap == 0 for gap in gaps)
    return LlamaComparison(sum(differences) / len(differences), agreed, len(gaps), max(gaps))


def _greedy(model: Any, prompt: list[int], steps: int) -> tuple[list[int], Float[Tensor, "steps vocabulary"]]:
    """Continue a prompt greedily; return the tokens, and the log-probabilities at every step."""
    device = model.get_input_embeddings().weight.device
    ids, chosen, rows = torch.tensor([prompt], device=device), list[int](), list[Tensor]()
    cache: Mapping[str, Any] = {}
    for _ in range(steps):
        out, cache = decoded(model, ids, cache)
        rows.append(out.logits[0, -1].double().log_softmax(-1).cpu())
        chosen.append(int(rows[-1].argmax()))
        ids = torch.tensor([chosen[-1:]], device=device)
    return chosen, torch.stack(rows)


def compare_source(path: Path, model: Any, window: Int[Tensor, " n"]) -> LlamaComparison:
    """Compare the source model in llama.cpp with transformers; see `compare_with_llama`.

    Raises:
        InputError: llama.cpp cannot load it, or disagrees with transformers so far that no result could be checked.
    """
    try:
        comparison = compare_with_llama(path, model, window)
    except VerificationError as error:
        raise InputError(f"{error}; give a directory as --out") from error
    if not comparison.difference <= MOST:
        raise InputError(
            f"llama.cpp and transformers do not agree about {path}: the log-probabilities of the next tokens differ by "
            f"{number(comparison.difference)} nats; give a directory as --out"
        )
    return comparison


def require_same(out: str | Path, comparison: LlamaComparison, source: LlamaComparison) -> None:
    """Raise unless llama.cpp computes with the written file what transformers computes with its weights.

    `source` is the comparison of the file that `out` was made from, which measures the rounding of llama.cpp.
    """
    allowed = max(LEAST, FACTOR * source.difference)
    if not (comparison.difference <= allowed and comparison.gap <= TIE * allowed):
        raise VerificationError(
            f"llama.cpp does not compute with {out} what transformers computes with its weights: the log-probabilities "
            f"of the next tokens differ by {number(comparison.difference)} nats, and {number(allowed)} are allowed; "
            f"the source differs by {number(source.difference)}"
        )


def llama_speed(before: Path, after: Path, window: Int[Tensor, " n"]) -> SpeedRecord:
    """Time two GGUF files in llama.cpp by its own clock; see `speed_record` for the arguments."""
    threads, size = torch.get_num_threads(), before.stat().st_size + after.stat().st_size
    request = {
        "path": "both files at once", "files": [str(before), str(after)], "prompt": window.tolist(),
        "seconds": speed.SECONDS, "context": len(window) + NEW_TOKENS, "threads": threads,
    }  # fmt: skip
    try:
        times = _run(request, SECONDS + SECONDS_PER_GB * size / 1e9)
    except VerificationError as error:  # such as too little memory; each of them was run alone
        return SpeedRecord(prefill=None, decode=None, what=f"not measured: {error}")
    prefill, decode = (PairedTimes(*times[part]) for part in ("prefill", "decode"))
    place = f"in llama.cpp with {counted(threads, 'thread')}"
    return speed.speed_record(counted(times["tokens"], "token"), prefill, decode, place)


def _run(request: dict[str, Any], limit: float) -> Any:
    """Run `fresh_process.py` in a new process without depthgauge, and return its result."""
    script = resources.files("depthgauge.surgery").joinpath("fresh_process.py").read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="depthgauge-") as folder:
        exchange = Path(folder)
        (exchange / "request.json").write_text(json.dumps(request), "utf-8")
        with open(exchange / "errors", "w", encoding="utf-8") as errors:
            try:
                ended = subprocess.run(
                    [sys.executable, "-I", "-c", script, folder, "xllamacpp", *filter(None, sys.path)],
                    env=os.environ | {"GGML_NO_BACKTRACE": "1"},
                    stdin=subprocess.DEVNULL,
                    stdout=errors,
                    stderr=errors,
                    timeout=limit,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                raise VerificationError(
                    f"llama.cpp has not answered about {request['path']} within {limit:.0f} s"
                ) from None
        if ended.returncode != 0 or not (exchange / "result.json").is_file():
            said = (exchange / "errors").read_text("utf-8", "replace")
            raise VerificationError(f"llama.cpp cannot run {request['path']}: {_reason(said, ended.returncode)}")
        return json.loads((exchange / "result.json").read_text("utf-8"))


def _reason(said: str, code: int) -> str:
    """Return the first line in which llama.cpp reports an error, or the last line of all.

    A thread of llama.cpp writes its log, so the exception of Python, which does not say why, may come before it.
    """
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line for line in lines if "error" in line.lower() or "GGML_ASSERT" in line]
    errors.sort(key=lambda line: line.startswith("RuntimeError"))
    return one_line((errors or lines[-1:] or [f"exit code {code}"])[0])
