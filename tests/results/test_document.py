"""Every part of a document appears in each renderer that it is marked for, and in no other."""

import html
import io
import re
from pathlib import Path

import pytest
from evaluate_documents import evaluation
from monitor_documents import write_log
from result_documents import DOCUMENT as NETWORKS
from rich.console import Console
from shrink_documents import DOCUMENT, encoder, limit_not_reached, not_certified, with_limit

from depthgauge.cli.print_document import part_lines, section_lines
from depthgauge.report.page import document_of, render_page
from depthgauge.results.document import Document, Part, Place
from depthgauge.results.gauge_record import check_result, read_result
from depthgauge.results.monitor_record import read_log
from depthgauge.results.recover_document import recover_document
from depthgauge.results.recover_record import check_recover
from depthgauge.results.shrink_document import shrink_document
from depthgauge.results.shrink_record import check_shrink
from depthgauge.surgery.write_shrunk import markdown, model_card

DATA = Path(__file__).parents[1] / "data"
SHRUNK = {
    "shrink": lambda: DOCUMENT, "limit": with_limit, "no size": limit_not_reached, "encoder": encoder,
    "not certified": not_certified,
}  # fmt: skip
GAUGED = ["gauge-decoder", "gauge-encoder", "gauge-weights", "gauge-network", "gauge-norm"]


def recovered() -> Document:
    shrunk = check_shrink(DOCUMENT)
    text = {"kind": "text", "name": "a.txt", "windows": 8, "teacher": 3.0, "before": 3.5, "after": 3.25}
    found = {
        "schema": "depthgauge.recover/1", "version": "0", "name": "small", "teacher": "large", "objective": "loss",
        "layers": 23, "teacher_layers": 30, "window": 512,
        "texts": [text | {"change": -0.25, "low": -0.3, "high": -0.2}], "recovery": shrunk.recovery.to_json(),
        "evaluation": evaluation("large", "small").to_json(), "settings": {}, "check": "checked: it loads",
        "notes": ["a note"], "versions": {"torch": "2"}, "seconds": 60.0, "out": None,
    }  # fmt: skip
    return recover_document(check_recover(found))


def documents(folder: Path) -> dict[str, Document]:
    """A document of every result."""
    found = {name: document_of(check_shrink(make())) for name, make in SHRUNK.items()}
    found |= {name: document_of(read_result(DATA / "documents" / f"{name}.json")) for name in GAUGED}
    notes = ("something was not measured",)
    return found | {
        "sizes": shrink_document(check_shrink(DOCUMENT), check_shrink(with_limit())),
        "networks": document_of(check_result(NETWORKS)),
        "recover": recovered(),
        "evaluate": document_of(evaluation("./model", "./smaller")),
        "one model": document_of(evaluation("./model")),
        "monitor": document_of(read_log(write_log(folder / "run-7", notes=notes))),
    }


def plain(text: str) -> str:
    """Return the words and numbers of an output, without marks, in one line."""
    return " ".join(re.sub(r"[│┃┏┓┗┛└┘┡┩┠┨━─╇┳┴┬|]+", " ", text).split())


def on_terminal(lines: object) -> str:
    console = Console(width=400, file=io.StringIO())
    for line in lines:  # type: ignore[attr-defined]
        console.print(line, highlight=False)
    return plain(console.file.getvalue())  # type: ignore[attr-defined]


def on_page(document: Document) -> dict[str, str]:
    """Return the text of each figure of the page, by the part it shows."""
    page = render_page(document, "")
    figures = re.findall(r'<figure id="s(\d+)-([\w-]+)".*?</figure>', page, re.DOTALL)
    bodies = re.findall(r"<figure .*?</figure>", page, re.DOTALL)
    texts = [plain(html.unescape(re.sub(r"<[^>]*>", "", body))) for body in bodies]
    assert len({*figures}) == len(texts)
    return {f"{section} {name}": text for (section, name), text in zip(figures, texts, strict=True)}


def words_of(part: Part, place: Place) -> list[str]:
    """Return what a renderer must show of a part: its sentences, its caption and the cells of its table."""
    found = [statement.removesuffix(".")[1:] for statement in part.statements] + [part.caption.replace("`", "")]
    table = part.table_at(place)
    if table is not None and place is Place.PAGE:
        found += [
            table.title,
            *table.headings,
            *(cell for row in table.values for cell in row if isinstance(cell, str)),
        ]
    elif table is not None:
        found += [table.title, *table.brief(), *(cell for cells in table.brief().values() for cell in cells)]
    return [plain(words) for words in found]


def test_every_part_appears_where_it_is_marked_for(tmp_path: Path) -> None:
    seen = dict.fromkeys(Place, 0)
    for name, document in documents(tmp_path).items():
        pages = on_page(document)
        for k, section in enumerate(document.sections):
            whole = on_terminal(section_lines(section, 400)).replace("`", "")
            names = [part.name for part in section.parts]
            assert len(set(names)) == len(names), name
            for part in section.parts:
                assert (f"{k} {part.name}" in pages) == (Place.PAGE in part.place), (name, part.name)
                shown = {
                    Place.TERMINAL: on_terminal(part_lines(part, 400)).replace("`", ""),
                    Place.PAGE: pages.get(f"{k} {part.name}", ""),
                    Place.CARD: plain(" ".join(markdown(part)).replace("`", "").replace("&#124;", "|")),
                }
                for place in Place:
                    if place in part.place:
                        seen[place] += 1
                        for words in words_of(part, place):
                            assert words in shown[place], (name, part.name, place, words)
                if Place.TERMINAL in part.place:
                    assert shown[Place.TERMINAL] in whole, (name, part.name)
    assert min(seen.values()) > 20


@pytest.mark.parametrize("name", SHRUNK)
def test_the_card_has_the_parts_of_the_card(name: str) -> None:
    record = check_shrink(SHRUNK[name]())
    card = model_card(record, None)
    (section,) = shrink_document(record).sections
    titles = [part.title for part in section.parts_at(Place.CARD)]
    assert re.findall(r"^## (.*)$", card, re.MULTILINE) == [*titles, "How to reproduce"]
