"""What a run is expected to take, before it starts, as a record."""

import msgspec

from depthgauge.base.format import duration, size_text
from depthgauge.results.record import Count, Number, Record

PLAN, MEMORY, DIRECTORY, GGUF = "plan", "memory", "directory", "gguf"
"""What a run of `shrink` ends with: a plan, a model in memory, or one that is written and checked."""
ESTIMATE_SCHEMA = "depthgauge.estimate/1"


class EstimateRecord(Record, frozen=True, kw_only=True):
    """The expected time, memory and disk space of a run, from the configuration and a few blocks with random weights.

    - `parts`: the seconds of each part of the run, by the names that `durations` has
    - `streamed`: the same for a run that reads the weights from disk in every pass over the blocks, in place of keeping
      them in memory. A run of `shrink` then samples no text, trains no weights and measures no speed. Without weight
      files to read, this is the time of a disk that is as fast as memory
    - `processes`: the seconds of a run of `shrink` in 2, 4 and 8 processes, each with a device of its own; empty where
      the weights are streamed
    - `gpu`, `ram`, `disk`: the largest number of bytes that are needed at a time, with the check in a new process. With
      more free memory on a GPU, more windows are computed at a time, and a run takes more of it
    - `parameters`, `layers`, `window`: the size of the model, and the tokens of a window
    - `device`, `dtype`: where the blocks were timed, and their number type
    - `read_speed`: bytes per second that were read from the weight files; null without any
    """

    schema: str = ESTIMATE_SCHEMA
    name: str
    parts: dict[str, Number]
    streamed: dict[str, Number] = msgspec.field(default_factory=dict)
    processes: dict[str, Number] = msgspec.field(default_factory=dict)
    gpu: Count
    ram: Count
    disk: Count
    parameters: Count
    layers: Count
    window: Count
    device: str
    dtype: str
    read_speed: Number | None = None

    @property
    def seconds(self) -> float:
        """The whole run."""
        return sum(self.parts.values())

    @property
    def sentence(self) -> str:
        """What is said before a run."""
        gpu = f", {size_text(self.gpu)} of GPU memory" if self.gpu else ""
        disk = f", {size_text(self.disk)} on disk" if self.disk else ""
        return f"estimate: about {duration(self.seconds)}, {size_text(self.ram)} of memory{gpu}{disk}"
