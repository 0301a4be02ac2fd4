"""The last collective of a step: one float64 vector with what the runtime and the user need of all groups.

It carries the runtime's own extras (who took part, in which step, with which microbatches, the ready flag,
whether a bucket has to be reduced again, which parameters had a gradient) and the extras that the user
declared. A group that replays the entry reads the same numbers from it as those who were there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import xxhash

NAMES_MAX = 256
ELEMENTS_MAX = 1 << 20  # of all user extras together: 8 MiB on the wire
MICROBATCHES_MAX = 1 << 20  # their 32-bit hashes then sum exactly in a float64
READY_MAX = 1 << 20  # the sum of its squares over 8192 members is then exact
MEMBERS_MAX = 1 << 12
_EXACT = 1 << 53  # integers up to here are exact in a float64
_STEP_MASK = (1 << 20) - 1  # of the step number, whose squares are summed too

_HEAD = 10  # runtime extras before the presence flags
_MEMBERS, _STEP, _STEP2, _COUNT, _HASHES, _READY, _READY2, _AGAIN, _SETTINGS, _SETTINGS2 = range(_HEAD)
_DTYPES = (torch.float32, torch.float64, torch.int64)


@dataclass(frozen=True)
class Declared:
    """A user extra: its place in the vector, its shape and its dtype."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int


class ExtrasLayout:
    """Which user extras an entry holds, in the order of their declaration; the same in every group."""

    def __init__(self) -> None:
        self._declared: dict[str, Declared] = {}
        self._numel = 0
        self._parameters: int | None = None

    @property
    def declared(self) -> Mapping[str, Declared]:
        """The user extras by name."""
        return self._declared

    def declare(self, name: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64) -> None:
        """Add a user extra; before the first step, alike in every group.

        Args:
            name: Its name.
            shape: Its shape; () is a number.
            dtype: float32 or float64 (summed in float64), or int64 (exact as long as the sum is below 2**53).

        Raises:
            RuntimeError: after the first step began.
            ValueError: a name declared twice, another dtype, or too many or too large extras.
        """
        if self._parameters is not None:
            raise RuntimeError(f"extra {name!r} is declared after the first step began: declare it before")
        if name in self._declared:
            raise ValueError(f"extra {name!r} is declared twice")
        if dtype not in _DTYPES:
            raise ValueError(f"extra {name!r} has dtype {dtype}: it must be float32, float64 or int64")
        if len(self._declared) == NAMES_MAX:
            raise ValueError(f"extra {name!r} is one too many: an entry holds at most {NAMES_MAX}")
        numel = math.prod(shape)
        if self._numel + numel > ELEMENTS_MAX:
            raise ValueError(f"extra {name!r} of {numel} elements is too large: {ELEMENTS_MAX} for all together")
        self._declared[name] = Declared(name, tuple(shape), dtype, self._numel, numel)
        self._numel += numel

    def freeze(self, parameters: int) -> None:
        """Fix the layout; `parameters` is the number of presence flags."""
        self._parameters = parameters

    @property
    def parameters(self) -> int:
        """Number of presence flags."""
        assert self._parameters is not None, "the layout is not frozen"
        return self._parameters

    @property
    def numel(self) -> int:
        """Length of the vector."""
        return _HEAD + self.parameters + self._numel

    def place(self, extra: Declared) -> slice:
        """Where `extra` is in the vector."""
        start = _HEAD + self.parameters + extra.offset
        return slice(start, start + extra.numel)

    def describe(self) -> dict[str, str]:
        """Name to "float32[8]", for comparing groups before they join."""
        return {e.name: f"{str(e.dtype).removeprefix('torch.')}{list(e.shape)}" for e in self._declared.values()}


class Contributions:
    """What this rank adds to the user extras of one step."""

    def __init__(self, layout: ExtrasLayout) -> None:
        self._layout = layout
        self._sums: dict[str, torch.Tensor] = {}

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        """Name to local sum, float64 or int64 on the CPU."""
        return self._sums

    def clear(self) -> None:
        """Start a new step."""
        self._sums.clear()

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add `value` (the declared shape) to the extra `name`.

        Raises:
            KeyError: not declared.
            ValueError: another shape, or a fraction for an int64 extra.
        """
        extra = self._layout.declared.get(name)
        if extra is None:
            known = ", ".join(sorted(self._layout.declared)) or "none"
            raise KeyError(f"extra {name!r} was not declared before the first step (declared: {known})")
        tensor = torch.as_tensor(value).detach()
        if tuple(tensor.shape) != extra.shape:
            raise ValueError(f"extra {name!r} was declared {extra.shape}, contributed {tuple(tensor.shape)}")
        if extra.dtype == torch.int64 and (tensor.is_floating_point() or tensor.is_complex()):
            raise ValueError(f"extra {name!r} was declared int64, contributed {tensor.dtype}")
        exact = torch.int64 if extra.dtype == torch.int64 else torch.float64
        tensor = tensor.to(device="cpu", dtype=exact)
        before = self._sums.get(name)
        self._sums[name] = tensor.clone() if before is None else before + tensor


@dataclass(frozen=True)
class Part:
    """What one member puts into the runtime's extras."""

    step: int
    microbatches: Sequence[int]
    presence: Sequence[bool]
    ready: int = 0
    again: bool = False
    settings: int = 0  # 16-bit hash of what every member's optimizer must have alike


