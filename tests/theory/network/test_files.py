"""Network files: exact round trips, error messages, and atomic writes."""

import json
import os
import pickle
import stat
import struct
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from mutate import Header, join, split
from safetensors import safe_open
from safetensors.torch import save_file

import depthgauge.theory.network.files
from depthgauge import SelfAttentionNetwork, load_network, random_network, save_network
from depthgauge.base.errors import InputError, NetworkFileError, OutputError
from depthgauge.base.io import write_atomically, write_text
from depthgauge.theory.network.network import Layer

KINDS: list[dict[str, object]] = [
    {},
    {"skip": False, "causal": True},
    {"key_dim": 2},
    {"mlp": 5, "activation": "gelu", "mlp_skip": True},
    {"norm": "pre"},
    {"norm": "post-rms"},
    {"norm": "post", "mlp": 3},
    {"distribution": "aligned", "eta": 1e-300},
]


def drawn(**changes: object) -> SelfAttentionNetwork:
    arguments: dict[str, object] = {"layers": 3, "heads": 2, "dim": 4, "eta": 0.3, "seed": 1} | changes
    return random_network(**arguments)  # type: ignore[arg-type]


def identical(a: SelfAttentionNetwork, b: SelfAttentionNetwork) -> bool:
    left, right = dict(a.named_parameters()), dict(b.named_parameters())
    return left.keys() == right.keys() and all(
        torch.equal(left[k].view(torch.uint8), right[k].view(torch.uint8)) for k in left
    )


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_network_comes_back_bit_for_bit(kind: dict[str, object], tmp_path: Path) -> None:
    network = drawn(**kind)
    network.name = 'a name with ℓ and "quotes"'
    network.provenance |= {"nested": {"list": [1, 2.5, None]}}
    network.other_metadata = {"colour": "red", "": "empty key"}
    path = tmp_path / "n.safetensors"
    save_network(network, path)
    again = load_network(path)
    assert identical(network, again)
    assert again.describe() == network.describe()
    assert again.provenance == network.provenance
    assert again.other_metadata == network.other_metadata
    x = torch.linspace(-1, 1, 12, dtype=torch.float64).reshape(3, 4)
    assert torch.equal(again(x), network(x))


def test_float32_files_hold_float32_and_load_as_asked(tmp_path: Path) -> None:
    network = drawn(dtype=torch.float32)
    path = tmp_path / "n.safetensors"
    save_network(network, path)
    with safe_open(path, framework="pt") as handle:
        assert handle.get_tensor("layers.0.query").dtype == torch.float32
    assert load_network(path).dtype == torch.float64
    assert identical(load_network(path, dtype=torch.float32), network)
    assert torch.equal(load_network(path)[1].value, network[1].value.double())


@given(scale=st.floats(1e-300, 1e300))
def test_the_scale_is_kept_to_the_last_bit(tmp_path_factory: pytest.TempPathFactory, scale: float) -> None:
    path = tmp_path_factory.mktemp("scale") / "n.safetensors"
    ones = torch.ones(1, 1, 1, dtype=torch.float64)
    save_network(SelfAttentionNetwork([Layer(ones, ones, ones)], scale=scale), path)
    assert load_network(path).scale == scale


