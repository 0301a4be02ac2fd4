"""Whether every CPU multiplies right: matrices of small integers, whose product is exact whatever the order of sums.

The product is compared with a digest that was made elsewhere, by integers: a CPU that errs cannot make its own answer.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping
from typing import Any

from lightkeeper.supervisor.preflight.request import Request
from lightkeeper.supervisor.preflight.results import Result, failed, ok

SIZE = 256
# sha256 of the product's little-endian float32 bytes, by Python's own integers; a test makes it anew by numpy's
KNOWN = "c4c7208cf5dbc999d1c6f2ff49c6121727a8f361da77a9a6041e782fc67e5574"


def factors(size: int) -> tuple[Any, Any]:
    """Two matrices of integers within -8..8, shape (size, size), as float32: sums of products stay below 2**24."""
    import numpy as np

    rows, columns = np.indices((size, size), dtype=np.int64)
    left = (7 * rows + 3 * columns + rows * columns) % 17 - 8
    right = (5 * rows + 11 * columns + rows * columns) % 17 - 8
    return left.astype(np.float32), right.astype(np.float32)


def digest(product: Any) -> str:
    """sha256 of its float32 bytes."""
    return hashlib.sha256(product.astype("<f4").tobytes()).hexdigest()


def look(request: Request, earlier: Mapping[str, Result]) -> Result:
    """Once on every CPU that this process may use; numpy's BLAS has one thread in a check's process."""
    left, right = factors(SIZE)
    allowed = sorted(os.sched_getaffinity(0))
    wrong = []
    for cpu in allowed:
        os.sched_setaffinity(0, {cpu})
        if digest(left @ right) != KNOWN:
            wrong.append(cpu)
    os.sched_setaffinity(0, allowed)
    if wrong:
        return failed(f"wrong product on CPU {', '.join(map(str, wrong))}", {"cpus": wrong, "known": KNOWN})
    return ok(f"exact on {len(allowed)} CPUs", {"cpus": len(allowed)})
