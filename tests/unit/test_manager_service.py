"""What the manager's process says, apart from any run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightkeeper.manager.service import ManagerService
from lightkeeper.manager.settings import Settings


def test_a_flood_of_strangers_is_told_of_seldom(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    service = ManagerService(Settings(group="g1", token="t"), "i1", tmp_path / "manager.sock")
    for _ in range(100):
        service.stranger("ipv4:10.0.0.7:1", "call")
    lines = capsys.readouterr().err.splitlines()
    assert 1 <= len(lines) < 20
    assert lines[0] == "manager g1: refused ipv4:10.0.0.7:1: wrong or missing token"
