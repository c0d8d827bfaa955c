"""The result of `depthgauge collapse` as a record."""

from depthgauge.results.network_subject import PrintedTheorem, Sandwich
from depthgauge.results.record import Count, Measured, Record


class CollapseRecord(Record, frozen=True, kw_only=True):
    """One surrogate network: its depth, the sandwich on its error, and Theorem D.1 of paper A beside it.

    The keys are those of `Sandwich` and `PrintedTheorem`, with `layers_before`.
    """

    method: str
    layers_before: Count
    layers_after: Count
    set: str
    radius: Measured
    tokens: Count | None
    effort: str
    upper: Measured
    lower: Measured
    ratio: Measured
    methods: tuple[str, ...]
    notes: tuple[str, ...]
    share: tuple[tuple[Measured, ...], ...]
    lost_at: Count | None
    seconds: Measured
    attack_seconds: Measured
    printed_bound: Measured
    printed_log10: Measured
    printed_applies: bool
    printed_conditions: dict[str, bool]

    def sandwich(self) -> Sandwich:
        """Return the bounds alone."""
        return Sandwich(**{name: getattr(self, name) for name in Sandwich.__struct_fields__ if name != "refused"})

    def printed(self) -> PrintedTheorem:
        """Return the printed theorem alone."""
        return PrintedTheorem(**{name: getattr(self, name) for name in PrintedTheorem.__struct_fields__})
