"""What belongs to the training state: objects under names, read anew for every transfer.

`scope="shared"` (the default) is state that all groups hold alike: it is copied to a joiner and covered by the
fingerprint. `scope="group"` is state that differs between groups, such as the statistics of BatchNorm: it is
known here by name, and travels nowhere. The running statistics of BatchNorm are such without being asked.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any, Literal, TypeAlias

from torch import nn
from torch.nn.modules.batchnorm import _NormBase

from lightkeeper.errors import UsageError
from lightkeeper.lighthouse.names import Entry, origin
from lightkeeper.manager.state.codec import StateRefused
from lightkeeper.manager.state.layout import RANGE_BYTES, Layout, layout_of
from lightkeeper.manager.state.segments import checksum_ranges
from lightkeeper.manager.state.tree import Captured, Leaf, capture, kind_of

Scope: TypeAlias = Literal["shared", "group"]

UNNAMED = origin(0)
_BOUNDARY_BYTES_MAX = 1 << 20  # of one tensor of a user's object, to be copied on the training thread
_NAME = re.compile(r"[A-Za-z0-9_\-]{1,64}")


class StateRegistry:
    """The objects whose state makes up the training state of this rank."""

    def __init__(self) -> None:
        self._shared: dict[str, Any] = {}
        self._group: dict[str, Any] = {}
        self._exclude: dict[str, tuple[str, ...]] = {}
        self._unsteady: dict[str, tuple[str, ...]] = {}

    def register(self, name: str, obj: Any, scope: Scope = "shared", exclude: Sequence[str] = ()) -> None:
        """Add an object; alike in all groups and in the same order.

        Args:
            name: Letters, digits, "_" and "-".
            obj: A module, an optimizer, a tensor, or anything with `state_dict()` and `load_state_dict()` whose
                state consists of what `codec.encode` takes. The object is kept, never its state.
            scope: "group" keeps it out of snapshot and fingerprint.
            exclude: For a module: patterns ("*.running_mean") of the names of parameters and buffers that differ
                between groups and stay out of snapshot and fingerprint.

        Raises:
            UsageError: a name that is taken or not allowed, a scope or pattern that cannot be right.
            StateRefused: a part of the object cannot be copied exactly; its path and type are given.
        """
        if not _NAME.fullmatch(name):
            raise UsageError(f"{name!r} cannot be the name of a state: letters, digits, '_' and '-', at most 64")
        if name in self._shared or name in self._group:
            raise UsageError(f"{name!r} is registered already")
        if scope not in ("shared", "group"):
            raise UsageError(f"scope {scope!r} of {name}: it is 'shared' or 'group'")
        if exclude and kind_of(obj, name) != "module":
            raise UsageError(f"exclude is for modules: {name} is none")
        if scope == "group":
            self._group[name] = obj
            return
        _check_paths(capture(name, obj).leaves)
        self._shared[name] = obj
        self._exclude[name] = (*exclude, *_statistics(obj))

    def whole(self) -> tuple[StateRegistry, tuple[str, ...]]:
        """All of it, also what differs between groups: for a checkpoint, from which every group is to begin alike.

        Returns:
            A registry that shares nothing but its own objects with this one, and which objects are in no checkpoint
            because they cannot be copied exactly; only one of scope "group" can be such.
        """
        found, left_out = StateRegistry(), []
        found._shared = dict(self._shared)
        found._unsteady = dict(self._exclude)
        for name, obj in self._group.items():
            try:
                capture(name, obj)
            except StateRefused:
                left_out.append(name)
                continue
            found._shared[name] = obj
            found._unsteady[name] = ("*",)
        found._exclude = dict.fromkeys(found._shared, ())
        return found, tuple(left_out)

    def unsteady(self, captured: Mapping[str, Captured]) -> set[int]:
        """The leaves, by `id`, that are copied at the boundary itself: they may change before the next apply phase.

        Small ones of a user's object, since nothing says when the user may change them; and of `whole`, what a forward
        pass may change.
        """
        users = [leaf for one in captured.values() if one.kind == "object" for leaf in one.leaves]
        found = {id(leaf) for leaf in users if leaf.tensor.nbytes <= _BOUNDARY_BYTES_MAX}
        for name, patterns in self._unsteady.items():
            leaves = captured[name].leaves if patterns else ()
            found |= {id(leaf) for leaf in leaves if differs(leaf.path[len(name) + 1 :], patterns)}
        return found

    def differing(self) -> set[str]:
        """Paths of the tensors that may differ between groups, and between the ranks of one."""
        found = set()
        for name, patterns in self._unsteady.items():
            for leaf in capture(name, self._shared[name]).leaves if patterns else ():
                if differs(leaf.path[len(name) + 1 :], patterns):
                    found.add(leaf.path)
        return found

    @property
    def shared(self) -> Mapping[str, Any]:
        """The objects that are copied and fingerprinted, in order."""
        return self._shared

    @property
    def group(self) -> Mapping[str, Any]:
        """The objects that differ between groups."""
        return self._group

    def capture(self) -> dict[str, Captured]:
        """Read all shared objects as they are now; on the training thread, between two steps.

        Raises:
            StateRefused: something came into the state since it was registered that cannot be copied exactly.
        """
        captured = {}
        for name, obj in self._shared.items():
            one = capture(name, obj)
            if patterns := self._exclude[name]:
                kept = [leaf for leaf in one.leaves if not differs(leaf.path[len(name) + 1 :], patterns)]
                one = Captured(one.kind, kept, one.tree)
            _check_paths(one.leaves)
            captured[name] = one
        return captured

    def layout(self, name: Entry = UNNAMED, range_bytes: int = RANGE_BYTES) -> Layout:
        """Describe the state as it is now."""
        return layout_of(name, self.capture(), range_bytes)

    def fingerprint(self, range_bytes: int = RANGE_BYTES) -> str:
        """Hash of the state as it is now, 32 hexadecimal digits, equal to that of a snapshot of it.

        Sharded tensors count by this rank's shard: compare rank by rank. Waits for the device.
        """
        captured = self.capture()
        layout = layout_of(UNNAMED, captured, range_bytes)
        return layout.fingerprint(checksum_ranges(layout, leaves_in(captured)))


def _statistics(obj: Any) -> list[str]:
    """Names of the buffers that a forward pass of BatchNorm changes."""
    if not isinstance(obj, nn.Module):
        return []
    kinds = [(path, module) for path, module in obj.named_modules() if isinstance(module, _NormBase)]
    return [f"{path}.{name}".lstrip(".") for path, module in kinds for name, _ in module.named_buffers(recurse=False)]


def leaves_in(captured: Mapping[str, Captured]) -> list[Leaf]:
    """All leaves in the order of the layout."""
    return [leaf for one in captured.values() for leaf in one.leaves]


def differs(path: str, patterns: Sequence[str]) -> bool:
    """Whether a tensor is one of those that differ between groups."""
    return any(fnmatchcase(path, pattern) for pattern in patterns)


def _check_paths(leaves: Sequence[Leaf]) -> None:
    seen: set[str] = set()
    for leaf in leaves:
        if leaf.path in seen:
            raise StateRefused(f"{leaf.path} names two tensors")
        seen.add(leaf.path)
