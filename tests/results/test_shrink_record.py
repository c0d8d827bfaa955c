"""Documents of `shrink`: round trips, both kinds of plan files, damaged documents, and the sentences about them."""

import copy
import json
import pickle
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shrink_documents import (
    ASSUMPTION,
    DOCUMENT,
    PLAN,
    encoder,
    limit_not_reached,
    not_certified,
    too_few_windows,
    with_limit,
)

from depthgauge.base.errors import InputError
from depthgauge.results.labels import objective_label
from depthgauge.results.record import ResultError, load_document
from depthgauge.results.shrink_document import (
    cost_rows,
    guarantee_sentences,
    shrink_verdict,
    shrink_warnings,
    stack_picture,
    times_sentence,
)
from depthgauge.results.shrink_record import (
    SHRINK_ADVICE,
    PlanRecord,
    ShrinkOptions,
    ShrinkRecord,
    check_shrink,
    make_shrink_options,
    read_plan,
)

DOCUMENTS: dict[str, Callable[[], dict[str, Any]]] = {
    "decoder": lambda: copy.deepcopy(DOCUMENT),
    "limit": with_limit,
    "limit not reached": limit_not_reached,
    "encoder": encoder,
    "too few windows": too_few_windows,
    "not certified": not_certified,
}
# Keys that may be missing: they have a default, and every option has one.
OPTIONAL = re.compile(
    r"(plan\.)?(settings\..*|search|candidates|files\..*)|plan\.schema|guarantee\.(limit|tested)|speed\.(\w+_\w+|what)|"
    r"versions\..*|stages|durations(\..*)?|(plan\.)?hub|evaluation|accuracy|"
    r"recovery(\.data\..*)?|reload\.(program|source_difference)"
)


def keys(value: Any, place: str = "") -> Iterator[tuple[list[Any], str]]:
    """Yield every key of a document, with the first entry of each list for all of them: its path, and its name."""
    inside = value.items() if isinstance(value, dict) else [(0, value[0])] if isinstance(value, list) and value else []
    for key, entry in inside:
        name = f"{place}[0]" if isinstance(value, list) else f"{place}.{key}".removeprefix(".")
        if isinstance(value, dict):
            yield [key], name
        for way, inner in keys(entry, name):
            yield [key, *way], inner


def reach(document: Any, way: list[Any]) -> Any:
    for step in way:
        document = document[step]
    return document


def read_shrink(path: Path) -> ShrinkRecord:
    return check_shrink(load_document(path, SHRINK_ADVICE), str(path))


# --- round trips ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_survives_reading_and_writing(name: str, tmp_path: Path) -> None:
    document = DOCUMENTS[name]()
    record = check_shrink(document)
    assert isinstance(record, ShrinkRecord)
    (tmp_path / "depthgauge.json").write_text(record.dump(), encoding="utf-8")
    again = read_shrink(tmp_path / "depthgauge.json")
    assert again == record == pickle.loads(pickle.dumps(record))
    written = again.to_json()
    for way, place in keys(document):
        assert reach(written, way) == reach(document, way), place


