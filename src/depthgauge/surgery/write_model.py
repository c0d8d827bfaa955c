"""Where a model is written, and how: a new directory is complete under its final name, or not there at all.

The files are written to a temporary directory next to the output, synchronized with the disk, and the directory is
renamed. A process that is killed before the rename leaves a hidden directory `.NAME.….partial`, which
`remove_unfinished` deletes.
"""

import glob
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from depthgauge.base.errors import InputError, OutputError, require_path, unknown_name
from depthgauge.base.format import size_text
from depthgauge.base.journal import RECORD, Journal
from depthgauge.checkpoints.source.library import quiet, transformers
from depthgauge.checkpoints.source.model_files import PICKLED, Source
from depthgauge.results.shrink_record import ShrinkOptions

# --- The outputs of `shrink`: a directory, or a GGUF file with its record next to it ---------------------------------

WRITTEN = ("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0", "F16", "BF16", "F32")
"""Types of tensors that gguf-py can write."""


def is_gguf_name(out: str | Path | None) -> bool:
    """Return whether an output is a GGUF file by its name; all other names are directories."""
    return out is not None and Path(out).suffix.lower() == ".gguf"


def check_gguf_output(source: Source | None, kind: str | None, name: str) -> None:
    """Raise unless the model called `name` can be written as a GGUF file, with weights of the type `kind` if given.

    `source` is None for a model in memory.
    """
    if kind is not None and kind not in WRITTEN:
        raise unknown_name("dtype", kind, WRITTEN)
    if source is None or source.gguf is None:
        raise InputError(
            f"a GGUF file can be written if the model is one, and {name} is not; convert it with llama.cpp's "
            "convert_hf_to_gguf.py and shrink the result, or give a directory as --out"
        )


def record_file(out: str | Path) -> Path:
    """Return where the record of an output is: in its directory, or next to a GGUF file, `NAME.depthgauge.json`."""
    return Path(out).with_suffix(f".{RECORD}") if is_gguf_name(out) else Path(out) / RECORD


def has_written(journal: Journal, out: str | Path) -> bool:
    """Return whether a run, before it was interrupted, has written an output completely."""
    if is_gguf_name(out):
        return journal.has_written(record_file(out)) and Path(out).is_file()
    return journal.has_written(out)


def output_folders(out: str | Path, settings: ShrinkOptions) -> list[Path]:
    """Return the directories or files that a run writes; of several sizes, one for each, `OUT-4` or `OUT-25%`."""
    names = settings.removals
    return [Path(out)] if len(names) == 1 else [sized_output(out, name) for name in names]


def sized_output(out: str | Path, size: str) -> Path:
    """Return the output of one of several sizes: `OUT-4`, or `NAME-4.gguf`."""
    path = Path(out)
    return path.with_stem(f"{path.stem}-{size}") if is_gguf_name(path) else Path(f"{out}-{size}")


ALIGNED = "alignment_heads"
"""The setting of generation with pairs of a decoder block and a head, which find the times of words."""
_TOKENIZER = (
    "tokenizer.*", "tokenizer_config.json", "vocab.txt", "vocab.json", "vocab.bpe", "merges.txt",
    "special_tokens_map.json", "added_tokens.json", "normalizer.json", "spiece.model",
    "sentencepiece.bpe.model", "tekken.json", "chat_template.*", "additional_chat_templates",
    "preprocessor_config.json", "processor_config.json",
)  # fmt: skip
"""Files of a tokenizer and of its chat templates, and of a processor."""
_COMPANIONS = (
    "LICENSE", "LICENSE.*", "LICENCE", "LICENCE.*", "NOTICE", "NOTICE.*", "USE_POLICY*",
    "preprocessor_config.json", "processor_config.json", "modules.json", "sentence_bert_config.json",
    "config_sentence_transformers.json",
)  # fmt: skip
"""Files that remain valid for the shrunk model: licences, processors of images and sound, which may not be
beside another tokenizer, and the pipeline of a sentence-transformers model."""
_WEIGHTS = ("model*.safetensors", "consolidated*.safetensors", PICKLED)
"""Files of weights."""
_TEXTS = (
    "config.json", "generation_config.json", "model.safetensors.index.json", "pytorch_model.bin.index.json",
    "README.md", ".gitattributes", RECORD, "plan.mergekit.yaml",
)  # fmt: skip
"""Further files of a checkpoint, or of a model that depthgauge wrote."""


