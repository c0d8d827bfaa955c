"""The programs that `verify.py` runs in fresh Python processes. Importing depthgauge raises an error in them.

- `main` uses transformers alone. It imports transformers and waits for a line on its standard input. Then it loads a
  directory as any user would, computes outputs and losses of windows, generates text with and without the key–value
  cache, and writes what it found to files.
- `run_llama` runs GGUF files in llama.cpp (xllamacpp). It writes the most likely next tokens of several prompts, with
  their log-probabilities, to a file. Or it times two files in pairs of runs.
"""

import hashlib
import json
import random
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from math import inf
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple


class WithoutDepthgauge:
    """An import hook that refuses depthgauge."""

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Raise for depthgauge; leave everything else to the other hooks."""
        if name.partition(".")[0] == "depthgauge":
            raise ImportError("the fresh process must not import depthgauge")


def main(exchange: Path, module: str, paths: list[str]) -> None:
    """Read `request.json` and `windows.safetensors` in a directory; write `result.json` and `outputs.safetensors`.

    The model's class is in `module`, which is imported early. Modules are found on `paths` too. Nothing is done if the
    standard input ends without a line.
    """
    sys.meta_path.insert(0, WithoutDepthgauge())
    sys.path.extend(path for path in paths if path not in sys.path)
    import torch
    from safetensors.torch import load_file, save_file

    transformers: Any = import_module("transformers")
    if module.startswith("transformers."):  # not code that comes with the checkpoint
        import_module(module)
    if not sys.stdin.readline():
        return
    request = json.loads((exchange / "request.json").read_text("utf-8"))
    torch.set_num_threads(request["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    given = load_file(exchange / "windows.safetensors")
    is_loss = request["is_loss"]
    # A head of another kind than a language model's, such as a classifier's, is loaded by the class of the model.
    loader = transformers.AutoModelForCausalLM if request["is_causal"] else getattr(transformers, request["class"])
    place = {"device_map": "auto"} if request["device"] == "auto" else {}
    if request["dtype"] is not None:
        place["dtype"] = request["dtype"]
    model, loading = loader.from_pretrained(request["out"], local_files_only=True, output_loading_info=True, **place)
    if "device_map" not in place:
        model.to(request["device"])
    model.eval()
    device = model.device
    result: dict[str, Any] = {
        "layers": [getattr(model.config, key) for key in request["layer_keys"]],
        "class": type(model).__name__,
        "missing": sorted(loading["missing_keys"]),
        "unexpected": sorted(loading["unexpected_keys"]),
        "digests": digests(model, Path(request["out"])),
        "losses": [],
    }
    outputs, targets = {}, given.pop("targets", None)
    with torch.no_grad():
        for index in range(len(next(iter(given.values())))):
            inputs = {name: value[index : index + 1].to(device) for name, value in given.items()}
            inputs = {name: one.to(model.dtype) if one.is_floating_point() else one for name, one in inputs.items()}
            out = (model if request["is_whole"] else model.base_model)(**inputs, **request["call"])
            made = out.logits[0] if request["has_head"] else out.last_hidden_state[0]
            if is_loss:
                # The next tokens, or the target of an encoder–decoder model, whose padding is −100.
                wanted = inputs["input_ids"][0, 1:] if targets is None else targets[index]
                rows, wanted = (made[:-1] if targets is None else made), wanted.to(made.device)
                rows, wanted = rows[wanted != -100], wanted[wanted != -100]
                tokens = torch.cat(
                    [
                        torch.nn.functional.cross_entropy(row.float(), target, reduction="none").double()
                        for row, target in zip(torch.split(rows, 256), torch.split(wanted, 256), strict=True)
                    ]
                )
                result["losses"].append(float(tokens.mean()))
            if index < request["compared"] or not is_loss:
                outputs[str(index)] = made[request["positions"]].cpu().contiguous()
        if is_loss and request["new_tokens"]:
            length = request["prompt"] if targets is None else None
            result |= generations(model, prompt_of(given, length), request["new_tokens"])
    assert not any(name.partition(".")[0] == "depthgauge" for name in sys.modules)
    save_file(outputs, exchange / "outputs.safetensors")
    (exchange / "result.json").write_text(json.dumps(result), "utf-8")


def digests(model: Any, folder: Path | None = None) -> dict[str, list[str | None]]:
    """Return dtype, shape and SHA-256 of the bytes of every tensor that a model saves, by name.

    A tensor that accelerate has offloaded is read from the safetensors files in `folder`; otherwise its digest is None.
    """
    import torch
    from safetensors import safe_open

    files: list[Any] = (
        [safe_open(path, framework="pt") for path in folder.glob("*.safetensors")] if folder is not None else []
    )
    places = {name: file for file in files for name in file.keys()}  # noqa: SIM118  # not a dict

    def described(name: str, tensor: Any) -> list[str | None]:
        dtype, shape = str(tensor.dtype), str(list(tensor.shape))
        if tensor.device.type == "meta" and name in places:
            tensor = places[name].get_tensor(name)
        if tensor.device.type == "meta":
            return [dtype, shape, None]
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        return [dtype, shape, hashlib.sha256(raw.data).hexdigest()]

    tensors = model.state_dict()
    with ThreadPoolExecutor(4) as pool:  # each has one tensor in memory
        return dict(zip(tensors, pool.map(described, tensors, tensors.values()), strict=True))


def prompt_of(inputs: Mapping[str, Any], length: int | None) -> dict[str, Any]:
    """Return the first window as a prompt: its first `length` tokens, or what the encoder of a model reads."""
    import torch

    prompt = {name: value[:1, :length] for name, value in inputs.items() if not name.startswith("decoder_")}
    if "input_ids" in prompt:
        prompt.setdefault("attention_mask", torch.ones_like(prompt["input_ids"]))
    return prompt


def generations(model: Any, prompt: Mapping[str, Any], new_tokens: int) -> dict[str, Any]:
    """Generate greedily with and without the cache and compare every step up to the first different token.

    `prompt` has the arguments of the model for one window; see `prompt_of`.

    Returns `cached` and `uncached` (the new tokens), `cache_difference` (the largest |Δ logit| ÷ max |logit| while the
    tokens are equal), and `gap` (at the first different token, the difference between the logits of the two tokens
    without cache ÷ max |logit|; None if all tokens are equal).
    """
    import torch

    transformers: Any = import_module("transformers")
    own = model.generation_config
    names = ("decoder_start_token_id", "bos_token_id", "pad_token_id")  # as pairs are read
    starts = (getattr(model.config, name, None) for name in names)
    start = next((one for one in starts if one is not None), 0)
    # greedy, without penalties and stops
    model.generation_config = transformers.GenerationConfig(pad_token_id=0, decoder_start_token_id=start)
    arguments = {
        name: value.to(model.device, model.dtype) if value.is_floating_point() else value.to(model.device)
        for name, value in prompt.items()
    }
    runs = []
    for use_cache in (True, False):
        # Not `model.generate`: that of Whisper divides a recording and needs the ids of its special tokens.
        made = transformers.GenerationMixin.generate(
            model, **arguments, do_sample=False, max_new_tokens=new_tokens, use_cache=use_cache,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        tokens = made.sequences[0, -len(made.logits) :].tolist()
        runs.append((tokens, [step[0].double().cpu() for step in made.logits]))
    model.generation_config = own
    (cached, with_cache), (uncached, without) = runs
    differences, gap = [], None
    for step, (ours, plain) in enumerate(zip(cached, uncached, strict=True)):
        size = without[step].abs().max()
        differences.append((with_cache[step] - without[step]).abs().max() / size)
        if ours != plain:
            gap = float((without[step][ours] - without[step][plain]).abs() / size)
            break
    difference = float(torch.stack(differences).max())  # NaN if one of them is
    return {"cached": cached, "uncached": uncached, "cache_difference": difference, "gap": gap}


# --- GGUF files in llama.cpp ------------------------------------------------------------------------------------------

BATCH = 512
"""Tokens that llama.cpp computes together."""


def run_llama(exchange: Path, paths: list[str]) -> None:
    """Read `request.json` in a directory and write `result.json`; modules are found on `paths`."""
    sys.path[:] = paths
    sys.meta_path.insert(0, WithoutDepthgauge())
    request = json.loads((exchange / "request.json").read_text("utf-8"))
    result = likely_tokens(request) if "prompts" in request else times(request)
    (exchange / "result.json").write_text(json.dumps(result), "utf-8")


def llama_server(request: dict[str, Any], path: str, cache: str) -> Any:
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
    """Return the most likely next tokens of every prompt."""
    server, answers = llama_server(request, request["path"], "F32"), []
    for prompt in request["prompts"]:
        answer = server.handle_completions(
            {"prompt": prompt, "n_predict": 1, "n_probs": request["likely"], "temperature": 0, "cache_prompt": True}
        )
        # llama.cpp says nothing about a token that ends the text, or that is a part of a character.
        told = (answer["choices"][0]["logprobs"] or {"content": []})["content"]
        likely = [[one["id"], one["logprob"]] for one in told[0]["top_logprobs"]] if told else []
        answers.append({"likely": likely, "prompt_tokens": answer["usage"]["prompt_tokens"]})
    return answers


def times(request: dict[str, Any]) -> dict[str, Any]:
    """Return the times of prefill and decode of two files, as llama.cpp tells them, and the tokens of the prompt."""
    servers = [llama_server(request, path, "F16") for path in request["files"]]
    prompt, seconds, started = request["prompt"], request["seconds"], time.perf_counter()

    def told(which: int, tokens: int, new: int, name: str) -> float:
        asked = {"prompt": prompt[:tokens], "n_predict": new, "ignore_eos": True, "cache_prompt": False}
        return float(servers[which].handle_completions(asked)["timings"][name]) / 1000

    least, most = min(FEW, len(prompt)), len(prompt)
    tokens = enough(lambda size: told(1, size, 1, "prompt_ms"), least, most, seconds)
    prefill = paired_times(lambda which: told(which, tokens, 1, "prompt_ms"), started + seconds / 2)
    # The first of the two new tokens comes from the prompt.
    decode = paired_times(lambda which: told(which, 1, 2, "predicted_per_token_ms"), started + seconds)
    return {"tokens": tokens, "prefill": prefill, "decode": decode}


# --- The ratio of two running times with a confidence interval that does not depend on how the clock is disturbed -----

FIRST, WITHIN, ODDS = 8, 0.05, 20
"""Pairs before the first look at the interval; how far its ends may be from the ratio; it misses once in so many."""
FEW, FLAT, REPEATS = 8, 0.9, 3
"""Tokens of the shortest prompt that is timed. An amount of work is enough if its time per unit is at least this share
of that of half the amount; each is timed so often."""


class PairedTimes(NamedTuple):
    """How many `pairs` of runs of two programs were timed, and their times; None if these did not settle.

    - `ratio`: the median over the pairs of the first time ÷ the second; `low`, `high`: its 95 % interval
    - `before`, `after`: the median seconds of the first program, and of the second
    """

    pairs: int
    ratio: float | None = None
    low: float | None = None
    high: float | None = None
    before: float | None = None
    after: float | None = None


def paired_times(
    run: Callable[[int], float],
    until: float,
    clock: Callable[[], float] = time.perf_counter,
    seed: int | None = None,
) -> PairedTimes:
    """Time two programs in pairs, in random order, until the interval of the ratio is within ± 5 % of it.

    The interval is that of the sign test. Let θ be the ratio, and let a run at a moment take u times as long as
    undisturbed. Whatever u does, the ratio of a pair is θ · (u₁ / u₂)^±1, with a sign that the coin of the order
    decides. So it is above θ with probability at most 1/2, independently of the other pairs, also if the machine has
    slow phases, drifts or stops now and then. Only this needs to be true: a disturbance multiplies the time, and does
    not depend on which program is running.

    Stopping where the interval is narrow favours narrow intervals that miss. The interval is therefore looked at after
    8, 16, 32, … pairs only, and may miss with probability 1/20 · 1/(k (k + 1)) at look k. The sum over all k is 1/20,
    which bounds the probability that any of them misses, and so that a wrong interval is returned.

    Args:
        run: runs program 0 or 1 and returns the seconds it took.
        until: the time of the clock at which to stop without a ratio; this is done where no further look fits.
        clock: returns the time in seconds.
        seed: of the coins.
    """
    coin, pairs, due, look, shortest = random.Random(seed), list[list[float]](), FIRST, 1, inf
    run(0), run(1)
    while True:
        pair, started = [0.0, 0.0], clock()
        for which in coin.sample((0, 1), 2):
            pair[which] = run(which)
        pairs.append(pair)
        shortest = min(shortest, clock() - started)
        if len(pairs) == due:
            ratios = [before / max(after, 1e-9) for before, after in pairs]
            ratio, (low, high) = median(ratios), sign_interval(ratios, ODDS * look * (look + 1))
            if ratio * (1 - WITHIN) <= low and high <= ratio * (1 + WITHIN):
                return PairedTimes(due, ratio, low, high, *map(median, zip(*pairs, strict=True)))
            due, look = 2 * due, look + 1
        if clock() + (due - len(pairs)) * shortest > until:
            return PairedTimes(len(pairs))


def sign_interval(values: list[float], odds: int) -> tuple[float, float]:
    """Return an interval that misses the median of independent values with probability at most 1 / `odds`.

    The k-th smallest of n values is above the median with probability at most P(B < k), for B binomial with n trials
    of probability 1/2. k is the largest number with 2 P(B < k) ≤ 1 / odds.
    """
    count, ordered = len(values), sorted(values)
    k, ways, below = 0, 1, 1  # C(n, k), and the sum of C(n, i) over i ≤ k
    while 2 * below * odds <= 2**count:
        k += 1
        ways = ways * (count - k + 1) // k
        below += ways
    return (ordered[k - 1], ordered[-k]) if k else (-inf, inf)


def enough(run: Callable[[int], float], least: int, most: float, seconds: float) -> int:
    """Return how much work to time: so much that twice the work takes about twice as long.

    The work is doubled, from `least`, until the time per unit falls by less than 10 %: what does not grow with the
    work, such as launching kernels, is then at most a ninth of the time. It is not doubled beyond `most`, or if 32
    pairs of runs take half of the time limit `seconds`. `run` does so much work and returns its seconds.
    """
    size, before, long = least, inf, seconds / (16 * FIRST)
    while True:
        taken = min(run(size) for _ in range(REPEATS))  # the first run of a size may load kernels
        if taken > long or taken / size > FLAT * before or 2 * size > most:
            return size
        size, before = 2 * size, taken / size


if __name__ == "__main__":
    if sys.argv[2] == "xllamacpp":
        run_llama(Path(sys.argv[1]), sys.argv[3:])
    else:
        main(Path(sys.argv[1]), sys.argv[2], sys.argv[3:])
