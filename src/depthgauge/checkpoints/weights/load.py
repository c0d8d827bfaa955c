"""Load checkpoints from disk, offline, with the class that the configuration names: a `Checkpoint` and its tokenizer.

A checkpoint has one list of blocks, or the two of an encoder–decoder model.
"""

import copy
import inspect
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, pairwise
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from depthgauge.base.format import counted, size_text
from depthgauge.base.progress import no_message
from depthgauge.checkpoints.inputs.found_data import RECORDINGS, TEXT, FoundData, require_fit
from depthgauge.checkpoints.source.library import CheckpointError, attempt, short, transformers
from depthgauge.checkpoints.source.model_class import context_length, loader_of, objective_of, pooling_modes
from depthgauge.checkpoints.source.model_files import (
    TOKENIZER_FILES,
    Source,
    gguf_sliding_blocks,
    quantization_method,
    require_streamable,
    weight_files,
)
from depthgauge.checkpoints.weights.families import Family, family_of, find_blocks
from depthgauge.checkpoints.weights.stored_weights import (
    Stream,
    built_model,
    count_parameters,
    free_memory,
    stream_map,
    streamed_bytes,
    tensor_count,
    unpack_gguf,
)
from depthgauge.results.gauge_record import BOTH, CheckpointDescription, ModelOptions, allows

OF_HEAD = ("loss", "labels", "logits")
"""Objectives that are measured at the output of the model's head."""
BY_TARGETS = ("loss", "labels")
"""Objectives that compare the output with targets. The others compare it with the output of the dense model."""
PLAIN = FoundData()
"""Plain text, which most commands read."""
HEADROOM = 1.2
"""Memory required, as a multiple of the size of the weights; a forward pass needs more than the weights."""
MANY_LAYERS = 200
"""From so many layers on, the number is compared with the weights before a model is built, which takes a minute."""
_COMPUTED = ("inv_freq", "position_ids")
"""Last names of buffers that old checkpoints store and that models compute."""


@dataclass(frozen=True)
class Placement:
    """How to load a checkpoint.

    The dtype `auto` means float32 on a CPU, where half precision is slow, and
    the stored dtype on a GPU, or where weights are streamed. `device_map` replaces `device`.
    """

    dtype: str = "auto"
    device: str | None = None
    device_map: str | None = None
    stream: bool = False
    allow: str | None = None

    @classmethod
    def of(cls, options: ModelOptions) -> "Placement":
        """Return the placement that the options of a command ask for."""
        device = None if options.is_streamed or options.is_spread else options.device
        if options.is_streamed and options.device is not None:
            device = options.device.partition(":")[2] or None
        dtype = "auto" if options.gguf_type else options.dtype or "auto"
        return cls(dtype, device, "auto" if options.is_spread else None, options.is_streamed, options.allow)

    def torch_dtype(self) -> Any:
        """Return the torch dtype, or `"auto"` for the dtype the checkpoint is stored in."""
        if self.dtype != "auto":
            return getattr(torch, self.dtype)
        return torch.float32 if self.torch_device().type == "cpu" and not self.stream else "auto"

    def torch_device(self) -> torch.device:
        """Return the requested device, or by default a GPU if there is one, else the CPU."""
        fallback = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            device = torch.device(self.device or fallback)
            torch.empty(0, device=device)
        except (RuntimeError, AssertionError) as error:
            raise CheckpointError(
                f"device {self.device!r} cannot be used: {short(error)}; choose a device of this machine, such as cpu"
            ) from error
        return device


