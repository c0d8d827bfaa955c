"""Names of the what-ifs and of the layer scores, with the text that tables and reports show for them.

This file is the only list of these names. Result documents, tables, charts and `--what-if` all read it.
"""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class WhatIfLabel:
    """The text shown for one what-if.

    - `label`: short form, for column headers and legends
    - `sentence`: what happens to the layer
    """

    label: str
    sentence: str


@dataclass(frozen=True)
class ScoreLabel:
    """The text shown for one layer score.

    - `label`: short form, with the method the score comes from
    - `what_if`: the what-if whose cost the score predicts
    - `sentence`: the definition
    """

    label: str
    what_if: str
    sentence: str


WHAT_IFS: Mapping[str, WhatIfLabel] = {
    "block": WhatIfLabel("skip block", "The layer returns its input unchanged."),
    "attention": WhatIfLabel("skip attention", "The layer's attention adds nothing."),
    "mlp": WhatIfLabel("skip MLP", "The layer's MLP adds nothing."),
    "uniform": WhatIfLabel("uniform attention", "Every head of the layer averages all tokens it can attend to."),
    "parallel": WhatIfLabel("parallel with next", "The layer and the next one both read the layer's input."),
}
"""What-if name → label, in the order in which what-ifs are measured and shown."""

DEFAULT_WHAT_IFS: tuple[str, ...] = ("block", "attention", "mlp")
"""The what-ifs measured unless others are requested."""

SCORES: Mapping[str, ScoreLabel] = {
    "block_influence": ScoreLabel(
        "block influence (ShortGPT)", "block", "1 − mean cosine of the states before and after the block."
    ),
    "angular_distance": ScoreLabel(
        "angular distance (UIDL)", "block", "Angle between the states before and after the block, at the last token."
    ),
    "attention_cosine": ScoreLabel(
        "attention cosine (LLM-Drop)", "attention", "1 − mean cosine of the states before and after attention."
    ),
    "mlp_cosine": ScoreLabel(
        "MLP cosine (LLM-Drop)", "mlp", "1 − mean cosine of the states before and after the MLP."
    ),
}
"""Score name → label, in the order in which scores are shown."""
