"""Find the blocks of a model in its modules."""

from typing import Any

from torch import nn


def find_blocks(model: nn.Module, layers: int) -> list[nn.Module]:
    """Return a model's blocks: the outermost `ModuleList` with one distinct entry per layer, or an empty list.

    In a model with parts that have their own configurations, such as an encoder of images, the blocks are those of the
    text model.
    """
    config: Any = getattr(model, "config", None)
    text = type(config.get_text_config()) if hasattr(config, "get_text_config") else object
    own = next((part for part in model.modules() if isinstance(getattr(part, "config", None), text)), model)
    others = {
        inner
        for part in own.modules()
        if hasattr(getattr(part, "config", None), "get_text_config") and not isinstance(part.config, text)
        for inner in part.modules()
    }
    for module in own.modules():
        if module in others or not isinstance(module, nn.ModuleList):
            continue
        if len(module) == layers and len(set(map(id, module))) == layers:
            return list(module)
    return []