def test_a_plan_can_be_read_from_both_kinds_of_file(tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    (tmp_path / "depthgauge.json").write_text(json.dumps(DOCUMENT))
    plan = read_plan(tmp_path / "plan.json")
    assert isinstance(plan, PlanRecord)
    assert plan == read_plan(tmp_path / "depthgauge.json") == read_shrink(tmp_path / "depthgauge.json").plan
    assert plan.settings == ShrinkOptions(
        remove="7", confidence=0.95, effort="default", recover="2M", text=("corpus.txt", "more text.txt"),
        sampled=0.5, window=512, bos="auto", seed=0, dtype="float32", device="cpu",
    )  # fmt: skip
    (tmp_path / "again.json").write_text(plan.dump(), encoding="utf-8")
    assert read_plan(tmp_path / "again.json") == plan
    with pytest.raises(ResultError, match=r"it has the schema 'depthgauge.plan/1', expected 'depthgauge.shrink/1'"):
        read_shrink(tmp_path / "plan.json")


def test_records_are_short_in_a_console_and_tables_in_a_notebook() -> None:
    record = check_shrink(DOCUMENT)
    assert repr(record) == (
        "ShrinkRecord(name='SmolLM2-135M', layers=30 → 23, removed=10, 12, 13, 14, 16, 21, 25, loss=3.42 → 3.85, "
        "out='smaller')"
    )
    assert repr(record.plan).startswith("PlanRecord(model='models/SmolLM2-135M', layers=30 → 23, removed=10, 12")
    assert "<td>30 → 23</td>" in record._repr_html_()


def test_frames_have_the_rows_of_the_document() -> None:
    pytest.importorskip("pandas")
    record = check_shrink(with_limit())
    for table, rows in (
        ("texts", record.texts),
        ("curve", record.curve),
        ("search", record.plan.search),
        ("candidates", record.plan.candidates),
        ("stages", record.stages),
        ("tested", record.guarantee.tested),
    ):
        found = record.to_frame(table)
        assert len(found) == len(rows) > 0
        assert list(found.columns) == list(rows[0].__struct_fields__)
    with pytest.raises(
        InputError, match="table must be one of texts, curve, search, candidates, stages, tested, got 'rows'"
    ):
        record.to_frame("rows")


# --- damaged documents ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("reader", [read_shrink, read_plan])
def test_a_missing_key_is_named(reader: Callable[[Path], Any], tmp_path: Path) -> None:
    document, asked = (with_limit() if reader is read_shrink else copy.deepcopy(PLAN)), 0
    path = tmp_path / "r.json"
    for way, name in keys(document):
        damaged = copy.deepcopy(document)
        del reach(damaged, way[:-1])[way[-1]]
        path.write_text(json.dumps(damaged))
        if OPTIONAL.fullmatch(name):
            assert reader(path)
            continue
        asked += 1
        with pytest.raises(ResultError) as refused:
            reader(path)
        expected = "it has no schema" if name == "schema" else f"r.json: {name}: is missing"
        assert expected in str(refused.value)
        assert "; give " in str(refused.value)
    assert asked > (70 if reader is read_shrink else 20)


@pytest.mark.parametrize(
    ("way", "wrong", "words"),
    [
        (["removed"], [1, 30], "removed[1]: expected a layer from 0 to 29, got 30"),
        (["removed"], [1, 2, 3, 4, 5, 6, 1], "removed[6]: layer 1 occurs twice"),
        (["removed"], [1, -2], "removed[1]: expected a whole number >= 0"),
        (["removed"], "1, 2", "removed: expected a list, got a string"),
        (["removed"], [1, 2], "layers_after: 23 is not 30 less 2 removed layers"),
        (["layers_before"], 31, "layers_before: 31 is not plan.layers, 30"),
        (["plan", "layers"], 10**12, "plan.layers: expected from 1 to 10000, got 1000000000000"),
        (["plan", "layers"], 0, "plan.layers: expected from 1 to 10000, got 0"),
        (["plan", "removed"], list(range(30)), "plan.removed: all 30 layers are removed"),
        (["plan", "search", 2, "layer"], 44, "plan.search[2].layer: expected a layer from 0 to 29, got 44"),
        (["plan", "candidates", 0, "removed"], [30], "plan.candidates[0].removed[0]: expected a layer from 0 to 29"),
        (["plan", "settings", "remove"], 7, "plan.settings.remove: expected a string or null, got a whole number"),
        (["plan", "settings", "text"], "corpus.txt", "plan.settings.text: expected a list, got a string"),
        (["loss", "dense"], "x", "loss.dense: expected a number or null, got a string"),
        (["texts", 1, "increase"], float("inf"), "texts[1].increase: expected a number"),
        (["guarantee", "quantile"], None, "guarantee.quantile: expected an object, got null"),
        (["schema"], "depthgauge.shrink/2", "'depthgauge.shrink/2' of another version of depthgauge"),
        (["schema"], "depthgauge.gauge/1", "it has the schema 'depthgauge.gauge/1', expected 'depthgauge.shrink/1'"),
    ],
)
def test_a_value_that_does_not_fit_is_named(way: list[Any], wrong: Any, words: str) -> None:
    damaged = copy.deepcopy(DOCUMENT)
    reach(damaged, way[:-1])[way[-1]] = wrong
    with pytest.raises(ResultError) as refused:
        check_shrink(damaged, "r.json")
    assert words in str(refused.value)
    assert len(str(refused.value)) < 240


@pytest.mark.parametrize("reader", [read_shrink, read_plan])
@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b'{"schema": NaN}', "NaN is not a JSON number"),
        (b"\xff\xfe", "it is not UTF-8 text"),
        (b"[1]", "expected an object, got [1]"),
        (b'{"schema": "depthgauge.gauge/1"}', "it has the schema 'depthgauge.gauge/1', expected"),
        (None, "cannot read"),
    ],
)
def test_other_files_are_refused(reader: Callable[[Path], Any], text: bytes | None, words: str, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    if text is not None:
        path.write_bytes(text)
    with pytest.raises(ResultError) as refused:
        reader(path)
    assert words in str(refused.value)
    assert "depthgauge shrink --out DIR" in str(refused.value)


def test_unknown_keys_are_ignored() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["later"] = document["plan"]["later"] = [1]
    assert check_shrink(document) == check_shrink(DOCUMENT)


# --- options ----------------------------------------------------------------------------------------------------------


def test_options_accept_one_text_and_a_whole_number() -> None:
    options = make_shrink_options(ShrinkOptions(seed=3), {"text": Path("a.txt"), "remove": 7, "recover": None})
    assert options == ShrinkOptions(seed=3, text=("a.txt",), remove="7")
    assert options.given() == {"seed": 3, "text": ("a.txt",), "remove": "7"}
    with pytest.raises(InputError, match=r"option of shrink must be one of .* did you mean 'remove'"):
        make_shrink_options(None, {"remov": 7})
    with pytest.raises(
        InputError, match="remove must be a number of blocks or a share of all blocks, got True; write remove=7"
    ):
        make_shrink_options(None, {"remove": True})


# --- sentences --------------------------------------------------------------------------------------------------------


def test_the_verdict_has_three_different_cases() -> None:
    verdicts = {name: shrink_verdict(check_shrink(make())) for name, make in DOCUMENTS.items()}
    assert verdicts["decoder"] == (
        "23 of 30 layers are kept; guaranteed, if future windows are exchangeable with those of corpus.txt, more "
        "text.txt: on 95 % of windows the loss grows by at most 0.613 nats per token (confidence 95 %); measured: the "
        "loss grows by 0.431 nats per token; on the selection windows 0.43 below the best of 2 choices without repair"
    )
    assert verdicts["encoder"] == (
        "5 of 6 layers are kept; guaranteed, if future windows are exchangeable with those of corpus.txt: on 95 % of "
        "windows the final states change by at most 0.391 of their size (confidence 95 %); measured: the final states "
        "change by 0.313 [0.291, 0.334] of their size"
    )
    assert verdicts["too few windows"] == (
        "23 of 30 layers are kept; measured only: the loss grows by 0.431 nats per token; on the selection windows "
        "0.43 below the best of 2 choices without repair; nothing is guaranteed, because 20 windows of corpus.txt, "
        "more text.txt are too few for a share of 95 % with confidence 95 %; --effort high has "
        "more, and a lower --confidence needs fewer"
    )
    assert verdicts["not certified"].endswith("nothing is guaranteed, because no bound was computed")
    assert verdicts["limit not reached"] == (
        "no model was written: for no tested size is it guaranteed, with confidence 95 %, that the loss grows by at "
        "most 0.1 nats per token; closest was removing 1 layer, with a bound of 0.143"
    )
    for name, verdict in verdicts.items():
        promised = name in ("decoder", "limit", "encoder")
        assert ("guaranteed, if future windows are exchangeable" in verdict) == promised
        assert ("measured only" in verdict) == (name in ("too few windows", "not certified"))
        assert ("no model was written" in verdict) == (name == "limit not reached")


def test_a_bound_says_how_it_accounts_for_the_choice_of_the_size() -> None:
    document = with_limit()
    bound, assumption = guarantee_sentences(check_shrink(document))
    tested = "; this is the limit, tested from gentle to harsh sizes)."
    assert bound.endswith(tested)
    assert "on at least 95 % of windows of 512 tokens like those of corpus.txt, the loss grows by at most 0.25" in bound
    assert assumption == ASSUMPTION
    assert not any(tested in sentence for sentence in guarantee_sentences(check_shrink(DOCUMENT)))


def test_the_text_that_a_guarantee_is_about_is_named() -> None:
    document = copy.deepcopy(DOCUMENT)
    for about, words in (
        ("text", "like those of corpus.txt, more text.txt, the loss"),
        ("sampled", "like those of text that the model writes itself, the loss"),
        ("built-in", "like those of the built-in text, the loss"),
        ("letters", "like those of letters, the loss"),
    ):
        document["guarantee"]["about"] = about
        assert words in guarantee_sentences(check_shrink(document))[0]


def test_a_guarantee_is_never_stated_without_its_assumption() -> None:
    for make in DOCUMENTS.values():
        sentences = guarantee_sentences(check_shrink(make()))
        assert sentences == () or sentences[-1] == ASSUMPTION
        assert not any("at most –" in sentence for sentence in sentences)
    document = copy.deepcopy(DOCUMENT)
    document["guarantee"]["quantile"]["increase"] = None
    assert guarantee_sentences(check_shrink(document)) == ()
    assert "measured only" in shrink_verdict(check_shrink(document))


def test_too_few_windows_for_any_size_is_said() -> None:
    document = limit_not_reached()
    for size in document["guarantee"]["tested"]:
        size["bound"] = None
    assert shrink_verdict(check_shrink(document)).endswith("; there are too few windows for any bound")


def test_several_texts_of_the_user_are_measured_together() -> None:
    """Their losses are those of all their windows; an interval is known only for one text alone."""
    document = copy.deepcopy(DOCUMENT)
    assert "measured: the loss grows by 0.431 nats per token;" in shrink_verdict(check_shrink(document))
    document["loss"]["dense"] = None
    assert "measured: the loss grows by – nats per token;" in shrink_verdict(check_shrink(document))
    del document["texts"][1]
    assert shrink_verdict(check_shrink(document)).count("the loss grows by 0.401 [0.36, 0.445] nats per token;") == 1
    del document["texts"][0]
    assert shrink_verdict(check_shrink(document)).count("the loss grows by 0.388 [0.347, 0.431] nats per token;") == 1


def test_a_result_that_is_no_better_than_a_simple_one_says_so() -> None:
    document = copy.deepcopy(DOCUMENT)
    document["plan"]["candidates"][0] |= {"repaired": 0.91}
    assert shrink_verdict(check_shrink(document)).endswith("no better than removing 12–18 without repair")
    document["plan"]["candidates"] = document["plan"]["candidates"][:1]
    document["plan"]["candidates"][0] |= {"repaired": 0.75}
    assert shrink_verdict(check_shrink(document)).endswith("0.2 below the same blocks without repair")
    document["plan"]["candidates"][0] |= {"repaired": None}
    assert "without repair" not in shrink_verdict(check_shrink(document))  # it is this model


@pytest.mark.parametrize(
    ("removed", "trained", "recover", "advice"),
    [
        ([12], True, "2M", "0.513 nats per token"),
        ([12], False, "off", "; train it with --recover 2M"),
        ([12], False, "none", "; leave --recover none out"),
        ([12, 13], False, "none", "; remove fewer blocks, or leave --recover none out"),
        ([12, 13], False, "off", "; remove fewer blocks, or train it with --recover 2M"),
    ],
)
def test_the_advice_for_a_damaged_model_can_be_followed(
    removed: list[int], trained: bool, recover: str, advice: str
) -> None:
    """Fewer than one block cannot be removed, and --recover has one value."""
    document = copy.deepcopy(DOCUMENT)
    document["removed"] = document["plan"]["removed"] = removed
    document["layers_after"] = document["layers_before"] - len(removed)
    document["plan"]["settings"]["recover"] = recover
    document["recovery"] = document["recovery"] if trained else None
    (found,) = shrink_warnings(check_shrink(document))
    assert found.endswith(advice)


def test_a_damaged_model_is_called_damaged() -> None:
    document = copy.deepcopy(DOCUMENT)
    (found,) = shrink_warnings(check_shrink(document))
    assert found == "warning: this model is damaged: the loss grows by 0.513 nats per token; remove fewer blocks"
    document["texts"] = document["texts"][:3]
    assert shrink_warnings(check_shrink(document)) == ()
    document["texts"][2]["increase"] = 1.3
    document["texts"][0]["increase"] = document["texts"][1]["increase"] = 0.4
    document["recovery"] = None
    (found,) = shrink_warnings(check_shrink(document))
    assert found.startswith("warning: on text that the model writes itself the loss grows by 1.3, more than 3 times")
    assert "damaged" not in found  # it is for the user's text
    document["texts"][2]["increase"] = 0.4
    document["guarantee"]["quantile"]["increase"] = 1.5
    (found,) = shrink_warnings(check_shrink(document))
    assert "only 1.5 nats per token are guaranteed" in found
    assert shrink_warnings(check_shrink(encoder())) == ()


def test_objectives_have_their_own_words() -> None:
    assert objective_label("states").by("0.2") == "the final states change by 0.2 of their size"
    assert objective_label("{0.x} #").by("#") == "the objective grows by #"


@pytest.mark.parametrize("width", [10, 60, 80, 200])
@pytest.mark.parametrize("removed", [(), (0,), (5, 6, 7, 11), tuple(range(1, 12)), (1, 3, 5, 7, 9, 11)])
def test_the_picture_names_every_kept_block_once_and_marks_the_others(removed: tuple[int, ...], width: int) -> None:
    shown: list[int | None] = []
    for word in stack_picture(12, removed, width).split():
        if set(word) == {"▓"}:
            shown += [None] * len(word)
        else:
            first, _, last = word.partition("–")
            shown += range(int(first), int(last or first) + 1)
    assert shown == [None if layer in removed else layer for layer in range(12)]


def test_costs_are_those_of_the_document() -> None:
    def rows(document: dict[str, Any]) -> list[tuple[str, ...]]:
        return cost_rows(check_shrink(document))

    assert rows(DOCUMENT) == [
        ("parameters", "134,515,008", "109,741,248", "0.816"),
        ("size on disk", "538 MB", "439 MB", "0.816"),
        ("memory", "546 MB", "445 MB", "0.815"),
        ("prefill", "812 ms", "634 ms", "0.781 [0.763, 0.8]"),
        ("decode, per token", "41.1 ms", "31.8 ms", "0.773 [0.75, 0.797]"),
    ]
    assert [row[0] for row in rows(encoder())] == ["parameters", "size on disk", "prefill"]
    assert cost_rows(check_shrink(limit_not_reached())) == []
    document = copy.deepcopy(DOCUMENT)
    document["speed"] = {"prefill": 1.25, "decode": None}
    assert rows(document)[3:] == [("prefill", "–", "–", "0.8")]  # of an early version: no times, and no interval


def test_times_that_did_not_settle_are_a_sentence_and_no_number() -> None:
    document = copy.deepcopy(DOCUMENT)
    assert times_sentence(check_shrink(document)) == (
        "Times, with the 95 % interval of their ratio: prefill of 512 tokens in 16 pairs of runs, decode of one token "
        "at a time in 64 pairs of runs, on cpu."
    )
    document["speed"] = {"prefill": None, "decode": None, "what": "prefill of 8 tokens: no number, on cpu"}
    record = check_shrink(document)
    assert [row[0] for row in cost_rows(record)] == ["parameters", "size on disk", "memory"]
    assert times_sentence(record) == "Times: prefill of 8 tokens: no number, on cpu."
    assert times_sentence(check_shrink(document | {"speed": None})) == ""
