"""Load checkpoints from disk, offline: directories with safetensors files, or GGUF files."""

import json
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from depthgauge._format import counted, size_text
from depthgauge.checkpoints.families import Family, family_of
from depthgauge.checkpoints.library import CheckpointError, quiet, transformers
from depthgauge.errors import unknown_name

PICKLED = "pytorch_model*.bin"
"""The files in which older checkpoints keep their weights."""
DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
HEADROOM = 1.2
"""Memory required, as a multiple of the size of the weights; a forward pass needs more than the weights."""
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """How to load a checkpoint.

    Args:
        dtype: one of `DTYPES`; `auto` means float32 on a CPU, where half precision is slow, and the stored dtype on a
            GPU.
        device: device name such as `cuda:1`; by default a GPU if there is one, else the CPU.
        device_map: how accelerate distributes the model over several devices, such as `auto`; replaces `device`.
        trust_remote_code: whether Python code in the checkpoint's directory may run.
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    def torch_dtype(self) -> Any:
        """Return the torch dtype, or `"auto"` for the dtype the checkpoint is stored in."""
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.torch_device().type == "cpu" else "auto"

    def torch_device(self) -> torch.device:
        """Return the requested device, or by default a GPU if there is one, else the CPU."""
        fallback = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(self.device or fallback)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise CheckpointError(
                f"device {self.device!r} cannot be used: {_short(error)}; choose a device of this machine, such as cpu"
            ) from error
        return device


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk.

    - `folder`: its directory
    - `gguf`: the name of the GGUF file in `folder`, or None for other files
    - `pickled`: whether the weights are in `pytorch_model*.bin` files instead of safetensors
    """

    folder: Path
    gguf: str | None = None
    pickled: bool = False

    @property
    def path(self) -> Path:
        """The path the user gave."""
        return self.folder if self.gguf is None else self.folder / self.gguf

    def keywords(self) -> dict[str, Any]:
        """Return the keyword arguments common to all calls of `from_pretrained`."""
        return {"local_files_only": True} | ({} if self.gguf is None else {"gguf_file": self.gguf})


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A loaded model.

    - `name`: name shown to the user
    - `model`: the transformers model, in evaluation mode
    - `config`: the configuration of its text model
    - `objective`: how a change is measured, by the `loss` or by the final `states`
    - `family`: paths of its modules, or None if the architecture is not in `FAMILIES`
    - `source`: where it was loaded from, or None for a model from memory
    """

    name: str
    model: Any
    config: Any
    objective: str
    family: Family | None
    source: Source | None = None

    def __repr__(self) -> str:
        layers = counted(self.layers, "layer")
        return f"Checkpoint({self.name!r}, {type(self.model).__name__}, {layers}, {self.objective!r})"

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return int(self.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        """H, the number of query heads."""
        return int(self.config.num_attention_heads)

    @property
    def device(self) -> torch.device:
        """The device that expects the token ids."""
        embedding = self.model.get_input_embeddings()
        device: torch.device = embedding.weight.device
        if device.type == "meta":  # offloaded by accelerate, which moves the weights in during the forward pass
            device = torch.device(embedding._hf_hook.execution_device)
        return device

    def describe(self) -> dict[str, Any]:
        """Return the description of the model in the result JSON."""
        parameter = next(self.model.parameters())
        return {
            "family": str(self.config.model_type),
            "architecture": type(self.model).__name__,
            "objective": self.objective,
            "layers": self.layers,
            "heads": self.heads,
            "kv_heads": int(getattr(self.config, "num_key_value_heads", None) or self.heads),
            "dim": int(self.config.hidden_size),
            "parameters": sum(p.numel() for p in self.model.parameters()),
            "dtype": str(parameter.dtype).removeprefix("torch."),
            "device": str(parameter.device),
            "context": context_length(self.config),
        }


def wrap(model: Any, name: str = "model", source: Source | None = None, objective: str | None = None) -> Checkpoint:
    """Wrap a transformers model that is already in memory.

    Args:
        model: the model; it is switched to evaluation mode.
        name: name shown to the user.
        source: where it was loaded from.
        objective: `loss` or `states`; by default `loss` for causal language models and `states` for all others.
    """
    if objective is None:
        causal = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        objective = "loss" if type(model).__name__ in causal else "states"
    model.eval()
    return Checkpoint(name, model, model.config.get_text_config(), objective, family_of(model.config), source)


def find(target: str | Path, allow_pickle: bool = False) -> Source:
    """Return the checkpoint at a path.

    Args:
        target: a directory or a `.gguf` file.
        allow_pickle: accept weights in `pytorch_model*.bin` files. They are read with `torch.load(weights_only=True)`,
            which does not run code from the file.

    Raises:
        CheckpointError: There is no checkpoint; the message names what is missing.
    """
    path = Path(target)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"cannot read {path}: no such file")
        with open(path, "rb") as handle:
            if handle.read(4) != b"GGUF":
                raise CheckpointError(
                    f"{path} is not a GGUF file: it does not start with the bytes GGUF; download it again"
                )
        return Source(path.parent, path.name)
    if not path.is_dir():
        raise CheckpointError(f"cannot read {path}: no such directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(
            f"{path} is a directory but not a checkpoint: it contains no config.json; give one that does"
        )
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob(PICKLED))
        if pickled and allow_pickle:
            return Source(path, pickled=True)
        hint = "download the complete checkpoint"
        if pickled:
            hint = "its weights are pickled (*.bin): use --allow-pickle to read them, or convert them to safetensors"
        raise CheckpointError(f"{path} contains no weights in *.safetensors files; {hint}")
    return Source(path)


def load_config(source: Source, placement: Placement) -> Any:
    """Load the configuration, without the weights, and refuse encoder–decoder models."""
    library = transformers()
    if source.gguf is None and not placement.trust_remote_code:
        _refuse_remote_code(library, source)
    config = _attempt(
        source,
        "configuration",
        lambda: library.AutoConfig.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, **source.keywords()
        ),
    )
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{source.path} is an encoder–decoder model; only encoders and decoders can be gauged")
    if not getattr(config.get_text_config(), "num_hidden_layers", 0):
        raise CheckpointError(
            f"{source.path} is not a transformer: its configuration has no num_hidden_layers; give another checkpoint"
        )
    return config


def _refuse_remote_code(library: Any, source: Source) -> None:
    """Raise if the architecture is defined by Python code in the checkpoint's directory."""
    raw = _attempt(source, "configuration", lambda: json.loads((source.folder / "config.json").read_text("utf-8")))
    if isinstance(raw, dict) and raw.get("auto_map") and raw.get("model_type") not in library.CONFIG_MAPPING:
        raise CheckpointError(
            f"{source.path} needs to run the Python code in its directory; if you have read and trust that code, use "
            "--trust-remote-code"
        )


