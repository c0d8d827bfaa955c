"""Write a shrunk model as a GGUF file: unchanged tensors byte for byte, and metadata about the blocks that are left."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from depthgauge._version import __version__
from depthgauge.base.errors import VerificationError
from depthgauge.base.format import counted
from depthgauge.base.progress import Step
from depthgauge.checkpoints.library import CheckpointError
from depthgauge.checkpoints.load import Placement, load_model
from depthgauge.checkpoints.source import Source
from depthgauge.surgery.gguf_layout import EncodedTensor, GgufLayout, gguf

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
    found = fields.get(f"{layout.architecture}.{_PATTERN}", (PERIODS.get(layout.architecture, 1), []))[0]
    return (
        list(map(bool, found))
        if isinstance(found, list)
        else [(index + 1) % max(1, found) > 0 for index in range(count)]
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
