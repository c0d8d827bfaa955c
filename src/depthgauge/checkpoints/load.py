"""A checkpoint from disk: a directory of safetensors or a GGUF file, offline, checked before anything long begins."""

import json
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from depthgauge.checkpoints.families import Family, family_of
from depthgauge.checkpoints.library import CheckpointError, quiet, transformers
from depthgauge.errors import unknown_name

DTYPES = ("auto", "float32", "float64", "float16", "bfloat16")
HEADROOM = 1.2
"""Memory asked for, in sizes of the weights: a forward pass needs some beside them."""
_TOKENIZER_FILES = (
    "tokenizer.json", "tokenizer.model", "vocab.txt", "vocab.json", "spiece.model", "sentencepiece.bpe.model",
)  # fmt: skip


@dataclass(frozen=True)
class Placement:
    """How to load: number type, device, or a `device_map` for several of them; remote code only when asked for."""

    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    trust_remote_code: bool = False

    def torch_dtype(self) -> Any:
        """float32 on a CPU, where half precision is slow; on a GPU what the checkpoint is stored in."""
        if self.dtype not in DTYPES:
            raise unknown_name("dtype", self.dtype, DTYPES)
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.torch_device().type == "cpu" else "auto"

    def torch_device(self) -> torch.device:
        """The device asked for, or a GPU where there is one."""
        fallback = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(self.device or fallback)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise CheckpointError(f"device {self.device!r} cannot be used: {_short(error)}") from error
        return device


@dataclass(frozen=True)
class Source:
    """A checkpoint on disk: `folder` holds it, `gguf` names the file within if it is one."""

    folder: Path
    gguf: str | None = None

    @property
    def path(self) -> Path:
        """What the user named."""
        return self.folder if self.gguf is None else self.folder / self.gguf

    def keywords(self) -> dict[str, Any]:
        """What every `from_pretrained` is given."""
        return {"local_files_only": True} | ({} if self.gguf is None else {"gguf_file": self.gguf})


@dataclass(frozen=True)
class Checkpoint:
    """A model ready to be observed; `objective` says how a change is measured: on the `loss` or the final `states`."""

    name: str
    model: Any
    config: Any
    objective: str
    family: Family | None
    source: Source | None = field(default=None, repr=False)

    @property
    def layers(self) -> int:
        """L, the number of blocks."""
        return int(self.config.num_hidden_layers)

    @property
    def heads(self) -> int:
        """H, the number of query heads."""
        return int(self.config.num_attention_heads)

    @property
    def device(self) -> torch.device:
        """Where token ids go."""
        embedding = self.model.get_input_embeddings()
        device: torch.device = embedding.weight.device
        if device.type == "meta":  # accelerate keeps the weights elsewhere and brings them in when needed
            device = torch.device(embedding._hf_hook.execution_device)
        return device

    def describe(self) -> dict[str, Any]:
        """As in the result JSON."""
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
    """A transformers model object as a checkpoint: a causal language model has a loss, anything else its states."""
    if objective is None:
        causal = transformers().models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
        objective = "loss" if type(model).__name__ in causal else "states"
    model.eval()
    return Checkpoint(name, model, model.config.get_text_config(), objective, family_of(model.config), source)


def is_checkpoint(target: str | Path) -> bool:
    """Whether a target is a directory or a GGUF file, and not a network file."""
    path = Path(target)
    return path.is_dir() or path.suffix.lower() == ".gguf"


def find(target: str | Path) -> Source:
    """The checkpoint at a path, or the error that says what is missing there."""
    path = Path(target)
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        if not path.is_file():
            raise CheckpointError(f"cannot read {path}: no such file")
        with open(path, "rb") as handle:
            if handle.read(4) != b"GGUF":
                raise CheckpointError(f"{path} is not a GGUF file: its first bytes say so; copy it again")
        return Source(path.parent, path.name)
    if not path.is_dir():
        raise CheckpointError(f"cannot read {path}: no such directory")
    if not (path / "config.json").is_file():
        raise CheckpointError(f"{path} is a directory and no checkpoint: it holds no config.json; name one that does")
    if not any(path.glob("*.safetensors")):
        pickled = any(path.glob("*.bin")) or any(path.glob("*.pt"))
        hint = "its pickled weights are not opened, convert them to safetensors" if pickled else "copy it whole"
        raise CheckpointError(f"{path} holds no weights, expected *.safetensors; {hint}")
    return Source(path)


def load_config(source: Source, placement: Placement) -> Any:
    """The configuration alone, which is quick; encoder–decoder models end here."""
    library = transformers()
    if source.gguf is None and not placement.trust_remote_code:
        _refuse_own_code(library, source)
    config = _attempt(
        source,
        "configuration",
        lambda: library.AutoConfig.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, **source.keywords()
        ),
    )
    if getattr(config, "is_encoder_decoder", False):
        raise CheckpointError(f"{source.path} is an encoder–decoder model; only encoders or decoders are gauged")
    if not getattr(config.get_text_config(), "num_hidden_layers", 0):
        raise CheckpointError(f"{source.path} says no number of layers in its configuration; it is no transformer")
    return config


