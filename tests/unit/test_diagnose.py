"""Logs in the shape of real ones, and the cause that stands in them; every rule, by a line that no other rule has."""

from __future__ import annotations

import importlib
import json
import re
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # so that the helper beside it is found
from cli_said import one_line

from lightkeeper.cli.app import run
from lightkeeper.diagnose import Diagnosis, classify
from lightkeeper.diagnose.files import first_cause, read_tail
from lightkeeper.diagnose.lines import CHARS_MAX, clean
from lightkeeper.diagnose.rules import WORDS, Rule, book

EXCEPTION = re.compile(r"^(\w+\.)*\w*(Error|Exception|Interrupt|StopIteration)\b")
LOGS = (Path(__file__).parent / "diagnose_logs.txt").read_text("utf-8")


def logs() -> list[tuple[str, str, bool, str, list[str]]]:
    """Name, cause, whether a victim, a piece of the deciding line, and the log."""
    found = []
    for section in LOGS.split("=== ")[1:]:
        head, *lines = section.splitlines()
        name, cause, victim, piece = (part.strip() for part in head.split(" | "))
        assert victim in ("yes", "no"), head
        found.append((name, cause, victim == "yes", piece, lines))
    return found


def only_rule(rule: Rule) -> Rule | None:
    (line,) = clean([rule.hit])
    return book().first(line.text, line.quiet, rule.where == "exception" or bool(EXCEPTION.match(line.text)))


@pytest.mark.parametrize("rule", book().rules, ids=lambda rule: rule.name)
def test_every_rule_has_its_line_and_no_earlier_rule_takes_it(rule: Rule) -> None:
    assert only_rule(rule) is rule


def test_rules_have_names_of_their_own_and_every_cause_has_a_rule() -> None:
    rules, causes = book().rules, book().causes
    assert len({rule.name for rule in rules}) == len(rules)
    assert {rule.cause for rule in rules} == set(causes)
    assert all(0 < rule.confidence <= 1 for rule in rules)
    assert all(cause.says and cause.advice for cause in causes.values())


def literals(parsed: Iterable[tuple[Any, Any]]) -> list[str]:
    """What stands literally in whatever a pattern matches, one text for each way through it; gaps are NULs."""
    texts = [""]
    for kind, what in parsed:
        name = str(kind)
        if name == "LITERAL":
            ways = [chr(what)]
        elif name == "SUBPATTERN":
            ways = literals(what[3])
        elif name == "BRANCH":
            ways = [text for branch in what[1] for text in literals(branch)]
        elif name in ("MAX_REPEAT", "MIN_REPEAT"):
            lowest, highest, inner = what
            ways = literals(inner) if lowest else ["\0"] if highest > 1 else ["", *literals(inner)]
        elif name == "IN" and all(str(member) == "LITERAL" for member, _ in what):
            ways = [chr(code) for _, code in what][:3]
        else:
            ways = [""] if name in ("AT", "ASSERT", "ASSERT_NOT") else ["\0"]
        texts = list(dict.fromkeys(text + way for text in texts for way in ways))
    return texts


@pytest.mark.parametrize("rule", [r for r in book().rules if r.where == "any"], ids=lambda rule: rule.name)
def test_no_line_of_a_rule_is_passed_over_unread(rule: Rule) -> None:
    parser = importlib.import_module("re._parser")  # private, so only here
    for text in literals(parser.parse(rule.pattern.pattern, rule.pattern.flags)):
        assert any(word in text.lower() for word in WORDS), text


def test_there_are_logs_enough() -> None:
    names = [name for name, *_ in logs()]
    assert len(names) >= 40
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("name", "cause", "victim", "piece", "lines"), logs(), ids=lambda v: v if isinstance(v, str) else ""
)
def test_log(name: str, cause: str, victim: bool, piece: str, lines: list[str]) -> None:
    found = classify(lines)
    assert (found.cause, found.victim) == (cause, victim), found
    assert piece.lower() in found.line.lower(), found
    if piece:
        assert found.line == re.sub(r"\s+$", "", lines[found.number - 1].strip())[: len(found.line)]