@dataclass(frozen=True, repr=False)
class Checkpoint:
    """A loaded model.

    - `name`: name shown to the user
    - `model`: the transformers model with its head, in evaluation mode
    - `config`: the configuration of its text model
    - `objective`: how a change is measured; see `window_losses`
    - `families`: the paths of the modules of every block; None where `FAMILIES` has no entry and they were not derived
      (`probe.derived`)
    - `source`: where it was loaded from, or None for a model from memory
    - `underived`: why a block has no family
    - `stack`: of an encoder–decoder model, what is gauged or shrunk: `encoder`, `decoder`, or `both`, whose blocks are
      numbered in this order
    - `layer_keys`: the keys of the configuration that have the numbers of layers, one for each stack
    - `pooling`: how the states of the tokens become one embedding, where that is measured
    - `stream`: brings the blocks to the device, if their weights are not there
    """

    name: str
    model: Any
    config: Any
    objective: str
    families: tuple[Family | None, ...]
    source: Source | None = None
    underived: str = ""
    pooling: tuple[str, ...] = ()
    stack: str | None = None
    layer_keys: tuple[str, ...] = ("num_hidden_layers",)
    stream: Stream | None = None

    def __repr__(self) -> str:
        layers = counted(self.layers, "layer")
        return f"Checkpoint({self.name!r}, {type(self.model).__name__}, {layers}, {self.objective!r})"

    def resident(self, layer: int) -> AbstractContextManager[None]:
        """Keep the weights of a block on the device, where they would be brought for every call."""
        return nullcontext() if self.stream is None else self.stream.resident(layer)

    @property
    def measured(self) -> Any:
        """The part of the model whose output is measured: with its head where that is, otherwise without it."""
        base = self.model.base_model
        # In a model without a head, such as DINOv3, transformers may give that name to the list of blocks.
        is_base = self.objective not in OF_HEAD and self.reads in inspect.signature(base.forward).parameters
        return base if is_base else self.model

    @property
    def reads(self) -> str:
        """The name of the model's main input: `input_ids`, or `pixel_values`."""
        return str(self.model.main_input_name)

    @property
    def batched(self) -> bool:
        """Whether windows can be computed together: a classifier that reads the last token needs a padding token."""
        needs = self.objective == "logits" and self.reads == TEXT.main
        return not needs or getattr(self.config, "pad_token_id", None) is not None

    @property
    def family(self) -> Family | None:
        """The family of all blocks; None if it is not known, or if they differ."""
        return self.families[0] if len(set(self.families)) == 1 else None

    @property
    def layers(self) -> int:
        """L, the number of layers."""
        return self.spans[-1].stop

    @property
    def spans(self) -> tuple[range, ...]:
        """The layers of each stack, one after the other."""
        ends = accumulate((int(getattr(self.config, key)) for key in self.layer_keys), initial=0)
        return tuple(range(first, end) for first, end in pairwise(ends))

    @property
    def roots(self) -> dict[str, Any]:
        """The parts of the model that contain the blocks, by name: the model, or one or both of its stacks."""
        if self.stack is None:
            return {"model": self.model}
        stacks = {"encoder": self.model.get_encoder(), "decoder": self.model.get_decoder()}
        return stacks if self.stack == "both" else {self.stack: stacks[self.stack]}

    @property
    def heads(self) -> int:
        """H, the number of query heads; 0 for a model without attention."""
        return int(getattr(self.config, "num_attention_heads", 0))

    @property
    def device(self) -> torch.device:
        """The device that expects the inputs."""
        embedding = self.model.get_input_embeddings()
        device: torch.device = next(embedding.parameters()).device
        if device.type == "meta":  # offloaded by accelerate, which moves the weights in during the forward pass
            device = torch.device(embedding._hf_hook.execution_device)
        return device

    @property
    def kv_heads(self) -> int:
        """The number of key–value heads, each shared by heads/kv_heads consecutive query heads."""
        return int(getattr(self.config, "num_key_value_heads", None) or self.heads)

    def describe(self) -> CheckpointDescription:
        """Return the description of the model in the result."""
        parameter = next(self.model.parameters())
        return CheckpointDescription(
            family=str(self.config.model_type),
            architecture=type(self.model).__name__,
            objective=self.objective,
            layers=self.layers,
            heads=self.heads,
            kv_heads=self.kv_heads,
            dim=int(self.config.hidden_size),
            parameters=parameter_count(self.model),
            dtype=str(parameter.dtype).removeprefix("torch."),
            device=str(parameter.device),
            context=context_length(self.config),
            hub=None if self.source is None else self.source.hub,
            stack=self.stack,
        )


def parameter_count(model: Any) -> int:
    """Return the number of parameters of a model; shared ones count once."""
    return sum(parameter.numel() for parameter in model.parameters())


def wrap(model: Any, name: str = "model", source: Source | None = None, objective: str | None = None) -> Checkpoint:
    """Wrap a transformers model that is already in memory, and switch it to evaluation mode.

    The objective is by default that of the head.
    """
    objective = objective or objective_of(type(model).__name__)
    model.eval()
    modes = pooling_modes(None if source is None else source.folder) if objective == "embedding" else ()
    config = model.config.get_text_config()
    families = (family_of(model.config),) * int(config.num_hidden_layers)
    return Checkpoint(name, model, config, objective, families, source, pooling=modes)


