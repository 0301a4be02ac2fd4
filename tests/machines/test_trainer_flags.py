"""What a rank's side of the protocol does with an answer, where a mistake of one rank stops the whole job."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from lightkeeper.manager import local
from lightkeeper.manager.before import BeforeExtras
from lightkeeper.manager.extras import ExtrasLayout
from lightkeeper.manager.trainer import Manager
from lightkeeper.manager.within import Within


class Anything:
    """Takes every call."""

    def __getattr__(self, name: str) -> Any:
        return lambda *args, **kwargs: None


def test_a_recovery_voids_the_ready_flag_given_before_it() -> None:
    """The flag of epoch 2 came with the answer before; then epoch 3 recovered the step, and epoch 2 is void."""
    manager = Manager.__new__(Manager)
    manager._reducer = manager._epochs = manager._record = manager._injector = Anything()
    manager.page = SimpleNamespace(step=5, phase="compute", enter=lambda *args: None)
    manager._ready, manager._step = 2, None
    manager._until, manager._microbatches = None, 1
    manager._within, manager._before = Within(), BeforeExtras(ExtrasLayout())
    plan = local.Plan(epoch=3, term=1, lighthouse="lh", members=("g0",), slot=0, step=5, share=(0,), total=1)
    manager._recover(local.Answer(verdict="recover", epoch=3, step=5, plan=plan))
    assert manager._ready == 0, "the next reduce carries a flag that no manager knows any more"
