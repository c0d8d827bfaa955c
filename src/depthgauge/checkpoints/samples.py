"""What a model reads, window by window: token ids, images, or a source and a target.

Most functions take a tensor with one row per window, which is the model's main input: token ids `[windows, n]`, or
images `[windows, channels, height, width]`. A model that reads several tensors, and one whose output is compared with
given targets, takes `Samples`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from depthgauge.base.array_record import ArrayRecord

ENCODED = "encoder_outputs"
"""The argument for states of the encoder, which are then not computed again."""
MASK = "attention_mask"
"""The argument that is 1 at tokens and 0 at padding."""
IGNORED = -100
"""A target that does not count, because the place is padding."""


@dataclass(frozen=True, eq=False, repr=False)
class Samples(ArrayRecord):
    """The inputs of a model with one row per window, and what its output is compared with.

    - `inputs`: keyword argument of the model → tensor, the main input first
    - `targets`: the label of every window, or the tokens that the model should write, `IGNORED` where there is none;
      None for text, whose next tokens are the targets, and where the output is compared with the dense model's
    """

    inputs: Mapping[str, Tensor]
    targets: Int[Tensor, "windows ..."] | None = None

    @property
    def main(self) -> Tensor:
        """The main input."""
        return next(iter(self.inputs.values()))

    @property
    def sources(self) -> Mapping[str, Tensor]:
        """The inputs without those of a decoder that reads the states of an encoder."""
        return {name: value for name, value in self.inputs.items() if not name.startswith("decoder_")}

    def __len__(self) -> int:
        return len(self.main)

    def __getitem__(self, rows: Any) -> "Samples":
        """Return some of the windows: `rows` is a slice or a tensor of indices."""
        chosen = {name: value[rows] for name, value in self.inputs.items()}
        return Samples(chosen, None if self.targets is None else self.targets[rows])

    def unpadded(self) -> "Samples":
        """Return the windows without the tokens at the end that are padding in all of them."""
        mask = self.inputs.get(MASK)
        if mask is None:
            return self
        length = int(mask.sum(dim=1).max())
        cut = {name: value[:, :length] for name, value in self.sources.items()}
        return Samples({**self.inputs, **cut}, self.targets)

    def keywords(self, device: torch.device, dtype: torch.dtype) -> dict[str, Any]:
        """Return the arguments of the model on its device; images get the dtype of its weights.

        transformers expects the outputs of an encoder in a tuple.
        """
        placed = {
            name: value.to(device, dtype if value.is_floating_point() else None) for name, value in self.inputs.items()
        }
        return {name: (value,) if name == ENCODED else value for name, value in placed.items()}


Inputs = Tensor | Samples
"""What a model reads: its main input alone, or several tensors."""


def as_samples(inputs: Inputs, name: str = "input_ids") -> Samples:
    """Return the inputs as samples; `name` is the model's main input, such as `input_ids` or `pixel_values`."""
    return inputs if isinstance(inputs, Samples) else Samples({name: inputs})


def few_windows(inputs: Inputs, tokens: int) -> Inputs:
    """Return two different short windows: `tokens` tokens and the same in reverse, or an image and its mirror image."""
    if isinstance(inputs, Samples):
        return inputs[:2] if len(inputs) > 1 else inputs[torch.zeros(2, dtype=torch.long)]
    first = shortened(inputs, tokens)
    assert isinstance(first, Tensor)
    if first.dim() == 2:
        first = first.repeat(1, -(-tokens // first.shape[1]))[:, :tokens]
    return torch.cat([first, first.flip(-1)])


def shortened(inputs: Inputs, tokens: int) -> Inputs:
    """Return the first window; of a text, at most `tokens` tokens of it."""
    first = inputs[:1]
    return first[:, :tokens] if isinstance(first, Tensor) and first.dim() == 2 else first


def repeated(inputs: Inputs, windows: int) -> Inputs:
    """Return the first window, repeated."""
    return inputs[torch.zeros(windows, dtype=torch.long)]