def _refuse_own_code(library: Any, source: Source) -> None:
    """Raise for an architecture that only code in the checkpoint's directory knows."""
    raw = _attempt(source, "configuration", lambda: json.loads((source.folder / "config.json").read_text("utf-8")))
    if isinstance(raw, dict) and raw.get("auto_map") and raw.get("model_type") not in library.CONFIG_MAPPING:
        raise CheckpointError(
            f"{source.path} needs Python code that comes with it; read that code, and if you trust it use "
            "--trust-remote-code"
        )


def load_tokenizer(source: Source, placement: Placement) -> Any:
    """The tokenizer beside the weights."""
    library = transformers()
    if source.gguf is None and not any((source.folder / name).is_file() for name in _TOKENIZER_FILES):
        raise CheckpointError(
            f"{source.path} holds no tokenizer, expected one of {', '.join(_TOKENIZER_FILES[:3])}; copy it from the "
            "model's origin, or use --weights-only"
        )
    return _attempt(
        source,
        "tokenizer",
        lambda: library.AutoTokenizer.from_pretrained(
            source.folder, trust_remote_code=placement.trust_remote_code, **source.keywords()
        ),
    )


def load_model(source: Source, config: Any, placement: Placement) -> Checkpoint:
    """The weights, after a look at whether they fit into memory."""
    library = transformers()
    if placement.device_map is None:
        check_memory(source, placement)
    decoder = _is_decoder(library, config)
    chosen = library.AutoModelForCausalLM if decoder else library.AutoModel
    keywords: dict[str, Any] = source.keywords() | {
        "dtype": placement.torch_dtype(),
        "trust_remote_code": placement.trust_remote_code,
        "output_loading_info": True,
    }
    if source.gguf is None:
        keywords |= {"config": config, "use_safetensors": True}
    if placement.device_map is not None:
        keywords["device_map"] = placement.device_map
    model, found = _attempt(source, "weights", lambda: chosen.from_pretrained(source.folder, **keywords))
    missing = [name for name in found["missing_keys"] if "pooler" not in name]
    output = model.get_output_embeddings() if decoder else None
    head = [] if output is None else [name for name, module in model.named_modules() if module is output]
    others = [name for name in missing if name.rsplit(".", 1)[0] not in head]
    if others:
        raise CheckpointError(f"{source.path} lacks {len(others)} weights, {others[0]} among them; copy it again")
    if missing:  # a decoder saved without its head
        model = model.base_model
    if placement.device_map is None:
        model.to(placement.torch_device())
    name = source.path.name if source.gguf else source.folder.resolve().name
    return wrap(model, name, source, "loss" if decoder and not missing else "states")


def check_memory(source: Source, placement: Placement) -> None:
    """Raise unless the weights, in the number type asked for, fit into the memory that is free."""
    parameters, stored = count_parameters(source)
    chosen = placement.torch_dtype()
    needed = HEADROOM * (stored if chosen == "auto" else parameters * chosen.itemsize)
    device = placement.torch_device()
    free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else free_memory()
    if needed > free:
        raise CheckpointError(
            f"{source.path} is too large: {parameters / 1e9:.1f} billion parameters need {needed / 1e9:.1f} GB, and "
            f"{free / 1e9:.1f} GB are free on {device}; use --dtype bfloat16, --device-map auto or a larger machine"
        )


def count_parameters(source: Source) -> tuple[int, int]:
    """How many numbers the weight files hold, and in how many bytes, from their headers alone."""
    if source.gguf is not None:
        import gguf

        tensors = _attempt(source, "weights", lambda: gguf.GGUFReader(source.path)).tensors
        parameters = sum(int(tensor.n_elements) for tensor in tensors)
        return parameters, 4 * parameters  # unpacked to float32 on the way in
    parameters = stored = 0
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
    """Bytes this process may still take: what the system has free, or what its control group leaves it."""
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
    """The longest window the model takes, if its configuration says so."""
    text = config.get_text_config()
    longest = getattr(text, "max_position_embeddings", None) or getattr(text, "n_positions", None)
    if longest is None:
        return None
    # RoBERTa's positions start after its padding index, so that two of them are never used.
    offset = (text.pad_token_id or 0) + 1 if text.model_type in ("roberta", "xlm-roberta", "camembert") else 0
    return int(longest) - offset


def _is_decoder(library: Any, config: Any) -> bool:
    auto = library.models.auto.modeling_auto
    kind = config.model_type
    names = getattr(config, "architectures", None) or [""]
    causal = kind in auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES
    masked = kind in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES
    if "AutoModelForCausalLM" in (getattr(config, "auto_map", None) or {}):  # code that comes with the checkpoint
        return True
    return causal and (not masked or names[0] == auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[kind])


def _attempt(source: Source, what: str, load: Any) -> Any:
    """Run a loader; whatever it does not like becomes one sentence."""
    try:
        with quiet():
            return load()
    except CheckpointError:
        raise
    except MemoryError as error:
        raise CheckpointError(f"{source.path} is too large for the memory of this machine") from error
    except Exception as error:  # transformers raises nearly everything: OSError, ValueError, KeyError, its own
        raise CheckpointError(f"cannot load the {what} of {source.path}: {_short(error)}") from error


def _short(error: BaseException) -> str:
    """The first sentence of an error, in one line."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) < 200 else text[:200] + "…"
