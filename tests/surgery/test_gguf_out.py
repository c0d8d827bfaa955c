"""GGUF files of shrunk models: what is copied, what is rounded, what the metadata says, and who can read it.

The oracles are the bytes of the source file, transformers' loader, and llama.cpp.
"""

import shutil
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from tiny_gguf import write_gguf
from tiny_models import tokens

from depthgauge.base.errors import InputError, VerificationError
from depthgauge.base.progress import silent
from depthgauge.checkpoints.source.library import CheckpointError
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Checkpoint, Placement, load_config, load_model
from depthgauge.surgery.extract import extract
from depthgauge.surgery.gguf_layout import (
    Arrangement,
    GgufLayout,
    check_written,
    decode,
    encode,
    match_weights,
    read_layout,
    shrunk_fields,
)
from depthgauge.surgery.gguf_layout import write_gguf as write_file
from depthgauge.surgery.repair import round_changed, round_map
from depthgauge.surgery.student import EFFORT, Student
from depthgauge.surgery.verify import LlamaComparison, _reason, compare_with_llama, require_same
from depthgauge.surgery.write_model import WRITTEN

HERE = Placement(device="cpu")
MIXED = {"attn_output": "Q4_1", "ffn_down": "Q4_K", "ffn_up": "Q5_0", "attn_q": "Q8_0", "attn_k": "F16"}


def opened(path: Path, fallback: str | None = None) -> tuple[GgufLayout, Checkpoint]:
    source = find(path)
    layout = read_layout(source, fallback, str(path))
    checkpoint = load_model(source, load_config(source, HERE), HERE)
    return match_weights(layout, checkpoint), checkpoint


def changed_student(checkpoint: Checkpoint, kept: list[int], only: tuple[int, ...]) -> Student:
    """Return a student whose blocks `only` have other weights."""
    ids = tokens(16, 12, seed=3)
    student = Student(checkpoint, ids[:8], ids[8:], effort=EFFORT["quick"])
    student.kept = kept
    generator = torch.Generator().manual_seed(1)
    for layer in only:
        weights = list(student.runner.blocks[layer].parameters())
        student.remember(weights)
        for weight in weights:
            weight.data += 0.05 * torch.randn(weight.shape, generator=generator)
    return student


@pytest.mark.parametrize(("family", "layers"), [("llama", 3), ("qwen2", 3), ("gemma3", 7)])
def test_every_weight_is_found_in_the_file(family: str, layers: int, tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, add_bos=True, family=family, layers=layers)
    layout, checkpoint = opened(path)
    blocks = checkpoint.model.get_submodule("model.layers")
    found = set()
    for layer, block in enumerate(blocks):
        for leaf, weight in block.named_parameters():
            tensor = layout.tensor(layer, leaf)
            np.testing.assert_array_equal(layout.arrangements[leaf].stored(weight.detach()).numpy(), tensor.data)
            found.add(tensor.name)
    assert found == {tensor.name for tensor in gguf.GGUFReader(path).tensors if tensor.name.startswith("blk.")}
    permuted = {leaf for leaf, how in layout.arrangements.items() if how.rows is not None}
    assert permuted == ({"self_attn.q_proj.weight", "self_attn.k_proj.weight"} if family == "llama" else set())


@pytest.mark.parametrize("how", [Arrangement(is_transposed=True), Arrangement(offset=1.0),
                                 Arrangement(rows=torch.tensor([2, 0, 1]))])  # fmt: skip
def test_an_arrangement_and_its_inverse(how: Arrangement) -> None:
    stored = torch.randn(3, 3, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(how.stored(how.weight(stored)), stored)


def test_rounding_with_feedback_changes_the_outputs_less() -> None:
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(512, 16, generator=generator) @ torch.randn(16, 128, generator=generator)
    inputs += 0.1 * torch.randn(512, 128, generator=generator)
    values = torch.randn(24, 128, generator=generator)
    for name in WRITTEN[:5]:
        kind = gguf.GGMLQuantizationType[name]
        plain, fed = encode(values, kind).decode(), round_map(values, (inputs.T @ inputs).double(), kind)
        errors = [float(((made - values) @ inputs.T).norm()) for made in (plain, fed.decode())]
        assert errors[1] < 0.6 * errors[0], name
        torch.testing.assert_close(encode(fed.decode(), kind).decode(), fed.decode(), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "qwen2", "gemma3"])