def check_output_directory(out: str | Path, source: Source | None, overwrite: bool, needed: int = 0) -> None:
    """Check that a model of `needed` bytes, 0 if unknown, can be written to a directory, before any long work.

    The output may not replace the checkpoint `source` that is read. With `overwrite`, the directory may exist; see
    `refuse_other_files` for those that are never replaced.

    Raises:
        InputError: the output exists, is not a directory, or overlaps with the checkpoint; its parent does not exist.
        OutputError: nothing can be written there, or the disk has less than `needed` bytes free.
    """
    target = _target(out)
    if source is not None:
        read, folder = Path(os.path.realpath(source.path)), Path(os.path.realpath(source.folder))
        if target == read:
            raise InputError(f"{out} is the model itself; give another --out")
        if target in read.parents:
            raise InputError(f"{out} contains the model {source.target}; give another --out")
        if source.gguf is None and folder in target.parents:
            raise InputError(f"{out} is inside the model directory {source.folder}; give another --out")
        if source.tokenizer is not None and Path(os.path.realpath(source.tokenizer)).is_relative_to(target):
            raise InputError(f"{out} contains the tokenizer {source.tokenizer}; give another --out")
    if target.is_dir():
        if not overwrite:
            raise InputError(f"{out} exists; use --overwrite to replace it, or give another --out")
        refuse_other_files(target, out)
        if os.path.ismount(target):
            raise InputError(f"{out} is a mount point and cannot be replaced; give a directory inside it")
    trial = target.parent / _hidden_name()
    try:
        trial.mkdir()
    except OSError as error:
        raise OutputError(f"cannot write {out}: {error.strerror or error}") from error
    finally:
        with suppress(OSError):
            trial.rmdir()
    require_room(out, needed)


def require_room(out: str | Path, needed: int) -> None:
    """Raise if the disk of an output has less than `needed` bytes free."""
    if needed > (free := free_disk(out)):
        raise OutputError(
            f"cannot write {out}: it needs {size_text(needed)}, and {size_text(free)} of the disk are free; free some "
            "space or give another --out"
        )


def free_disk(out: str | Path) -> int:
    """Return the free bytes of the disk of an output."""
    return shutil.disk_usage(Path(os.path.realpath(out)).parent).free


def refuse_other_files(folder: Path, out: str | Path) -> None:
    """Raise unless a directory is empty, or a checkpoint all of whose files have names that checkpoints use.

    Errors call it `out`.
    """
    files = [path for path in folder.rglob("*") if not path.is_dir() or path.is_symlink()]
    advice = "--overwrite replaces checkpoints only; give another --out"
    if others := sorted(str(path.relative_to(folder)) for path in files if not _is_of_checkpoint(path, folder)):
        more = f" and {len(others) - 1} more" if len(others) > 1 else ""
        raise InputError(f"{out} has files that do not belong to a checkpoint, {others[0]}{more}; {advice}")
    if files and not (_names_model(folder / "config.json") and any(_matches(path, _WEIGHTS) for path in files)):
        raise InputError(f"{out} is not a checkpoint: it has no weights with a config.json of transformers; {advice}")


def _is_of_checkpoint(path: Path, folder: Path) -> bool:
    """Return whether a file of a directory has a name that checkpoints use."""
    if path.parent == folder:
        return _matches(path, (*_WEIGHTS, *_TEXTS, *_TOKENIZER, *_COMPANIONS))
    module = path.relative_to(folder).parts[0]
    if module == "additional_chat_templates":
        return path.suffix == ".jinja"
    return module in _modules(folder) and path.name in ("config.json", "model.safetensors", "pytorch_model.bin")


def _matches(path: Path, patterns: tuple[str, ...]) -> bool:
    return any(path.match(pattern) for pattern in patterns)


def _names_model(config: Path) -> bool:
    """Return whether a file is the configuration of a transformers model."""
    try:
        return "model_type" in json.loads(config.read_text("utf-8"))
    except (OSError, ValueError, TypeError):
        return False


def _modules(folder: Path) -> list[str]:
    """Return the directories of the modules that follow the transformer in a sentence-transformers model."""
    try:
        paths = [module.get("path") for module in json.loads((folder / "modules.json").read_text("utf-8"))]
    except (OSError, ValueError, TypeError, AttributeError):
        return []
    return [path for path in paths if path and Path(path).name == path]