def load_config(source: Source, placement: Placement, data: FoundData | None = PLAIN) -> Any:
    """Load the configuration, without the weights; refuse models that do not read these inputs, by default text.

    None leaves the check to the caller.
    """
    placement.torch_device()  # raises now if this machine does not have it
    config = _from_pretrained(transformers().AutoConfig, "configuration", source, placement)
    loader, _ = loader_of(config)
    if not hasattr(loader, "main_input_name"):
        loader = transformers().MODEL_MAPPING.get(type(config), loader)
    if data is not None:
        require_kind(loader, config, source.target, data)
    if source.gguf is None and quantization_method(vars(config)) is not None:
        config.quantization_config = {**config.quantization_config, "dequantize": True}
    slides = "sliding_attention" in (getattr(config, "layer_types", None) or ())
    if slides and source.gguf is not None and (sliding := gguf_sliding_blocks(source)) is not None:
        # transformers ignores the list, and assumes a rule that holds in files without one.
        config.layer_types = ["sliding_attention" if one else "full_attention" for one in sliding]
    return config


def require_layers(config: Any, name: str) -> None:
    """Raise unless the configuration of the model called `name` has a number of layers, all with as many heads."""
    text = config.get_text_config()
    if not getattr(text, "num_hidden_layers", 0):
        raise CheckpointError(
            f"{name} is a {config.model_type} model without layers: its configuration has no num_hidden_layers; give a "
            "transformer"
        )
    if isinstance(heads := getattr(text, "num_attention_heads", 0), list | tuple):
        raise CheckpointError(
            f"{name} is a {config.model_type} model with stages: its configuration gives a number of heads for each, "
            f"{list(heads)}; give a model with one number for all layers"
        )


def require_kind(kind: Any, config: Any, name: str, data: FoundData) -> None:
    """Raise unless a model of this class, called `name`, has layers and reads these inputs."""
    has_two, main = bool(getattr(config, "is_encoder_decoder", False)), getattr(kind, "main_input_name", TEXT.main)
    if data.kind is RECORDINGS and main == RECORDINGS.main and not (has_two and objective_of(kind.__name__) == "loss"):
        raise CheckpointError(
            f"{name} is a {kind.__name__}, which writes no text; give a model of speech that does, such as Whisper"
        )
    require_layers(config, name)
    require_fit(data, name, kind.__name__, main, has_two, getattr(config, "vision_config", None) is not None)


def load_tokenizer(source: Source, placement: Placement) -> Any:
    """Load the tokenizer of a checkpoint, or the one that replaces it."""
    library, folder = transformers(), source.tokenizer_folder
    if folder is not None and not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise CheckpointError(
            f"{folder} contains no tokenizer, expected one of {', '.join(TOKENIZER_FILES[:3])}; download it with the "
            "model, or give its directory with --tokenizer"
        )
    files = source if folder is None else Source(folder)
    return _from_pretrained(library.AutoTokenizer, "tokenizer", files, placement)


def _from_pretrained(kind: Any, what: str, source: Source, placement: Placement, **keywords: Any) -> Any:
    keywords |= {"trust_remote_code": allows(placement, "code"), **source.keywords()}

    def load() -> Any:
        with source.parsed_once():
            return kind.from_pretrained(source.folder, **keywords)

    return attempt(source.target, what, load)


