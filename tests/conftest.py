"""What all tests share: the helpers beside the tests are importable by name, whatever pytest is started from."""

from __future__ import annotations

import sys
from pathlib import Path

for folder in ("runs",):
    sys.path.insert(0, str(Path(__file__).parent / folder))
