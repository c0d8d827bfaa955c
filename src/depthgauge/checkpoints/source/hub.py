"""Models on the Hugging Face hub: what their names look like, and how their files come into the cache."""

import glob
import os
import re
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path, PurePosixPath
from typing import Any

from depthgauge.base.errors import optional
from depthgauge.base.progress import no_message
from depthgauge.checkpoints.source.library import CheckpointError, short
from depthgauge.checkpoints.source.model_files import (
    PICKLES,
    SAFETENSORS,
    Source,
    check_config,
    check_safetensors,
    find,
    piece_names,
    require_tokenizer,
    shard_names,
)
from depthgauge.results.gauge_record import HubModel

_PART = r"\w(?:[\w.-]*\w)?"
_NAME = re.compile(
    rf"(?:(?P<model>\w(?:[\w-]*\w)?)|(?P<repo>{_PART}/{_PART})(?:/(?P<file>(?:{_PART}/)*{_PART}\.gguf))?)"
    r"(?:@(?P<revision>.+))?",
    re.ASCII,
)
_LONGEST = 96
"""The hub has no longer names."""
_FILES = (".bin", ".csv", ".gguf", ".html", ".json", ".jsonl", ".pt", ".pth", ".safetensors", ".toml", ".txt")
"""Ends of the names of files; no model on the hub is meant by `folder/net.safetensors`."""
_TEXTS = re.compile(
    r"[^/]+\.(json|txt|model|jinja|py|bpe|tiktoken)|(LICEN[CS]E|NOTICE|USE_POLICY)[^/]*"
    r"|additional_chat_templates/[^/]+\.jinja|\d+_[^/]+/(config\.json|model\.safetensors)"
)
"""Files besides the weights: configuration, tokenizer, licence, the modules of a sentence-transformers model."""


@dataclass(frozen=True)
class HubName:
    """The name of a model on the hub: `name`, `org/name` or `org/name/file.gguf`, each with `@revision` or without.

    - `repo`: the repository
    - `file`: the path of a GGUF file in it, or of its first piece; None for other models
    - `revision`: a branch, a tag or a commit; None is the default branch
    """

    repo: str
    file: str | None = None
    revision: str | None = None

    def __str__(self) -> str:
        return "/".join(filter(None, (self.repo, self.file))) + (f"@{self.revision}" if self.revision else "")


def parse_hub_name(target: object) -> HubName | None:
    """Return the name on the hub that a target is, or None if it is a path.

    Everything that exists here is a path, and so is a file in a directory that exists here. A path that does not exist
    is no name if it starts with `.`, `/` or `~`, if it ends like a file, or if it is a `Path`.
    """
    name = _spelled(target)
    return None if name is None or os.path.exists(str(target) if name.revision else name.repo) else name


def _spelled(target: object) -> HubName | None:
    """Return a target as a name if it is spelled like one, whether or not there is a file or directory of this name."""
    parts = _NAME.fullmatch(target) if isinstance(target, str) else None
    if parts is None:
        return None
    repo, file, revision = parts["model"] or parts["repo"], parts["file"], parts["revision"]
    if len(repo) > _LONGEST or PurePosixPath(repo).suffix.lower() in _FILES:
        return None
    if revision is not None and revision.lower().endswith(".gguf"):
        revision, _, file = revision.partition("/")
        raise CheckpointError(f"the revision comes last: give {repo}/{file}@{revision} instead of {target}")
    return HubName(repo, None if file is None else piece_names(file)[0], revision)


def resolve(
    target: str | Path,
    allow_pickle: bool = False,
    tokenizer: str | None = None,
    message: Callable[[str], None] = no_message,
    trust_remote_code: bool = False,
    weights: bool = True,
) -> Source:
    """Return the checkpoint of a directory, a GGUF file or a name on the hub, which is downloaded if necessary.

    Args:
        target: the path, or the name; see `parse_hub_name`.
        allow_pickle: accept weights in `pytorch_model*.bin` files; see `find`.
        tokenizer: the directory of another tokenizer.
        message: called with a sentence if the hub cannot be asked and the copy in the cache is used.
        trust_remote_code: accept a model that is defined by code in its directory.
        weights: whether they are needed. Otherwise those of a directory on the hub are not downloaded.

    Raises:
        CheckpointError: there is no such checkpoint, it cannot be read, or it needs `allow_pickle` or
            `trust_remote_code`. Weights that would be refused are not downloaded.
    """
    name = parse_hub_name(target)
    if name is None:
        spelled = _spelled(str(target))
        if spelled is not None and Path(target).is_dir() and not (Path(target) / "config.json").is_file():
            raise CheckpointError(
                f"{target} is a directory but not a checkpoint: it contains no config.json; give one that does, or "
                f"{spelled.repo}@main for the model of this name on the hub"
            )
        source = find(target, allow_pickle, tokenizer, weights=weights)
    else:
        require_tokenizer(tokenizer)  # before the download
        path, hub = _download(name, allow_pickle, message, weights)
        source = find(path, allow_pickle, tokenizer, hub, weights)
    if source.gguf is None:
        check_config(source.folder / "config.json", source.target, trust_remote_code)
        if not source.pickled:
            check_safetensors(source)
    return source