def test_layers_that_differ_and_tensors_that_are_shared_or_strided_can_be_saved(tmp_path: Path) -> None:
    """One matrix in two places, a view of a larger tensor, an expanded tensor and a transposed tensor can be saved."""
    big = torch.randn(2, 3, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    q, expanded, turned = big[:1], torch.tensor(0.5, dtype=torch.float64).expand(2, 3, 3), big.mT
    network = SelfAttentionNetwork(
        [Layer(q, q, q), Layer(turned, turned, expanded), Layer(big[1:, :, :2], big[1:, :, 1:], big[1:])], scale=1.0
    )
    path = tmp_path / "n.safetensors"
    save_network(network, path)
    again = load_network(path)
    for a, b in zip(network, again, strict=True):
        for name in ("query", "key", "value"):
            assert torch.equal(getattr(a, name), getattr(b, name))


def test_a_loaded_network_does_not_depend_on_the_file(tmp_path: Path) -> None:
    path = tmp_path / "n.safetensors"
    network = drawn()
    save_network(network, path)
    loaded = load_network(path)
    with open(path, "r+b") as handle:  # in place, so a view of the file would change
        handle.write(b"\0" * path.stat().st_size)
    assert identical(loaded, network)
    with open(path, "r+b") as handle:
        handle.truncate(0)
    assert identical(loaded, network)


# --- error messages --------------------------------------------------------------------------------------------------


def rewrite(edit: Callable[[Header], None]) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        header, data = split(content)
        edit(header)
        return join(header, data)

    return change


def metadata(**entries: str | None) -> Callable[[bytes], bytes]:
    def edit(header: Header) -> None:
        for key, value in entries.items():
            if value is None:
                header["__metadata__"].pop(key)
            else:
                header["__metadata__"][key] = value

    return rewrite(edit)


def renamed(old: str, new: str) -> Callable[[bytes], bytes]:
    return rewrite(lambda header: header.__setitem__(new, header.pop(old)))


def reshaped(name: str, shape: list[int]) -> Callable[[bytes], bytes]:
    return rewrite(lambda header: header[name].__setitem__("shape", shape))


def retyped(name: str, dtype: str, shape: list[int]) -> Callable[[bytes], bytes]:
    return rewrite(lambda header: header[name].update(dtype=dtype, shape=shape))


def poisoned(value: float) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        header, data = split(content)
        start = header["layers.1.value"]["data_offsets"][0]
        return join(header, data[:start] + struct.pack("<d", value) + data[start + 8 :])

    return change


def pickled(_: bytes) -> bytes:
    return pickle.dumps({"layers.0.query": [1.0]})


FAILURES: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "a missing tensor": (renamed("layers.1.key", "layers.3.key"), r"lacks the tensor layers\.1\.key; write"),
    "a missing layer": (
        rewrite(lambda h: [h.__setitem__(k.replace("layers.0", "layers.7"), h.pop(k)) for k in list(h) if ".0." in k]),
        r"lacks the tensor layers\.0\.query; write",
    ),
    "part of an MLP": (renamed("layers.2.mlp.in_bias", "layers.3.query"), r"lacks the tensor layers\.2\.mlp\.in_bias"),
    "an unknown tensor": (renamed("layers.1.key", "layers.1.keys"), r"unknown tensor 'layers\.1\.keys'; a layer has"),
    "a layer index with a leading zero": (renamed("layers.1.key", "layers.01.key"), "unknown tensor"),
    "a tensor of another library": (renamed("layers.1.key", "lm_head.weight"), "unknown tensor 'lm_head.weight'"),
    "norms that are not declared": (
        renamed("layers.1.key", "layers.1.norm.weight"), r"layers\.1\.norm\.weight.*norm='none'; set norm"),
    "a wrong width": (reshaped("layers.1.key", [1, 4, 8]), r"layers\.1\.key must have .*\[2, 4, 4\], got \[1, 4, 8\]"),
    "a wrong rank": (reshaped("layers.1.key", [32]), r"layers\.1\.key has shape \[32\], expected 3 non-empty"),
    "an MLP that does not fit": (reshaped("layers.2.mlp.out", [4, 5]), r"layers\.2\.mlp\.out must have shape \[5, 4\]"),
    "a tensor of integers": (retyped("layers.1.key", "I64", [2, 4, 4]), r"layers\.1\.key is torch\.int64, expected"),
    "a bfloat16 tensor": (retyped("layers.1.key", "BF16", [2, 4, 16]), r"layers\.1\.key is torch\.bfloat16.*convert"),
    "NaN": (poisoned(float("nan")), r"layers\.1\.value holds NaN or infinity; repair"),
    "infinity": (poisoned(float("inf")), r"layers\.1\.value holds NaN or infinity; repair"),
    "minus infinity": (poisoned(float("-inf")), r"layers\.1\.value holds NaN or infinity"),
    "an unknown version": (metadata(version="3"), "version='3', this depthgauge reads versions '1' and '2'; upgrade"),
    "no version": (metadata(version=None), "version=None"),
    "another format": (metadata(format="pt"), "format='pt', expected 'depthgauge.network'; write it with save"),
    "no format": (metadata(format=None), "format=None"),
    "no metadata": (rewrite(lambda h: h.pop("__metadata__")), "format=None"),
    "a scale that is not a number": (metadata(scale="big"), "scale='big', expected a positive decimal number"),
    "a scale of zero": (metadata(scale="0"), "scale='0'"),
    "an infinite scale": (metadata(scale="1e999"), "scale='1e999'"),
    "no scale": (metadata(scale=None), "scale=None"),
    "an invalid flag": (metadata(skip="yes"), "skip='yes', expected 'true' or 'false'"),
    "no causal flag": (metadata(causal=None), "causal=None, expected 'true' or 'false'"),
    "an unknown activation": (metadata(activation="tanh"), "activation='tanh', expected one of relu, gelu"),
    "an unknown norm": (metadata(norm="batch"), "norm='batch', expected one of none, pre, post"),
    "norms that are missing": (metadata(norm="pre"), r"lacks the tensor layers\.0\.norm\.weight"),
    "provenance that is not JSON": (metadata(provenance="{"), "provenance that is not a JSON object; remove the key"),
    "provenance with very deep nesting": (metadata(provenance="[" * 100_000), "provenance that is not a JSON object"),
    "provenance that is a list": (metadata(provenance="[1]"), "provenance that is not a JSON object"),
    "a header cut short": (lambda content: content[:100], "ends too early: 100 bytes.*truncated"),
    "data cut short": (lambda content: content[:-1], "not a readable safetensors file.*copy it again"),
    "data too long": (lambda content: content + b"\0", "not a readable safetensors file"),
    "an empty file": (lambda _: b"", "ends too early: 0 bytes"),
    "seven bytes": (lambda _: b"1234567", "ends too early: 7 bytes"),
    "a header that claims to be huge": (
        lambda content: struct.pack("<Q", 2**60) + content[8:], "its header needs 1152921504606846984"),
    "a pickle": (pickled, "is a pickle, which can run code when it is opened; convert it to safetensors"),
    "text": (lambda _: b"layers: 12\nheads: 4\n", "truncated or not a safetensors file"),
}  # fmt: skip


