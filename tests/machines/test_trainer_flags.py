"""What a rank's side of the protocol does with an answer, where a mistake of one rank stops the whole job."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightkeeper.errors import UsageError
from lightkeeper.manager import local
from lightkeeper.manager.before import BeforeExtras
from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.groups import Alone
from lightkeeper.manager.progress import EXPECTED, ProgressPage, read_progress
from lightkeeper.manager.trainer import Manager
from lightkeeper.manager.within import Within


class Anything:
    """Takes every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_a_recovery_voids_the_ready_flag_given_before_it() -> None:
    """The flag of epoch 2 came with the answer before; then epoch 3 recovered the step, and epoch 2 is void."""
    manager = Manager.__new__(Manager)
    manager._reducer = manager._record = manager._injector = Anything()
    manager._epochs = SimpleNamespace(take=lambda epoch: Alone(), drop=lambda epoch: None)
    manager.page = SimpleNamespace(step=5, phase="compute", enter=lambda *args: None, waits=None, waiting=nullcontext)
    manager._ready, manager._step = 2, None
    manager._until, manager._microbatches, manager._cancels = None, 1, False
    manager._within, manager._before = Within(), BeforeExtras(ExtrasLayout())
    plan = local.Plan(epoch=3, term=1, lighthouse="lh", members=("g0",), slot=0, step=5, share=(0,), total=1)
    manager._recover(local.Answer(verdict="recover", epoch=3, step=5, plan=plan))
    assert manager._ready == 0, "the next reduce carries a flag that no manager knows any more"


# ---------------------------------------------------------------- what is no step


@pytest.fixture
def manager(tmp_path: Path) -> Manager:
    """In microbatch 3 of step 12, as far as its page says."""
    made = Manager.__new__(Manager)
    made._injector, made.page = Anything(), ProgressPage(tmp_path / "page")
    made.page.enter("compute", 12, 3)
    return made


def shown(manager: Manager) -> tuple[str, int, int]:
    """What is read from outside."""
    read = read_progress(manager.page.path)
    assert read is not None
    return read.phase, read.step, read.microbatches


@pytest.mark.parametrize("what", EXPECTED)
def test_what_is_no_step_shows_as_long_as_it_lasts(manager: Manager, what: str) -> None:
    with manager.expect(what):
        assert shown(manager) == (what, 12, 0)
    assert shown(manager) == ("compute", 12, 3)
    with pytest.raises(ZeroDivisionError), manager.expect(what):
        raise ZeroDivisionError
    assert shown(manager) == ("compute", 12, 3)


def test_one_inside_another_gives_way_to_it_again(manager: Manager) -> None:
    with manager.expect("evaluation"):
        with manager.expect("compile"):
            assert shown(manager)[0] == "compile"
        assert shown(manager)[0] == "evaluation"
    assert shown(manager) == ("compute", 12, 3)


def test_steps_that_are_made_inside_are_not_taken_back(manager: Manager) -> None:
    """A profiler's context around some of the loop: the page's step is the one that the next vote is about."""
    with manager.expect("profile"):
        manager.page.enter("apply", 13)
    assert shown(manager) == ("apply", 13, 0)


def test_what_nobody_knows_is_refused_by_name(manager: Manager) -> None:
    line = r"expect\('lunch'\): give 'checkpoint', 'compile', 'evaluation' or 'profile'"
    with pytest.raises(UsageError, match=line), manager.expect("lunch"):
        raise AssertionError("it was let in")
    assert shown(manager) == ("compute", 12, 3)


# ---------------------------------------------------------------- a run that begins at a step


@pytest.mark.parametrize("step", [-1, 1.0, True, "7", None])
def test_no_number_of_steps_is_refused(manager: Manager, step: Any) -> None:
    with pytest.raises(UsageError, match="the number of steps that the state has behind it, 0 or more"):
        manager.resume(step)


def test_it_is_resumed_before_its_first_step(manager: Manager) -> None:
    named: list[int] = []
    manager._reducer, manager._entries = None, SimpleNamespace(starts=named.append)
    manager.resume(7)
    assert named == [7] and manager.page.step == 7
    manager._reducer = Anything()
    with pytest.raises(UsageError, match=r"resume\(9\) after the first step began: call it before"):
        manager.resume(9)
    assert named == [7] and manager.page.step == 7
