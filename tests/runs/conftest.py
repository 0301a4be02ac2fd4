"""One job of real processes per test, and the plain reference run, kept for all tests that ask for the same one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from facts import Gold
from harness import Job, run_gold
from lives import Lives


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    """A job under `tmp_path`; whatever it left running is ended, and a failing test shows what was printed."""
    made = Job(tmp_path / "run")
    yield made
    made.end()


@pytest.fixture
def lives(tmp_path: Path) -> Iterator[Lives]:
    """A run of several jobs under `tmp_path`, as `job`."""
    made = Lives(tmp_path)
    yield made
    made.end()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    given = getattr(item, "funcargs", {})
    made = given.get("job") or (given["lives"].jobs or [None])[-1] if "lives" in given else given.get("job")
    if made is not None and call.when == "call" and report.failed:
        report.sections.append(("what the processes printed", made.printed()))
        report.sections.append(("events", made.told()))
    return report


_golds: dict[str, Gold] = {}


@pytest.fixture
def gold(tmp_path: Path):
    """A function from options to the plain run with them."""

    def of(**options: object) -> Gold:
        key = repr(sorted(options.items()))
        if key not in _golds:
            _golds[key] = run_gold(tmp_path, options)
        return _golds[key]

    return of
