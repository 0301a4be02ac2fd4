"""What all tests share: the helpers beside the tests are importable by name, whatever pytest is started from."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("runs", "unit", "integrations", "simulation"):
    sys.path.insert(0, str(Path(__file__).parent / folder))

import pytest  # noqa: E402

import lightkeeper.wire  # noqa: E402, F401 - before any test imports grpc: it turns grpc's fork handlers off

HEAL_FILES = ("test_heal.py", "test_heal_alike.py")
# Healing takes 10 to 20 s a test, since a group has to die, start again and catch up: these stand for the rest in the
# fast tier.
HEAL_FAST = (
    "test_a_killed_group_comes_back_with_the_same_bits",
    "test_two_groups_come_back_at_once",
    "test_below_the_minimum_the_survivor_stands_and_the_other_comes_back",
    "test_equal_starts_send_nothing",
    "test_register_refuses",
)


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the long tier of the healing tests."""
    for item in items:
        if item.path.name in HEAL_FILES and not item.name.startswith(HEAL_FAST):
            item.add_marker(pytest.mark.long)
