"""The program that `verify_gguf.py` runs in a fresh Python process; it runs GGUF files in llama.cpp (xllamacpp).

It writes the most likely next tokens of several prompts, with their log-probabilities, to a file; importing depthgauge
raises an error then. Or it times two files in pairs of runs, with `paired_times.py`.
"""

import json
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

BATCH = 512
"""Tokens that llama.cpp computes together."""


def main(exchange: Path, paths: list[str]) -> None:
    """Read `request.json` in a directory and write `result.json`; modules are found on `paths`."""
    sys.path[:] = paths
    request = json.loads((exchange / "request.json").read_text("utf-8"))
    found = likely_tokens(request) if "prompts" in request else times(request)
    (exchange / "result.json").write_text(json.dumps(found), "utf-8")


def load(request: dict[str, Any], path: str, cache: str) -> Any:
    """Return a server of a file, which keeps keys and values in the type `cache`."""
    llama: Any = import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = path
    params.n_ctx, params.n_parallel, params.n_gpu_layers = request["context"], 1, 0
    params.n_batch = params.n_ubatch = BATCH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.warmup = False
    params.cache_type_k = params.cache_type_v = getattr(llama.ggml_type, f"GGML_TYPE_{cache}")
    return llama.Server(params)


def likely_tokens(request: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the most likely next tokens of every prompt; without depthgauge."""
    sys.modules["depthgauge"] = None  # type: ignore[assignment]  # an import of it raises
    server, found = load(request, request["path"], "F32"), []
    for prompt in request["prompts"]:
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": 1, "n_probs": request["likely"], "temperature": 0, "cache_prompt": True}
        )
        # llama.cpp says nothing about a token that ends the text, or that is a part of a character.
        told = (answer["choices"][0]["logprobs"] or {"content": []})["content"]
        likely = [[one["id"], one["logprob"]] for one in told[0]["top_logprobs"]] if told else []
        found.append({"likely": likely, "prompt_tokens": answer["usage"]["prompt_tokens"]})
    return found


def times(request: dict[str, Any]) -> dict[str, Any]:
    """Return the times of prefill and decode of two files, as llama.cpp tells them, and the tokens of the prompt."""
    pairs: Any = import_module("depthgauge.surgery.paired_times")
    servers = [load(request, path, "F16") for path in request["files"]]
    prompt, seconds, started = request["prompt"], request["seconds"], time.perf_counter()

    def told(which: int, tokens: int, new: int, name: str) -> float:
        asked = {"prompt": prompt[:tokens], "n_predict": new, "ignore_eos": True, "cache_prompt": False}
        return float(servers[which].handle_completions(asked)["timings"][name]) / 1000

    least, most = min(pairs.FEW, len(prompt)), len(prompt)
    tokens = pairs.enough(lambda size: told(1, size, 1, "prompt_ms"), least, most, seconds)
    prefill = pairs.paired_times(lambda which: told(which, tokens, 1, "prompt_ms"), started + seconds / 2)
    # The first of the two new tokens comes from the prompt.
    decode = pairs.paired_times(lambda which: told(which, 1, 2, "predicted_per_token_ms"), started + seconds)
    return {"tokens": tokens, "prefill": prefill, "decode": decode}


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