def _download(
    name: HubName, allow_pickle: bool, message: Callable[[str], None], weights: bool
) -> tuple[Path, HubModel]:
    """Return the directory or GGUF file in the cache, and what it is on the hub."""
    library = _library()
    try:
        info = library.HfApi().model_info(name.repo, revision=name.revision)
    except Exception as error:  # the errors of huggingface_hub and those of its HTTP library
        folder = _cached(library, name, [name.file or "config.json"])
        if folder is None:
            raise CheckpointError(_reason(library, name, error)) from error
        if not isinstance(error, library.errors.OfflineModeIsEnabled):
            reason = f"{library.constants.ENDPOINT} cannot be asked about {name}: {short(error)}"
            message(f"{reason}; using the commit {folder.name} in the cache")
    else:
        listed = {one.rfilename for one in info.siblings or ()}
        try:
            wanted = list(_wanted(library, name, info.sha, listed, allow_pickle, weights))
            folder = _cached(library, name, wanted)
            if folder is None or folder.name != info.sha:
                patterns = [glob.escape(one) for one in wanted]
                folder = Path(library.snapshot_download(name.repo, revision=name.revision, allow_patterns=patterns))
        except CheckpointError:
            raise
        except Exception as error:
            raise CheckpointError(_reason(library, name, error)) from error
    hub = HubModel(repo=name.repo, file=name.file, revision=name.revision, commit=folder.name)
    return folder / (name.file or ""), hub


def _library() -> Any:
    for lazy in ("constants", "errors"):
        optional(f"huggingface_hub.{lazy}", "a model on the hub", "models")
    return import_module("huggingface_hub")


def _cached(library: Any, name: HubName, files: Collection[str]) -> Path | None:
    """Return the directory of the revision in the cache, or None unless it has all of these files."""
    try:
        folder = library.snapshot_download(
            name.repo, revision=name.revision, allow_patterns=list(map(glob.escape, files)), local_files_only=True
        )
    except (FileNotFoundError, ValueError):  # it is not there; no repository can have the name
        return None
    return Path(folder) if all((Path(folder) / file).is_file() for file in files) else None


def _wanted(
    library: Any, name: HubName, commit: str, listed: set[str], allow_pickle: bool, weights: bool
) -> Iterator[str]:
    """Yield the files of a repository that are needed; raise if it has no weights that may be read."""
    ggufs = sorted(one for one in listed if one.endswith(".gguf") and one == piece_names(one)[0])
    if name.file is not None:
        for piece in piece_names(name.file):
            if piece not in listed:
                raise CheckpointError(f"{name.repo} has no file {piece} on the hub; {_known(name, ggufs)}")
            yield piece
        return
    chosen: list[str] = []
    for file in (SAFETENSORS, PICKLES) if allow_pickle else (SAFETENSORS,):
        if chosen:
            break
        index = f"{file}.index.json"
        if file in listed:
            chosen = [file]
        elif index in listed:
            path = library.hf_hub_download(name.repo, index, revision=commit)
            chosen = [index, *shard_names(Path(path), str(name))]
    if ggufs and not (chosen and "config.json" in listed):
        raise CheckpointError(f"{name} has GGUF files instead of a config.json with weights; {_known(name, ggufs)}")
    if not chosen:
        is_pickled = any(one in listed for one in (PICKLES, f"{PICKLES}.index.json"))
        hint = "its weights are pickled (*.bin): use --allow pickle to read them" if is_pickled else "give another one"
        raise CheckpointError(
            f"{name} has no weights that can be read, neither {SAFETENSORS} nor {SAFETENSORS}.index.json; {hint}"
        )
    if "config.json" not in listed:
        raise CheckpointError(f"{name} has no config.json, so it is not a checkpoint of transformers; give another one")
    yield from chosen if weights else ()
    yield from sorted(one for one in listed if _TEXTS.fullmatch(one) and not one.endswith(".index.json"))


def _known(name: HubName, ggufs: list[str]) -> str:
    if not ggufs:
        return "it has no GGUF files"
    more = f" or {len(ggufs) - 5} more" if len(ggufs) > 5 else ""
    revision = f"@{name.revision}" if name.revision else ""
    return f"give {' or '.join(f'{name.repo}/{file}{revision}' for file in ggufs[:5])}{more}"


def _reason(library: Any, name: HubName, error: Exception) -> str:
    """Return why a model cannot be had, as one sentence that says what to do."""
    errors, hub, said = library.errors, library.constants.ENDPOINT, short(error).rstrip(".")
    here = f"{name} is not a file or directory here, and"
    if isinstance(error, errors.GatedRepoError):
        return (
            f"{name} is a gated model: accept its conditions at {hub}/{name.repo}, then log in with `hf auth login` or "
            "set HF_TOKEN"
        )
    if isinstance(error, errors.RepositoryNotFoundError):
        return (
            f"{here} {hub} has no model of this name that you may read; check the name, or log in with `hf auth login` "
            "if the model is private"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return f"{name.repo} has no revision {name.revision} on {hub}; give a branch, a tag or a commit"
    if isinstance(error, errors.HFValidationError):
        return f"{here} no model on a hub can have this name: {said}; check the name"
    cache = f"it is not in the cache {library.constants.HF_HUB_CACHE}"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return f"{here} {cache}; unset HF_HUB_OFFLINE to download it, or copy it into the cache"
    return f"{here} {cache}, and it cannot be downloaded from {hub}: {said}; run the command again when it can"
