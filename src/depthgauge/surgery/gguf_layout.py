"""How a GGUF file holds the weights of a model, and how a shrunk model is written as one.

The names come from gguf-py. The arrangement of a tensor is found by comparing the tensors of the first block with the
weights that transformers made of them: equal, transposed (GPT-2), larger by 1 (the norms of Gemma), or with rows in
another order (the queries and keys of Llama). Tensors that did not change are written byte for byte.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Shaped
from torch import Tensor

from depthgauge._version import __version__
from depthgauge.base.errors import InputError, VerificationError
from depthgauge.base.format import counted
from depthgauge.base.progress import Step
from depthgauge.checkpoints.source.library import CheckpointError, attempt
from depthgauge.checkpoints.source.model_files import Source
from depthgauge.checkpoints.weights.families import find_blocks
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_model
from depthgauge.surgery.write_model import WRITTEN, check_gguf_output

FALLBACK = "Q8_0"
"""The type of a changed weight whose own type gguf-py can only read."""
BY_INDEX = (
    "nextn_predict_layers", "leading_dense_block_count", "full_attention_interval", "interleave_moe_layer_step",
    "attention.shared_kv_layers", "decoder_block_count",
)  # fmt: skip
"""Keys after the architecture that give blocks a meaning by their number; they cannot follow a removal."""
RECOGNIZED = {"gemma2": 46, "gemma3": 62}
"""Models that llama.cpp recognizes by their number of blocks, and gives another scale of attention."""


@dataclass(frozen=True, eq=False)
class Arrangement:
    """How a weight w is stored as a tensor t: w = t[rows] − offset, or its transpose.

    `rows` is None if the order is the same.
    """

    is_transposed: bool = False
    offset: float = 0.0
    rows: Tensor | None = None

    def weight(self, stored: Tensor) -> Tensor:
        """Return w."""
        made = stored if self.rows is None else stored[self.rows]
        return (made.t() if self.is_transposed else made) - self.offset

    def stored(self, weight: Tensor) -> Tensor:
        """Return t."""
        made = (weight.t() if self.is_transposed else weight) + self.offset
        return made if self.rows is None else made[self.rows.argsort()]


@dataclass(frozen=True, eq=False)
class EncodedTensor:
    """The bytes of a tensor and their type."""

    data: Shaped[np.ndarray, "..."]
    kind: Any

    def decode(self) -> Float[Tensor, "..."]:
        """Return the values as float32."""
        return decode(self.data, self.kind)


@dataclass(frozen=True, eq=False)
class GgufLayout:
    """The tensors and the metadata of the GGUF file that a model was loaded from.

    - `architecture`, `layers`: the name that llama.cpp has for the architecture, and the number of blocks
    - `fields`: key → value and its types
    - `tensors`: name → tensor of gguf-py
    - `names`: name of a weight in a block → name of its tensor after `blk.N.`
    - `arrangements`: name of a weight in a block → how it is stored
    - `fallback`: the type of changed weights whose own type cannot be written
    """

    architecture: str
    layers: int
    fields: Mapping[str, tuple[Any, list[Any]]]
    tensors: Mapping[str, Any]
    fallback: str = FALLBACK
    names: Mapping[str, str] = field(default_factory=dict)
    arrangements: Mapping[str, Arrangement] = field(default_factory=dict)

    def tensor(self, layer: int, leaf: str) -> Any:
        """Return the tensor of a weight of a block."""
        return self.tensors[f"blk.{layer}.{self.names[leaf]}"]

    def kind(self, tensor: Any) -> Any:
        """Return the type that a tensor has after a change."""
        types = gguf().GGMLQuantizationType
        return tensor.tensor_type if tensor.tensor_type.name in WRITTEN else types[self.fallback]

    def sizes(self, repairs: bool) -> tuple[int, list[int]]:
        """Return the bytes of all tensors and those of every block, the smallest first.

        With `repairs`, every matrix of a block may be written in the type that it has after a change.
        """
        total, blocks = 0, [0] * self.layers
        for name, tensor in self.tensors.items():
            taken = int(tensor.n_bytes)
            if name.startswith("blk."):
                block, size = gguf().GGML_QUANT_SIZES[self.kind(tensor)]
                taken = max(taken, int(tensor.n_elements) // block * size) if repairs else taken
                blocks[int(name.split(".")[1])] += taken
            total += taken
        return total, sorted(blocks)


def gguf() -> Any:
    """Return the package gguf, which the extra `models` installs."""
    return import_module("gguf")


def sliding_blocks(checkpoint: Checkpoint, removed: Collection[int]) -> list[int]:
    """Return the blocks with a sliding window; raise if all of them would be removed, which llama.cpp cannot run."""
    kinds = getattr(checkpoint.config, "layer_types", None) or ()
    sliding = [index for index, kind in enumerate(kinds) if kind == "sliding_attention"]
    if sliding and set(sliding) <= set(removed):
        raise InputError(
            f"{counted(len(sliding), 'block')} of {checkpoint.name} have a sliding window, and all of them would "
            "be removed; llama.cpp cannot run such a file: keep one of them, or give a directory as --out"
        )
    return sliding


def decode(data: Any, kind: Any) -> Float[Tensor, "..."]:
    """Return the values of a tensor in a file as float32."""
    return torch.from_numpy(np.array(gguf().quants.dequantize(data, kind), dtype=np.float32))


def encode(values: Float[Tensor, "..."], kind: Any) -> EncodedTensor:
    """Round values to a type."""
    return EncodedTensor(gguf().quants.quantize(values.float().cpu().numpy(), kind), kind)


def read_layout(source: Source | None, fallback: str | None, name: str) -> GgufLayout:
    """Read the metadata of the GGUF file of a model, and refuse what cannot be written again without some blocks.

    `source` is None for a model in memory, and errors call the model `name`. `fallback` is the type of changed weights
    whose own type cannot be written; None for the default.

    Raises:
        InputError: the model is not a GGUF file, or the type cannot be written.
        CheckpointError: the file has parts whose meaning depends on the number of a block.
    """
    check_gguf_output(source, fallback, name)
    assert source is not None
    reader = attempt(source.target, "metadata", lambda: source.reader)
    fields = {
        key: (found.contents(), found.types) for key, found in reader.fields.items() if not key.startswith("GGUF.")
    }
    architecture = str(fields.get("general.architecture", ("", []))[0])
    if f"{architecture}.block_count" not in fields:
        raise CheckpointError(f"{source.target} does not say how many blocks it has; give a GGUF file of a model")
    layers = int(fields[f"{architecture}.block_count"][0])
    for key in BY_INDEX:
        if fields.get(f"{architecture}.{key}", (0, []))[0]:
            raise CheckpointError(
                f"{source.target} cannot be written as GGUF without some blocks: {architecture}.{key} depends on the "
                "numbers of the blocks; give a directory as --out"
            )
    if RECOGNIZED.get(architecture) == layers:
        raise CheckpointError(
            f"{source.target} cannot be written as GGUF without some blocks: llama.cpp recognizes this model by its "
            f"{layers} blocks; give a directory as --out"
        )
    if nested := [key for key, (_, types) in fields.items() if len(types) > 2]:
        raise CheckpointError(f"{source.target} has a list of lists, {nested[0]}; give a directory as --out")
    tensors = {tensor.name: tensor for tensor in reader.tensors}
    return GgufLayout(architecture, layers, fields, tensors, fallback or FALLBACK)


@torch.no_grad()
def match_weights(layout: GgufLayout, checkpoint: Checkpoint) -> GgufLayout:
    """Return the layout with the tensor and the arrangement of every weight of a block.

    Raises:
        CheckpointError: a weight has no tensor, or the tensor does not hold the weight in any known arrangement.
    """
    model, name = checkpoint.model, checkpoint.name
    if checkpoint.objective != "loss":
        raise CheckpointError(f"{name} is not a causal language model; give a directory as --out")
    first = find_blocks(model, checkpoint.layers)[0]
    path = next(path for path, module in model.named_modules() if module is first)
    library = gguf()
    known = {value: key for key, value in library.MODEL_ARCH_NAMES.items()}
    if layout.architecture not in known:
        raise CheckpointError(f"gguf {library.__version__} does not know the architecture of {name}; update it")
    to_gguf = library.get_tensor_name_map(known[layout.architecture], layout.layers)
    names: dict[str, str] = {}
    arrangements: dict[str, Arrangement] = {}
    for leaf, weight in first.named_parameters():
        found = to_gguf.get_name(f"{path}.{leaf}", try_suffixes=(".weight", ".bias"))
        tensor = layout.tensors.get(str(found))
        arranged = None if tensor is None else _arrangement(tensor, weight, arrangements.get(_of_weight(leaf)))
        if arranged is None:
            raise CheckpointError(
                f"{name} cannot be written as GGUF: its weight {path}.{leaf} is not the tensor {found} of the file in "
                "an arrangement that depthgauge knows; give a directory as --out"
            )
        names[leaf], arrangements[leaf] = str(found).removeprefix("blk.0."), arranged
    return GgufLayout(
        layout.architecture, layout.layers, layout.fields, layout.tensors, layout.fallback, names, arrangements
    )


def _of_weight(leaf: str) -> str:
    """Return the name of the weight that a bias belongs to."""
    return leaf.removesuffix("bias") + "weight"


def _arrangement(tensor: Any, weight: Tensor, of_module: Arrangement | None) -> Arrangement | None:
    """Return how a tensor holds a weight, or None. The bias of a module has its rows in the order of its weight."""
    stored, weight = decode(tensor.data, tensor.tensor_type), weight.detach().cpu()
    candidates = [Arrangement(), Arrangement(is_transposed=True), Arrangement(offset=1.0)]
    if of_module is not None and of_module.rows is not None:
        candidates.insert(0, Arrangement(rows=of_module.rows))
    elif stored.shape == weight.shape:
        order = torch.from_numpy(_row_order(stored.to(weight.dtype)))
        candidates.append(Arrangement(rows=order[torch.from_numpy(_row_order(weight)).argsort()]))
    for candidate in candidates:
        made = candidate.weight(stored)
        if made.shape == weight.shape and torch.equal(made.to(weight.dtype), weight):
            return candidate
    return None


def _row_order(values: Tensor) -> Shaped[np.ndarray, " rows"]:
    """Return the order that sorts the rows by their bytes."""
    flat = values.float().reshape(len(values), -1).contiguous().numpy()
    return flat.view(np.dtype((np.void, flat.shape[1] * flat.itemsize))).ravel().argsort(kind="stable")


# --- Write a shrunk model as a GGUF file ------------------------------------------------------------------------------

NOT_PER_LAYER = ("rope.dimension_sections", "classifier.output_labels")
"""Lists of an architecture, after its name, that have nothing to do with blocks, however long they are."""
PERIODS = {"gemma2": 2, "gemma3": 6}
"""Every how many blocks one has full attention, for architectures whose files need not say so."""
_PATTERN = "attention.sliding_window_pattern"


def shrunk_fields(
    layout: GgufLayout, kept: Sequence[int], layer_types: Sequence[str] | None
) -> dict[str, tuple[Any, list[Any]]]:
    """Return the metadata of a file that has the blocks `kept` alone: key → value and its types.

    The number of blocks and all lists with one entry per block follow. Keys about the parts of a divided file are left
    out. `layer_types` are those of the shrunk model's configuration, or None.
    """
    types, prefix = gguf().GGUFValueType, f"{layout.architecture}."
    fields: dict[str, tuple[Any, list[Any]]] = {}
    for key, (value, kinds) in layout.fields.items():
        if key.startswith(("split.", "depthgauge.")):
            continue
        if _is_per_layer(key, value, kinds, layout):
            value = [value[layer] for layer in kept]
        fields[key] = value, kinds
    fields[f"{prefix}block_count"] = len(kept), layout.fields[f"{prefix}block_count"][1]
    sliding = [kind == "sliding_attention" for kind in layer_types or ()]
    if any(sliding) and sliding != _implied(layout, fields, len(kept)):
        fields[prefix + _PATTERN] = sliding, [types.ARRAY, types.BOOL]
    return fields


def _is_per_layer(key: str, value: Any, kinds: list[Any], layout: GgufLayout) -> bool:
    """Return whether a field is a list with one entry per block."""
    prefix, is_list = f"{layout.architecture}.", kinds[0] == gguf().GGUFValueType.ARRAY
    return (
        is_list and key.startswith(prefix) and key[len(prefix) :] not in NOT_PER_LAYER and len(value) == layout.layers
    )


def _implied(layout: GgufLayout, fields: Mapping[str, tuple[Any, list[Any]]], count: int) -> list[bool]:
    """Return which blocks have a sliding window according to the metadata, or to the rule of the architecture."""
    pattern = fields.get(f"{layout.architecture}.{_PATTERN}", (PERIODS.get(layout.architecture, 1), []))[0]
    return (
        list(map(bool, pattern))
        if isinstance(pattern, list)
        else [(index + 1) % max(1, pattern) > 0 for index in range(count)]
    )


def write_gguf(
    path: Path,
    layout: GgufLayout,
    kept: Sequence[int],
    fields: Mapping[str, tuple[Any, list[Any]]],
    changed: Mapping[str, EncodedTensor],
    progress: Step,
) -> None:
    """Write a GGUF file with the blocks `kept` of another one, `layout`, renumbered.

    `fields` is the metadata, see `shrunk_fields`. `changed` has the tensors that are not copied, by their name in the
    other file.
    """
    library = gguf()
    writer = library.GGUFWriter(path, layout.architecture)
    for key, (value, kinds) in fields.items():
        if key == "general.alignment":
            writer.add_custom_alignment(value)
        elif key != "general.architecture" and not (isinstance(value, list) and not value):
            writer.add_key_value(key, value, *kinds[:2])
    new_index = {str(old): new for new, old in enumerate(kept)}
    chosen: list[Any] = []
    for name, tensor in layout.tensors.items():
        start, _, rest = name.partition(".")
        number, _, leaf = rest.partition(".")
        if start == "blk" and number not in new_index:
            continue
        made = changed.get(name) or EncodedTensor(tensor.data, tensor.tensor_type)
        renamed = f"blk.{new_index[number]}.{leaf}" if start == "blk" else name
        writer.add_tensor_info(renamed, made.data.shape, made.data.dtype, made.data.nbytes, made.kind)
        chosen.append(made.data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    for done, data in enumerate(chosen):
        progress(done, len(chosen), "writing the GGUF file")
        writer.write_tensor_data(data)
    writer.close()


def provenance(layout: GgufLayout, name: str, sha256: str, removed: Sequence[int]) -> dict[str, tuple[Any, list[Any]]]:
    """Return the metadata that says where a shrunk file comes from: `layout`, `name` and `sha256` are of the source."""
    types, left = gguf().GGUFValueType, layout.layers - len(removed)
    title = str(layout.fields.get("general.name", (name, []))[0])
    return {
        "general.name": (f"{title} ({left} of {counted(layout.layers, 'layer')})", [types.STRING]),
        "depthgauge.version": (__version__, [types.STRING]),
        "depthgauge.removed_blocks": (list(removed), [types.ARRAY, types.UINT32]),
        "depthgauge.source.name": (name, [types.STRING]),
        "depthgauge.source.block_count": (layout.layers, [types.UINT32]),
        "depthgauge.source.sha256": (sha256, [types.STRING]),
    }


@torch.no_grad()
def check_written(path: Path, out: str | Path, model: Any, stream: bool = False) -> None:
    """Read a written file with transformers and raise unless every weight equals that of the model in memory.

    Errors call the file `out`, the name that it will have. With `stream`, its weights have no room in memory.
    """
    placement = Placement(dtype=str(model.dtype).removeprefix("torch."), device="cpu", stream=stream)
    try:
        read = load_model(Source(path.parent, path.name), model.config, placement).model.state_dict()
    except CheckpointError as error:
        raise VerificationError(f"transformers cannot read {out}: {error}") from error
    ours = model.state_dict()
    for name in [*ours, *(name for name in read if name not in ours)]:
        if name in ours and name in read and ours[name].is_meta:  # offloaded by accelerate
            continue
        if name not in ours or name not in read or not torch.equal(ours[name].cpu(), read[name]):
            raise VerificationError(f"the weight {name} in {out} is not the one in memory")
