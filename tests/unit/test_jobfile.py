"""Job files: what is read, and the one line for what cannot be right."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.supervisor.example import EXAMPLE
from lightkeeper.supervisor.jobchecks import check_job
from lightkeeper.supervisor.jobfile import JobFile, read_job
from lightkeeper.supervisor.jobshape import check_shape, shape_of
from lightkeeper.supervisor.launching import launch_argv

LEAST = 'name = "j"\ncommand = ["t.py"]\n'


def read(tmp_path: Path, text: str) -> JobFile:
    path = tmp_path / "job.toml"
    path.write_text(text)
    return read_job(path)


def test_the_least_is_one_group_on_one_node(tmp_path: Path) -> None:
    job = read(tmp_path, LEAST)
    assert (job.groups, job.nodes, job.group_names, job.preflight.enabled) == (1, ("n0",), ("g0",), True)


def test_the_example_is_read_and_says_the_defaults(tmp_path: Path) -> None:
    job, plain = read(tmp_path, EXAMPLE), read(tmp_path, LEAST)
    assert job.nodes == ("n0", "n1", "n2", "n3") and job.groups == 3
    assert job.budget == plain.budget and job.lighthouse == plain.lighthouse


def test_places_in_the_command_are_filled_in_and_other_braces_stay(tmp_path: Path) -> None:
    job = read(
        tmp_path, 'name = "j"\ncommand = ["t.py", "{checkpoints}", "in={run_folder}", \'{"a": {"b": 1}}\', "{x}"]\n'
    )
    words = ["t.py", "/r/checkpoints", "in=/r", '{"a": {"b": 1}}', "{x}"]
    assert job.command_in(Path("/r")) == words


@pytest.mark.parametrize(("text", "why"), [
    ("", "job.toml: name is missing"),
    ('name = "j"\ncommand = []\n', "command is empty"),
    (LEAST + "gruops = 3\n", "job.toml: unknown key 'gruops'; did you mean groups?"),
    (LEAST + "[budget]\natempts = 3\n", "job.toml budget: unknown key 'atempts'; did you mean attempts?"),
    (LEAST + "[zzz]\n", "unknown key 'zzz'; it takes name, command"),
    (LEAST + 'groups = "3"\n', "job.toml groups is a whole number, not '3'"),
    (LEAST + "groups = true\n", "job.toml groups is a whole number, not True"),
    (LEAST + "minimum = 2\n", "minimum 2 of 1 groups"),
    (LEAST + "groups = 3\n[cluster]\nnodes = 2\n", "2 nodes for 3 groups of 1: give at least 3"),
    (LEAST + '[cluster]\nkind = "slurm"\n', "kind 'slurm': give local"),
    (LEAST + '[cluster]\nnames = ["a", "a"]\n', "one of them stands there twice"),
    (LEAST + "[preflight]\nlimit_s = 0\n", "limit_s 0.0: give seconds above 0"),
    (LEAST + "[budget]\npause_s = 10\npause_s_max = 1\n", "pause_s_max 1.0 is below pause_s 10.0"),
    (LEAST + "[options]\nrestarts = 3\n", "job.toml options: restarts is said by [budget] in_place"),
    (LEAST + "[options]\nlighthouse = 'h:1'\n", "lighthouse is said by [lighthouse] address"),
    (LEAST + "[options]\ndael = 'even'\n", "job.toml options: unknown key 'dael'; did you mean deal?"),
    (LEAST + "[options]\ndeal = 'evne'\n", "job.toml options: deal 'evne': give speed or even"),
    (LEAST + "[options]\nbucket-mb = true\n", "job.toml options bucket-mb is text or a number, not True"),
    (LEAST + "[budget]\nin_place = -1\n", "in_place -1: it is not negative"),
    (LEAST + "[burn_in]\nrounds = 0\n", "rounds is at least 1"),
    (LEAST + "environment = 3\n", "job.toml environment is a table, not 3"),
    (LEAST + 'command = ["x"', "is no TOML"),
    (LEAST + "notify = 3\n", "notify"),
    (LEAST + "[budget]\norphan_s = nan\n", "job.toml budget orphan_s is a number, and nan is none that can be meant"),
    (LEAST + "[burn_in]\nfor_s = inf\n", "job.toml burn_in for_s is a number, and inf is none"),
    (LEAST + 'run_folder = "a\\u0000b"\n', "run_folder: 'a\\x00b' is no path"),
    (LEAST + f'run_folder = "{"x" * 300}"\n', "is no path"),
    (LEAST + 'checkpoints = ""\n', "checkpoints: '' is no path"),
    (LEAST + "groups = 1000000\n", "groups 1000000: at most 10000"),
    (LEAST + "[cluster]\nnodes = 100000000\n", "nodes 100000000: at most 100000"),
])  # fmt: skip
def test_what_cannot_be_right_is_told_in_one_line(tmp_path: Path, text: str, why: str) -> None:
    with pytest.raises(UsageError) as told:
        read(tmp_path, text)
    assert why in str(told.value) and "\n" not in str(told.value)


def test_a_file_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read the job file .*nothing.toml"):
        read_job(tmp_path / "nothing.toml")


def test_options_go_to_the_launcher_as_words(tmp_path: Path) -> None:
    job = read(tmp_path, LEAST + "[options]\nbucket-mb = 8\nstall_floor_s = 12.5\ndeal = 'even'\n")
    assert job.options == {"bucket-mb": "8", "stall-floor-s": "12.5", "deal": "even"}


@pytest.mark.parametrize("name", ["job.toml", "titan.toml"])
def test_the_job_files_among_the_examples_are_read(name: str) -> None:
    job = read_job(Path(__file__).resolve().parents[2] / "examples" / name)
    assert job.groups >= 2 and job.torchtitan == (name == "titan.toml")


def test_a_group_on_two_nodes_is_started_by_a_line_for_each(tmp_path: Path) -> None:
    job = read(tmp_path, LEAST + "groups = 2\nnodes_per_group = 2\nranks = 4\n[budget]\nin_place = 3\n")
    argv = launch_argv(job, tmp_path, "h:1", "g1", 1)
    options = dict(zip(argv[4:-2:2], argv[5:-2:2], strict=True))
    assert argv[-2:] == ["--", "t.py"] and options["--nnodes"] == "2" and options["--node-rank"] == "1"
    assert options["--restarts"] == "3" and options["--ranks"] == "4" and options["--lighthouse"] == "h:1"


@pytest.mark.parametrize(("text", "why"), [
    ('command = ["other.py"]\n', "command: there is no script other.py in "),
    ('command = ["t.py", "{checkpoint}"]\n', "{checkpoint} is filled in by nobody; did you mean {checkpoints}?"),
    ('command = ["t.py"]\nrun_folder = "t.py/run"\n', "t.py is no folder"),
    ('command = ["t.py"]\nrequeue = ["/no/such"]\n', "requeue: there is no program /no/such"),
    ('command = ["t.py"]\noutage_budget_s = 0.1\n', "outage_budget_s 0.1"),
    ('command = ["t.py"]\n[lighthouse]\nbind = "nonsense"\n', "[lighthouse]: "),
    ('command = ["t.py"]\n[lighthouse]\nlease_s = 200\n', "lease_s 200 must be below outage_budget_s 60"),
    ('command = ["t.py"]\n[preflight]\noptions = ["--only", "memry"]\n', "no check 'memry': is memory meant?"),
    ('command = ["t.py"]\n[burn_in]\ncommand = ["/no/such"]\n', "[burn_in] command: there is no program /no/such"),
])  # fmt: skip
def test_what_cannot_run_is_told_before_anything_is_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, why: str
) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UsageError) as told:
        check_job(read(tmp_path, 'name = "j"\n' + text))
    assert why in str(told.value) and "\n" not in str(told.value)


def test_by_whom_nobody_will_be_told_is_said_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("NO_SUCH_URL", raising=False)
    notify = "[[notify]]\nkind = 'webhook'\nurl = 'env:NO_SUCH_URL'\n"
    notify += "[[notify]]\nkind = 'command'\nargv = ['/no/such']\n"
    lines = check_job(read(tmp_path, LEAST + notify))
    assert len(lines) == 2 and "NO_SUCH_URL" in lines[0] and "/no/such" in lines[1]
    assert check_job(read(tmp_path, LEAST)) == []


def test_a_variable_that_looks_like_an_option_and_is_none_is_said_at_the_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "t.py").touch()
    monkeypatch.chdir(tmp_path)
    given = "[environment]\nLIGHTKEEPER_OUTAGE_BUDGETS = '5'\nNCCL_DEBUG = 'INFO'\n"
    (line,) = check_job(read(tmp_path, LEAST + given))
    assert line.startswith("[environment]: LIGHTKEEPER_OUTAGE_BUDGETS is not an option")


def test_a_job_file_that_changed_while_groups_run_is_refused(tmp_path: Path) -> None:
    before = shape_of(read(tmp_path, LEAST + "groups = 3\n"))
    now = read(tmp_path, LEAST + "groups = 2\n")
    with pytest.raises(UsageError, match=r"while the job runs \(g0, lighthouse\): groups was 3 and is 2; nodes was"):
        check_shape(now, before, [("n0", "g0"), ("n2", "lighthouse")])
    check_shape(now, before, [])  # another number of groups goes on from the checkpoint
    check_shape(now, shape_of(now), [("n0", "g0")])
