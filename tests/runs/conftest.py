"""One job of real processes per test, and the plain reference run, kept for all tests that ask for the same one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from facts import Gold
from harness import Job, names, run_gold
from lives import Lives
from outages import STEPS
from proxy import Proxy


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


_calm: dict[tuple[int, int], dict[int, str]] = {}


@pytest.fixture
def dealt_evenly(job: Job) -> None:
    """Sums whose order follows how busy the machine is could not be compared with those of another job."""
    job.settings["deal"] = "even"


@pytest.fixture
def calm(tmp_path: Path) -> Callable[..., dict[int, str]]:
    """Digest of the state after each step of a run of three groups in which nothing goes wrong."""

    def of(steps: int = STEPS, groups: int = 3) -> dict[int, str]:
        if (steps, groups) not in _calm:
            job = Job(tmp_path / "calm")
            job.settings["deal"] = "even"
            try:
                job.start_all(groups, steps=steps)
                facts = job.finish()
            finally:
                job.end()
            facts.check(steps, set(names(groups)))
            _calm[steps, groups] = facts.traces["g0"].digests
        return _calm[steps, groups]

    return of


@pytest.fixture
def proxies() -> Iterator[Callable[[str], Proxy]]:
    """Makes proxies, and ends them."""
    made: list[Proxy] = []

    def make(target: str) -> Proxy:
        made.append(Proxy(target))
        return made[-1]

    yield make
    for proxy in made:
        proxy.close()