def gguf_metadata(source: Source | None) -> dict[str, Any]:
    """Return the scalar metadata of a GGUF file by key; nothing for other checkpoints and models in memory."""
    if source is None or source.gguf is None:
        return {}
    import gguf

    fields = _attempt(source, "metadata", lambda: gguf.GGUFReader(source.path)).fields
    array = gguf.GGUFValueType.ARRAY
    return {name: field.contents() for name, field in fields.items() if field.types and field.types[0] != array}


def load_tokenizer(source: Source, placement: Placement) -> Any:
    """Load the tokenizer of a checkpoint."""
    library = transformers()
    if source.gguf is None and not any((source.folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{source.path} contains no tokenizer, expected one of {', '.join(_TOKENIZER_FILES[:3])}; download it with "
            "the model, or use --weights-only"
        )
    return _attempt(
        source,
        "tokenizer",
        lambda: library.AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, **source.keywords()
        ),
    )


def load_model(source: Source, config: Any, placement: Placement) -> Checkpoint:
    """Load the weights, after a check that they fit into memory.

    Args:
        source: the checkpoint.
        config: its configuration, from `load_config`.
        placement: dtype and device.
    """
    library = transformers()
    if placement.device_map is None:
        check_memory(source, placement)
    decoder = is_decoder(config)
    chosen = library.AutoModelForCausalLM if decoder else library.AutoModel
    keywords: dict[str, Any] = source.keywords() | {
        "dtype": placement.torch_dtype(),
        "trust_remote_code": placement.trust_remote_code,
        "output_loading_info": True,
        "ignore_mismatched_sizes": True,  # checked below, with the name of the weight
    }
    if source.gguf is None:
        keywords |= {"config": config, "use_safetensors": not source.pickled}
    if placement.device_map is not None:
        keywords["device_map"] = placement.device_map
    model, found = _attempt(source, "weights", lambda: chosen.from_pretrained(source.folder, **keywords))
    for weight, stored, expected in sorted(found["mismatched_keys"]):
        raise CheckpointError(
            f"{source.path} contradicts its config.json: the weight {weight} has the shape {list(stored)}, and the "
            f"configuration asks for {list(expected)}; download it again"
        )
    missing = [name for name in found["missing_keys"] if "pooler" not in name]
    output = model.get_output_embeddings() if decoder else None
    head = [] if output is None else [name for name, module in model.named_modules() if module is output]
    others = [name for name in missing if name.rsplit(".", 1)[0] not in head]
    if others:
        raise CheckpointError(
            f"{source.path} lacks {counted(len(others), 'weight')}, such as {others[0]}; download it again"
        )
    if missing:  # a decoder saved without its output head
        model = model.base_model
    if placement.device_map is None:
        model.to(placement.torch_device())
    name = source.path.name if source.gguf else source.folder.resolve().name
    return wrap(model, name, source, "loss" if decoder and not missing else "states")


