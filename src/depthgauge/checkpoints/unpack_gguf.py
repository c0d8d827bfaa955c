"""Unpack a GGUF file into safetensors files, block by block, so that its weights need not fit into memory."""

import json
import shutil
from importlib import import_module
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from safetensors.torch import save_file

from depthgauge.base.format import size_text
from depthgauge.checkpoints.library import CheckpointError, attempt
from depthgauge.checkpoints.source import SAFETENSORS, Source


def unpack_gguf(source: Source, skeleton: Any, folder: Path, dtype: torch.dtype) -> Source:
    """Write the weights of a GGUF file to safetensors files, one for each block, and return these.

    transformers unpacks all tensors of a file in memory; here it is given those of one block at a time.

    Args:
        source: the GGUF file.
        skeleton: a model of its class, without weights.
        folder: where the files are written.
        dtype: their dtype.

    Raises:
        CheckpointError: the disk has too little space.
    """
    library: Any = import_module("transformers.modeling_gguf_pytorch_utils")
    whole = source.reader
    needed = dtype.itemsize * sum(int(tensor.n_elements) for tensor in whole.tensors)
    if needed > (free := shutil.disk_usage(folder).free):
        smaller = ", or use --dtype bfloat16" if dtype.itemsize > 2 else ""
        raise CheckpointError(
            f"{source.target} cannot be streamed: unpacked, it takes {size_text(needed)}, and {size_text(free)} are "
            f"free in {folder.parent}; set TMPDIR to a directory on a larger disk{smaller}"
        )
    # Parsing hundreds of thousands of tokens takes seconds, and the weights do not depend on them.
    fields = {key: field for key, field in whole.fields.items() if not key.startswith("tokenizer.")}
    files: dict[str, str] = {}
    for number, (_, tensors) in enumerate(groupby(sorted(whole.tensors, key=_part), key=_part)):
        part = SimpleNamespace(fields=fields, tensors=list(tensors))

        def read(part: SimpleNamespace = part) -> dict[str, torch.Tensor]:
            with source.parsed_once(part):
                found = library.load_gguf_checkpoint(
                    str(source.path), return_tensors=True, model_to_load=skeleton, torch_dtype=dtype
                )
            tensors: dict[str, torch.Tensor] = found["tensors"]
            return tensors

        weights = attempt(source.target, "weights", read)
        name = f"unpacked-{number:05}.safetensors"
        save_file(weights, folder / name, metadata={"format": "pt"})
        files |= dict.fromkeys(weights, name)
    skeleton.config.save_pretrained(folder)
    index = {"metadata": {}, "weight_map": files}
    (folder / f"{SAFETENSORS}.index.json").write_text(json.dumps(index), encoding="utf-8")
    return Source(folder)


def _part(tensor: Any) -> str:
    """Return the block of a tensor, such as `blk.3`; the tensors outside of the blocks are one part."""
    return ".".join(tensor.name.split(".")[:2]) if tensor.name.startswith("blk.") else ""
