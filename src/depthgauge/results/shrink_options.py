"""The options of `shrink`, each declared once: the command line, the Python interface and the result all use these."""

import numbers
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from depthgauge.errors import InputError, require_options, unknown_name
from depthgauge.results.record import Record

EFFORTS = ("quick", "default", "high")
OBJECTIVES = ("loss", "kl", "states")
GUARANTEES = ("quantile", "mean")
SIZE, TEXT, MODEL = "size", "text", "model"


def _option(help: str, panel: str | None = None) -> Meta:
    return Meta(description=help, extra={"only": panel})


class ShrinkOptions(Record, frozen=True, kw_only=True):
    """What `shrink` is asked to do. None means the default.

    Attributes:
        remove: how many blocks to remove: a number such as `7`, or a share of all blocks such as `25%`, rounded down,
            at least 1. In Python also a whole number, or a number between 0 and 1 as a share: `0.25` is `25%`.
        max_increase: remove as many blocks as possible while the guaranteed increase of the loss stays within this.
        confidence: confidence of the guarantee (default 0.95).
        guarantee: which guarantee `max_increase` limits: `quantile` (default) or `mean`.
        effort: `quick`, `default` or `high`: more calibration windows and a wider search cost more time.
        objective: what the search minimizes: `loss` (default for decoders), `kl` (divergence from the dense model) or
            `states` (distance of the final states, the only choice for encoders).
        no_repair: remove blocks without changing any weights.
        heal: after the repair, train this many steps towards the dense model's predictions.
        text: text files to calibrate on; `data.jsonl:field` reads a field of a JSONL file (default field: `text`, or
            `messages` for chats). Without a text, text sampled from the model itself is used.
        as_is: read the text files as plain text, even if they are JSONL, JSON, CSV or HTML.
        sampled: share of the calibration windows that are sampled from the model itself (default 0.5).
        window: tokens per window (default 512, with effort `quick` 256, or the model's context if that is shorter).
        bos: start every window with the BOS token: `yes`, `no` or `auto` (default).
        seed: seed of everything random (default 0).
        dtype: number type (default: float32 on a CPU, the checkpoint's own on a GPU).
        device: device (default: a GPU if there is one).
        device_map: spread the model over devices, as in transformers; for example `auto`.
        trust_remote_code: run Python code that comes with the checkpoint.
        allow_pickle: read weights from `pytorch_model*.bin` files, with `torch.load(weights_only=True)`.
        ignore_unused: accept weights that no module of the model takes.
    """

    remove: Annotated[
        str | None,
        _option("How many blocks to remove: a number, 7, or a share, 25%, rounded down, at least 1.", SIZE),
    ] = None
    max_increase: Annotated[
        float | None,
        _option("Remove as many blocks as the guarantee allows: the loss grows by at most this (nats/token).", SIZE),
    ] = None
    confidence: Annotated[float | None, _option("Confidence of the guarantee  [default: 0.95].", SIZE)] = None
    guarantee: Annotated[str | None, _option("What --max-increase limits: quantile  [default] or mean.", SIZE)] = None
    effort: Annotated[
        str | None, _option("quick, default or high: more calibration windows, a wider search, more time.")
    ] = None
    objective: Annotated[
        str | None, _option("What the search minimizes: loss  [default for decoders], kl, or states (encoders).")
    ] = None
    no_repair: Annotated[bool | None, _option("Remove blocks without changing any weights.")] = None
    heal: Annotated[
        int | None, _option("After the repair, train this many steps towards the dense model's predictions.")
    ] = None
    text: Annotated[
        tuple[str, ...] | None,
        _option(
            "Text file, or FILE.jsonl:FIELD, to calibrate on; repeat it for several  [default: text sampled from the "
            "model].",
            TEXT,
        ),
    ] = None
    as_is: Annotated[bool | None, _option("Read --text as plain text, even if it is JSON, CSV or HTML.", TEXT)] = None
    sampled: Annotated[
        float | None, _option("Share of calibration windows sampled from the model  [default: 0.5].", TEXT)
    ] = None
    window: Annotated[int | None, _option("Tokens per window  [default: 512, with --effort quick 256].", TEXT)] = None
    bos: Annotated[str | None, _option("Start every window with the BOS token: yes, no, or auto  [default].", TEXT)] = (
        None
    )
    seed: Annotated[int | None, _option("Seed of everything random  [default: 0].")] = None
    dtype: Annotated[
        str | None, _option("Number type  [default: float32 on a CPU, the checkpoint's own on a GPU].", MODEL)
    ] = None
    device: Annotated[str | None, _option("Device  [default: a GPU if there is one].", MODEL)] = None
    device_map: Annotated[str | None, _option("Spread the model over devices, as transformers does: auto.", MODEL)] = (
        None
    )
    trust_remote_code: Annotated[bool | None, _option("Run Python code that comes with the checkpoint.", MODEL)] = None
    allow_pickle: Annotated[
        bool | None, _option("Read pickled weights (pytorch_model*.bin), without running code in them.", MODEL)
    ] = None
    ignore_unused: Annotated[bool | None, _option("Accept weights that no module of the model takes.", MODEL)] = None

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        values = {name: getattr(self, name) for name in ShrinkOptions.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None and value is not False}


def make_shrink_options(options: ShrinkOptions | None, fields: dict[str, Any]) -> ShrinkOptions:
    """Combine an options record with single options given by keyword; check the types of both.

    A single text may be given as one path, and `remove` as a whole number or as a number between 0 and 1.

    Raises:
        InputError: names an option that does not exist or whose type does not fit.
    """
    require_options(options, ShrinkOptions, "shrink")
    known = ShrinkOptions.__struct_fields__
    for name in fields:
        if name not in known:
            raise unknown_name("option of shrink", name, known)
    plain = {**(options.given() if options else {}), **{k: v for k, v in fields.items() if v is not None}}
    if "text" in plain:
        text = plain["text"]
        plain["text"] = [str(path) for path in (text if isinstance(text, list | tuple) else [text])]
    if "remove" in plain:
        plain["remove"] = _remove_text(plain["remove"])
    try:
        return msgspec.convert(plain, ShrinkOptions)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        raise InputError(f"{place.strip('`$.') or 'options'}: {what.replace('`', '')}; see ShrinkOptions") from error


def _remove_text(remove: Any) -> Any:
    """Return a number of blocks, or a share of all blocks between 0 and 1, as the command line writes it.

    >>> _remove_text(7), _remove_text(0.25), _remove_text(1 / 3), _remove_text("25%")
    ('7', '25%', '33.3333333333%', '25%')
    """
    if isinstance(remove, str):
        return remove
    if isinstance(remove, numbers.Integral) and not isinstance(remove, bool):
        return str(int(remove))
    if isinstance(remove, numbers.Real) and 0 < float(remove) < 1:
        return f"{100 * float(remove):.10f}".rstrip("0").rstrip(".") + "%"
    raise InputError(
        f"remove must be a number of blocks or a share of all blocks, got {remove!r}; write remove=7 for 7 blocks, and "
        "remove=0.25 or remove='25%' for a quarter of them"
    )
