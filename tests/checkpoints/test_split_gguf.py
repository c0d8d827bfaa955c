"""GGUF files in several pieces, written by gguf-py, against the same file in one."""

import shutil
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf
from transformers import LlamaConfig

from depthgauge.base.errors import InputError
from depthgauge.checkpoints.source.model_files import (
    file_digests,
    find,
    gguf_metadata,
    piece_names,
    weight_bytes,
)
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model, load_tokenizer
from depthgauge.checkpoints.weights.stored_weights import count_parameters, stored_dtype
from depthgauge.workflows.gauge import gauge
from depthgauge.workflows.shrink import shrink

HERE = Placement("float32", "cpu")
PIECES = [f"m-0000{number}-of-00003.gguf" for number in (1, 2, 3)]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_gguf(tmp_path / "whole.gguf", add_bos=True)
    write_gguf(tmp_path / "m.gguf", add_bos=True, most=12)
    assert sorted(path.name for path in tmp_path.iterdir()) == [*PIECES, "whole.gguf"]
    return tmp_path


@pytest.mark.parametrize("given", PIECES)
def test_any_piece_is_the_whole_model(folder: Path, given: str) -> None:
    whole, split = find(folder / "whole.gguf"), find(folder / given)
    assert split.path == folder / PIECES[0]
    assert count_parameters(split) == count_parameters(whole)
    assert (
        gguf_metadata(split).items()
        >= {key: value for key, value in gguf_metadata(whole).items() if not key.startswith("GGUF.")}.items()
    )
    assert not any(key.startswith("split.") for key in split.reader.fields)
    expected = {tensor.name: tensor.data for tensor in gguf.GGUFReader(folder / "whole.gguf").tensors}
    assert [tensor.name for tensor in split.reader.tensors] == list(expected)
    assert all(np.array_equal(tensor.data, expected[tensor.name]) for tensor in split.reader.tensors)
    assert list(file_digests(split)) == PIECES
    assert weight_bytes(split) == sum((folder / name).stat().st_size for name in PIECES)
    tokens = [load_tokenizer(one, HERE)("a b ab").input_ids for one in (whole, split)]
    assert tokens[0] == tokens[1]
    ours, theirs = (load_model(one, load_config(one, HERE), HERE).model.state_dict() for one in (split, whole))
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def test_gauge_finds_the_same_in_both(folder: Path) -> None:
    names = ("whole.gguf", PIECES[1])
    asked = {"tokens": 64, "window": 16, "what_if": "block", "device": "cpu", "allow": "unread"}
    whole, split = (gauge(folder / name, **asked).subjects[0].layers for name in names)
    assert whole == split


@pytest.mark.usefixtures("forked_verification")
def test_shrink_reads_pieces(folder: Path) -> None:
    asked = {"remove": 1, "window": 16, "effort": "quick", "recover": "none", "device": "cpu", "allow": "unread"}
    made = [shrink(folder / name, out=folder / f"{name}-out", **asked).record for name in ("whole.gguf", PIECES[2])]
    assert made[0].removed == made[1].removed
    assert made[0].loss == made[1].loss
    assert list(made[1].plan.files) == PIECES
    assert not (folder / f"{PIECES[2]}-out" / "plan.mergekit.yaml").exists()  # mergekit reads no GGUF files
    assert "its weights were dequantized" in (folder / f"{PIECES[2]}-out" / "README.md").read_text()


def test_missing_pieces_are_named(folder: Path) -> None:
    (folder / PIECES[0]).unlink()
    with pytest.raises(InputError, match=f"{PIECES[1]} is a piece of a GGUF file in 3 pieces, .* lacks {PIECES[0]};"):
        find(folder / PIECES[1])
    (folder / PIECES[2]).unlink()
    with pytest.raises(InputError, match=f"lacks {PIECES[0]}, {PIECES[2]}; put all pieces into one directory"):
        find(folder / PIECES[1])
    (folder / PIECES[1]).unlink()
    with pytest.raises(InputError, match=f"cannot read .*{PIECES[1]}: no such file"):
        find(folder / PIECES[1])


def test_damaged_pieces_are_refused(folder: Path) -> None:
    (folder / PIECES[2]).write_bytes(b"GGML")
    with pytest.raises(InputError, match=f"{PIECES[2]} is not a GGUF file"):
        find(folder / PIECES[0])
    shutil.copy(folder / PIECES[1], folder / PIECES[2])
    with pytest.raises(InputError, match=r"the pieces of .* do not belong together; download them again"):
        load_config(find(folder / PIECES[0]), HERE)


def test_pieces_with_other_names_are_refused(folder: Path) -> None:
    (folder / PIECES[0]).rename(folder / "first.gguf")
    with pytest.raises(InputError, match=r"of 3 pieces by its metadata, and of 1 by its name; .*-00001-of-00003\.gguf"):
        load_config(find(folder / "first.gguf"), HERE)
    for number in (1, 2):
        shutil.copy(folder / "whole.gguf", folder / f"x-0000{number}-of-00002.gguf")
    with pytest.raises(InputError, match="of 1 piece by its metadata, and of 2 by its name"):
        load_config(find(folder / "x-00001-of-00002.gguf"), HERE)


def test_a_file_that_was_joined_is_whole(folder: Path) -> None:
    """The program that joins pieces leaves `split.count` at 0."""
    reader = gguf.GGUFReader(folder / PIECES[0], "r+")
    for name in PIECES[1:]:
        (folder / name).unlink()
    reader.fields["split.count"].parts[-1][0] = 0
    reader.data.flush()
    (folder / PIECES[0]).rename(folder / "joined.gguf")
    assert find(folder / "joined.gguf").reader.tensors


def test_names_that_are_no_pieces() -> None:
    for name in ("m.gguf", "m-00000-of-00003.gguf", "m-00004-of-00003.gguf", "m-1-of-3.gguf", "m-00001-OF-00003.gguf"):
        assert piece_names(name) == [name]
    assert piece_names("M-00001-of-00001.GGUF") == ["M-00001-of-00001.GGUF"]


def test_a_gguf_file_has_no_dtype_of_its_own(folder: Path) -> None:
    """Its weights are dequantized; their dtype is asked for before they are."""
    assert stored_dtype(LlamaConfig(dtype=None), find(folder / "whole.gguf")) is None