@pytest.fixture
def good(tmp_path: Path) -> Path:
    network = drawn(mlp=5)
    path = tmp_path / "n.safetensors"
    save_network(network, path)
    return path


@pytest.mark.parametrize("failure", FAILURES)
def test_every_failure_is_one_sentence_with_a_fix(failure: str, good: Path) -> None:
    damage, complaint = FAILURES[failure]
    load_network(good)
    good.write_bytes(damage(good.read_bytes()))
    with pytest.raises(NetworkFileError, match=complaint) as caught:
        load_network(good)
    assert str(good) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.exit_code == 2


def test_a_header_beyond_the_limit_is_not_read(good: Path) -> None:
    """The file really has that length (it is sparse), so only the limit can reject it."""
    limit = depthgauge.theory.network.files.HEADER_LIMIT
    with open(good, "r+b") as handle:
        handle.write(struct.pack("<Q", limit + 1))
        handle.truncate(limit + 1000)
    with pytest.raises(NetworkFileError, match=f"header of {limit + 1} bytes, more than the limit of {limit}"):
        load_network(good)


def test_a_pickle_is_never_run(tmp_path: Path) -> None:
    """Old and new files of `torch.save` are recognised by their first bytes, and no code in them is executed."""
    canary = tmp_path / "canary"

    class Bomb:
        def __reduce__(self) -> tuple[Callable[[str], object], tuple[str]]:
            return Path.touch, (canary,)  # type: ignore[return-value]

    plain, zipped = tmp_path / "plain.pt", tmp_path / "zipped.pt"
    plain.write_bytes(pickle.dumps(Bomb()))
    with zipfile.ZipFile(zipped, "w") as archive:
        archive.writestr("archive/data.pkl", pickle.dumps(Bomb()))
    torch.save({"a": torch.ones(2)}, tmp_path / "torch.pt")
    for path in (plain, zipped, tmp_path / "torch.pt"):
        with pytest.raises(NetworkFileError, match="is a pickle"):
            load_network(path)
    assert not canary.exists()


