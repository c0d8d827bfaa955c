"""The program that `verify_gguf.py` runs in a fresh Python process; it uses llama.cpp (xllamacpp) alone.

It loads a GGUF file and writes the most likely next tokens of several prompts, with their log-probabilities, to a file.
Importing depthgauge raises an error here.
"""

import json
import sys
from importlib import import_module
from pathlib import Path
from typing import Any

BATCH = 512
"""Tokens that llama.cpp computes together."""


def main(exchange: Path, paths: list[str]) -> None:
    """Read `request.json` in a directory and write `result.json`; modules are found on `paths` too."""
    sys.modules["depthgauge"] = None  # type: ignore[assignment]  # an import of it raises
    sys.path.extend(path for path in paths if path not in sys.path)
    request = json.loads((exchange / "request.json").read_text("utf-8"))
    llama: Any = import_module("xllamacpp")
    params = llama.CommonParams()
    params.model.path = request["path"]
    params.n_ctx, params.n_parallel, params.n_gpu_layers = request["context"], 1, 0
    params.n_batch = params.n_ubatch = BATCH
    params.cpuparams.n_threads = params.cpuparams_batch.n_threads = request["threads"]
    params.warmup = False
    params.cache_type_k = params.cache_type_v = llama.ggml_type.GGML_TYPE_F32
    server = llama.Server(params)
    found = []
    for prompt in request["prompts"]:
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": 1, "n_probs": request["likely"], "temperature": 0, "cache_prompt": True}
        )
        # llama.cpp says nothing about a token that ends the text, or that is a part of a character.
        told = (answer["choices"][0]["logprobs"] or {"content": []})["content"]
        likely = [[one["id"], one["logprob"]] for one in told[0]["top_logprobs"]] if told else []
        found.append({"likely": likely, "prompt_tokens": answer["usage"]["prompt_tokens"]})
    (exchange / "result.json").write_text(json.dumps(found), "utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2:])
