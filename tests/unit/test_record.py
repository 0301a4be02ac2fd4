"""What a rank says of its steps."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from lightkeeper.events import read_run
from lightkeeper.events.schema import SettingsDiffer
from lightkeeper.manager.record import StepRecord
from lightkeeper.manager.settings import Settings


def test_settings_that_differ_are_said_again_and_written_once(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    record = StepRecord(Settings(run_folder=str(tmp_path)), "1-ab", 0)
    for step in range(7, 1000):
        record.settings_differ(step)
    lines = capsys.readouterr().err.splitlines()
    assert [int(re.search(r"step (\d+):", line)[1]) for line in lines] == [7, 107, 207, 407, 807]  # type: ignore[index]
    assert "manager.register()" in lines[0] and "still do NOT have" in lines[1] and "(since step 7)" in lines[1]
    assert [event.step for event in read_run(tmp_path).events if isinstance(event, SettingsDiffer)] == [7]