def test_paths_that_are_not_files(tmp_path: Path) -> None:
    with pytest.raises(NetworkFileError, match="is a directory; give the network file itself"):
        load_network(tmp_path)
    with pytest.raises(NetworkFileError, match=r"No such file or directory; `depthgauge random --out missing"):
        load_network(tmp_path / "missing.safetensors")
    (tmp_path / "file").touch()
    with pytest.raises(NetworkFileError, match="Not a directory"):
        load_network(tmp_path / "file" / "n.safetensors")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(NetworkFileError, match="is a pipe or a device"):
        load_network(tmp_path / "pipe")


def test_weights_too_large_for_float32_are_named(tmp_path: Path) -> None:
    path = tmp_path / "n.safetensors"
    save_network(drawn(eta=1e200), path)
    assert load_network(path).eta > 1e199
    with pytest.raises(
        NetworkFileError, match=r"layers\.0\.query overflows torch\.float32; load the network in float64"
    ):
        load_network(path, dtype=torch.float32)


def test_unknown_metadata_is_kept_and_optional_metadata_has_defaults(good: Path) -> None:
    header, data = split(good.read_bytes())
    for key in ("activation", "norm", "mlp_skip", "name", "provenance"):
        del header["__metadata__"][key]
    header["__metadata__"]["trained_by"] = "someone"
    good.write_bytes(join(header, data))
    network = load_network(good)
    assert (network.activation, network.norm, network.mlp_skip) == ("relu", "none", False)
    assert network.name == "n"
    assert network.provenance == {}
    assert network.other_metadata == {"trained_by": "someone"}
    save_network(network, good)
    assert split(good.read_bytes())[0]["__metadata__"]["trained_by"] == "someone"


def test_the_file_is_plain_safetensors_as_documented(good: Path) -> None:
    header, _ = split(good.read_bytes())
    meta = header.pop("__metadata__")
    assert meta["format"] == "depthgauge.network"
    assert meta["version"] == "1"
    assert float(meta["scale"]) == 0.5
    assert (meta["skip"], meta["causal"]) == ("true", "false")
    assert json.loads(meta["provenance"])["seed"] == 1
    assert {name: entry["shape"] for name, entry in header.items() if name.startswith("layers.0")} == {
        "layers.0.query": [2, 4, 4], "layers.0.key": [2, 4, 4], "layers.0.value": [2, 4, 4],
        "layers.0.mlp.in": [4, 5], "layers.0.mlp.in_bias": [5], "layers.0.mlp.out": [5, 4],
        "layers.0.mlp.out_bias": [4],
    }  # fmt: skip


# --- writing ---------------------------------------------------------------------------------------------------------


def test_weights_that_are_not_finite_are_not_written(tmp_path: Path) -> None:
    network = drawn()
    with torch.no_grad():
        network[1].key[0, 0, 0] = float("nan")
    with pytest.raises(InputError, match=r"layers\.1\.key holds NaN or infinity"):
        save_network(network, tmp_path / "n.safetensors")
    assert list(tmp_path.iterdir()) == []


def test_provenance_must_be_json_to_be_written(tmp_path: Path) -> None:
    network = drawn()
    network.provenance["source"] = object()
    with pytest.raises(InputError, match="provenance must be plain JSON"):
        save_network(network, tmp_path / "n.safetensors")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), RuntimeError("a bug"), KeyboardInterrupt()])