def load_model(source: Source, config: Any, placement: Placement) -> Checkpoint:
    """Load the weights. Raise if they do not fit into memory, or if one is missing, not used or not finite."""
    chosen, objective = loader_of(config, source)
    layers = int(config.get_text_config().num_hidden_layers)
    skeleton = built_model(source.target, config, chosen, allows(placement, "code"))
    device = placement.torch_device()
    keywords = {"config": config} | ({"use_safetensors": not source.pickled} if source.gguf is None else {})
    folder: tempfile.TemporaryDirectory[str] | None = None
    if placement.stream:
        require_streamable(source, placement, config)
        places = stream_map(skeleton, layers, device, source.target)
        folder = tempfile.TemporaryDirectory(prefix="depthgauge-")  # of weights that are unpacked or converted
        keywords |= {"device_map": places, "offload_folder": folder.name}
    elif placement.device_map is not None:
        keywords["device_map"] = placement.device_map
    else:
        check_memory(source, placement, skeleton)
    wanted = placement.torch_dtype()
    keywords |= {"dtype": wanted, "output_loading_info": True}
    keywords["ignore_mismatched_sizes"] = True  # `_refuse_misfits` names the weight
    with ExitStack() as at_failure:
        files = source
        if folder is not None:
            at_failure.callback(folder.cleanup)
            if source.gguf is not None:
                wanted = wanted if isinstance(wanted, torch.dtype) else torch.float32
                files = unpack_gguf(source, skeleton, Path(folder.name), wanted)
                keywords |= {"dtype": wanted, "use_safetensors": True}
        model, loaded = _from_pretrained(chosen, "weights", files, placement, **keywords)
        source.close()
        _refuse_misfits(source, config, model, loaded, allows(placement, "unused"))
        at_failure.pop_all()
    stream = None if folder is None else Stream.of_offloaded(model, layers, device, folder.cleanup)
    refuse_infinite(model, source.target)
    if isinstance(wanted, torch.dtype):
        for weight in model.parameters():  # transformers dequantizes MXFP4 to bfloat16, whatever is asked for
            weight.data = weight.data.to(wanted) if weight.dtype == torch.bfloat16 else weight.data
    if placement.device_map is None and stream is None:
        model.to(device)
    return replace(wrap(model, source.name, source, objective), stream=stream)


def fitted(source: Source, config: Any, placement: Placement, message: Callable[[str], None] = no_message) -> Placement:
    """Return the placement, with streamed weights if they would not fit otherwise, and say so.

    A source without weight files, which are not downloaded yet, has those of its configuration.

    Raises:
        CheckpointError: the weights do not fit, and they cannot be streamed, or they have too few tensors.
    """
    layers = int(config.get_text_config().num_hidden_layers)
    is_here = source.gguf is not None or bool(weight_files(source))
    if is_here and layers > MANY_LAYERS and layers > (stored := tensor_count(source)):
        raise CheckpointError(
            f"{source.target} contradicts its configuration, which describes {layers:,} layers: its files have "
            f"{stored} tensors; correct the number of layers, or download it again"
        )
    if placement.stream or placement.device_map is not None:
        return placement
    skeleton = built_model(source.target, config, loader_of(config, source)[0], allows(placement, "code"))
    try:
        check_memory(source, placement, skeleton)
    except CheckpointError:
        streamed, device = replace(placement, stream=True), placement.torch_device()
        with suppress(CheckpointError):
            require_streamable(source, streamed, config)
            if streamed_bytes(skeleton, layers) <= free_memory(device):
                where = "" if source.gguf is None else f", after they are unpacked into {tempfile.gettempdir()}"
                message(
                    f"the weights do not fit into the free memory of {device}: they are streamed, block by block{where}"
                )
                return streamed
        raise
    return placement


def _refuse_misfits(source: Source, config: Any, model: Any, loaded: Mapping[str, Any], ignore_unused: bool) -> None:
    """Raise if a weight has another shape than its module, a module has no weights, or no module takes a weight."""
    for weight, stored, expected in sorted(loaded["mismatched_keys"]):
        raise CheckpointError(
            f"{source.target} contradicts its config.json: the weight {weight} has the shape {list(stored)}, and the "
            f"configuration asks for {list(expected)}; download it again"
        )
    # transformers gives a bare encoder a pooler, whose output is not measured.
    bare = model.base_model is model
    missing = sorted(name for name in loaded["missing_keys"] if not (bare and "pooler" in name))
    if missing:
        raise CheckpointError(
            f"{source.target} lacks {counted(len(missing), 'weight')} of a {type(model).__name__}, such as "
            f"{missing[0]}; download it again, or correct its config.json"
        )
    unused = sorted(name for name in loaded["unexpected_keys"] if name.rpartition(".")[2] not in _COMPUTED)
    if unused and not ignore_unused:
        layers = config.get_text_config().num_hidden_layers
        raise CheckpointError(
            f"{source.target} has {counted(len(unused), 'weight')} that a {type(model).__name__} with "
            f"{counted(layers, 'layer')} does not use, such as {unused[0]}; correct its config.json, or use "
            "--allow unused if this is intended"
        )


