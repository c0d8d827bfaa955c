"""Which texts are read and how: plain text, fields of JSONL files, chats; JSON, CSV and HTML are refused."""

import hashlib
import json
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import depthgauge
from depthgauge.base.errors import InputError
from depthgauge.checkpoints.inputs import text_files
from depthgauge.checkpoints.inputs.text_files import (
    TextContent,
    TextFile,
    find_text,
    lines_between,
    read_text,
    split_field,
)
from depthgauge.checkpoints.inputs.windows import tokenize_text

PLAIN = {
    "fortune": 'A day without sunshine is like night.\n%\nHe said, "no", and left.\n\t\t-- Anonymous, 1902\n%\n{sic}\n',
    "poem.txt": "Sea, sand, salt,\nstone, shell, stick,\ntide, town, time,\nwind, wave, wick,\n" * 5,
    "source.py": '"""A module."""\n\nTABLE = {"a": 1, "b": [2, 3]}\n\n\ndef f(x):\n    return TABLE[x]\n',
    "data.py": "[x for x in range(3)]\n",
    "README.md": '[![build](x.svg)](y)\n\n# Title\n\n<div align="center">\n<b>bold</b>\n</div>\n\n| a |\n| - |\n',
    "page.md": "<!-- comment -->\n<h1>Title</h1>\n\nText with <i>tags</i>, and {braces}.\n",
    "paper.tex": "\\documentclass{article}\n\\begin{document}\n{\\bf Bold}, [1], $\\{x\\}$\n\\end{document}\n",
    "group.tex": "{\\small\n[1] text\n}\n",
    "script.sh": '[ -f x ] && { echo "a: b"; }\n',
    "quote.txt": '"text": is a word in quotes\n',
    "braces.txt": '{"A quotation that starts with a brace", he said.}\n',
    "list.txt": "[1] First.\n[2] Second.\n",
    "empty.txt": "",
}


@pytest.fixture
def write(tmp_path: Path) -> Callable[[str, str | bytes], Path]:
    def write(name: str, content: str | bytes) -> Path:
        path = tmp_path / name
        path.write_bytes(content.encode() if isinstance(content, str) else content)
        return path

    return write


def read(text: TextFile, wanted: int = 3, length: int = 8, seed: int = 0) -> TextContent:
    return read_text(text, lambda chat: f"<{len(chat)}>", wanted=wanted, length=length, seed=seed)


def lines(*records: Any) -> str:
    return "".join(json.dumps(record) + "\n" for record in records)


@pytest.mark.parametrize("name", PLAIN)
def test_ordinary_text_is_read(write: Any, name: str) -> None:
    path = write(name, PLAIN[name])
    found = find_text(path)
    assert found == TextFile(path)
    assert read(found).pieces == (PLAIN[name],)


def test_our_own_files_are_read() -> None:
    """The built-in text, all Python sources and all documents of the project."""
    assert find_text(None).name == "the built-in text"
    package = Path(depthgauge.__file__).parent
    files = [*package.rglob("*.py"), package / "checkpoints" / "inputs" / "text.txt"]
    assert len(files) > 100
    for path in [*files, *package.parents[1].glob("docs/**/*.md")]:
        assert find_text(path) == TextFile(path)


@pytest.mark.parametrize(
    ("name", "content", "kind"),
    [
        ("data.json", '{"text": "a"}', "JSON"),
        ("data", '\n  [{"text": "a"},\n {"text": "b"}]', "JSON"),
        ("pretty.js", '{\n  "text": "a",\n  "more": 1\n}\n{\n  "text": "b"\n}\n', "JSON"),
        ("numbers", "[1, 2, 3]", "JSON"),
        ("bom", '\ufeff["a", "b"]', "JSON"),
        ("lines", lines({"text": "a"}, {"text": "b"}), "JSON"),
        ("page.html", "<p>Text</p>", "an HTML page"),
        ("page.tpl", " <!DOCTYPE html>\n<html><body>Text</body></html>", "an HTML page"),
        ("page", '<?xml version="1.0"?>\n<!-- c -->\n<HTML lang="en">Text</HTML>', "an HTML page"),
        ("data.csv", "id,text\n1,a\n", "comma-separated values"),
        ("data.TSV", "id\ttext\n1\ta\n", "tab-separated values"),
    ],
)
def test_markup_is_refused_unless_the_name_says_that_it_is_text(write: Any, name: str, content: str, kind: str) -> None:
    path = write(name, content)
    with pytest.raises(InputError, match=f"is not plain text but {kind}, and its markup .* a name that ends with .txt"):
        find_text(path)
    path = write(f"{name}.txt", content)
    found = find_text(path)
    assert found == TextFile(path)
    assert read(found).pieces == (content,)


