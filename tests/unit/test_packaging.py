"""What is installed: everything under `lightkeeper`, and nothing beside it on anybody's path."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
OUTSIDE = (
    "manager", "lighthouse", "events", "bench", "examples", "protos", "simulator", "integrations", "chaos",
    "checkpoint", "supervisor",
)  # fmt: skip
TORCHTITAN = ("lightkeeper.integrations.torchtitan", "lightkeeper.examples.train_titan")  # who may import it
DATA_SUFFIXES = (".py", ".pyi", ".typed", ".proto", ".toml")


def packaged_files() -> set[str]:
    """Every file that must be in the wheel, as it is named there."""
    found = set()
    for folder, folders, names in os.walk(ROOT / "lightkeeper", followlinks=True):
        folders[:] = [name for name in folders if name != "__pycache__"]
        for name in names:
            if name.endswith(DATA_SUFFIXES):
                found.add(str((Path(folder) / name).relative_to(ROOT)))
    return found


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A wheel and an sdist, built from a copy of the tree that keeps its symbolic links."""
    source = tmp_path_factory.mktemp("source") / "tree"
    left_out = (".git", ".venv", "__pycache__", "*.egg-info", "build", "dist", "runs", ".*_cache")
    ignore = shutil.ignore_patterns(*left_out)
    shutil.copytree(ROOT, source, symlinks=True, ignore=ignore)
    code = "import setuptools.build_meta as b; b.build_sdist('dist'); b.build_wheel('dist')"
    done = subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr
    return source / "dist"


def test_every_folder_with_code_is_a_package() -> None:
    for name in packaged_files():
        folder = ROOT / Path(name).parent
        assert (folder / "__init__.py").exists(), f"{folder} has no __init__.py, so it would not be installed"


def test_wheel_holds_all_files_and_no_other_top_level(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    missing = sorted(packaged_files() - names)
    assert not missing
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == {"lightkeeper"}
    assert not [name for name in names if "__pycache__" in name]


def test_sdist_holds_all_files(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        names = {"/".join(name.split("/")[1:]) for name in archive.getnames()}
    assert not sorted(packaged_files() - names)


def modules() -> list[str]:
    """Everything that can be imported, by its dotted name."""
    names = [Path(name).with_suffix("") for name in packaged_files() if name.endswith(".py")]
    parts = [name.parts[:-1] if name.name == "__init__" else name.parts for name in names if name.name != "__main__"]
    return sorted(".".join(part) for part in parts)


def test_importing_everything_loads_no_top_level_module_and_no_torchtitan(built: Path, tmp_path: Path) -> None:
    """From the unpacked wheel, and away from the checkout, but for what binds torchtitan: nobody else waits for it."""
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(tmp_path)
    names = [name for name in modules() if not name.startswith(TORCHTITAN)]
    code = f"""
import importlib, sys
sys.path.insert(0, {str(tmp_path)!r})
for name in {names!r}:
    importlib.import_module(name)
assert sys.modules["lightkeeper"].__file__.startswith({str(tmp_path)!r})
bad = [name for name in {(*OUTSIDE, "torchtitan", "datasets", "tyro")!r} if name in sys.modules]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=110)
    assert done.returncode == 0, done.stderr


def test_importing_the_checkout_loads_no_top_level_module() -> None:
    code = f"""
import sys
sys.path.insert(0, {str(ROOT)!r})
import lightkeeper, lightkeeper.cli, lightkeeper.events, lightkeeper.lighthouse
bad = [name for name in {OUTSIDE!r} + ("torch", "grpc", "torchtitan") if name in sys.modules]
assert not bad, bad
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_public_names_are_listed() -> None:
    import lightkeeper

    assert "Manager" in dir(lightkeeper)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        _ = lightkeeper.Nonsense