def test_prefixes_of_launchers_change_nothing() -> None:
    line = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2.00 GiB."
    prefixes = (
        "[rank3]: ", "3: ", "[default3]:", "n12: ", "[2026-03-04 05:06:07,123] [ERROR] ", "ERROR:root:",
        "2026-03-04T05:06:07.123456789Z stderr F ", "(RayTrainWorker pid=4711, ip=10.0.0.7) ", "train-worker-0 | ",
        "\x1b[31m", "[rank3]:[E321 02:07:08.408271257 ProcessGroupNCCL.cpp:607] ",
        "E1106 04:43:02.651000 26021 torch/distributed/run.py:869] ",
    )  # fmt: skip
    for prefix in prefixes:
        (cleaned,) = clean([prefix + line])
        assert cleaned.text.strip() == line, prefix
        assert not cleaned.quiet
        assert classify([prefix + line]).cause == "cuda_oom"
    assert classify([prefixes[0] + line]).rank == 3
    assert classify([prefixes[1] + line]).rank == 3


def test_what_was_logged_as_a_warning_is_no_cause() -> None:
    for prefix in ("WARNING:root:", "2026-03-04 05:06:07,123 - root - INFO - ", "/opt/x.py:12: UserWarning: "):
        assert classify([prefix + "CUDA out of memory. Retried with less"]) == Diagnosis(), prefix


def test_of_an_overwritten_line_every_part_is_read() -> None:
    found = classify(["start\r\n", "10%|#\r20%|##\rKilled\r\n", "end\r\n"])
    assert (found.rule, found.number, found.line) == ("worker-killed", 2, "Killed")


def test_binary_junk_and_endless_lines_are_borne() -> None:
    junk = "\x00\x01\ufffd" * 50 + "x" * 10 * CHARS_MAX + " No space left on device"
    found = classify([junk, "", "\r\r\r"])
    assert found.cause == "disk_full"
    assert "\x00" not in found.line


def test_ranks_whose_tracebacks_are_interleaved_are_told_apart() -> None:
    log = [
        "[rank0]: Traceback (most recent call last):",
        "[rank1]: Traceback (most recent call last):",
        '[rank0]:   File "a.py", line 1, in f',
        '[rank1]:   File "a.py", line 1, in g',
        '[rank0]:     raise ValueError("zero")',
        '[rank1]:     raise MemoryError("one")',
        "[rank1]: KeyError: 'one'",
        "[rank0]: ValueError: zero",
    ]
    found = classify(log)
    assert (found.rule, found.rank, found.number) == ("python-error", 1, 7)


def test_what_a_traceback_quotes_is_no_evidence() -> None:
    log = [
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in f',
        '    raise OSError("No space left on device")',
        "    ^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^^",
        "RuntimeError: something else",
    ]
    assert classify(log).rule == "uncaught-exception"


def test_an_exception_that_python_ignored_counts_less() -> None:
    ignored = [
        "Exception ignored in: <function Loader.__del__ at 0x7f>",
        "Traceback (most recent call last):",
        '  File "a.py", line 1, in __del__',
        "AttributeError: 'NoneType' object has no attribute 'close'",
    ]
    alone = classify(ignored)
    assert alone.cause == "user_error"
    assert alone.confidence < 0.6
    assert classify([*ignored, "OSError: [Errno 28] No space left on device"]).cause == "disk_full"


def test_progress_of_one_step_does_not_excuse_an_error() -> None:
    error = "torch.OutOfMemoryError: CUDA out of memory."
    later = [f"step {step} loss 2.0 lr 0.1" for step in range(5)]
    assert classify([error, *later[:2], "srun: error: n1: task 0: Exited with exit code 1"]).confidence > 0.9
    survived = classify([error, *later])
    assert survived.cause == "cuda_oom"
    assert survived.confidence < 0.5


# --- files and the command ----------------------------------------------------------------------------------


def test_of_a_huge_log_only_the_end_is_read(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"No space left on device\n" + b"x" * 99 + b"\n" + b"line\n" * 10 + b"Killed\n")
    tail = read_tail(log, 60)
    assert tail.cut
    assert tail.lines[0] == "line"
    assert classify(tail.lines).rule == "worker-killed"
    assert not read_tail(log).cut


