"""The last collective of a step: one float64 vector with what the runtime and the user need of all groups.

It carries the runtime's own extras (who took part, in which step, with which microbatches, the ready flag,
whether a bucket has to be reduced again, which parameters had a gradient) and the extras that the user
declared: sums over all groups, values that were reduced when the step started, and values that are the lowest
slot's. A group that replays the entry reads the same numbers from it as those who were there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, TypeAlias

import torch
import xxhash

from lightkeeper.errors import UsageError

NAMES_MAX = 256
ELEMENTS_MAX = 1 << 20  # of all user extras together: 8 MiB on the wire
MICROBATCHES_MAX = 1 << 20  # their 32-bit hashes then sum exactly in a float64
READY_MAX = 1 << 20  # the sum of its squares over 8192 members is then exact
MEMBERS_MAX = 1 << 12
PRESENT_SPAN = 1 << 13  # above `MEMBERS_MAX`: a presence flag counts members below it, and kinds above
_EXACT = 1 << 53  # integers up to here are exact in a float64
_STEP_MASK = (1 << 20) - 1  # of the step number, whose squares are summed too

_HEAD = 10  # runtime extras before the presence flags
_MEMBERS, _STEP, _STEP2, _COUNT, _HASHES, _READY, _READY2, _AGAIN, _SETTINGS, _SETTINGS2 = range(_HEAD)
_DTYPES = (torch.float32, torch.float64, torch.int64)

Kind: TypeAlias = Literal["sum", "before", "agreed"]


@dataclass(frozen=True)
class Declared:
    """A user extra: its place in the vector, its shape, its dtype, and how it comes about."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    offset: int
    numel: int
    kind: Kind = "sum"

    @property
    def places(self) -> int:
        """Elements of the vector: an agreed one has a flag after it that says whether it was given."""
        return self.numel + (self.kind == "agreed")


class ExtraError(UsageError, ValueError):
    """An extra is declared or given in a way that no entry can hold."""


class UnknownExtraError(UsageError, KeyError):
    """No extra of this name was declared."""

    __str__ = Exception.__str__  # a KeyError's would quote the line


class LateExtraError(UsageError, RuntimeError):
    """The first step has begun: what an entry holds is settled."""


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

    def declare(
        self, name: str, shape: Sequence[int] = (), dtype: torch.dtype = torch.float64, kind: Kind = "sum"
    ) -> None:
        """Add a user extra; before the first step, alike in every group.

        Args:
            name: Its name.
            shape: Its shape; () is a number.
            dtype: float32 or float64 (summed in float64), or int64 (exact as long as the sum is below 2**53).
            kind: "sum" over all groups of what they contribute; "before", reduced when the step starts; "agreed", the
                lowest slot's value.

        Raises:
            RuntimeError: after the first step began.
            ValueError: a name declared twice, another dtype, or too many or too large extras.
        """
        if self._parameters is not None:
            raise LateExtraError(f"extra {name!r} is declared after the first step began: declare it before")
        if name in self._declared:
            raise ExtraError(f"extra {name!r} is declared twice")
        if dtype not in _DTYPES:
            raise ExtraError(f"extra {name!r} has dtype {dtype}: it must be float32, float64 or int64")
        if len(self._declared) == NAMES_MAX:
            raise ExtraError(f"extra {name!r} is one too many: an entry holds at most {NAMES_MAX}")
        extra = Declared(name, tuple(shape), dtype, self._numel, math.prod(shape), kind)
        if self._numel + extra.places > ELEMENTS_MAX:
            raise ExtraError(f"extra {name!r} of {extra.numel} elements is too large: {ELEMENTS_MAX} for all together")
        self._declared[name] = extra
        self._numel += extra.places

    def freeze(self, parameters: int) -> None:
        """Fix the layout; `parameters` is the number of presence flags, alike in all ranks of a group."""
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

    @property
    def user_numel(self) -> int:
        """Elements of all user extras together."""
        return self._numel

    def place(self, extra: Declared) -> slice:
        """Where the value of `extra` is in the vector."""
        start = _HEAD + self.parameters + extra.offset
        return slice(start, start + extra.numel)

    def flag(self, extra: Declared) -> int:
        """Where the flag of an agreed extra is in the vector."""
        return self.place(extra).stop

    def describe(self) -> dict[str, str]:
        """Name to "float32[8]" or "int64[] before", for comparing groups before they join."""
        found = {}
        for extra in self._declared.values():
            kind = "" if extra.kind == "sum" else f" {extra.kind}"
            found[extra.name] = f"{str(extra.dtype).removeprefix('torch.')}{list(extra.shape)}{kind}"
        return found