def test_large_json_is_refused_by_its_beginning(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_files, "WHOLE_BYTES", 100)
    path = write("t", "[" + ",\n".join(json.dumps({"text": "a" * 50}) for _ in range(2000)) + "]")
    with pytest.raises(InputError, match=r"is not plain text but JSON.*write one JSON object per line"):
        find_text(path)
    path = write("u", lines(*[{"text": "a" * 50}] * 2000))
    with pytest.raises(InputError, match=f"name the field with the text, {path}:FIELD, if the file has one JSON"):
        find_text(path)


def test_the_field_is_named_after_the_path(write: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write("data.jsonl", lines({"text": "a", "note": "b", "x:y": "c"}))
    assert split_field(f"{path}:note") == (path, "note")
    assert split_field(f"{path}:x:y") == (path, "x:y")
    assert split_field(path) == (path, None)
    assert split_field(f"{path}:") == (Path(f"{path}:"), None)
    assert [read(find_text(text)).pieces for text in (path, f"{path}:note", f"{path}:x:y")] == [
        ("a\n\n",), ("b\n\n",), ("c\n\n",)
    ]  # fmt: skip
    assert find_text(path).name == f"{path}:text"
    assert find_text(f"{path}:note").name == f"{path}:note"
    # A name that exists is a name, and a drive is not a file.
    colon = write("data.jsonl:note", "plain")
    assert split_field(colon) == (colon, None)
    assert split_field("C:/missing.txt") == (Path("C:/missing.txt"), None)
    assert split_field("C:/missing.jsonl:text") == (Path("C:/missing.jsonl"), "text")
    with pytest.raises(InputError, match=r"cannot read text a*: File name too long"):
        find_text("a" * 5000)
    for text in ("missing.jsonl:text", "missing.jsonl", "missing.txt"):
        with pytest.raises(InputError, match=r"cannot read text missing\.\w+: No such file"):
            read(find_text(text))
    # A field can be named for any file with one object per line.
    assert read(find_text(f"{write('data.txt', lines({'text': 'a'}))}:text")).pieces == ("a\n\n",)


def test_documents_are_separated_and_chats_are_rendered(write: Any) -> None:
    raw = "\ufeff" + lines({"text": "one"}, {"text": ""}, {"text": "two\nlines"}) + "\n"
    path = write("a.jsonl", raw)
    found = read(find_text(path))
    assert found.pieces == ("one\n\ntwo\nlines\n\n",)
    assert found.digest == hashlib.sha256(raw.encode()).hexdigest()
    chat = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Ho"}]
    path = write("b.jsonl", lines({"messages": chat}, {"messages": chat[:1]}))
    assert find_text(path).name == f"{path}:messages"
    assert read(find_text(path)).pieces == ("<2><1>",)
    both = write("c.jsonl", lines({"text": "a", "messages": chat}))
    assert find_text(both).field == "text"
    assert read(find_text(f"{both}:messages")).pieces == ("<2>",)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (lines({"text": "a"}, {"body": "b", "id": 1}), "line 2 of .* has no field 'text'; .* are: 'body', 'id'; "),
        (lines({"text": "a"}, {}), r"line 2 of .* has no field 'text'; its fields are: none; "),
        (lines({"text": "a"}, {"text": 7}), "the field 'text' in line 2 of .* must hold a text, or a chat .*; got int"),
        (lines({"text": ["a", "b"]}), "the field 'text' in line 1 of .* must hold a text, or a chat .*; got list"),
        (lines({"text": "a"}, ["text"]), "line 2 of .* is not a JSON object; a JSONL file has one object per line"),
        (lines({"text": "a"}) + "null", "line 2 of .* is not a JSON object"),
        (lines({"text": "a"}) + "\n{text", "line 3 of .* is not JSON: Expecting property name"),
        (lines({"text": "a"}).encode() + b'{"text": "\xff"}', "line 2 of .* is not JSON: 'utf-8' codec can't decode"),
        (lines({"text": "a"}) + "[" * 100_000, "line 2 of .* is not JSON: "),
    ],
)  # fmt: skip
def test_bad_lines_are_named(write: Any, content: str | bytes, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        read(find_text(write("t.jsonl", content)))


def test_an_empty_file_has_no_text(write: Any) -> None:
    assert read(find_text(write("t.jsonl", "\n\n"))).pieces == ("",)


@given(st.lists(st.binary(max_size=9).map(lambda line: line.replace(b"\n", b"")), max_size=12), st.integers(1, 13))
def test_every_line_starts_in_one_block(
    tmp_path_factory: pytest.TempPathFactory, content: list[bytes], step: int
) -> None:
    path = tmp_path_factory.mktemp("lines") / "t"
    raw = b"\n".join(content)
    path.write_bytes(raw)
    with open(path, "rb") as handle:
        found = [line for first in range(0, len(raw), step) for line in lines_between(handle, first, first + step)]
    assert b"".join(line for _, line in found) == raw
    assert all(raw[offset:].startswith(line) and (offset == 0 or raw[offset - 1] == 10) for offset, line in found)


@pytest.mark.parametrize("longest", [5, 3000])
def test_large_files_are_read_in_whole_lines(write: Any, monkeypatch: pytest.MonkeyPatch, longest: int) -> None:
    """Documents shorter and longer than a block of 8 · 64 bytes; every piece consists of whole documents."""
    monkeypatch.setattr(text_files, "WHOLE_BYTES", 1000)
    documents = [f"<{number} " + "é" * (number * 7 % longest) + ">" for number in range(400)]
    path = write("t.jsonl", "".join(json.dumps({"text": one}, ensure_ascii=False) + "\n" for one in documents))
    few = read(find_text(path), wanted=3)
    assert not few.complete
    assert len(few.pieces) == 3
    used = [one for piece in few.pieces for one in piece.removesuffix("\n\n").split("\n\n")]
    assert set(used) <= set(documents)
    assert len(used) == len(set(used))
    assert all(len(piece) >= 8 * 16 for piece in few.pieces)
    assert read(find_text(path), wanted=3) == few
    assert read(find_text(path), wanted=3, seed=1) != few
    everything = read(find_text(path), wanted=10**6)
    assert everything.complete
    assert sorted("".join(everything.pieces).removesuffix("\n\n").split("\n\n")) == sorted(documents)
    before = lines(*[{"text": "a" * 90}] * 50)
    damaged = write("d.jsonl", before + lines({"body": "b"}))
    with pytest.raises(InputError, match=f"the line at byte {len(before)} of .* has no field 'text'"):
        read(find_text(damaged), wanted=10**6)


class Chatting:
    """A tokenizer with one token per character, and a chat template."""

    chat_template = "template"

    def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
        return {"input_ids": list(text.encode())}

    def apply_chat_template(self, messages: list[dict[str, str]], tokenize: bool) -> str:
        assert not tokenize
        return "".join(f"[{one['role']}]{one['content']}" for one in messages)


def test_the_template_of_the_tokenizer_is_used(write: Any) -> None:
    path = write("t.jsonl", lines({"messages": [{"role": "user", "content": "Hi"}]}, {"messages": [{"role": "x"}]}))
    settings: dict[str, int] = {"wanted": 1, "length": 4, "seed": 0}
    with pytest.raises(InputError, match=r"cannot read the chat in line 2 of .*: the chat template failed: 'content'"):
        tokenize_text(Chatting(), path, **settings)
    path = write("t.jsonl", lines({"messages": [{"role": "user", "content": "Hi"}]}))
    found = tokenize_text(Chatting(), path, **settings)
    assert bytes(found.pieces[0].tolist()).decode() == "[user]Hi"
    assert found.source == f"{path}:messages"
    plain = Chatting()
    plain.chat_template = None  # type: ignore[assignment]
    with pytest.raises(
        InputError, match=r"line 1 of .*: the tokenizer has no chat template; use the tokenizer of a chat"
    ):
        tokenize_text(plain, path, **settings)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="the system has no named pipes")
def test_a_pipe_is_not_read_twice(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=pipe.write_text, args=("some text",))
    writer.start()
    assert read(find_text(pipe)).pieces == ("some text",)
    writer.join()
