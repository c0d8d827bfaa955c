"""Random damage to checkpoints and GGUF files, and a reused process that gauges and shrinks them in limited time."""

import json
import multiprocessing
import random
import resource
import shutil
import traceback
import warnings
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from mutate import join, mutated, split
from tiny_checkpoints import save_checkpoint, text_of
from tiny_gguf import write_gguf

FAMILIES = ("llama", "mistral", "gpt2", "gemma3", "gpt_neox", "bert", "distilbert", "mixtral", "opt", "falcon")
GGUFS = ("llama", "qwen2", "gemma3")
VALUES = (None, True, False, 0, 1, -1, 3, 7, 2**31, 10**12, 0.5, -1.5, 1e30, "", "x", "12", [], [1], [[]], {}, {"a": 1})
MEMORY = 6 * 2**30
"""Bytes of address space of the process; allocations beyond it fail instead of filling the machine."""


def save_originals(folder: Path) -> None:
    """Save an intact checkpoint of every family and a text."""
    for name in FAMILIES:
        save_checkpoint(folder / name, name)
    for name in GGUFS:
        write_gguf(folder / f"{name}.gguf", add_bos=True, family=name)
    (folder / "text.txt").write_text(text_of(4000))


def damaged(originals: Path, folder: Path, seed: int) -> str:
    """Write a damaged copy of a checkpoint to a folder, or of a GGUF file; return what was done to it."""
    rng = random.Random(seed)
    if rng.random() < 0.15:
        return f"seed {seed}, {_damaged_gguf(rng, originals, folder)}"
    family = rng.choice(FAMILIES)
    shutil.copytree(originals / family, folder)
    config = json.loads((folder / "config.json").read_text())
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        damage = rng.choice((_delete, _retype, _retype, _resize, _resize, _swap, _nest, _weights, _weights, _shards))
        done.append(damage(rng, config, folder, originals))
    (folder / "config.json").write_text(json.dumps(config))
    return f"seed {seed}, {family}: {'; '.join(done)}"


def _damaged_gguf(rng: random.Random, originals: Path, path: Path) -> str:
    """Write a GGUF file with changed bytes of its header, most of them at its ends, between which the tokens are."""
    family = rng.choice(GGUFS)
    content = bytearray((originals / f"{family}.gguf").read_bytes())
    end, done = content.rfind(b".weight") + 40, []
    for _ in range(rng.choice((1, 1, 2, 4))):
        place = rng.choice((rng.randrange(700), rng.randrange(end), end - rng.randrange(1, 2500)))
        content[place] = rng.choice((0, 1, 2, 255, rng.randrange(256), content[place] ^ 1))
        done.append(f"byte {place} = {content[place]}")
    path.write_bytes(content)
    return f"{family}.gguf: {'; '.join(done)}"


def _delete(rng: random.Random, config: dict[str, Any], *_: Path) -> str:
    key = rng.choice(sorted(config))
    del config[key]
    return f"deleted {key}"


def _retype(rng: random.Random, config: dict[str, Any], *_: Path) -> str:
    key = rng.choice(sorted(config))
    config[key] = rng.choice(VALUES)
    return f"{key} = {config[key]!r}"


