"""`lightkeeper notify -- COMMAND`: as if nobody stood between it and its terminal; its log, and what is told."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
import sys
import tarfile
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from listeners import Web, serving

from lightkeeper.errors import UsageError
from lightkeeper.events import read_run
from lightkeeper.events.of_supervisor import NotNotified
from lightkeeper.supervisor.notify import artefacts, keeping
from lightkeeper.supervisor.notify.artefacts import pack
from lightkeeper.supervisor.notify.keeping import Kept

NOTIFY = [sys.executable, "-m", "lightkeeper", "notify"]


def notify(tmp_path: Path, *words: str, options: tuple[str, ...] = (), **given: object) -> subprocess.CompletedProcess:
    command = [*NOTIFY, "--log", str(tmp_path / "log"), *options, "--", *words]
    given.setdefault("cwd", tmp_path)
    return subprocess.run(command, capture_output=True, timeout=120, **given)  # type: ignore[call-overload]


@pytest.fixture(autouse=True)
def no_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "127.0.0.1")


def kept(tmp_path: Path) -> Path:
    (folder,) = (tmp_path / "log").iterdir()
    return folder


def ended(tmp_path: Path) -> dict:
    return json.loads((kept(tmp_path) / "end.json").read_text())


def python(code: str) -> tuple[str, str, str]:
    return (sys.executable, "-c", code)


def test_bytes_pass_unchanged_and_are_kept(tmp_path: Path) -> None:
    code = "import sys; b = bytes(range(256)) * 4000; sys.stdout.buffer.write(b); sys.stderr.buffer.write(b[::-1])"
    done = notify(tmp_path, *python(code + "; assert sys.stdin.read() == 'in'"), input=b"in")
    data = bytes(range(256)) * 4000
    assert (done.returncode, done.stdout, done.stderr) == (0, data, data[::-1])
    assert (kept(tmp_path) / "stdout.log").read_bytes() == data
    assert (kept(tmp_path) / "stderr.log").read_bytes() == data[::-1]
    assert ended(tmp_path)["exit_code"] == 0


def test_the_log_is_there_before_the_command_and_the_environment_is_the_callers(tmp_path: Path) -> None:
    code = (
        "import json, os, pathlib, sys; (run,) = pathlib.Path('log').iterdir();"
        "told = json.loads((run / 'command.json').read_text()); assert told['argv'][0] == sys.executable;"
        "assert (run / 'stdout.log').exists();"
        "print(sorted(name for name in os.environ if name.startswith(('GRPC', 'LIGHTKEEPER'))))"
    )
    environment = {name: os.environ[name] for name in os.environ if not name.startswith(("GRPC", "LIGHTKEEPER"))}
    done = notify(tmp_path, *python(code), env=environment)
    assert (done.returncode, done.stdout) == (0, b"[]\n")


def test_names_are_on_the_disk_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    real = os.fsync

    def fsync(handle: int) -> None:
        synced.append(os.readlink(f"/proc/self/fd/{handle}"))
        real(handle)

    monkeypatch.setattr(keeping.os, "fsync", fsync)
    made = Kept(str(tmp_path / "new" / "log"), "x", ["x"], ["stdout.log"])
    path = Path(made.path)
    assert synced == [str(one) for one in (path / "command.json", path, path.parent, path.parent.parent)]


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (("sh", "-c", "kill -9 $$"), 137),
        (("no-such-program",), 127),
        (("/etc/passwd",), 126),
    ],
)
def test_exit_codes(tmp_path: Path, words: tuple[str, ...], code: int) -> None:
    assert notify(tmp_path, *words).returncode == code


def test_the_exit_code_is_the_commands_whatever_the_notifier_does(tmp_path: Path) -> None:
    done = notify(tmp_path, "sh", "-c", "exit 3", options=("--command", "false", "--within-s", "20"))
    assert done.returncode == 3
    assert b"nobody was told by command false" in done.stderr
    (event,) = [one for one in read_run(kept(tmp_path)).events if isinstance(one, NotNotified)]
    assert event.what == "failed" and event.tries == 3


def test_a_command_that_removes_its_folder_still_has_its_code(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    done = notify(tmp_path, "sh", "-c", "rmdir ../here; exit 7", options=("--artefact", "*"), cwd=tmp_path / "here")
    assert done.returncode == 7 and b"Traceback" not in done.stderr
    assert "nothing is named *" in done.stderr.decode()


def test_a_bug_of_ours_changes_no_exit_code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code = (
        "import sys; from lightkeeper.cli import notify; notify._message = None; "
        f"sys.exit(notify.main(['--log', {str(tmp_path / 'log')!r}, '--', 'sh', '-c', 'exit 7'], {{'PATH': '/bin'}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=120)
    assert done.returncode == 7 and b"TypeError" in done.stderr


def test_a_notifier_that_hangs_costs_only_its_bound(tmp_path: Path) -> None:
    done = notify(tmp_path, "sh", "-c", "exit 4", options=("--command", "sleep 50", "--within-s", "0.2"))
    assert done.returncode == 4
    assert b"it took longer than the 0.2 s that there were" in done.stderr


def test_a_person_is_told_the_cause_and_the_last_lines(tmp_path: Path) -> None:
    code = "print('step 7 loss 1.0', flush=True); raise RuntimeError('CUDA out of memory. Tried to allocate 2 GiB')"
    with serving(Web()) as web:
        done = notify(tmp_path, *python(code), options=("--webhook", web.url, "--name", "llama"))
        assert done.returncode == 1
        (post,) = web.posts
        assert (post["what"], post["job"], post["evidence"]) == ("failed", "llama", str(kept(tmp_path)))
        assert post["cause"].startswith("cuda_oom: ")
        assert "step 7 loss 1.0" in post["lines"], "two pipes have no common order"
        assert "RuntimeError: CUDA out of memory. Tried to allocate 2 GiB" in post["lines"]
        assert notify(tmp_path, "true", options=("--webhook", web.url)).returncode == 0
        assert len(web.posts) == 1, "it went well, and --on is failure"
        assert notify(tmp_path, "true", options=("--webhook", web.url, "--on", "always")).returncode == 0
        assert web.posts[-1]["what"] == "finished"


def start(tmp_path: Path, *words: str, **given: object) -> subprocess.Popen:
    command = [*NOTIFY, "--log", str(tmp_path / "log"), "--", *words]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **given)  # type: ignore[call-overload]


@pytest.mark.parametrize(("number", "whom"), [(signal.SIGTERM, "it"), (signal.SIGINT, "it"), (signal.SIGTERM, "all")])
def test_signals_are_handed_on_once(tmp_path: Path, number: signal.Signals, whom: str) -> None:
    code = (
        "import signal, sys, time\ngot = []\n"
        f"signal.signal({int(number)}, lambda *_: got.append(1))\n"
        "print('ready', flush=True)\nwhile not got: time.sleep(0.01)\ntime.sleep(0.2)\nsys.exit(10 + len(got))"
    )
    process = start(tmp_path, *python(code), start_new_session=True)
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    (os.killpg if whom == "all" else os.kill)(process.pid, number)
    process.communicate(timeout=120)
    assert process.returncode == 11
    assert ended(tmp_path)["asked"] == [int(number)]


def test_a_signal_nobody_handles_ends_the_command_and_is_told(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "echo ready; exec sleep 100")
    assert process.stdout is not None and process.stdout.readline() == b"ready\n"
    process.send_signal(signal.SIGTERM)
    _, said = process.communicate(timeout=120)
    assert process.returncode == 143
    assert b"was killed by SIGTERM" in said and b"after it was asked to end" in said


def test_the_command_does_not_outlive_it(tmp_path: Path) -> None:
    process = start(tmp_path, "sh", "-c", "echo $$; exec sleep 100")
    assert process.stdout is not None
    child = int(process.stdout.readline())
    watch = os.pidfd_open(child)
    process.kill()
    process.communicate(timeout=120)
    import select

    assert select.select([watch], [], [], 60)[0], "it has ended"
    os.close(watch)


def test_one_file_for_both_streams_keeps_their_order(tmp_path: Path) -> None:
    code = "import os\nfor i in range(300): os.write(1 + i % 2, b'%d\\n' % i)"
    command = [*NOTIFY, "--log", str(tmp_path / "log"), "--", *python(code)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=120)
    expected = b"".join(b"%d\n" % i for i in range(300))
    assert done.stdout == expected == (kept(tmp_path) / "output.log").read_bytes()


def test_a_terminal_stays_one(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()
    code = "import os, sys; print(os.isatty(1), os.isatty(2), os.get_terminal_size(2).columns)"
    process = subprocess.Popen(
        [*NOTIFY, "--log", str(tmp_path / "log"), "--", *python(code)], stdout=subprocess.PIPE, stderr=theirs
    )
    out, _ = process.communicate(timeout=120)
    os.close(theirs)
    os.close(ours)
    assert (process.returncode, out) == (0, b"False True 0\n")


def test_a_reader_that_goes_away_ends_the_command(tmp_path: Path) -> None:
    process = start(tmp_path, "yes")
    assert process.stdout is not None and process.stdout.readline() == b"y\n"
    process.stdout.close()
    assert process.wait(120) == 128 + signal.SIGPIPE
    assert process.stderr is not None
    process.stderr.close()


@pytest.mark.long
def test_what_holds_the_output_open_is_not_waited_for(tmp_path: Path) -> None:
    done = notify(tmp_path, "sh", "-c", "sleep 20 >/dev/null 2>/dev/null 3>&1 & sleep 20 2>/dev/null & echo $!; exit 5")
    left = int(done.stdout)
    assert done.returncode == 5
    assert b"still holds its output open" in done.stderr
    os.kill(left, signal.SIGKILL)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ([], "give the command after --"),
        (["--wehook", "x", "--", "true"], "unrecognized arguments: --wehook x"),
        (["--budget-mib", "0", "--", "true"], "--budget-mib must be above 0"),
        (["--webhook", "nonsense", "--", "true"], "--webhook: url must be http://"),
        (["--mail-to", "a@b", "--", "true"], "--mail-to needs --smtp"),
        (["--smtp", "a:1", "--", "true"], "--smtp is of no use without --mail-to"),
        (["--settings", "none.toml", "--", "true"], "--settings none.toml: No such file"),
        (["--log", "/dev/null/x", "--", "touch", "started"], "cannot keep a log in /dev/null/x"),
        (["--command", "a 'b", "--", "true"], "--command: No closing quotation"),
    ],
)
def test_wrong_input_starts_nothing(
    words: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from lightkeeper.cli.app import run

    monkeypatch.chdir(tmp_path)
    assert run(["notify", *words]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line
    assert not list(tmp_path.iterdir())


def test_settings_of_a_file_are_used(tmp_path: Path) -> None:
    from lightkeeper.cli.telling import notifiers

    path = tmp_path / "n.toml"
    path.write_text('[[notify]]\nkind = "command"\nargv = ["page"]\n')
    (one,) = notifiers(file=str(path))
    assert one.via == "command page"
    path.write_text('[[notfy]]\nkind = "command"\n')
    with pytest.raises(UsageError, match=r"no key 'notfy' \(did you mean notify\?\)"):
        notifiers(file=str(path))


# --- artefacts


def test_artefacts_are_packed_within_the_budget_and_the_others_named(tmp_path: Path) -> None:
    make = "head -c 300000 /dev/zero > a.bin; head -c 900000 /dev/zero > b.bin; mkdir d; echo x > d/c.txt; exit 6"
    given = ("--artefact", "*.bin", "--artefact", "d", "--artefact", "d/**", "--artefact", "*.none")
    done = notify(tmp_path, "sh", "-c", make, options=(*given, "--budget-mib", "0.5"))
    assert done.returncode == 6
    (line,) = [line for line in done.stderr.decode().splitlines() if "artefacts:" in line]
    assert "b.bin (878.9 KiB, beyond the budget)" in line and "d (0 bytes, is a folder: name d/**)" in line
    assert "nothing is named *.none" in line
    archive = kept(tmp_path) / "artefacts.tar"
    assert archive.stat().st_size <= 1 << 19
    with tarfile.open(archive) as tar:
        assert sorted(tar.getnames()) == ["a.bin", "d/c.txt"]
        member = tar.extractfile("a.bin")
        assert member is not None and member.read() == bytes(300000)
    assert ended(tmp_path)["artefacts"]["left_out"]["b.bin"] == [900000, "beyond the budget"]


def test_a_file_that_shrinks_breaks_no_archive(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("a").write_bytes(b"x" * 5000)
    Path("b").write_bytes(b"y" * 10)
    os.utime("b", (time.time() - 100, time.time() - 100))
    real = artefacts._Whole.read

    def read(self: artefacts._Whole, size: int) -> bytes:
        if os.path.getsize("a") == 5000:
            os.truncate("a", 100)
        return real(self, size)

    monkeypatch.setattr(artefacts._Whole, "read", read)
    done = pack(["*"], str(tmp_path / "out.tar"), 1 << 20)
    assert done.changed == ["a"] and "a shrank while it was packed" in done.line
    with tarfile.open(tmp_path / "out.tar") as tar:
        first, second = (tar.extractfile(name) for name in ("a", "b"))
        assert first is not None and second is not None
        assert first.read() == b"x" * 100 + bytes(4900) and second.read() == b"y" * 10


def test_what_is_no_regular_file_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    os.mkfifo("pipe")
    done = pack(["pipe"], str(tmp_path / "out.tar"), 1 << 20)
    assert done.left_out == {"pipe": (0, "is not a regular file")} and not Path("out.tar").exists()