def test_a_written_file_is_the_model_in_memory(family: str, tmp_path: Path) -> None:
    path, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(path, add_bos=True, family=family, layers=8, hidden=256, types=MIXED)
    layout, checkpoint = opened(path)
    kept = [0, 2, 3, 5, 7]
    student = changed_student(checkpoint, kept, (3, 7))
    before = student.losses()
    encoded = round_changed(student, layout)
    assert not torch.equal(student.losses(), before)
    model = student.model()
    write_file(out, layout, kept, shrunk_fields(layout, kept, model.config.layer_types if family == "gemma3" else None),
               encoded, silent)  # fmt: skip
    check_written(out, out, model)
    source, written = ({tensor.name: tensor for tensor in gguf.GGUFReader(one).tensors} for one in (path, out))
    new_index = {old: new for new, old in enumerate(kept)}
    assert {name.split(".")[1] for name in written if name.startswith("blk.")} == {"0", "1", "2", "3", "4"}
    for name, tensor in source.items():
        place = int(name.split(".")[1]) if name.startswith("blk.") else None
        if place is not None and place not in kept:
            continue
        other = written[name if place is None else f"blk.{new_index[place]}.{name.split('.', 2)[2]}"]
        assert (place in (3, 7)) == (tensor.data.tobytes() != other.data.tobytes()), name
        fallback = place in (3, 7) and "ffn_down" in name
        assert other.tensor_type.name == ("Q8_0" if fallback else tensor.tensor_type.name)
    # llama.cpp, which knows nothing of this, computes the same; a wrong order of the blocks is found.
    pytest.importorskip("xllamacpp")
    ids = tokens(24, 1, seed=9)[0]
    same = compare_with_llama(out, model, ids)
    require_same(out, same, LlamaComparison(0.02, 1, 1, 0.0))
    other = compare_with_llama(out, extract(checkpoint, [0, 1, 2, 3, 4]), ids)
    with pytest.raises(VerificationError, match=r"does not compute with b\.gguf what transformers computes"):
        require_same("b.gguf", other, same)


def test_a_damaged_tensor_is_found_when_the_file_is_read_back(tmp_path: Path) -> None:
    path, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(path, add_bos=True, layers=3)
    layout, checkpoint = opened(path)
    model = extract(checkpoint, [0, 2])
    tensor = layout.tensors["blk.2.attn_q.weight"]
    wrong = encode(decode(tensor.data, tensor.tensor_type).flip(0), tensor.tensor_type)
    write_file(out, layout, [0, 2], shrunk_fields(layout, [0, 2], None), {"blk.2.attn_q.weight": wrong}, silent)
    with pytest.raises(VerificationError, match=r"model\.layers\.1\.self_attn\.q_proj\.weight in .* is not the one"):
        check_written(out, out, model)


def test_the_blocks_with_a_sliding_window_stay_the_same_blocks(tmp_path: Path) -> None:
    path, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(path, add_bos=True, family="gemma3", layers=8)
    layout, checkpoint = opened(path)
    types = checkpoint.config.layer_types
    assert [layer for layer, kind in enumerate(types) if kind == "full_attention"] == [5]
    key = "gemma3.attention.sliding_window_pattern"
    assert key not in shrunk_fields(layout, range(7), types[:7])  # the rule of the architecture says the same
    kept = [0, 3, 5, 6]
    fields = shrunk_fields(layout, kept, [types[layer] for layer in kept])
    assert fields[key][0] == [True, True, False, True]
    write_file(out, layout, kept, fields, {}, silent)
    # depthgauge reads the list that it wrote, and shortens it when the file is shrunk again
    again, smaller = opened(out)
    assert smaller.config.layer_types == [types[layer] for layer in kept]
    assert shrunk_fields(again, [0, 2], [smaller.config.layer_types[layer] for layer in (0, 2)])[key][0] == [
        True,
        False,
    ]