def _resize(rng: random.Random, config: dict[str, Any], *_: Path) -> str:
    sizes = [key for key, value in sorted(config.items()) if isinstance(value, int) and not isinstance(value, bool)]
    key = rng.choice(sizes or ["hidden_size"])
    value = config.get(key, 1)
    config[key] = rng.choice((value * 2, value + 1, value - 1, value // 2, value * 1000, -value))
    return f"{key} = {config[key]!r}"


def _nest(rng: random.Random, config: dict[str, Any], *_: Path) -> str:
    """Change an entry of a list or a dictionary in the configuration, or its length."""
    nested = [key for key, value in sorted(config.items()) if isinstance(value, list | dict) and value]
    key = rng.choice(nested or ["architectures"])
    value = config[key] if nested else ["x"]
    if isinstance(value, dict):
        value = {**value, rng.choice(sorted(value)): rng.choice(VALUES)}
    else:
        value = rng.choice((value[:-1], value * 2, [*value[:-1], rng.choice(VALUES)], ["x"] * len(value)))
    config[key] = value
    return f"{key} = {value!r}"


def _swap(rng: random.Random, config: dict[str, Any], folder: Path, originals: Path) -> str:
    """Take the architecture, the model type or all of the configuration from another family."""
    other = rng.choice(FAMILIES)
    found = json.loads((originals / other / "config.json").read_text())
    keys = rng.choice((["architectures"], ["model_type"], ["architectures", "model_type"], list(found)))
    config |= {key: found[key] for key in keys}
    return f"{', '.join(keys) if len(keys) < 3 else 'everything'} of {other}"


def _weights(rng: random.Random, _: Any, folder: Path, originals: Path) -> str:
    """Edit the header or the bytes of the weights."""
    path = next(iter(sorted(folder.glob("*.safetensors"))), None)
    if path is None:
        return "no weights"
    content = path.read_bytes()
    try:
        if rng.random() < 0.3:
            path.write_bytes(mutated(rng, content))
            return "bytes of the weights"
        header, data = split(content)
        name = rng.choice(sorted(set(header) - {"__metadata__"}))
        entry = header[name]
        done, edit = rng.choice(_EDITS)
        edit(rng, header, name, entry)
    except Exception:  # it is damaged already
        return "nothing"
    path.write_bytes(join(header, data))
    return f"{done} {name}"


def _reshape(rng: random.Random, header: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
    shape = entry["shape"]
    entry["shape"] = rng.choice((shape[::-1], [1, *shape], [rng.randrange(1, 5), *shape[1:]], []))


def _redtype(rng: random.Random, header: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
    kind = rng.choice(("F16", "BF16", "F64", "I32", "U8", "BOOL", "F8_E4M3", "X"))
    entry["dtype"] = kind
    if kind in ("F16", "BF16"):  # keeps the number of bytes
        entry["shape"] = [2 * entry["shape"][0], *entry["shape"][1:]]


def _shift(rng: random.Random, header: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
    entry["data_offsets"] = [place + rng.choice((-4, 4, 0, 10**9)) for place in entry["data_offsets"]]


def _rename(rng: random.Random, header: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
    renamed = rng.choice((f"{name}.x", name.replace("0", "7"), name.replace("layers", "blocks"), ""))
    header[renamed] = header.pop(name)


def _exchange(rng: random.Random, header: dict[str, Any], name: str, entry: dict[str, Any]) -> None:
    other = rng.choice(sorted(set(header) - {"__metadata__"}))
    header[name], header[other] = header[other], header[name]


_EDITS: tuple[tuple[str, Callable[..., None]], ...] = (
    ("shape of", _reshape), ("dtype of", _redtype), ("offsets of", _shift), ("renamed", _rename),
    ("exchanged", _exchange),
)  # fmt: skip


def _shards(rng: random.Random, _: Any, folder: Path, originals: Path) -> str:
    """Replace the weights by an index, with or without all its files."""
    weights = folder / "model.safetensors"
    if not weights.exists():
        return "no weights"
    shard = folder / "model-00001-of-00001.safetensors"
    weights.rename(shard)
    names: Any = {"a": shard.name}
    with suppress(Exception):  # it is damaged already
        names = {name: shard.name for name in split(shard.read_bytes())[0] if name != "__metadata__"}
    wrong: Any = rng.choice((names, names | {"more": "model-00002-of-00002.safetensors"}, [], {"a": 1}, {}, None))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": wrong}))
    return f"index of {'the right files' if wrong is names else str(wrong)[-60:]}"


class DamageWorker:
    """A process that gauges or shrinks one damaged checkpoint after the other.

    `outcome(seed)` returns what was done and one of `result`, `refused: …`, `unexpected: …` with the traceback, and
    `hang`, after which the process is replaced.
    """

    def __init__(self, originals: Path, seconds: float) -> None:
        self.originals, self.seconds = originals, seconds
        self._start()

    def _start(self) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # Python 3.12 warns about threads of pytest-xdist
            self._process = context.Process(target=_serve, args=(theirs, self.originals), daemon=True)
            self._process.start()
        theirs.close()

    def outcome(self, seed: int) -> tuple[str, str]:
        self._pipe.send(seed)
        done, found = f"seed {seed}", "hang"
        try:
            done = self._pipe.recv()
            if self._pipe.poll(self.seconds):
                return done, self._pipe.recv()
        except EOFError:
            found = "unexpected: the process died"
        self.close()
        self._start()
        return done, found

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()


def _serve(pipe: Connection, originals: Path) -> None:
    import depthgauge as dg
    from depthgauge.base.errors import DepthgaugeError

    warnings.simplefilter("ignore")
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    folder = originals / "damaged.gguf"  # a name for both: a directory may end like a file
    while True:
        seed = pipe.recv()
        shutil.rmtree(folder, ignore_errors=True)
        folder.unlink(missing_ok=True)
        pipe.send(damaged(originals, folder, seed))
        text = originals / "text.txt"
        try:
            if seed % 4:
                dg.gauge(folder, text=str(text), tokens=32, window=16, what_if="block,attention", allow="unread")
            else:
                dg.shrink(folder, text=str(text), remove=1, window=16, effort="quick", allow="unread")
            found = "result"
        except DepthgaugeError as error:
            found = f"refused: {error}"
        except BaseException:
            found = f"unexpected: {traceback.format_exc()}"
        pipe.send(found)
