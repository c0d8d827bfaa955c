"""`depthgauge report` and `gauge --report` as a user meets them."""

import json
import sys

import pytest
from shrink_documents import DOCUMENT as SHRUNK
from shrink_documents import PLAN

from depthgauge.cli.main import main
from depthgauge.theory.network.files import save_network
from depthgauge.theory.network.random_networks import random_network


@pytest.fixture
def run(capsys, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # With LayerNorm nothing is proved about it, which is quick.
    save_network(random_network(layers=2, heads=2, dim=3, eta=0.1, norm="pre"), tmp_path / "net.safetensors")

    def command(*arguments):
        monkeypatch.setattr(sys, "argv", ["depthgauge", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        captured = capsys.readouterr()
        return int(ended.value.code or 0), captured.out, captured.err

    return command


@pytest.fixture
def no_plotly(monkeypatch):
    monkeypatch.setitem(sys.modules, "plotly", None)
    monkeypatch.setitem(sys.modules, "plotly.offline", None)


GAUGE = ("gauge", "net.safetensors", "--samples", "1", "--tokens", "4")


def test_both_ways_give_the_same_page(run, tmp_path):
    code, out, err = run(*GAUGE, "--report", "a.html", "--out", "r.json")
    assert code == 0, err
    assert "Effective depth" in out or "layers" in out
    assert err.endswith("page written to a.html\n")
    code, out, err = run("report", "r.json")
    assert (code, out, err) == (0, "", "page written to r.html\n")
    page = (tmp_path / "r.html").read_bytes()
    assert page == (tmp_path / "a.html").read_bytes()
    assert b"depthgauge gauge --samples 1 --tokens 4 --radius 1 --seed 0 net.safetensors" in page
    code, out, err = run("report", "r.json", "--out", "b.html", "--json")
    assert code == 0
    assert json.loads(out) == {"out": "b.html", "bytes": len(page)}
    assert (tmp_path / "b.html").read_bytes() == page


def test_without_the_extra_gauge_stops_before_the_work(run, tmp_path, no_plotly):
    before = {path.name for path in tmp_path.iterdir()}
    code, out, err = run(*GAUGE, "--report", "a.html", "--out", "r.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: the page needs the extra `report`")
    assert {path.name for path in tmp_path.iterdir()} == before
    assert run(*GAUGE, "--out", "r.json")[0] == 0
    code, out, again = run("report", "r.json")
    assert (code, out, again) == (2, "", err)


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["none.json"], 2, "cannot read none.json: No such file or directory; give the file that"),
        (["net.safetensors"], 2, "net.safetensors is not a result document"),
        (["old.json"], 2, "'depthgauge.gauge/0' of another version"),
        (["part.json"], 2, "part.json: subjects: is missing"),
        (["part.json", "--out", "."], 2, "cannot write .: it is a directory; give the name of a file"),
        (["part.json", "--out", "part.json"], 2, "--out and RESULT are the same file, part.json"),
        (["."], 2, ". is not the log of a monitor: it contains no run.json; give the log directory"),
        ([], 2, "Missing argument 'RESULT'"),
    ],
)
def test_bad_requests_end_with_one_sentence_and_no_page(run, tmp_path, arguments, code, words):
    (tmp_path / "old.json").write_text('{"schema": "depthgauge.gauge/0"}')
    (tmp_path / "part.json").write_text('{"schema": "depthgauge.gauge/1", "version": "0", "settings": {}}')
    ended, out, err = run("report", *arguments)
    assert (ended, out) == (code, "")
    assert words in err
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert list(tmp_path.glob("*.html")) == []


def test_a_shrunk_model_has_a_page(run, tmp_path):
    (tmp_path / "smaller").mkdir()
    (tmp_path / "smaller" / "depthgauge.json").write_text(json.dumps(SHRUNK))
    code, out, err = run("report", "smaller/depthgauge.json", "--out", "page.html")
    assert (code, out, err) == (0, "", "page written to page.html\n")
    assert "23 of 30 layers are kept" in (tmp_path / "page.html").read_text(encoding="utf-8")
    (tmp_path / "plan.json").write_text(json.dumps(PLAN))
    code, out, err = run("report", "plan.json")
    assert (code, out) == (2, "")
    assert err.startswith("error: plan.json is a plan, which has nothing to show yet; give the `depthgauge.json`")


def test_a_page_that_cannot_be_written_is_noticed_before_the_work(run, tmp_path):
    (tmp_path / "d.html").mkdir()
    code, out, err = run(*GAUGE, "--report", "d.html")
    assert (code, out) == (2, "")
    assert err == "error: cannot write d.html: it is a directory; give the name of a file\n"


def test_a_result_that_cannot_be_written_is_still_printed(run, tmp_path):
    code, out, err = run(*GAUGE, "--out", "/dev/full")
    assert code == 1
    assert "layer" in out
    assert err == "error: cannot write /dev/full: No space left on device\n"
    code, out, err = run(*GAUGE, "--out", "/dev/full", "--json")
    assert json.loads(out)["schema"] == "depthgauge.gauge/1"


def test_nothing_is_replaced_without_being_asked(run, tmp_path):
    (tmp_path / "r.json").write_text("mine")
    code, out, err = run(*GAUGE, "--out", "r.json")
    assert (code, out) == (2, "")
    assert err == "error: r.json exists; use --overwrite to replace it, or give another --out\n"
    assert (tmp_path / "r.json").read_text() == "mine"
    code, out, err = run(*GAUGE, "--out", "r.json", "--overwrite")
    assert code == 0
    assert json.loads((tmp_path / "r.json").read_text())["schema"] == "depthgauge.gauge/1"
    code, out, err = run(*GAUGE, "--out", "x.html", "--report", "x.html")
    assert err == "error: --report and --out are the same file, x.html; give another --report\n"