@dataclass(frozen=True)
class Total:
    """What the vector says once it is reduced."""

    members: int
    step_sum: int
    step_squares: int
    microbatches: int
    hash_sum: int
    ready: int  # the epoch number that all members carry, or 0
    again: int  # members that ask for another reduce
    presence: tuple[bool, ...]
    alike: bool = True  # whether all members carry the same settings
    user: dict[str, torch.Tensor] = field(default_factory=dict)


def microbatch_hash(step: int, k: int) -> int:
    """32-bit hash that stands for microbatch `k` of `step`."""
    return xxhash.xxh32_intdigest(step.to_bytes(8, "little") + k.to_bytes(8, "little"))


def pack(layout: ExtrasLayout, part: Part, sums: Mapping[str, torch.Tensor], into: torch.Tensor) -> None:
    """Write one member's part into `into`, float64[layout.numel].

    Raises:
        ValueError: a ready flag, or a number of microbatches, that would not sum exactly.
        OverflowError: an int64 extra at or above 2**53.
    """
    if not 0 <= part.ready < READY_MAX:
        raise ValueError(f"ready flag {part.ready} is outside [0, {READY_MAX})")
    if len(part.microbatches) > MICROBATCHES_MAX:
        raise ValueError(f"{len(part.microbatches)} microbatches in a step: at most {MICROBATCHES_MAX}")
    step = part.step & _STEP_MASK
    hashes = sum(microbatch_hash(part.step, k) for k in part.microbatches)
    head = [1, step, step * step, len(part.microbatches), hashes, part.ready, part.ready**2, part.again]
    head += [part.settings, part.settings**2]
    numbers = [float(x) for x in head]
    numbers.extend(map(float, part.presence))
    staged = torch.zeros(layout.numel, dtype=torch.float64)
    staged[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    for name, value in sums.items():
        _check_exact(layout.declared[name], value)
        staged[layout.place(layout.declared[name])] = value.reshape(-1).to(torch.float64)
    into.copy_(staged)


def unpack(layout: ExtrasLayout, vector: torch.Tensor) -> Total:
    """Read a reduced vector, float64[layout.numel]; the user's tensors are copies.

    Raises:
        OverflowError: the sum of an int64 extra at or above 2**53.
    """
    host = vector.to("cpu", copy=True)
    head = [int(x) for x in host[:_HEAD].tolist()]
    user = {}
    for extra in layout.declared.values():
        value = host[layout.place(extra)]
        _check_exact(extra, value)
        user[extra.name] = value.to(extra.dtype, copy=True).reshape(extra.shape)
    members = head[_MEMBERS]
    same = head[_READY] % max(members, 1) == 0 and head[_READY] ** 2 == members * head[_READY2]
    return Total(
        members=members,
        step_sum=head[_STEP],
        step_squares=head[_STEP2],
        microbatches=head[_COUNT],
        hash_sum=head[_HASHES],
        ready=head[_READY] // members if same and members else 0,
        again=head[_AGAIN],
        alike=head[_SETTINGS] ** 2 == members * head[_SETTINGS2],
        presence=tuple(x > 0 for x in host[_HEAD : _HEAD + layout.parameters].tolist()),
        user=user,
    )


def check(total: Total, step: int, microbatches: int, members: int) -> str | None:
    """What is wrong with a reduced entry, or None.

    Args:
        total: The reduced runtime extras.
        step: The step that was to be reduced.
        microbatches: M, how many microbatches a step has.
        members: Size of the epoch's group.
    """
    if total.members != members:
        return f"step {step}: {total.members} members took part in a reduce of {members}"
    short = step & _STEP_MASK
    if total.step_sum != members * short or total.step_squares != members * short * short:
        return f"step {step}: the members were at different steps"
    if total.microbatches != microbatches:
        return f"step {step}: {total.microbatches} microbatches were summed instead of {microbatches}"
    if total.hash_sum != sum(microbatch_hash(step, k) for k in range(microbatches)):
        return f"step {step}: {microbatches} microbatches were summed, but not each of them exactly once"
    return None


def _check_exact(extra: Declared, value: torch.Tensor) -> None:
    if extra.dtype == torch.int64 and value.numel() and int(value.abs().max()) >= _EXACT:
        raise OverflowError(f"int64 extra {extra.name!r} is at or above 2**53, where its sum is not exact")
