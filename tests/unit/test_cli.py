"""The command line: quick, told in one line when it is wrong, and each option reaches who it is for."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from cli_said import one_line, only_the_token

from lightkeeper.cli.app import run
from lightkeeper.cli.options import LaunchOptions, check_address, require_token
from lightkeeper.errors import RunFolderError, UsageError
from lightkeeper.events import EventLog, reader
from lightkeeper.events.schema import Committed, GroupLost, ProcessStarted, Waiting
from lightkeeper.manager.settings import Settings

OF_LAUNCH = {"script", "token_file", "restarts", "warm", "torchtitan", "log_folder"}  # options of it, no settings
COMMANDS = ["lighthouse", "launch", "manager", "demo", "bench", "events", "why", "diagnose", "status", "fence"]


@pytest.fixture(autouse=True)
def token(monkeypatch: pytest.MonkeyPatch) -> None:
    only_the_token(monkeypatch)


@pytest.fixture
def handed(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Stand-ins for the parts that do the work: they keep the options they are handed and return 7."""
    options: list[object] = []

    def keep(given: object) -> int:
        options.append(given)
        return 7

    for name in ("lighthouse.main", "manager.launch", "manager.main", "demo.runner"):
        module = types.ModuleType(f"lightkeeper.{name}")
        module.run = keep  # type: ignore[attr-defined]
        module.Options = types.SimpleNamespace  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, f"lightkeeper.{name}", module)
    return options


