"""Each transcript comes out as it is written down."""

from __future__ import annotations

import difflib
import os
from pathlib import Path

import pytest
from transcript import INDENT, replay

HERE = Path(__file__).parent
SCRIPTS = sorted(HERE.glob("*.txt"))


@pytest.mark.parametrize("path", SCRIPTS, ids=[path.stem for path in SCRIPTS])
def test_transcript(path: Path) -> None:
    written, now = replay(path)
    if os.environ.get("LIGHTKEEPER_REWRITE") == "1":
        path.write_text("\n".join(now) + "\n", encoding="utf-8")
        return
    difference = "\n".join(difflib.unified_diff(written, now, "as written", "as it comes out", lineterm=""))
    assert written == now, difference


def test_every_transcript_says_what_it_shows_and_something_happens_in_it() -> None:
    assert len(SCRIPTS) >= 15
    for path in SCRIPTS:
        lines = path.read_text(encoding="utf-8").splitlines()
        assert lines[0].startswith("# "), f"{path.name} begins with what it shows"
        assert sum(line.startswith(INDENT) for line in lines) >= 5, path.name