@contextmanager
def written_model(
    model: Any, source: Source | None, tokenizer: Any, out: str | Path, *, overwrite: bool, max_shard: str = "5GB"
) -> Iterator[Path]:
    """Write a model and its tokenizer to a directory, atomically.

    Yields a temporary directory with the complete model; check it there, and add further files. At the end of the
    context the directory gets its final name. If the context raises, nothing is left.

    Weights are written as safetensors files. The tokenizer, the chat template, the generation configuration and the
    licence of a directory are copied unchanged. For a GGUF file or a model from memory they are saved from memory.

    The tokenizer is used if `source`, the checkpoint that the model comes from, has no directory with tokenizer files.
    With `overwrite`, a checkpoint that exists is replaced. `max_shard` is the largest size of one weight file.

    Raises:
        InputError: `out` cannot be used; see `check_output_directory`.
        OutputError: writing failed. Nothing is left, and what was at `out` before is unchanged.
    """
    check_output_directory(out, source, overwrite)
    target = _target(out)
    temporary = target.parent / f".{target.name}{_hidden_name()}"
    try:
        temporary.mkdir()
        with quiet(), _plain_generation_config(model):
            model.save_pretrained(temporary, max_shard_size=max_shard)
        _write_generation_config(model, source, temporary)
        if source is not None and source.gguf is None:
            _copy(source.folder, temporary, (*_COMPANIONS, *map(glob.escape, _modules(source.folder))))
        folder = None if source is None else source.tokenizer_folder
        copied = 0 if folder is None else _copy(folder, temporary, _TOKENIZER)
        if tokenizer is not None and not copied:
            with quiet():
                tokenizer.save_pretrained(temporary)
        yield temporary
        _synchronize(temporary)
        _move(temporary, target, overwrite)
    except (OSError, SafetensorError) as error:
        reason = error.strerror if isinstance(error, OSError) and error.strerror else " ".join(str(error).split())
        raise OutputError(f"cannot write {out}: {reason}") from error
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _target(out: str | Path) -> Path:
    """Return the directory that a write to `out` creates or replaces, with symbolic links followed."""
    given = require_path("out", out)
    try:
        target = Path(os.path.realpath(given))
        if target.exists() and not target.is_dir():
            raise InputError(f"{given} is a file; give the name of a directory as --out")
        if not target.parent.is_dir():
            raise InputError(f"there is no directory {given.parent} for {given}; create it: mkdir -p {given.parent}")
    except OSError as error:  # a name that is too long, for example
        raise InputError(f"cannot write {given}: {error.strerror or error}; give another --out") from error
    return target


def remove_unfinished(out: str | Path) -> None:
    """Delete what killed processes left while they wrote to `out`."""
    target = _target(out)
    unfinished = re.compile(re.escape(f".{target.name}") + r"\.[0-9a-f]{16}\.partial")
    for path in list(target.parent.iterdir()):
        if unfinished.fullmatch(path.name) and path.is_dir():
            shutil.rmtree(path, ignore_errors=True)


def _hidden_name() -> str:
    return f".{secrets.token_hex(8)}.partial"


@contextmanager
def _plain_generation_config(model: Any) -> Iterator[None]:
    """Replace the generation configuration of a model by an empty one for a while.

    `save_pretrained` refuses contradictory settings, such as a temperature without sampling, which many published
    models have. `_write_generation_config` writes the configuration as it is.
    """
    own = getattr(model, "generation_config", None)
    if own is not None:
        model.generation_config = transformers().GenerationConfig()
    try:
        yield
    finally:
        if own is not None:
            model.generation_config = own


def _write_generation_config(model: Any, source: Source | None, folder: Path) -> None:
    """Copy the generation configuration of the source, with the model's `ALIGNED`, or write that of the model."""
    written = folder / "generation_config.json"
    if source is not None and source.gguf is None and (source.folder / written.name).is_file():
        shutil.copyfile(source.folder / written.name, written)
        if getattr(model.config, "is_encoder_decoder", False):
            settings = json.loads(written.read_text("utf-8"))
            if settings.pop(ALIGNED, None) is not None:
                heads = getattr(model.generation_config, ALIGNED, None)
                settings |= {} if heads is None else {ALIGNED: heads}
                written.write_text(json.dumps(settings, indent=2) + "\n", "utf-8")
    elif written.is_file():  # the model can generate
        with quiet():
            model.generation_config.to_json_file(written, use_diff=True)


def _copy(source: Path, folder: Path, patterns: tuple[str, ...]) -> int:
    """Copy the files and directories that match one of the patterns, and return how many there were."""
    found = sorted({path for pattern in patterns for path in source.glob(pattern)})
    for path in found:
        if path.is_dir():
            shutil.copytree(path, folder / path.name, copy_function=shutil.copyfile)
        else:
            shutil.copyfile(path, folder / path.name)
    return len(found)


def _synchronize(folder: Path) -> None:
    """Give all files the default permissions and wait until they are on the disk."""
    probe = folder / _hidden_name()
    probe.touch()
    mode = probe.stat().st_mode
    probe.unlink()
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            os.chmod(path, mode)
        _flush(path)
    _flush(folder)


def _flush(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _move(temporary: Path, target: Path, overwrite: bool) -> None:
    """Rename a complete directory to its final name; a directory that is replaced is deleted afterwards.

    The replaced directory is called `NAME.replaced-…` meanwhile, so that it is found if the process is killed here.
    """
    if not target.exists():
        os.rename(temporary, target)
    elif not overwrite:
        raise FileExistsError(17, "the directory was created in the meantime")
    else:
        refuse_other_files(target, target)  # somebody may have put a file there during the work
        aside = target.with_name(f"{target.name}.replaced-{secrets.token_hex(4)}")
        os.rename(target, aside)
        try:
            os.rename(temporary, target)
        except OSError:
            os.rename(aside, target)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    _flush(target.parent)
