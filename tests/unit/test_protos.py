"""The committed protobuf modules are what the committed .proto files give."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROTOS = sorted((ROOT / "protos").glob("*.proto"))


@pytest.fixture(scope="module")
def regenerated(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("protos")
    environment = {**os.environ, "LIGHTKEEPER_PROTOC_PYTHON": sys.executable}
    subprocess.run([ROOT / "scripts/protos", "--out", out], env=environment, check=True, timeout=60)
    return out / "lightkeeper" / "protos"


def test_there_are_protos() -> None:
    assert PROTOS


def test_regenerating_gives_the_same_files(regenerated: Path) -> None:
    names = sorted(path.name for path in regenerated.iterdir())
    committed = sorted(path.name for path in (ROOT / "protos").glob("*_pb2*.py*"))
    assert names == committed
    stale = [name for name in names if (regenerated / name).read_bytes() != (ROOT / "protos" / name).read_bytes()]
    assert not stale, f"run ./scripts/protos: {stale} are not what the .proto files give"


def test_imports_go_through_the_import_name(regenerated: Path) -> None:
    for path in regenerated.glob("*.py"):
        lines = [line for line in path.read_text().splitlines() if "_pb2" in line and "import" in line]
        for line in lines:
            assert "lightkeeper.protos" in line or line.startswith("from google."), line


def test_unknown_argument_gets_one_line() -> None:
    done = subprocess.run([ROOT / "scripts/protos", "--nonsense"], capture_output=True, text=True, timeout=30)
    assert done.returncode == 1
    assert done.stderr.strip() == "error: unknown argument --nonsense (allowed: --out DIR)"
