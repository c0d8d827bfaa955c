"""Names on the hub: what is a name, what is downloaded, and what is said if it cannot be."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from local_hub import COMMIT, TOKEN, LocalHub, serving, use_hub
from tiny_checkpoints import save_checkpoint, text_of
from tiny_gguf import write_gguf

from depthgauge.base.errors import InputError, OutputError
from depthgauge.checkpoints.source.hub import HubName, parse_hub_name, resolve
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights import load
from depthgauge.checkpoints.weights.load import Placement, load_config, load_model
from depthgauge.cli.main import main
from depthgauge.results.gauge_record import HubModel
from depthgauge.surgery import write_model
from depthgauge.workflows.gauge import gauge, load_result
from depthgauge.workflows.shrink import shrink

HERE = Placement("float32", "cpu")
NEEDED = ["LICENSE", "config.json", "generation_config.json", "model.safetensors", "tokenizer.json",
          "tokenizer_config.json"]  # fmt: skip


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    folders = {
        name: root / name for name in ("org/plain", "org/sharded", "org/pickled", "org/ggufs", "org/diffuser", "bare")
    }
    save_checkpoint(folders["org/plain"], "llama")
    for extra in ("pytorch_model.bin", "tf_model.h5", "onnx/model.onnx", "original/consolidated.00.pth", "README.md",
                  "onnx/config.json", "model.fp16.safetensors", "LICENSE"):  # fmt: skip
        (folders["org/plain"] / extra).parent.mkdir(exist_ok=True)
        (folders["org/plain"] / extra).write_text("not needed")
    model = save_checkpoint(folders["org/sharded"], "llama")
    (folders["org/sharded"] / "model.safetensors").unlink()
    model.save_pretrained(folders["org/sharded"], max_shard_size="20KB")
    save_checkpoint(folders["org/pickled"], "llama")
    (folders["org/pickled"] / "model.safetensors").unlink()
    torch.save(model.state_dict(), folders["org/pickled"] / "pytorch_model.bin")
    (folders["org/ggufs"] / "q4").mkdir(parents=True)
    write_gguf(folders["org/ggufs"] / "whole.gguf", add_bos=True)
    write_gguf(folders["org/ggufs"] / "q4" / "split.gguf", add_bos=True, most=12)
    save_checkpoint(folders["bare"], "gpt2")
    folders["org/diffuser"].mkdir()
    (folders["org/diffuser"] / "model.safetensors").touch()
    return folders | {"org/locked": folders["org/plain"]}


@pytest.fixture
def hub(models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[LocalHub]:
    """A hub with an empty cache at `cache`, from the directory `here`."""
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with serving(LocalHub(models, frozenset({"org/locked"}))) as found:
        use_hub(monkeypatch, found.endpoint, tmp_path / "cache")
        yield found


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        ("gpt2", HubName("gpt2")),
        ("HuggingFaceTB/SmolLM2-135M", HubName("HuggingFaceTB/SmolLM2-135M")),
        ("Qwen/Qwen2.5-0.5B@refs/pr/1", HubName("Qwen/Qwen2.5-0.5B", None, "refs/pr/1")),
        ("org/name/m.Q4_0.gguf", HubName("org/name", "m.Q4_0.gguf")),
        ("org/name/q4/m-00002-of-00003.gguf@v1", HubName("org/name", "q4/m-00001-of-00003.gguf", "v1")),
        ("folder@main", HubName("folder", None, "main")),
        ("folder", None),
        ("org/here", None),
        ("org/here/m.gguf", None),  # the file is missing from a directory that exists
        ("org/here/m.gguf@main", HubName("org/here", "m.gguf", "main")),
        ("./modle", None),
        ("../org/name", None),
        ("/org/name", None),
        ("~/model", None),
        ("model/", None),
        ("net.safetensors", None),
        ("m.gguf", None),
        ("org/net.safetensors", None),
        ("org/m.gguf", None),
        ("org/../name/m.gguf", None),
        ("org/name@", None),
        ("org/name@" + "x" * 300, HubName("org/name", None, "x" * 300)),
        ("a/b/c", None),
        ("x" * 97, None),
        ("", None),
        (Path("org/name"), None),
        (None, None),
    ],
    ids=str,
)
def test_what_is_a_name(
    target: object, expected: HubName | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    (tmp_path / "org" / "here").mkdir(parents=True)
    assert parse_hub_name(target) == expected


def test_the_needed_files_are_downloaded_once(hub: LocalHub, models: dict[str, Path]) -> None:
    source = resolve("org/plain")
    assert source.hub == HubModel(repo="org/plain", commit=COMMIT)
    assert source.target == f"org/plain@{COMMIT}"
    assert source.name == "org/plain@0123456"
    assert sorted(hub.served) == [f"org/plain/{name}" for name in NEEDED]
    for name in NEEDED:
        assert (source.folder / name).read_bytes() == (models["org/plain"] / name).read_bytes()
    ours, theirs = (load_model(one, load_config(one, HERE), HERE).model for one in (source, find(models["org/plain"])))
    assert all(torch.equal(weight, theirs.state_dict()[key]) for key, weight in ours.state_dict().items())
    hub.served.clear()
    for again in ("org/plain", "org/plain@main", f"org/plain@{COMMIT}"):
        assert resolve(again).folder == source.folder
    assert hub.served == []


def test_names_of_one_part_shards_and_ggufs(hub: LocalHub, models: dict[str, Path]) -> None:
    assert resolve("bare").hub == HubModel(repo="bare", commit=COMMIT)
    source = resolve("org/sharded")
    assert len(hub.served) > len(NEEDED)
    assert load_model(source, load_config(source, HERE), HERE).layers == 3
    hub.served.clear()
    whole, split = resolve("org/ggufs/whole.gguf"), resolve("org/ggufs/q4/split-00002-of-00003.gguf@main")
    assert whole.hub == HubModel(repo="org/ggufs", file="whole.gguf", commit=COMMIT)
    assert split.target == f"org/ggufs/q4/split-00001-of-00003.gguf@{COMMIT}"
    assert sorted(hub.served) == [
        *(f"org/ggufs/q4/split-0000{number}-of-00003.gguf" for number in (1, 2, 3)), "org/ggufs/whole.gguf",
    ]  # fmt: skip
    weights = [load_model(one, load_config(one, HERE), HERE).model.state_dict() for one in (whole, split)]
    assert all(torch.equal(weights[0][key], weights[1][key]) for key in weights[0])


def test_pickles_are_refused_before_they_are_downloaded(hub: LocalHub) -> None:
    with pytest.raises(InputError, match=r"org/pickled has no weights .* use --allow pickle"):
        resolve("org/pickled")
    assert hub.served == []
    source = resolve("org/pickled", allow_pickle=True)
    assert source.pickled
    assert "org/pickled/pytorch_model.bin" in hub.served
    assert resolve("org/plain", allow_pickle=True).pickled is False
    assert "org/plain/pytorch_model.bin" not in hub.served


def test_a_gated_model_needs_its_token(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(InputError, match=r"org/locked is a gated model: accept .*/org/locked, then log in .*HF_TOKEN"):
        resolve("org/locked")
    assert hub.served == []
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    assert resolve("org/locked").hub == HubModel(repo="org/locked", commit=COMMIT)


@pytest.mark.parametrize(
    ("target", "words"),
    [
        ("org/nothing", "org/nothing is not a file or directory here, and http.* has no model of this name"),
        ("modle", "modle is not a file or directory here, and http.* has no model of this name"),
        ("org/plain@v9", "org/plain has no revision v9 on http.*; give a branch, a tag or a commit"),
        ("org/ggufs", "has GGUF files .*; give org/ggufs/q4/split-00001-of-00003.gguf or org/ggufs/whole.gguf"),
        ("org/ggufs/hole.gguf", "org/ggufs has no file hole.gguf on the hub; give .* or org/ggufs/whole.gguf"),
        ("org/ggufs@main/q4/whole.gguf", "the revision comes last: give org/ggufs/q4/whole.gguf@main instead of"),
        ("org/diffuser", "org/diffuser has no config.json, so it is not a checkpoint of transformers"),
        ("org/a--b", "no model on a hub can have this name: .*; check the name"),
        ("folder", "it contains no config.json; give one that does, or folder@main for the model of this name on the"),
    ],
)  # fmt: skip
def test_what_cannot_be_had_is_one_sentence(
    hub: LocalHub, target: str, words: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("folder").mkdir()
    for verb in (["gauge", target], ["shrink", target, "--remove", "1", "--out", "smaller"]):
        monkeypatch.setattr(sys, "argv", ["depthgauge", *verb])
        with pytest.raises(SystemExit) as ended:
            main()
        error = capsys.readouterr().err
        assert ended.value.code == 2
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        with pytest.raises(InputError, match=words):
            raise InputError(error)
    assert hub.served == []
    assert os.listdir() == ["folder"]


@pytest.mark.parametrize("target", ["./modle", "net.safetensors", "org/net.safetensors", "org/m.gguf"])
def test_a_path_that_does_not_exist_is_not_asked_for(hub: LocalHub, target: str) -> None:
    for verb in (lambda: gauge(target, device="cpu"), lambda: shrink(target, remove=1)):
        with pytest.raises(InputError, match=r"cannot read .*: no such file|device applies|--device applies"):
            verb()
    assert hub.requests == []


def test_nothing_is_downloaded_for_a_request_that_must_fail(hub: LocalHub) -> None:
    Path("taken").mkdir()
    Path("taken/file").touch()
    for refused in (
        lambda: gauge("org/plain", text="missing.txt"),
        lambda: gauge("org/plain", tokenizer="missing"),
        lambda: gauge("org/plain", radius=1.0),
        lambda: shrink("org/plain", text="missing.txt", remove=1),
        lambda: shrink("org/plain", remove=1, out="taken"),
    ):
        with pytest.raises(InputError, match=r"missing|taken exists|--radius applies"):
            refused()
    assert hub.requests == []


def _fill(cache: Path, repo: str, files: Path) -> Path:
    """Make the cache that another program leaves, with all files of a model and the branch `main`."""
    folder = cache / f"models--{repo.replace('/', '--')}"
    snapshot = folder / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)
    for path in files.iterdir():
        if path.is_file():
            (snapshot / path.name).symlink_to(path)
    return snapshot


@pytest.mark.parametrize("offline", [True, False])
def test_without_a_connection_the_cache_is_used(
    offline: bool, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    cache, said = tmp_path / "cache", []
    use_hub(monkeypatch, "http://127.0.0.1:9", cache, offline=offline)
    action = (
        "unset HF_HUB_OFFLINE to download it" if offline else "cannot be downloaded from http://127.0.0.1:9: .*refused"
    )
    with pytest.raises(InputError, match=rf"org/plain is not .* here, and it is not in the cache .*/cache.*{action}"):
        resolve("org/plain", message=said.append)
    assert said == []
    snapshot = _fill(cache, "org/plain", models["org/plain"])
    for target in ("org/plain", f"org/plain@{COMMIT}"):
        said.clear()
        source = resolve(target, message=said.append)
        assert source.folder == snapshot
        assert source.target == f"org/plain@{COMMIT}"
        assert len(said) == (not offline)
        assert all(f"using the commit {COMMIT} in the cache" in sentence for sentence in said)
    with pytest.raises(InputError, match="org/plain@v2 is not a file or directory here, and it is not in the cache"):
        resolve("org/plain@v2")
    (snapshot / "model.safetensors").unlink()
    with pytest.raises(InputError, match=r"^org/plain contains no weights .* use --allow pickle"):
        resolve("org/plain")


def test_the_record_of_gauge_has_the_commit(hub: LocalHub, tmp_path: Path) -> None:
    Path("corpus.txt").write_text(text_of(100))
    result = gauge("org/plain", text="corpus.txt", tokens=32, window=16, what_if="none", device="cpu", out="r.json")
    assert result.settings.target == f"org/plain@{COMMIT}"
    (subject,) = load_result("r.json").subjects
    assert subject.name == "org/plain@0123456"
    assert subject.model.hub == HubModel(repo="org/plain", commit=COMMIT)
    assert COMMIT in result.report("page.html").read_text()
    for written in ("r.json", "page.html"):
        assert str(tmp_path / "cache") not in Path(written).read_text()


@pytest.mark.usefixtures("forked_verification")
def test_the_card_of_a_shrunk_model_names_its_source(hub: LocalHub, tmp_path: Path) -> None:
    Path("corpus.txt").write_text(text_of(4000))
    asked = {"text": "corpus.txt", "window": 16, "effort": "quick", "recover": "none", "device": "cpu"}
    record = shrink("org/plain", remove=1, out="smaller", report="page.html", **asked).record
    assert record.plan.model == f"org/plain@{COMMIT}"
    assert record.plan.hub == HubModel(repo="org/plain", commit=COMMIT)
    card = Path("smaller/README.md").read_text()
    assert 'base_model: "org/plain"\n' in card
    assert "# org/plain with 2 of 3 layers\n" in card
    assert f"The source is the commit {COMMIT}." in card
    assert f"depthgauge shrink org/plain@{COMMIT} --remove depthgauge.json" in card
    assert f'model: "org/plain@{COMMIT}"' in Path("smaller/plan.mergekit.yaml").read_text()
    assert Path("smaller/LICENSE").read_text() == "not needed"
    for written in (*Path("smaller").glob("*.[jmy]*"), Path("page.html")):
        assert str(tmp_path / "cache") not in written.read_text(), written
    followed = shrink(record.plan.model, plan=record.plan).record
    assert (followed.removed, followed.plan.files) == (record.removed, record.plan.files)


def test_the_environment_of_huggingface_hub_is_used(hub: LocalHub, tmp_path: Path) -> None:
    """In new processes: the variables are read when huggingface_hub is imported."""
    home = tmp_path / "home"
    script = "from depthgauge.checkpoints.source.hub import resolve; print(resolve('org/plain').path)"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "HF_HOME": str(home), "HF_ENDPOINT": hub.endpoint}
    for offline in ("0", "1"):
        found = subprocess.run(
            [sys.executable, "-c", script],
            env=os.environ | paths | {"HF_HUB_OFFLINE": offline}, capture_output=True, text=True, check=True,
        )  # fmt: skip
        assert found.stdout == f"{home}/hub/models--org--plain/snapshots/{COMMIT}\n"
        assert ("Fetching" in found.stderr) == (offline == "0")  # the progress bar of the download


def test_a_model_that_does_not_fit_is_not_downloaded(hub: LocalHub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its configuration is enough, and for the output as well."""
    monkeypatch.setattr(write_model, "free_disk", lambda out: 1000)
    with pytest.raises(OutputError, match=r"cannot write smaller: it needs .* of the disk are free"):
        shrink("org/plain", remove=1, out="smaller")
    monkeypatch.setattr(load, "free_memory", lambda device=None: 1000)
    for run in (lambda: gauge("org/plain"), lambda: shrink("org/plain", remove=1)):
        with pytest.raises(InputError, match=r"org/plain.* is too large: .* and 1 kB are free"):
            run()
    assert "org/plain/config.json" in hub.served
    assert "org/plain/model.safetensors" not in hub.served
