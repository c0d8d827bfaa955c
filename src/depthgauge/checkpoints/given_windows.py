"""Windows that the user gave one by one: images, texts with labels, pairs, or recordings."""

from dataclasses import dataclass

from depthgauge.base.array_record import ArrayRecord
from depthgauge.checkpoints.samples import Samples
from depthgauge.results.checkpoint_subject import TextWindows


@dataclass(frozen=True, eq=False, repr=False)
class GivenWindows(ArrayRecord):
    """Images, texts, pairs or recordings as a model reads them.

    - `kind`: `images`, `texts`, `pairs` or `recordings`
    - `inputs`: what the model reads, with labels or targets where they are given
    - `source`: the directory or the file
    - `digest`: SHA-256 of what was read
    """

    kind: str
    inputs: Samples
    source: str
    digest: str

    def record(self, tokens: int) -> TextWindows:
        """Return the record of the windows, each of which becomes this many tokens."""
        count = len(self.inputs)
        return TextWindows(
            kind=self.kind, source=self.source, sha256=self.digest, windows=count, window=tokens, tokens=count * tokens
        )
