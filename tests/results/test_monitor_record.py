"""The documentation names every key that a log contains."""

import re
from pathlib import Path
from typing import Any

from monitor_documents import write_log

import depthgauge as dg

ROOT = Path(__file__).parents[2]


def keys_of(value: Any) -> set[str]:
    if isinstance(value, dict):
        return set(value) | {key for inner in value.values() for key in keys_of(inner)}
    return {key for inner in value for key in keys_of(inner)} if isinstance(value, list) else set()


def test_the_documentation_names_every_key(tmp_path: Path) -> None:
    record = dg.results.read_log(write_log(tmp_path / "x"))
    formats = (ROOT / "docs" / "formats.md").read_text(encoding="utf-8")
    section = formats.split("\n## Log of a monitor", 1)[1].split("\n## ")[0]
    written = keys_of(record.to_json())
    assert {"direction_ratio", "skip_loss", "first_mass", "threshold", "ranks"} <= written
    assert written - set(re.findall(r"`([^`\n]+)`", section)) == set()


def test_records_are_short_in_print(tmp_path: Path) -> None:
    record = dg.results.read_log(write_log(tmp_path / "x"))
    assert repr(record) == f"MonitorRecord(name='x', probes=11, alarms={len(record.alarms)} alarms)"
    assert len(repr(record.probes[0])) < 200