class Contributions:
    """What this rank has for the user extras of one step.

    What was contributed stays on its device, and is fetched once for the step: a loop that adds its loss after every
    microbatch does not wait for the device there.
    """

    def __init__(self, layout: ExtrasLayout) -> None:
        self._layout = layout
        self._sums: dict[str, torch.Tensor] = {}
        self._agreed: dict[str, torch.Tensor] = {}
        self._kept: dict[str, torch.Tensor] = {}

    @property
    def sums(self) -> Mapping[str, torch.Tensor]:
        """Name to local sum of what was contributed, on the CPU; waits for the device."""
        return {name: value.cpu() for name, value in self._sums.items()}

    @property
    def agreed(self) -> Mapping[str, torch.Tensor]:
        """Name to what this rank gave of agreed extras."""
        return self._agreed

    def of_slot(self, slot: int, group: Mapping[str, torch.Tensor]) -> Mapping[str, torch.Tensor]:
        """Name to what the member of this slot puts into the vector; what is not summed, the entry has of slot 0.

        Args:
            slot: Its slot.
            group: What was contributed, or given of agreed extras, by the ranks of its group.
        """
        if slot == 0:
            return {**group, **self._kept}
        return {name: value for name, value in group.items() if self._layout.declared[name].kind == "sum"}

    def clear(self) -> None:
        """Start a new step."""
        self._sums.clear()
        self._agreed.clear()
        self._kept.clear()

    def add(self, name: str, value: torch.Tensor | float) -> None:
        """Add `value` (the declared shape) to the extra `name`.

        Raises:
            KeyError: not declared.
            ValueError: another kind or shape, or a fraction for an int64 extra.
        """
        tensor = _summable(self._known(name, "sum", "contributed"), value)
        before = self._sums.get(name)
        if before is not None and before.device != tensor.device:
            before, tensor = before.cpu(), tensor.cpu()
        self._sums[name] = tensor if before is None else before + tensor

    def agree(self, name: str, value: torch.Tensor | float) -> None:
        """Give this member's value of an agreed extra; a later one replaces it; raises as `add`."""
        self._agreed[name] = exact(self._known(name, "agreed", "agreed on"), value)

    def keep(self, name: str, value: torch.Tensor) -> None:
        """Take the value that an extra was reduced to before the first backward pass, for the entry."""
        self._kept[name] = exact(self._known(name, "before", "reduced before the step"), value)

    def _known(self, name: str, kind: Kind, done: str) -> Declared:
        extra = self._layout.declared.get(name)
        if extra is None:
            known = ", ".join(sorted(self._layout.declared)) or "none"
            raise UnknownExtraError(f"extra {name!r} was not declared before the first step (declared: {known})")
        if extra.kind != kind:
            raise ExtraError(f"extra {name!r} is not {done}: it was declared as one of kind {extra.kind!r}")
        return extra


def exact(extra: Declared, value: torch.Tensor | float) -> torch.Tensor:
    """`value` as it is summed, float64 or int64 on the CPU, not shared with it.

    Raises:
        ValueError: another shape than was declared, or a fraction for an int64 extra.
    """
    return _summable(extra, value).cpu()