def test_a_wrong_list_of_sliding_windows_is_found(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    path, out = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(path, add_bos=True, family="gemma3", layers=8)
    layout, checkpoint = opened(path)
    kept, ids = [0, 3, 5, 6], tokens(24, 1, seed=9)[0]
    model, source = extract(checkpoint, kept), compare_with_llama(path, checkpoint.model, ids)
    fields = shrunk_fields(layout, kept, model.config.layer_types)
    write_file(out, layout, kept, fields, {}, silent)
    require_same(out, compare_with_llama(out, model, ids), source)
    del fields["gemma3.attention.sliding_window_pattern"]
    write_file(out, layout, kept, fields, {}, silent)
    wrong = compare_with_llama(out, model, ids)
    with pytest.raises(VerificationError, match="what transformers computes with its weights"):
        require_same(out, wrong, source)


PER_LAYER = {
    "attention.head_count_kv": [2, 2, 2, 2],
    "feed_forward_length": [64, 64, 64, 64],
    "rope.dimension_sections": [1, 2, 3, 4],
    "split.count": 1,
}


def test_lists_with_an_entry_per_block_are_shortened(tmp_path: Path) -> None:
    path, out, wrong = (tmp_path / f"{name}.gguf" for name in "abc")
    write_gguf(path, add_bos=True, layers=4, fields=PER_LAYER)
    layout = read_layout(find(path), None, "a")
    fields = shrunk_fields(layout, [0, 3], None)
    values = {key: value for key, (value, _) in fields.items()}
    assert values["llama.attention.head_count_kv"] == [2, 2]
    assert values["llama.feed_forward_length"] == [64, 64]
    assert values["llama.rope.dimension_sections"] == [1, 2, 3, 4]
    assert values["llama.block_count"] == 2
    assert "split.count" not in values
    assert values["tokenizer.ggml.tokens"] == layout.fields["tokenizer.ggml.tokens"][0]
    write_file(out, layout, [0, 3], fields, {}, silent)
    write_gguf(tmp_path / "plain.gguf", add_bos=True, layers=4)
    model = extract(opened(tmp_path / "plain.gguf")[1], [0, 3])  # the same weights
    pytest.importorskip("xllamacpp")
    ids = tokens(24, 1, seed=9)[0]
    assert compare_with_llama(out, model, ids).difference < 0.02
    uncut = fields | {"llama.feed_forward_length": layout.fields["llama.feed_forward_length"]}
    write_file(wrong, layout, [0, 3], uncut, {}, silent)
    with pytest.raises(VerificationError, match=r"llama\.cpp cannot run .*c\.gguf: .*wrong array length"):
        compare_with_llama(wrong, model, ids)


@pytest.mark.parametrize("late", [False, True])
def test_the_reason_is_that_of_llama_whenever_its_log_is_written(late: bool) -> None:
    log = ["0.01 E llama_model_load: error loading model: wrong array length", "0.02 E srv: exiting due to an error"]
    raised = ["Traceback (most recent call last):", "RuntimeError: Failed to init server."]
    assert _reason("\n".join(raised + log if late else log + raised), 1) == log[0]
    assert _reason("\n".join(raised), 1) == raised[1]
    assert _reason("", 9) == "exit code 9"


def test_what_cannot_be_written_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, add_bos=True, layers=3, fields={"nextn_predict_layers": 1})
    with pytest.raises(CheckpointError, match=r"llama\.nextn_predict_layers depends on the numbers of the blocks"):
        read_layout(find(path), None, "a")
    write_gguf(path, add_bos=True, family="gemma3", layers=62)
    with pytest.raises(CheckpointError, match="recognizes this model by its 62 blocks"):
        read_layout(find(path), None, "a")
    with pytest.raises(InputError, match=r"dtype must be one of Q4_0.*got 'Q4_K'"):
        read_layout(find(path), "Q4_K", "a")
    with pytest.raises(InputError, match=r"shared is not; convert it with llama\.cpp's convert_hf_to_gguf\.py"):
        read_layout(None, None, "shared")


def test_a_file_that_llama_does_not_know(tmp_path: Path) -> None:
    pytest.importorskip("xllamacpp")
    path, foreign = tmp_path / "a.gguf", tmp_path / "b.gguf"
    write_gguf(path, add_bos=True)
    _, checkpoint = opened(path)
    shutil.copy(path, foreign)
    content = foreign.read_bytes().replace(b"llama", b"lambo")
    foreign.write_bytes(content)
    with pytest.raises(VerificationError, match=r"llama\.cpp cannot run .*b\.gguf: .*lambo"):
        compare_with_llama(foreign, checkpoint.model, tokens(24, 1, seed=9)[0])


def test_sizes_are_upper_bounds(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    write_gguf(path, add_bos=True, layers=3, hidden=256, types=MIXED)
    layout, _ = opened(path)
    total, blocks = layout.sizes(repairs=False)
    read: Any = gguf.GGUFReader(path)
    assert total == sum(int(tensor.n_bytes) for tensor in read.tensors)
    larger = 32 * 256 // 32 * 34 - 32 * 144  # ffn_down as Q8_0 instead of Q4_K
    assert layout.sizes(repairs=True) == (total + 3 * larger, [block + larger for block in blocks])