def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "n.safetensors"
    first = drawn()
    save_network(first, path)
    before = path.read_bytes()

    def half_a_file(tensors: object, filename: Path, metadata: object) -> None:
        filename.write_bytes(before[: len(before) // 2])
        raise error

    monkeypatch.setattr(depthgauge.theory.network.files, "save_file", half_a_file)
    expected = OutputError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected):
        save_network(drawn(seed=2), path)
    with pytest.raises(expected):
        save_network(drawn(seed=2), tmp_path / "new.safetensors")
    assert [p.name for p in tmp_path.iterdir()] == ["n.safetensors"]
    assert path.read_bytes() == before


@pytest.mark.skipif(sys.platform == "win32", reason="file size limits need POSIX")
def test_a_full_disk_is_an_output_error(tmp_path: Path) -> None:
    """A limit on file sizes makes the writer fail in the same way as a full disk."""
    import resource
    import signal

    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    network = drawn(dim=32)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
        with pytest.raises(OutputError, match=r"cannot write .*n\.safetensors"):
            save_network(network, tmp_path / "n.safetensors")
        with pytest.raises(OutputError, match=r"cannot write .*n\.txt: File too large"):
            write_text(tmp_path / "n.txt", "x" * 100_000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert list(tmp_path.iterdir()) == []


def test_targets_that_cannot_be_files(tmp_path: Path) -> None:
    network = drawn()
    (tmp_path / "file").touch()
    for target, complaint in [
        (tmp_path, "is a directory; give the name of a file"),
        (Path(), "is a directory; give the name of a file"),
        (Path("/"), "is a directory; give the name of a file"),
        (tmp_path / "file" / "n.safetensors", "cannot write"),
        (tmp_path / ("n" * 300), "File name too long"),
    ]:
        with pytest.raises(OutputError, match=complaint):
            save_network(network, target)
    assert [p.name for p in tmp_path.iterdir()] == ["file"]


def test_long_names_fit(tmp_path: Path) -> None:
    """The temporary name must not exceed the limit on the length of file names."""
    path = tmp_path / ("n" * 255)
    write_text(path, "ℓ\n")
    assert path.read_text(encoding="utf-8") == "ℓ\n"
    assert len(list(path.parent.iterdir())) == 1


def test_a_reader_never_sees_half_a_file(tmp_path: Path) -> None:
    path = tmp_path / "result"
    write_text(path, "old")

    def write(temporary: Path) -> None:
        temporary.write_text("new")
        assert path.read_text() == "old"
        assert temporary.parent == path.parent  # a rename across file systems would not be atomic

    write_atomically(path, write)
    assert path.read_text() == "new"


def test_a_network_file_is_as_readable_as_any_other_file(tmp_path: Path) -> None:
    """safetensors creates files that only the owner can read; `save_network` applies the umask instead."""
    before = os.umask(0o027)
    try:
        save_network(drawn(), tmp_path / "net")
        write_text(tmp_path / "text", "x")
    finally:
        os.umask(before)
    assert [stat.S_IMODE((tmp_path / name).stat().st_mode) for name in ("net", "text")] == [0o640, 0o640]


def test_two_files_of_one_network_are_equal_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        save_network(drawn(mlp=3, norm="pre"), tmp_path / name)
    header_a, data_a = split((tmp_path / "a").read_bytes())
    header_b, data_b = split((tmp_path / "b").read_bytes())
    assert header_a == header_b
    assert data_a == data_b


def test_a_file_made_by_hand_is_read(tmp_path: Path) -> None:
    """The example of the documentation: safetensors alone can write a network file."""
    eye = torch.eye(3, dtype=torch.float64)[None]
    meta = {"format": "depthgauge.network", "version": "1", "scale": "1", "skip": "true", "causal": "false"}
    tensors = {"layers.0.query": eye, "layers.0.key": 2 * eye, "layers.0.value": 3 * eye}
    save_file(tensors, tmp_path / "hand.safetensors", metadata=meta)
    network = load_network(tmp_path / "hand.safetensors")
    assert (network.dim, len(network), network.scale) == (3, 1, 1.0)
    assert torch.equal(network[0].value, 3 * eye)
