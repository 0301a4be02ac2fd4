"""What tests of the checkers share."""

from __future__ import annotations

import pytest
from checkerbench import Bench


@pytest.fixture
def bench() -> Bench:
    return Bench()