def test_a_line_that_was_cut_is_no_evidence_unless_there_is_no_other(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_bytes(b"x" * 99 + b"Killed")
    assert read_tail(log, 6).lines == ["Killed"]


def test_first_cause_is_no_victims_and_the_earliest() -> None:
    victim = Diagnosis("nccl", "Watchdog", 1, 0.55, "nccl-time-out", True)
    killed = Diagnosis("host_oom", "Killed", 1, 0.7, "worker-killed")
    raised = Diagnosis("user_error", "ValueError: x", 1, 0.6, "uncaught-exception")
    a, b, c = (Path(name) for name in "abc")
    assert first_cause({a: victim, b: killed}) == b
    assert first_cause({a: victim, b: killed, c: raised}) == c, "a cause before a symptom"
    assert first_cause({a: victim, b: Diagnosis()}) is None
    early = Diagnosis("user_error", "2026-03-04 05:06:07,100 KeyError: 'x'", 9, 0.6, "uncaught-exception")
    late = Diagnosis("disk_full", "2026-03-04T05:06:07.200 No space left on device", 1, 0.95, "disk-full")
    assert first_cause({a: late, b: early}) == b
    assert first_cause({a: late, b: raised}) == a, "without a time the surest"


def test_command_says_one_line_a_log_and_whose_is_the_first_cause(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "r0").write_text("RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [h]:1\n")
    (tmp_path / "r1").write_text("torch.OutOfMemoryError: CUDA out of memory.\r\n")
    assert run(["diagnose", str(tmp_path / "r0"), str(tmp_path / "r1")]) == 0
    zero, one, last = capsys.readouterr().out.splitlines()
    assert "/r0: gloo (confidence 0.60, gloo-connection, a victim of somebody else): line 1: Runtime" in zero
    assert "/r1: cuda_oom (confidence 0.97" in one
    assert f"first cause: {tmp_path / 'r1'}: the GPU's memory is full" in last


def test_command_names_the_log_that_ends_without_an_error(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "r0").write_text("[Rank 0] Watchdog caught collective operation timeout: WorkNCCL(SeqNum=1)\n")
    (tmp_path / "r1").write_text("step 1 loss 2\n")
    assert run(["diagnose", str(tmp_path / "r0"), str(tmp_path / "r1")]) == 0
    assert capsys.readouterr().out.splitlines()[-1].endswith(f"without an error: {tmp_path / 'r1'}")
    assert run(["diagnose", str(tmp_path / "r0")]) == 0
    assert "another rank's log" in capsys.readouterr().out.splitlines()[-1]


def test_command_in_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    log, empty = tmp_path / "log", tmp_path / "empty"
    log.write_text("start\n[rank3]: OSError: [Errno 28] No space left on device\n")
    empty.touch()
    assert run(["diagnose", "--json", str(log), str(empty)]) == 0
    one, two, last = (json.loads(line) for line in capsys.readouterr().out.splitlines())
    assert (one["cause"], one["number"], one["rank"], one["victim"], one["cut"]) == ("disk_full", 2, 3, False, False)
    assert (two["cause"], two["confidence"], two["number"]) == ("unknown", 0.0, 0)
    assert last == {"first_cause": str(log)}


def test_a_log_that_cannot_be_read_is_told_in_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["diagnose", str(tmp_path / "none")]) == 2
    assert one_line(capsys) == f"{tmp_path / 'none'}: no such file"
    assert run(["diagnose", str(tmp_path)]) == 2
    assert one_line(capsys) == f"{tmp_path}: not a regular file"


def test_the_classifier_loads_nothing_of_lightkeeper_but_its_errors() -> None:
    code = (
        "import sys; import lightkeeper.diagnose.files\n"
        "own = {n for n in sys.modules if n.startswith('lightkeeper.') and '.diagnose' not in n}\n"
        "assert own <= {'lightkeeper.errors'}, own\n"
        "assert 'torch' not in sys.modules and 'msgspec' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30)
    assert done.returncode == 0, done.stderr