def _summable(extra: Declared, value: torch.Tensor | float) -> torch.Tensor:
    """The same, where `value` is: without waiting for its device."""
    tensor = torch.as_tensor(value).detach()
    if tuple(tensor.shape) != extra.shape:
        raise ExtraError(f"extra {extra.name!r} was declared {extra.shape}, given {tuple(tensor.shape)}")
    if extra.dtype == torch.int64 and (tensor.is_floating_point() or tensor.is_complex()):
        raise ExtraError(f"extra {extra.name!r} was declared int64, given {tensor.dtype}")
    return tensor.to(dtype=torch.int64 if extra.dtype == torch.int64 else torch.float64, copy=True)


class Values(dict[str, torch.Tensor]):
    """The user's extras of an entry, by name."""

    def __missing__(self, name: str) -> torch.Tensor:
        raise UnknownExtraError(
            f"this entry has no extra {name!r}: it was not declared, or is one to agree on and the group in the lowest "
            "slot did not call step.agree(), which every group does in every step"
        )


@dataclass(frozen=True)
class Part:
    """What one member puts into the runtime's extras; `placed` says how each gradient that is present is placed."""

    step: int
    microbatches: Sequence[int]
    presence: Sequence[bool]
    ready: int = 0
    again: bool = False
    placed: Sequence[int] = ()  # a number below 2**20 for each parameter; () if all are placed like their parameters
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
    placed: tuple[int, ...] = ()  # for each parameter; -1 if the members do not agree
    alike: bool = True  # whether all members carry the same settings
    user: Values = field(default_factory=Values)


def microbatch_hash(step: int, k: int) -> int:
    """32-bit hash that stands for microbatch `k` of `step`."""
    return xxhash.xxh32_intdigest(step.to_bytes(8, "little") + k.to_bytes(8, "little"))


def pack(layout: ExtrasLayout, part: Part, sums: Mapping[str, torch.Tensor], into: torch.Tensor) -> None:
    """Write one member's part, and what it has for the user's extras, into `into`, float64[layout.numel].

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
    placed = part.placed or [0] * len(part.presence)
    flags = zip(part.presence, placed, strict=True)
    numbers.extend(float(1 + PRESENT_SPAN * code) if present else 0.0 for present, code in flags)
    staged = torch.zeros(layout.numel, dtype=torch.float64)
    staged[: len(numbers)] = torch.tensor(numbers, dtype=torch.float64)
    for name, value in sums.items():
        extra = layout.declared[name]
        check_exact(extra, value)
        staged[layout.place(extra)] = value.reshape(-1).to(torch.float64)
        if extra.kind == "agreed":
            staged[layout.flag(extra)] = 1.0
    into.copy_(staged)


def unpack(layout: ExtrasLayout, vector: torch.Tensor) -> Total:
    """Read a reduced vector, float64[layout.numel]; the user's tensors are copies; an agreed one that was not given is
    left out.

    Raises:
        OverflowError: the sum of an int64 extra at or above 2**53.
    """
    host = vector.to("cpu", copy=True)
    head = [int(x) for x in host[:_HEAD].tolist()]
    user = Values()
    for extra in layout.declared.values():
        value = host[layout.place(extra)]
        if extra.kind == "agreed" and host[layout.flag(extra)] != 1.0:
            continue  # the lowest slot gave none
        check_exact(extra, value)
        user[extra.name] = value.to(extra.dtype, copy=True).reshape(extra.shape)
    members = head[_MEMBERS]
    flags = host[_HEAD : _HEAD + layout.parameters].to(torch.int64)
    counts, kinds = flags % PRESENT_SPAN, flags // PRESENT_SPAN
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
        presence=tuple((counts > 0).tolist()),
        placed=tuple(torch.where(kinds % counts.clamp(min=1) == 0, kinds // counts.clamp(min=1), -1).tolist()),
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
    if -1 in total.placed:
        return f"step {step}: the members' gradients of parameter {total.placed.index(-1)} are placed differently"
    return None


def check_exact(extra: Declared, value: torch.Tensor) -> None:
    """Refuses what a float64 does not hold exactly.

    Raises:
        OverflowError: an int64 extra at or above 2**53.
    """
    if extra.dtype == torch.int64 and value.numel() and int(value.abs().max()) >= _EXACT:
        raise OverflowError(f"int64 extra {extra.name!r} is at or above 2**53, where its sum is not exact")
