"""The page as text: complete, escaped, and made of the record alone."""

import base64
import hashlib
import json
import re
import shlex
import sys
from html import unescape

import pytest
from markupsafe import escape

import depthgauge as dg
from depthgauge.base.errors import InputError, MissingPackageError, OutputError
from depthgauge.base.format import printable
from depthgauge.cli.main import main
from depthgauge.report.page import render, templates
from depthgauge.results.document import Table
from depthgauge.results.gauge_document import gauge_command, gauge_section
from depthgauge.results.gauge_record import GaugeSettings, check_result


def test_nothing_from_the_document_is_markup(document):
    page = render(check_result(document), "")
    assert page.count("<script") == 3
    assert page.count("</script") == 3
    for word in ("<script>alert", "<img", "onerror=alert(2)>"):
        assert word not in page
    assert escape(document["subjects"][0]["name"]) in page
    assert "$title" in page  # a name with a placeholder in it stays as it is


def test_the_scripts_are_named_in_the_policy_by_what_they_are(document):
    page = render(check_result(document), "var a = '</script>';\r\nvar b = 1;")
    policy = re.search(r'Content-Security-Policy" content="([^"]*)"', page).group(1)
    scripts = re.findall(r"<script>(.*?)</script>", page, re.DOTALL)
    assert scripts[0] == "var a = '<\\/script>';\nvar b = 1;"
    hashes = [base64.b64encode(hashlib.sha256(script.encode()).digest()).decode() for script in scripts]
    assert policy.startswith("default-src 'none'; script-src " + " ".join(f"'sha256-{h}'" for h in hashes))


def test_the_same_document_gives_the_same_page_and_nothing_else_is_in_it(document):
    assert render(check_result(document), "x") == render(check_result(document), "x")
    assert not re.search(r"\b20\d\d-\d\d-\d\d\b", render(check_result(document), ""))


def test_one_subject_needs_no_overview(document):
    document["subjects"] = document["subjects"][:1]
    page = render(check_result(document), "")
    assert 'class="overview"' not in page
    assert page.count('class="verdict"') == 1
    assert "1 network gauged with depthgauge 0.1.0" in page


def test_the_table_states_what_theorem_d1_prints(document):
    subject = document["subjects"][0]

    def cell() -> str:
        record = check_result(document)
        parts = gauge_section(record.subjects[0], record.settings).parts
        return next(part.table.values[1][4] for part in parts if part.name == "sandwich")

    assert cell() == "0.25: false"
    subject["collapse"][1]["lower"] = 0.2
    assert cell() == "0.25"
    subject["printed"] = {"printed_bound": None, "printed_log10": 1679.4, "printed_applies": False}
    assert cell() == "(1e1679)"
    subject["printed"]["printed_log10"] = None
    assert cell() == "(overflows)"


def test_where_depth_is_not_defined_the_page_says_so(document):
    document["subjects"][0]["depth"] = []
    assert "Effective depth is not defined for this kind of network." in render(check_result(document), "")


def test_the_command_can_be_typed():
    settings = GaugeSettings(target="my net; rm -rf ~", radius=0.1 + 0.2, seed=0, text="none", allow=None)
    assert shlex.split(gauge_command(settings)) == [
        *("depthgauge", "gauge", "--radius", "0.30000000000000004", "--seed", "0", "--text", "none"),
        "my net; rm -rf ~",
    ]
    assert gauge_command(GaugeSettings(radius=1.0)) == "depthgauge gauge --radius 1"
    words = shlex.split(gauge_command(GaugeSettings(target="-x", input="-y")))
    assert words == ["depthgauge", "gauge", "--input=-y", "--", "-x"]


def test_a_network_in_memory_has_no_command_until_it_is_saved(tmp_path, monkeypatch):
    """Follow the page: run its Python line to save the network, then its command to gauge the file."""
    monkeypatch.chdir(tmp_path)
    network = dg.random_network(layers=2, heads=1, dim=3, eta=0.1, norm="pre", seed=2)
    document = dg.gauge(network, samples=2, tokens=5, radius=0.5, seed=3).to_json()
    page = render(check_result(document), "")
    assert "gauged from Python and has no file" in page
    assert f">{network.name}</code>" not in page
    saving = unescape(re.search(r"<p>[^\n]*<code>(.*?)</code>", page).group(1))
    exec(saving, {"depthgauge": dg, "network": network})
    typed = unescape(re.search(r'<code id="command">(.*?)</code>', page).group(1))
    monkeypatch.setattr(sys, "argv", [*shlex.split(typed), "--json", "--out", "again.json"])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code
    again = json.loads((tmp_path / "again.json").read_text(encoding="utf-8"))
    assert again["subjects"][0]["layers"] == document["subjects"][0]["layers"]


def test_a_file_needs_no_saving(document):
    assert "with depthgauge 0.1.0 and the same target:" in render(check_result(document), "")
    assert "has no file" not in render(check_result(document), "")


def test_characters_that_steer_are_replaced(document):
    assert printable("a\u202eb\x1b[1m\nc") == "a\ufffdb\ufffd[1m\ufffdc"
    for subject in document["subjects"]:
        subject["name"] = subject["verdict"] = "a\u202eb"
    page = render(check_result(document), "")
    assert "\u202e" not in page
    assert "a\ufffdb" in page


def test_tables_show_three_digits_and_carry_them_all():
    shown = Table("t", ("name", "value"), (("a<b", 0.123456789), ("c", None)))
    html = templates().get_template("parts.html").module.table(shown, "t")
    assert '<th scope="row">a&lt;b</th><td class="number" data-value="0.123456789">0.123</td>' in html
    assert '<td class="number" data-value="">–</td>' in html
    assert '<th scope="col" class="number">value</th>' in html


def test_write_report_takes_a_result_a_document_or_a_file(document, tmp_path):
    (tmp_path / "r.json").write_text(json.dumps(document))
    pages = [
        dg.results.write_report(given, tmp_path / f"{k}.html").read_bytes()
        for k, given in enumerate((check_result(document), document, tmp_path / "r.json", str(tmp_path / "r.json")))
    ]
    assert len(set(pages)) == 1
    assert 4_500_000 < len(pages[0]) < 6_000_000
    with pytest.raises(InputError, match="would replace its own result"):
        dg.results.write_report(tmp_path / "r.json", tmp_path / ".." / tmp_path.name / "r.json")
    with pytest.raises(OutputError, match="is a directory"):
        dg.results.write_report(document, tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["0.html", "1.html", "2.html", "3.html", "r.json"]


@pytest.mark.parametrize("missing", [("plotly", "plotly.offline"), ("jinja2",)])
def test_without_the_extra_the_error_says_what_to_install(document, tmp_path, monkeypatch, missing):
    for module in missing:
        monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(MissingPackageError, match=r"needs the extra `report`.*'jinja2>=.* 'plotly>="):
        dg.results.write_report(document, tmp_path / "page.html")
    assert list(tmp_path.iterdir()) == []