@pytest.mark.parametrize("command", COMMANDS)
def test_help_names_every_option_with_a_text(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    import typer.main

    from lightkeeper.cli.app import build

    assert run([command, "--help"]) == 0
    assert command in capsys.readouterr().out
    for parameter in typer.main.get_command(build()).commands[command].params:  # type: ignore[attr-defined]
        assert parameter.help, f"{command} {parameter.name} has no help"


def test_help_imports_neither_torch_nor_grpc() -> None:
    code = (
        "import sys; from lightkeeper.cli.app import run; run(['--help']); run(['launch', '--help'])\n"
        "bad = [n for n in ('torch', 'grpc', 'numpy', 'psutil') if n in sys.modules]; assert not bad, bad"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--version"]) == 0
    assert capsys.readouterr().out == "lightkeeper 0.1.0\n"


def test_lighthouse_options_arrive(handed: list[object], tmp_path: Path) -> None:
    file = tmp_path / "token"
    file.write_text("from-file\n")
    words = f"lighthouse --bind [::1]:0 --token-file {file} --log {tmp_path}/log --run-folder {tmp_path}/run"
    assert run([*words.split(), "--lease-s", "3.5", "--admit-interval-s", "0.5"]) == 7
    (options,) = handed
    assert vars(options) == {
        "bind": "[::1]:0",
        "token": "from-file",
        "log": tmp_path / "log",
        "run_folder": tmp_path / "run",
        "lease_s": 3.5,
        "admit_interval_s": 0.5,
    }


ALL_OPTIONS = {
    "group": "g1",
    "ranks": 2,
    "lighthouse": "h:1",
    "job": "j",
    "groups": 3,
    "minimum": 2,
    "start_window_s": 4.0,
    "outage_budget_s": 30.0,
    "host": "10.0.0.1",
    "bucket_mb": 8.0,
    "fingerprint_every": 5,
}


def test_launch_options_arrive(handed: list[object], tmp_path: Path) -> None:
    words = ["launch", "--run-folder", str(tmp_path)]
    for name, value in ALL_OPTIONS.items():
        words += ["--" + name.replace("_", "-"), str(value)]
    assert run([*words, "--", "train.py", "--group", "x", "-m", "y"]) == 7
    settings = Settings(token="secret", run_folder=str(tmp_path), **ALL_OPTIONS)  # type: ignore[arg-type]
    assert handed == [LaunchOptions(settings, ("train.py", "--group", "x", "-m", "y"))]


def test_ranks_are_those_of_each_node(handed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    words = "launch --group g0 --nnodes 4 --node-rank 3 --manager n0:29500 -- train.py"
    assert run(words.split()) == 7
    monkeypatch.setenv("LIGHTKEEPER_RANKS", "8")
    assert run(words.split()) == 7
    one, eight = (options.settings for options in handed)  # type: ignore[attr-defined]
    assert (one.ranks, one.ranks_per_node, list(one.ranks_here)) == (4, 1, [3])
    assert (eight.ranks, eight.ranks_per_node, list(eight.ranks_here)) == (32, 8, [*range(24, 32)])
    assert (eight.nnodes, eight.node_rank, eight.manager) == (4, 3, "n0:29500")


def test_launch_reads_the_environment(handed: list[object], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in ALL_OPTIONS.items():
        monkeypatch.setenv(f"LIGHTKEEPER_{name.upper()}", str(value))
    monkeypatch.setenv("LIGHTKEEPER_RUN_FOLDER", "/tmp/run")
    assert run(["launch", "--", "train.py"]) == 7
    settings = Settings(token="secret", run_folder="/tmp/run", **ALL_OPTIONS)  # type: ignore[arg-type]
    assert handed == [LaunchOptions(settings, ("train.py",))]


def test_launch_takes_what_is_not_the_managers(
    handed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["launch", "--group", "g0"]
    assert run([*words, "--restarts", "5", "--", "train.py"]) == 7
    monkeypatch.setenv("LIGHTKEEPER_RESTARTS", "0")
    assert run([*words, "--", "train.py"]) == 7
    assert run([*words, "--restarts", "2", "--no-warm", "--log-folder", "here", "--", "train.py"]) == 7
    got = [
        (options.restarts, options.warm, options.log_folder) for options in handed if isinstance(options, LaunchOptions)
    ]
    assert got == [(5, True, ""), (0, False, ""), (2, False, "here")]
    assert run([*words, "--restarts", "-1", "--", "train.py"]) == 2
    assert "--restarts must be within 0.." in capsys.readouterr().err


def test_launch_runs_torchtitan(handed: list[object], capsys: pytest.CaptureFixture[str]) -> None:
    words = ["launch", "--group", "g0", "--ranks", "8", "--torchtitan"]
    assert run([*words, "--", "--module", "llama3", "--config", "llama3_8b", "--training.steps", "9"]) == 7
    (options,) = handed
    ours = ("--module", "lightkeeper.integrations.torchtitan", "--config", "llama3.llama3_8b_ft")
    assert options.command == ("-m", "torchtitan.train", *ours, "--training.steps", "9")  # type: ignore[attr-defined]
    assert run(words) == 2 and "--torchtitan -- --module llama3" in one_line(capsys)
    assert run([*words, "--", "train.py"]) == 2
    assert "'train.py' is no argument of torchtitan.train" in one_line(capsys)


def test_every_setting_is_an_option_of_launch() -> None:
    """No setting that can only be reached by editing code, no option that goes nowhere."""
    from dataclasses import fields
    from inspect import signature

    from lightkeeper.cli import launch, manager

    named = {field.name for field in fields(Settings)} - {"token"} | {"members"}  # which is groups less spares
    assert set(signature(launch.command).parameters) - OF_LAUNCH == named
    assert set(signature(manager.command).parameters) - {"token_file"} == named


def test_manager_options_arrive(handed: list[object]) -> None:
    assert run(["manager", "--group", "g0"]) == 7
    assert handed == [Settings(group="g0", token="secret")]


def test_demo_options_arrive(handed: list[object], tmp_path: Path) -> None:
    words = f"demo --groups 2 --steps 9 --microbatches 5 --fault freeze --seed 4 --json --run-folder {tmp_path}"
    assert run(words.split()) == 7
    (options,) = handed
    from lightkeeper.demo.options import DemoOptions

    assert options == DemoOptions(2, 9, 5, "freeze", 4, True, tmp_path)


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("nonsense", "No such command 'nonsense'."),
        ("lighthouse --nope", "No such option: --nope"),
        ("lighthouse --bind here", "--bind: 'here' is not an address of the form HOST:PORT"),
        ("lighthouse --bind h:70000", "--bind: 'h:70000' is not an address"),
        ("lighthouse --lease-s x", "Invalid value for '--lease-s'"),
        ("lighthouse --token-file /nonexistent", "cannot read the token file /nonexistent"),
        ("launch -- train.py", "--group NAME is missing"),
        ("launch --group g0", "no script"),
        ("launch --group ../x -- t.py", "group '../x': give 1 to 100 of"),
        ("launch --group g0 --ranks 0 -- t.py", "ranks 0: a group has at least one rank"),
        ("launch --group g0 --nnodes 0 -- t.py", "nnodes 0: give 1 to"),
        ("launch --group g0 --nnodes 2 --ranks 0 -- t.py", "ranks 0: a group has at least one rank"),
        ("launch --group g0 --nnodes 2 --node-rank 2 -- t.py", "node_rank 2: of 2 nodes give 0 to 1"),
        ("launch --group g0 --manager n0 -- t.py", "manager: 'n0' is not an address"),
        ("launch --group g0 --lighthouse h -- t.py", "lighthouse: 'h' is not an address"),
        ("launch --group g0 --minimum 4 --groups 3 -- t.py", "minimum 4 of 3 groups"),
        ("launch --group g0 --outage-budget-s 0 -- t.py", "outage_budget_s 0.0: give 1 to 86400 seconds"),
        ("launch --group g0 --lighthouse a:1,h -- t.py", "lighthouse: 'h' is not an address"),
        ("status --lighthouse a:1,nowhere", "--lighthouse: 'nowhere' is not an address"),
        ("status --lighthouse file:/nonexistent", "--lighthouse: cannot read /nonexistent"),
        ("status --manager nowhere", "--manager: 'nowhere' is not an address"),
        ("fence --group g1 --lighthouse nowhere", "--lighthouse: 'nowhere' is not an address"),
        ("status --lighthouse nowhere", "--lighthouse: 'nowhere' is not an address"),
        ("demo --groups 0", "--groups must be within 1..16, got 0"),
        ("demo --groups 1", "--groups 1 has no peer"),
        ("demo --groups 3 --microbatches 2", "--microbatches must be at least --groups (3), got 2"),
        ("demo --fault flood", "Invalid value for '--fault'"),
        ("bench nonsense", "no bench 'nonsense'"),
        ("bench chaos --often 3", "bench chaos does not know --often (it takes --interval, --minutes, --restart)"),
        ("bench vote --minutes 3", "bench vote does not know --minutes (it takes no options of its own)"),
        ("bench chaos --minutes", "--minutes : give a number"),
        ("bench chaos --minutes -1", "--minutes -1: give a number above 0"),
        ("bench titan --peer", "--peer: give a value"),
        ("bench titan --peer /nonexistent", "--peer /nonexistent: it has no killtest.py"),
        ("bench chaos --restart 15", "--restart 15 is not below --interval 15"),
        ("events /nonexistent", "no event log in /nonexistent"),
        ("events /tmp --kind meteor", "no event kind 'meteor'"),
        ("events /tmp --except meteor", "no event kind 'meteor'"),
        ("events /tmp --kind gruop_lost", "no event kind 'gruop_lost' (did you mean group_lost?)"),
        ("preflight --only memry", "--only: there is no check 'memry': is memory meant?"),
        ("events /tmp --follow --summary", "--summary is of what is written so far"),
    ],
)
def test_bad_input_gets_one_line_and_code_2(words: str, says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(words.split()) == 2
    assert says in one_line(capsys)


def test_no_token_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.delenv("LIGHTKEEPER_TOKEN")
    assert run(["lighthouse"]) == 2
    assert one_line(capsys) == "no job token: give --token-file FILE or set LIGHTKEEPER_TOKEN"


@pytest.mark.parametrize("text", ["", "\n", "é", "a" * 513, "a\nb"])
def test_bad_tokens_are_refused(text: str, tmp_path: Path) -> None:
    (tmp_path / "t").write_text(text, encoding="utf-8")
    with pytest.raises(UsageError):
        require_token(tmp_path / "t")


def test_addresses() -> None:
    assert check_address("h:5", "--x") == "h:5"
    assert check_address("[fe80::1%eth0]:5", "--x") and check_address(":5", "--x") and check_address("a_b.c-d:5", "--x")
    for bad in ("h", "h:", "h:-1", "h:5x", "h:65536", "h:²", "bad host:5", "[::1:5", "::1:5", "[h]:5", "[]:5", "h\n:5"):
        with pytest.raises(UsageError, match="--x") as refused:
            check_address(bad, "--x")
        assert "\n" not in str(refused.value) and repr(bad) in str(refused.value)


def test_told_errors_and_interrupts_have_their_codes(
    monkeypatch: pytest.MonkeyPatch, handed: list[object], capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse(_: object) -> int:
        raise RunFolderError("cannot write the run folder /x")

    def interrupt(_: object) -> int:
        raise KeyboardInterrupt

    monkeypatch.setattr(sys.modules["lightkeeper.lighthouse.main"], "run", refuse)
    assert run(["lighthouse"]) == 2
    assert one_line(capsys) == "cannot write the run folder /x"
    monkeypatch.setattr(sys.modules["lightkeeper.lighthouse.main"], "run", interrupt)
    assert run(["lighthouse"]) == 130
    assert capsys.readouterr().err == ""


# --- events


@pytest.fixture
def a_run(tmp_path: Path) -> Path:
    log = EventLog(tmp_path, "rank g0/0", group="g0")
    for step in range(3):
        log.write(Committed(step=step, epoch=1, total=2, microbatches=(0, 1), loss=2.5))
    EventLog(tmp_path, "lighthouse").write(GroupLost(group="g1", cause="signal 9", detected_by="stream"))
    return tmp_path


def test_events_prints_a_line_each(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", str(a_run)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 4
    assert "rank g0/0" in lines[0]
    assert "committed" in lines[0]
    assert "microbatches=[0,1] loss=2.5" in lines[0]
    assert "g1 group_lost" in lines[3]
    assert "cause='signal 9'" in lines[3]


def test_events_filters_and_json(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", str(a_run), "--kind", "committed", "--json"]) == 0
    steps = [json.loads(line)["step"] for line in capsys.readouterr().out.splitlines()]
    assert steps == [0, 1, 2]
    assert run(["events", str(a_run), "--group", "g1"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1


def test_events_hides_kinds(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["events", str(a_run), "--except", "group_lost"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 3
    assert run(["events", str(a_run), "--brief"]) == 0
    assert "group_lost" in capsys.readouterr().out.splitlines()[0]


@pytest.mark.parametrize("follows", [False, True])
def test_brief_says_once_for_whom_a_process_waits(
    follows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lighthouse, manager = EventLog(tmp_path, "lighthouse"), EventLog(tmp_path, "manager g0", group="g0")
    for since_s in (1.0, 2.0, 3.0):
        lighthouse.write(Waiting(whom="g1", since_s=since_s, why=f"rank 0 compute of step 3 for {since_s + 0.5} s"))
        manager.write(Waiting(whom="the others", since_s=since_s))
    lighthouse.write(Waiting(whom="g1", since_s=4.0, why="silent"))
    manager.write(ProcessStarted())
    manager.write(Waiting(whom="the others", since_s=5.0))
    words = ["events", str(tmp_path), "--kind", "waiting"]
    if follows:
        follow = reader.follow
        monkeypatch.setattr(reader, "follow", lambda folder, **_: follow(folder, stop=lambda: True))
        words.append("--follow")
    assert run(words) == 0
    assert len(capsys.readouterr().out.splitlines()) == 8
    assert run([*words, "--brief"]) == 0
    said = [line.partition("since_s=")[2].split()[0] for line in capsys.readouterr().out.splitlines()]
    assert sorted(said) == ["1", "1", "4", "5"]


def test_following_a_folder_that_is_not_there_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("lightkeeper.cli.events.FOLDER_S_MAX", 0.3)
    assert run(["events", str(tmp_path / "no"), "--follow"]) == 2
    said, wrong = capsys.readouterr().err.splitlines()
    assert said.startswith("lightkeeper: waiting 0.3 s for an event log in")
    assert wrong.startswith("lightkeeper: no event log in")


def test_events_summary_ends_well_when_every_rule_holds(tmp_path: Path) -> None:
    log = EventLog(tmp_path, "rank g0/0", group="g0")
    for step in range(3):
        log.write(Committed(step=step, epoch=1, total=2, microbatches=(0, 1), computed=2, fingerprint="f"))
    assert run(["events", str(tmp_path), "--summary"]) == 0


def test_events_tells_torn_lines_and_sums_up(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    next((a_run / "events").glob("rank*")).open("a").write('{"kind":"comm')
    assert run(["events", str(a_run), "--summary"]) == 1, "a rule does not hold"
    said = capsys.readouterr()
    assert "samples consumed exactly once            yes  6" in said.out
    assert "line 4 is torn" in said.err


def test_a_foreign_file_beside_the_events_is_one_line(a_run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (a_run / "events" / "core.jsonl").write_bytes(bytes(range(256)) * 9 + b"\x1b[31m\n" * 418)
    for command in ("why", "events"):
        run([command, str(a_run)])
        (said,) = capsys.readouterr().err.splitlines()
        assert said.startswith("lightkeeper: core.jsonl 427 lines are torn, first line 1: \\x00\\x01"), said
        assert len(said) < 400 and said.isprintable()


def test_what_others_wrote_is_neither_endless_nor_obeyed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A terminal obeys what stands between the letters."""
    bad = "\x1b[2J\x1b]0;pwned\x07\nsecond\x9b31m" + "x" * (1 << 20)
    log = EventLog(tmp_path, "lighthouse")
    log.write(GroupLost(group="g1\x1b[31m", cause="a word", step=2, detected_by="lease"))
    log.write(GroupLost(group="g2", cause="was killed", step=2, detected_by="lease"))
    log.close()
    (file,) = (tmp_path / "events").iterdir()
    file.write_text(file.read_text().replace('"a word"', json.dumps(bad)))  # longer than we write one
    for words in (["events"], ["events", "--summary"], ["why"]):
        run([words[0], str(tmp_path), *words[1:]])
        said = capsys.readouterr()
        assert "\\x1b[2J" in said.out and len(said.out) < 6000, said.out[:500]
        assert all(line.isprintable() for line in said.out.splitlines())
        assert "g2" in said.out, "a long word of one does not hide the next"
    assert run(["why", str(tmp_path), "\x1b[31mg9"]) == 2
    assert one_line(capsys).isprintable()


@pytest.mark.parametrize(("command", "closed"), [("why", ">&-"), ("why", "2>&-"), ("diagnose", "<&- >&-")])
def test_closed_streams_cost_only_what_would_be_printed(a_run: Path, command: str, closed: str) -> None:
    what = a_run if command == "why" else next((a_run / "events").glob("rank*"))
    words = [sys.executable, "-m", "lightkeeper", command, str(what)]
    done = subprocess.run(["sh", "-c", f'exec "$@" {closed}', "sh", *words], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert bool(done.stdout) is (closed == "2>&-")


def test_what_goes_wrong_is_not_told_on_standard_output(tmp_path: Path) -> None:
    words = ["sh", "-c", 'exec "$@" 2>&-', "sh", sys.executable, "-m", "lightkeeper", "why", str(tmp_path)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout) == (2, "")


def test_bench_lists_what_is_there(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["bench", "list"]) == 0


def test_a_notice_that_could_never_appear_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "none" / "notice"
    assert run(["launch", "--group", "g0", "--notice-file", str(path), "--", "train.py"]) == 2
    assert one_line(capsys) == f"--notice-file {path}: there is no folder {path.parent}"


def test_a_misspelt_variable_is_told(
    handed: list[object], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("LIGHTKEEPER_MINIMUN", "2")
    assert run(["launch", "--group", "g0", "--", "train.py"]) == 7, "it goes on"
    assert one_line(capsys) == "LIGHTKEEPER_MINIMUN is not an option (LIGHTKEEPER_MINIMUM is)"
