"""A script that runs below the bootstrap cannot tell it from a plain `python SCRIPT`."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

ABOUT = """
import json, multiprocessing, pickle, sys
from pathlib import Path
import beside

class Thing:
    pass

def child(queue):
    queue.put((Thing.__module__, __file__))

if __name__ == "__main__":
    shown = {
        "argv": sys.argv, "name": __name__, "file": __file__, "package": __package__,
        "spec": getattr(__spec__, "name", None),
        "path": sys.path[0], "beside": beside.VALUE, "main": sys.modules["__main__"].Thing is Thing,
        "loaded": sorted(name for name in ("torch", "manager", "ranks") if name in sys.modules),
        "names": sorted(name for name in globals() if not name.startswith("__")),
    }
    assert isinstance(pickle.loads(pickle.dumps(Thing())), Thing)
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    process = context.Process(target=child, args=(queue,))
    process.start()
    shown["child"] = queue.get(timeout=60)
    process.join()
    print(json.dumps(shown))
"""


def runs(folder: Path, *command: str, below: bool) -> subprocess.CompletedProcess[str]:
    words = ["-m", "lightkeeper.manager.bootstrap", "-"] if below else []
    return subprocess.run(
        [sys.executable, *words, *command], cwd=folder, capture_output=True, text=True, timeout=60, check=False
    )


def both(folder: Path, *command: str) -> tuple[subprocess.CompletedProcess[str], subprocess.CompletedProcess[str]]:
    return runs(folder, *command, below=False), runs(folder, *command, below=True)


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "pack").mkdir()
    for inside in (tmp_path, tmp_path / "pack"):
        (inside / "about.py").write_text(ABOUT)
        (inside / "beside.py").write_text(f"VALUE = {str(inside)!r}")
    (tmp_path / "pack" / "__init__.py").write_text("")
    (tmp_path / "link.py").symlink_to("pack/about.py")
    return tmp_path


@pytest.mark.parametrize(
    "command", [("about.py", "-x", "--", "y z"), ("pack/about.py",), ("link.py", "1"), ("-m", "pack.about", "-m", "q")]
)
def test_a_script_sees_what_it_would_see_below_python(folder: Path, command: tuple[str, ...]) -> None:
    plain, below = both(folder, *command)
    assert plain.returncode == below.returncode == 0, below.stderr
    assert plain.stdout and plain.stdout == below.stdout


@pytest.mark.parametrize(
    "body",
    [
        "def f():\n    raise ValueError('no')\nf()",
        "x = = 1",
        "import sys\nsys.exit('a word')",
        "import sys\nsys.exit(7)",
        "import sys\ndef hook(*given):\n    print('mine', given[0], len(given))\nsys.excepthook = hook\n1 / 0",
        "import atexit\natexit.register(print, 'last')\ntry:\n    1 / 0\nexcept ZeroDivisionError:\n    raise KeyError",
        "raise KeyboardInterrupt",
        "import os\nos._exit(3)",
    ],
)
def test_it_fails_as_it_would_fail_below_python(folder: Path, body: str) -> None:
    (folder / "bad.py").write_text(body + "\n")
    plain, below = both(folder, "bad.py")
    assert plain.returncode != 0
    assert (below.returncode, below.stdout, below.stderr) == (plain.returncode, plain.stdout, plain.stderr)


def test_a_module_that_fails_or_is_not_there(folder: Path) -> None:
    (folder / "pack" / "bad.py").write_text("1 / 0\n")
    for module in ("pack.bad", "pack.missing"):
        plain, below = both(folder, "-m", module)
        assert below.returncode == plain.returncode == 1
        assert below.stderr == plain.stderr


def test_ctrl_c_ends_it_as_it_ends_python(folder: Path) -> None:
    (folder / "waits.py").write_text("import time\nprint('here', flush=True)\ntime.sleep(60)\n")
    process = subprocess.Popen(
        [sys.executable, "-m", "lightkeeper.manager.bootstrap", "-", "waits.py"],
        cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None and process.stderr is not None
    assert process.stdout.readline() == "here\n"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(timeout=60) == -signal.SIGINT
    assert "KeyboardInterrupt" in process.stderr.read()
    process.stdout.close()
    process.stderr.close()