def check_memory(source: Source, placement: Placement) -> None:
    """Raise if the weights, in the requested dtype, do not fit into free memory."""
    parameters, stored = count_parameters(source)
    chosen = placement.torch_dtype()
    needed = HEADROOM * (stored if chosen == "auto" else parameters * chosen.itemsize)
    device = placement.torch_device()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > free:
        raise CheckpointError(
            f"{source.path} is too large: {parameters:,} parameters need {size_text(needed)}, and {size_text(free)} "
            f"are free on {device}; use --dtype bfloat16, --device-map auto or a larger machine"
        )


def count_parameters(source: Source) -> tuple[int, int]:
    """Return the number of parameters and their loaded size in bytes, from the headers of the weight files."""
    if source.gguf is not None:
        import gguf

        tensors = _attempt(source, "weights", lambda: gguf.GGUFReader(source.path)).tensors
        parameters = sum(int(tensor.n_elements) for tensor in tensors)
        return parameters, 4 * parameters  # the loader unpacks to float32
    parameters = stored = 0
    if source.pickled:
        for path in source.folder.glob(PICKLED):
            tensors = _attempt(source, "weights", partial(torch.load, path, map_location="meta", weights_only=True))
            parameters += sum(tensor.numel() for tensor in tensors.values())
            stored += sum(tensor.numel() * tensor.itemsize for tensor in tensors.values())
        return parameters, stored
    for path in source.folder.glob("*.safetensors"):
        for shape, width in _headers(source, path):
            count = int(torch.tensor(shape).prod()) if shape else 1
            parameters, stored = parameters + count, stored + count * width
    return parameters, stored


def _headers(source: Source, path: Path) -> Iterable[tuple[list[int], int]]:
    from safetensors import safe_open

    def read() -> list[tuple[list[int], int]]:
        with safe_open(path, framework="pt") as handle:
            slices = [handle.get_slice(key) for key in handle.keys()]  # noqa: SIM118
            return [(part.get_shape(), _WIDTH.get(part.get_dtype(), 4)) for part in slices]

    found: list[tuple[list[int], int]] = _attempt(source, "weights", read)
    return found


_WIDTH = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I8": 1, "U8": 1, "BOOL": 1}


def free_memory() -> int:
    """Return the bytes of memory available to this process: free system memory, limited by the control group."""
    pages = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    meminfo, group = Path("/proc/meminfo"), Path("/sys/fs/cgroup")
    if meminfo.is_file():
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        pages = int(lines["MemAvailable"].split()[0]) * 1024
    try:
        limit = (group / "memory.max").read_text().strip()
        used = int((group / "memory.current").read_text())
    except OSError:
        return pages
    return pages if limit == "max" else min(pages, max(0, int(limit) - used))


def context_length(config: Any) -> int | None:
    """Return the largest number of tokens the model accepts, or None if its configuration does not say."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if longest is None:
        return None
    # The positions of RoBERTa models start at pad_token_id + 1; the ones before are never used.
    offset = (text.pad_token_id or 0) + 1 if text.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    return int(longest) - offset


def is_decoder(config: Any) -> bool:
    """Return whether a configuration is that of a causal language model."""
    auto = transformers().models.auto.modeling_auto
    kind = config.model_type
    names = getattr(config, "architectures", None) or [""]
    causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    # A checkpoint that brings its own code declares its classes in `auto_map`.
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):
        return True
    return causal and (not masked or names[0] == auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def _attempt(source: Source, what: str, load: Any) -> Any:
    """Run a loader and turn every exception into a `CheckpointError` of one sentence."""
    try:
        with quiet():
            return load()
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(
            f"{source.path} does not fit into memory; use --dtype bfloat16, --device-map auto or a larger machine"
        ) from error
    except Exception as error:  # transformers raises OSError, ValueError, KeyError and many others
        raise CheckpointError(f"cannot load the {what} of {source.path}: {_short(error)}") from error


def _short(error: BaseException) -> str:
    """Return an error message on one line, cut to 200 characters, without references to a log that is not shown."""
    text = re.sub(r" ?For details look at [^!]*above report!", "", " ".join(str(error).split())) or type(error).__name__
    return text if len(text) < 200 else text[:200] + "…"
