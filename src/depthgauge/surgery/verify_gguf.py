"""Run GGUF files in llama.cpp, in a fresh process: compare one with its weights in transformers, and time two."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from depthgauge.base.errors import InputError, VerificationError, install_command
from depthgauge.base.format import counted, number, one_line
from depthgauge.checkpoints.load import context_length
from depthgauge.checkpoints.model_output import decoded
from depthgauge.results.shrink_record import SpeedRecord
from depthgauge.surgery import speed
from depthgauge.surgery.paired_times import PairedTimes

PROMPT, NEW_TOKENS, LIKELY = 256, 32, 10
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
    context = context_length(model.config) or PROMPT + NEW_TOKENS
    new = max(1, min(NEW_TOKENS, context // 2))
    prompt = window[: min(PROMPT, context - new)].tolist()
    chosen, ours = _greedy(model, prompt, new)
    prompts = [prompt + chosen[:step] for step in range(new)]
    request = {
        "path": str(path), "prompts": prompts, "likely": LIKELY,
        "context": len(prompt) + new + 8, "threads": torch.get_num_threads(),
    }  # fmt: skip
    found = _run(request, SECONDS + SECONDS_PER_GB * path.stat().st_size / 1e9)
    differences, gaps = [], []
    for asked, answer, row in zip(prompts, found, ours, strict=True):
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
        found = compare_with_llama(path, model, window)
    except VerificationError as error:
        raise InputError(f"{error}; give a directory as --out") from error
    if not found.difference <= MOST:
        raise InputError(
            f"llama.cpp and transformers do not agree about {path}: the log-probabilities of the next tokens differ by "
            f"{number(found.difference)} nats; give a directory as --out"
        )
    return found


def require_same(out: str | Path, found: LlamaComparison, source: LlamaComparison) -> None:
    """Raise unless llama.cpp computes with the written file what transformers computes with its weights.

    `source` is the comparison of the file that `out` was made from, which measures the rounding of llama.cpp.
    """
    allowed = max(LEAST, FACTOR * source.difference)
    if not (found.difference <= allowed and found.gap <= TIE * allowed):
        raise VerificationError(
            f"llama.cpp does not compute with {out} what transformers computes with its weights: the log-probabilities "
            f"of the next tokens differ by {number(found.difference)} nats, and {number(allowed)} are allowed; the "
            f"source differs by {number(source.difference)}"
        )


def llama_speed(before: Path, after: Path, window: Int[Tensor, " n"]) -> SpeedRecord:
    """Time two GGUF files in llama.cpp by its own clock; see `speed_record` for the arguments."""
    threads, size = torch.get_num_threads(), before.stat().st_size + after.stat().st_size
    request = {
        "path": "both files at once", "files": [str(before), str(after)], "prompt": window.tolist(),
        "seconds": speed.SECONDS, "context": len(window) + NEW_TOKENS, "threads": threads,
    }  # fmt: skip
    try:
        found = _run(request, SECONDS + SECONDS_PER_GB * size / 1e9)
    except VerificationError as error:  # such as too little memory; each of them was run alone
        return SpeedRecord(prefill=None, decode=None, what=f"not measured: {error}")
    prefill, decode = (PairedTimes(*found[part]) for part in ("prefill", "decode"))
    place = f"in llama.cpp with {counted(threads, 'thread')}"
    return speed.speed_record(counted(found["tokens"], "token"), prefill, decode, place)


def _run(request: dict[str, Any], limit: float) -> Any:
    """Run `llama_process.py` in a new process without depthgauge, and return its result."""
    script = resources.files("depthgauge.surgery").joinpath("llama_process.py").read_text("utf-8")
    with tempfile.TemporaryDirectory(prefix="depthgauge-") as folder:
        exchange = Path(folder)
        (exchange / "request.json").write_text(json.dumps(request), "utf-8")
        with open(exchange / "errors", "w", encoding="utf-8") as errors:
            try:
                ended = subprocess.run(
                    [sys.executable, "-I", "-c", script, folder, *filter(None, sys.path)],
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
