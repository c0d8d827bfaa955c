"""The options of `gauge`, each declared once: the command line, the Python interface and the result all use these."""

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from depthgauge.errors import InputError, require_options, unknown_name
from depthgauge.results.record import Record

NETWORKS, CHECKPOINTS = "networks", "checkpoints"


def _option(help: str, only: str | None = None) -> Meta:
    return Meta(description=help, extra={"only": only})


class GaugeOptions(Record, frozen=True, kw_only=True):
    """What `gauge` is asked to do. None means the default.

    Attributes:
        samples: number of random inputs for a network (default 4).
        tokens: tokens per input of a network (default 128), or of text in total for a checkpoint (default 2048).
        radius: φ, the largest |entry| of a network's inputs (default 1); they are uniform in this box.
        seed: seed of random inputs and of the choice of text windows (default 0).
        input: safetensors file with a network's inputs (tensor `x`) instead of random ones.
        text: text file to gauge a checkpoint on (default: a built-in text); `data.jsonl:field` reads a field of a JSONL
            file (default field: `text`, or `messages` for chats).
        as_is: read the text file as plain text, even if it is JSONL, JSON, CSV or HTML.
        window: tokens per text window (default: an eighth of `tokens`, from 64 to 512, at most the model's context).
        what_if: what-ifs to measure: `default`, `all`, `none`, or names separated by commas.
        bos: start every window with the BOS token: `yes`, `no` or `auto` (default), which does what the tokenizer or
            the GGUF metadata says and otherwise measures which is better.
        depth: remove layers greedily while the loss grows by at most this.
        max_removed: remove at most this many layers.
        weights_only: read no text; report what the weights alone show.
        dtype: number type (default: float32 on a CPU, the checkpoint's own on a GPU).
        device: device (default: a GPU if there is one).
        device_map: spread the model over devices, as in transformers; for example `auto`.
        trust_remote_code: run Python code that comes with the checkpoint.
        allow_pickle: read weights from `pytorch_model*.bin` files, with `torch.load(weights_only=True)`.
        ignore_unused: accept weights that no module of the model takes.
    """

    samples: Annotated[int | None, _option("Number of random inputs  [default: 4].", NETWORKS)] = None
    tokens: Annotated[
        int | None,
        _option("Tokens per random input  [default: 128]; for a checkpoint, tokens of text in total  [default: 2048]."),
    ] = None
    radius: Annotated[
        float | None, _option("Largest |entry| φ of the random inputs, uniform in this box  [default: 1].", NETWORKS)
    ] = None
    seed: Annotated[int | None, _option("Seed of everything random  [default: 0].")] = None
    input: Annotated[
        str | None, _option("Read the inputs from this safetensors file instead (tensor `x`).", NETWORKS)
    ] = None
    text: Annotated[
        str | None,
        _option("Text file, or FILE.jsonl:FIELD, to gauge on  [default: a built-in text].", CHECKPOINTS),
    ] = None
    as_is: Annotated[
        bool | None, _option("Read --text as plain text, even if it is JSON, CSV or HTML.", CHECKPOINTS)
    ] = None
    window: Annotated[
        int | None, _option("Tokens per window of text  [default: for 8 windows, from 64 to 512].", CHECKPOINTS)
    ] = None
    what_if: Annotated[
        str | None,
        _option(
            "What to remove from each layer: block,attention,mlp  [default], uniform, parallel, all or none.",
            CHECKPOINTS,
        ),
    ] = None
    bos: Annotated[
        str | None,
        _option("Start every window with the BOS token: yes, no, or auto  [default], which measures.", CHECKPOINTS),
    ] = None
    depth: Annotated[float | None, _option("Remove layers while the loss grows by at most this.", CHECKPOINTS)] = None
    max_removed: Annotated[int | None, _option("Remove at most this many layers.", CHECKPOINTS)] = None
    weights_only: Annotated[bool | None, _option("Read no text: report what the weights alone show.", CHECKPOINTS)] = (
        None
    )
    dtype: Annotated[
        str | None, _option("Number type  [default: float32 on a CPU, the checkpoint's own on a GPU].", CHECKPOINTS)
    ] = None
    device: Annotated[str | None, _option("Device  [default: a GPU if there is one].", CHECKPOINTS)] = None
    device_map: Annotated[
        str | None, _option("Spread the model over devices, as transformers does: auto.", CHECKPOINTS)
    ] = None
    trust_remote_code: Annotated[
        bool | None, _option("Run Python code that comes with the checkpoint.", CHECKPOINTS)
    ] = None

    allow_pickle: Annotated[
        bool | None, _option("Read pickled weights (pytorch_model*.bin), without running code in them.", CHECKPOINTS)
    ] = None
    ignore_unused: Annotated[bool | None, _option("Accept weights that no module of the model takes.", CHECKPOINTS)] = (
        None
    )

    def given(self) -> dict[str, Any]:
        """Return the options that are set, by name."""
        values = {name: getattr(self, name) for name in GaugeOptions.__struct_fields__}
        return {name: value for name, value in values.items() if value is not None and value is not False}

    def refuse_other_kind(self, kind: str, target: str) -> None:
        """Raise if an option is set that does not apply to this kind of target.

        Args:
            kind: `networks` or `checkpoints`.
            target: what was given, for the error message.
        """
        other = {NETWORKS: "checkpoints (directories and .gguf files)", CHECKPOINTS: "network files"}[kind]
        noun = {NETWORKS: "a network", CHECKPOINTS: "a checkpoint"}[kind]
        for name in self.given():
            only = applies_to(name)
            if only is not None and only != kind:
                raise InputError(f"--{name.replace('_', '-')} applies to {other}; {target} is {noun}. Leave it out")


class GaugeSettings(GaugeOptions, frozen=True, kw_only=True):
    """The options of a finished gauge with their defaults filled in: with the target they reproduce the result.

    `target` is the path; None is the built-in pair. With `in_memory` it is the name of a network given as an object.
    """

    target: str | None = None
    in_memory: bool = False


def applies_to(name: str) -> str | None:
    """Return the kind of target an option applies to, or None if it applies to all."""
    only: str | None = GaugeOptions.__annotations__[name].__metadata__[0].extra["only"]
    return only


def make_options(options: GaugeOptions | None, fields: dict[str, Any]) -> GaugeOptions:
    """Combine an options record with single options given by keyword; check the types of both.

    Raises:
        InputError: names an option that does not exist or whose type does not fit.
    """
    require_options(options, GaugeOptions, "gauge")
    known = GaugeOptions.__struct_fields__
    for name in fields:
        if name not in known:
            raise unknown_name("option of gauge", name, known)
    plain = {
        name: str(value) if name in ("input", "text") else value
        for name, value in {**(options.given() if options else {}), **fields}.items()
        if value is not None
    }
    try:
        return msgspec.convert(plain, GaugeOptions)
    except msgspec.ValidationError as error:
        what, _, place = str(error).partition(" - at ")
        raise InputError(f"{place.strip('`$.') or 'options'}: {what.replace('`', '')}; see GaugeOptions") from error