def refuse_infinite(model: Any, name: str) -> None:
    """Raise if a weight of the model called `name` is NaN or infinite. Offloaded weights are not read."""
    for key, weight in model.named_parameters():
        if weight.is_meta or not weight.is_floating_point() or not weight.numel():
            continue
        if not all(bool(end.isfinite()) for end in torch.aminmax(weight.detach())):
            raise CheckpointError(
                f"the weight {key} of {name} has entries that are NaN or infinite; repair it, or download it again"
            )


def check_memory(source: Source, placement: Placement, skeleton: Any = None) -> None:
    """Raise if the weights, in the requested dtype, do not fit into free memory.

    `skeleton` is the model according to the configuration; see `built_model`.
    """
    parameters, stored = count_parameters(source)
    if skeleton is not None:
        parameters = max(parameters, parameter_count(skeleton))
        stored = stored or sum(weight.nbytes for weight in skeleton.parameters())
    chosen = placement.torch_dtype()
    needed = HEADROOM * (stored if chosen == "auto" else parameters * chosen.itemsize)
    free = free_memory(device := placement.torch_device())
    if needed > free:
        smaller = "--dtype bfloat16, " if needed > 2 * HEADROOM * parameters else ""
        raise CheckpointError(
            f"{source.target} is too large: {parameters:,} parameters need {size_text(needed)}, and {size_text(free)} "
            f"are free on {device}; use {smaller}--device spread or a larger machine"
        )


# --- Find the blocks of a model: one list, or the two lists of an encoder–decoder model ------------------------------


def with_stack(checkpoint: Checkpoint, stack: str) -> Checkpoint:
    """Return an encoder–decoder model of which one stack is gauged or shrunk, `encoder` or `decoder`, or `both`.

    The key of the configuration that has its number of layers is the one that changes this stack alone.

    Raises:
        CheckpointError: there is no such key.
    """
    if stack == BOTH:
        one, two = with_stack(checkpoint, "encoder"), with_stack(checkpoint, "decoder")
        return replace(
            one, stack=stack, layer_keys=one.layer_keys + two.layer_keys, families=one.families + two.families
        )
    kind: Any = type(checkpoint.model)
    other = "encoder" if stack == "decoder" else "decoder"
    lengths = {name: _stack_length(replace(checkpoint, stack=name)) for name in (stack, other)}
    values = checkpoint.config.to_dict().items()
    for key in [key for key, value in values if type(value) is int and value == lengths[stack] and "layer" in key]:
        config = copy.deepcopy(checkpoint.config)
        setattr(config, key, lengths[stack] + 1)
        try:
            with torch.device("meta"):
                built = attempt(checkpoint.name, "model", partial(kind, config), verb="build")
        except CheckpointError:  # transformers compares the numbers of layers with other settings
            continue
        trial = replace(checkpoint, model=built)
        changed = {name: _stack_length(replace(trial, stack=name)) for name in (stack, other)}
        if changed == lengths | {stack: lengths[stack] + 1}:
            families = (None,) * lengths[stack]
            return replace(checkpoint, stack=stack, layer_keys=(key,), families=families)
    raise CheckpointError(
        f"no key of the configuration of {checkpoint.name} has the number of layers of its {stack} alone; this model "
        "is not supported"
    )


def _stack_length(checkpoint: Checkpoint) -> int:
    """Return the number of blocks of a stack, the outermost list of modules in it."""
    (root,) = checkpoint.roots.values()
    return next((len(one) for one in root.modules() if isinstance(one, nn.ModuleList)), 0)


def blocks_of(checkpoint: Checkpoint) -> list[nn.Module]:
    """Return the blocks of all stacks of a checkpoint, or an empty list if those of one are not found."""
    by_stack = [
        find_blocks(root, len(span)) for root, span in zip(checkpoint.roots.values(), checkpoint.spans, strict=True)
    ]
    return [block for blocks in by_stack for block in blocks] if all(by_stack) else []


def require_rows(checkpoint: Checkpoint, ids: Sequence[Int[Tensor, "..."]]) -> None:
    """Raise if one of the token ids that the model will read has no row in its embedding."""
    rows = int(checkpoint.model.get_input_embeddings().weight.shape[0])
    largest = max((int(one.max()) for one in ids if one.numel()), default=0)
    if largest >= rows:
        raise CheckpointError(
            f"the tokenizer of {checkpoint.name} gives token ids up to {largest}, but the embedding of the model has "
            f"{rows} rows, for ids up to {rows - 1}; use the tokenizer that belongs to the model"
        )
