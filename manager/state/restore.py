"""Puts a state that arrives range by range into a joiner's own tensors, in place.

Parameters, buffers, optimizer state and registered tensors are written where they lie; what does not lie
row-major in host memory is staged tensor by tensor. Optimizer state that does not exist yet is allocated as the
layout says. Scalars are set at the end; `Optimizer.load_state_dict` is never called, because it casts the fp32
moments of bf16 parameters to bf16. Any other object gets its rebuilt state through its own `load_state_dict`.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
from torch import nn

from lightkeeper.manager.buckets import as_gradient, local_tensor, placements_of
from lightkeeper.manager.fingerprint import raw_bytes
from lightkeeper.manager.state.codec import DTYPES, CodecError, decode, encode
from lightkeeper.manager.state.layout import (
    STATE_BYTES_MAX,
    Layout,
    ObjectHeader,
    TensorHeader,
    compare,
    differences,
    layout_of,
    shorten,
)
from lightkeeper.manager.state.registry import StateRegistry, leaves_in
from lightkeeper.manager.state.segments import Segments, checksum_ranges, is_direct
from lightkeeper.manager.state.tree import Leaf, extra_state_modules, parameters_of

_PIECES_MAX = 64  # a range of more pieces is received as one and dealt out afterwards


class StateDoesNotFit(RuntimeError):
    """The state is not one that this rank could hold; the message names what does not fit."""


class Target:
    """Where the bytes of a state go on this rank.

    Nothing is written before the constructor has returned; from the first range on, the state here is neither
    the old nor the new one until `finish` and `verify` have returned.

    Args:
        registry: The objects here, which must be those of the layout.
        layout: As it came from a donor.
        bytes_max: Bound on the size of the state.

    Attributes:
        opened: Whether a range was: then the state here may have been overwritten.

    Raises:
        StateDoesNotFit: with the names of what does not.
    """

    def __init__(self, registry: StateRegistry, layout: Layout, bytes_max: int = STATE_BYTES_MAX) -> None:
        self.layout = layout
        self.opened = False
        self._registry = registry
        self._visible = {name: tensors_by_path(name, obj) for name, obj in registry.shared.items()}
        self._own = {leaf.path: leaf.tensor for leaf in leaves_in(registry.capture())}
        if layout.nbytes > bytes_max:
            raise StateDoesNotFit(f"the state has {layout.nbytes} bytes: at most {bytes_max} are taken here")
        if lines := self._misfits():
            raise StateDoesNotFit(f"the state of {layout.name} does not fit: {'; '.join(shorten(lines))}")
        self._new: dict[str, torch.Tensor] = {}  # by path: allocated here, as their object will hold them
        self._tensors = [self._place(header) for header in layout.tensors]
        self._decoded = {one.name: self._decode(one) for one in layout.objects}
        self._segments = Segments(layout)
        self._lock = threading.Lock()
        self._views: dict[int, memoryview] = {}  # by tensor
        self._staged: dict[int, torch.Tensor] = {}  # by tensor that is not written in place
        self._missing = {i: header.nbytes for i, header in enumerate(layout.tensors)}
        self._gathered: dict[int, bytearray] = {}  # by range of many pieces
        self._dealt_out: set[int] = set()  # such ranges, once they arrived
        self._left = set(range(layout.ranges))

    # --- the bytes ---

    def open(self, index: int) -> list[memoryview]:
        """Writable memory for the bytes of a range, in order; a range may be opened again."""
        self.opened = True
        start, end = self.layout.bounds(index)
        pieces = self._segments.pieces(start, end)
        if len(pieces) > _PIECES_MAX:
            with self._lock:
                gathered = self._gathered.setdefault(index, bytearray(end - start))
            return [memoryview(gathered)]
        return [self._view(i)[at : at + n] if i >= 0 else memoryview(bytearray(n)) for i, at, n in pieces]

    def arrived(self, index: int) -> None:
        """The bytes of a range are all there, and their checksum is right."""
        pieces = self._segments.pieces(*self.layout.bounds(index))
        with self._lock:
            gathered = self._gathered.pop(index, None)
        if gathered is not None:
            self._dealt_out.add(index)
            source, at = memoryview(gathered), 0
            for i, start, nbytes in pieces:
                if i >= 0:
                    self._view(i)[start : start + nbytes] = source[at : at + nbytes]
                at += nbytes
        with self._lock:
            assert index in self._left, f"range {index} arrived twice"
            self._left.remove(index)
            for i, _, nbytes in pieces:
                if i >= 0:
                    self._missing[i] -= nbytes
            whole = [i for i, _, _ in pieces if i >= 0 and i in self._staged and self._missing[i] == 0]
            staged = [(self._tensors[i], self._staged.pop(i)) for i in whole]
            for i in whole:
                del self._views[i]
        with torch.no_grad():
            for tensor, data in staged:
                tensor.copy_(data)

    def _view(self, i: int) -> memoryview:
        with self._lock:
            if i not in self._views:
                tensor = self._tensors[i]
                if not is_direct(tensor):
                    tensor = self._staged[i] = torch.empty(tensor.shape, dtype=tensor.dtype)
                self._views[i] = raw_bytes(tensor)
            return self._views[i]

    def tensors(self) -> dict[str, torch.Tensor]:
        """Where the tensors of the layout go, by path, distributed ones whole: for a reader that fills them itself."""
        found = {}
        for header, local in zip(self.layout.tensors, self._tensors, strict=True):
            owner = header.path.partition(".")[0]
            whole = self._new.get(header.path, self._visible[owner].get(header.path))
            found[header.path] = local if whole is None else whole
        return found

    def filled(self) -> None:
        """Whoever took `tensors` has filled them all."""
        self.opened = True
        self._left.clear()

    # --- what is not bytes ---

    def finish(self) -> None:
        """Set everything but tensors, after all ranges have arrived; on the training thread."""
        assert not self._left, f"{len(self._left)} ranges have not arrived"
        last = []
        for name, obj in self._registry.shared.items():
            if isinstance(obj, nn.Module):
                parts = dict(extra_state_modules(obj))
                for key, value in self._decoded[name].items():
                    parts[key].set_extra_state(value)
            elif isinstance(obj, torch.optim.Optimizer):
                last.append((obj, self._decoded[name]))  # after all that might reach into it
            elif not isinstance(obj, torch.Tensor):
                obj.load_state_dict(self._decoded[name])
        for optimizer, (groups, state) in last:
            _restore_optimizer(optimizer, groups, state)

    def verify(self, fingerprint: str, checksums: Sequence[str] | None = None) -> None:
        """Read the state anew, as a donor would, and compare it with that of the donors.

        Args:
            fingerprint: Of the donors' state.
            checksums: Of all ranges as they arrived: then bytes that arrived in the very memory where the state
                lies now are not read again. None to read every byte.

        Raises:
            StateDoesNotFit: it is another one, for instance because an object does not take its state back.
        """
        captured = self._registry.capture()
        now = layout_of(self.layout.name, captured, self.layout.range_bytes)
        lines = differences(now, self.layout)
        trees = {one.name: json.dumps(one.tree) for one in now.objects}
        unlike = [one.name for one in self.layout.objects if trees.get(one.name) != json.dumps(one.tree)]
        lines += [f"{name} does not take back its state" for name in unlike]
        if not lines:
            leaves = leaves_in(captured)
            known = {} if checksums is None else {i: checksums[i] for i in self._in_place(leaves)}
            if now.fingerprint(checksum_ranges(now, leaves, known)) != fingerprint:
                lines = ["its bytes are others than were received"]
        if lines:
            raise StateDoesNotFit(f"the state of {self.layout.name} was not restored: {'; '.join(shorten(lines))}")

    def _in_place(self, leaves: Sequence[Leaf]) -> list[int]:
        """The ranges that were received in the memory of `leaves`."""
        direct = [
            leaf.tensor.data_ptr() == tensor.data_ptr() and is_direct(tensor) and is_direct(leaf.tensor)
            for leaf, tensor in zip(leaves, self._tensors, strict=True)
        ]
        ranges = [i for i in range(self.layout.ranges) if i not in self._dealt_out]
        return [i for i in ranges if all(direct[j] for j in self._segments.holders(*self.layout.bounds(i)))]

    # --- does it fit ---

    def _misfits(self) -> list[str]:
        captured = self._registry.capture()
        mine = layout_of(self.layout.name, captured, self.layout.range_bytes)
        lines = compare({o.name: o.kind for o in mine.objects}, {o.name: o.kind for o in self.layout.objects})
        if lines:
            return lines
        for header in mine.objects, self.layout.objects:
            if [o.name for o in header] != [o.name for o in mine.objects]:
                return ["its objects were registered in another order"]
        kinds = {one.name: one.kind for one in mine.objects}
        here = {t.path: t for t in mine.tensors}
        there = {t.path: t for t in self.layout.tensors}
        for path in dict.fromkeys([*here, *there]):
            owner = kinds.get(path.partition(".")[0])
            line = self._misfit(path, here.get(path), there.get(path), owner)
            if line:
                lines.append(line)
        return lines

    def _misfit(
        self, path: str, here: TensorHeader | None, there: TensorHeader | None, owner: str | None
    ) -> str | None:
        if owner == "object" or (owner == "optimizer" and there is None):
            return None
        if here is not None and there is not None and here.kind == there.kind:
            return None
        if owner == "optimizer" and here is None and there is not None:
            return self._cannot_allocate(there)
        return f"{path} is {here.kind if here else 'missing'} here and {there.kind if there else 'missing'} there"

    def _cannot_allocate(self, header: TensorHeader) -> str | None:
        if header.wrap:
            return f"{header.path} is {header.kind}, which can only be received once it exists: make one step before"
        if not header.placements:
            return None
        parameter = self._parameter_of(header.path)
        placed = placements_of(parameter) if parameter is not None else None
        if parameter is None or placed is None:
            return f"{header.path} is {header.kind} there, and its parameter is not distributed here"
        there = (header.placements, header.global_shape, header.shape)
        if (tuple(map(str, placed)), tuple(parameter.shape), tuple(local_tensor(parameter).shape)) != there:
            return f"{header.path} is {header.kind} there, which is not how its parameter is placed here"
        return None

    def _parameter_of(self, path: str) -> torch.Tensor | None:
        """The parameter that a value of an optimizer's state belongs to."""
        name, _, rest = path.partition(".")
        section, _, rest = rest.partition(".")
        index = rest.partition(".")[0]
        parameters = parameters_of(self._registry.shared[name])
        if section != "state" or not index.isdecimal() or int(index) >= len(parameters):
            return None
        return parameters[int(index)]

    # --- making what is missing ---

    def _place(self, header: TensorHeader) -> torch.Tensor:
        """The tensor that the bytes of this one go to."""
        owner = self._registry.shared[header.path.partition(".")[0]]
        own = self._own.get(header.path)
        in_place = isinstance(owner, nn.Module | torch.optim.Optimizer | torch.Tensor)
        if own is not None and in_place:
            return own
        parameter = self._parameter_of(header.path) if in_place else None
        device: Any = header.device
        if parameter is not None and header.device == local_tensor(parameter).device.type:
            device = local_tensor(parameter).device
        local = torch.empty(header.shape, dtype=DTYPES[header.dtype], device=device)
        whole = local
        if header.placements and parameter is not None:
            whole = as_gradient(local, cast(nn.Parameter, parameter), None)
        self._new[header.path] = whole
        return local

    def _decode(self, one: ObjectHeader) -> Any:
        visible = self._visible[one.name]

        def tensor(path: str) -> torch.Tensor:
            found = self._new.get(path)
            found = visible.get(path) if found is None else found
            if found is None:
                raise CodecError(f"{path[:200]} is not among the tensors of the state")
            return found

        obj = self._registry.shared[one.name]
        try:
            if one.kind == "module":
                parts = {key for key, _ in extra_state_modules(obj)}
                if set(one.tree) != parts:
                    raise CodecError("other modules have an extra state there")
                return {key: decode(value) for key, value in one.tree.items()}
            if one.kind == "optimizer":
                return _decode_optimizer(obj, one.tree, tensor)
            return decode(one.tree, tensor) if one.kind == "object" else None
        except (CodecError, KeyError, TypeError, ValueError) as e:
            raise StateDoesNotFit(f"the state of {self.layout.name} does not fit: {one.name}: {e}") from e


def _decode_optimizer(optimizer: torch.optim.Optimizer, tree: Any, tensor: Any) -> tuple[list[Any], dict[int, Any]]:
    counts = [len(group["params"]) for group in optimizer.param_groups]
    if [count for count, _ in tree["groups"]] != counts:
        raise CodecError(f"its groups have {counts} parameters here and {[c for c, _ in tree['groups']]} there"[:300])
    groups = [decode(hyper, tensor) for _, hyper in tree["groups"]]
    state = {index: decode(values, tensor) for index, values in tree["state"]}
    if any(type(index) is not int or not 0 <= index < sum(counts) for index in state):
        raise CodecError("it has state for a parameter that does not exist")
    if any(type(values) is not dict or "params" in values for values in [*groups, *state.values()]):
        raise CodecError("its state is not one dict for each parameter")
    return groups, state


def _restore_optimizer(optimizer: torch.optim.Optimizer, groups: list[Any], state: Mapping[int, Any]) -> None:
    for group, hyper in zip(optimizer.param_groups, groups, strict=True):
        parameters = group["params"]
        group.clear()  # the donor's keys in the donor's order, which a checkpoint that it has loaded may have changed
        group.update({"params": parameters, **hyper})
    for i, parameter in enumerate(parameters_of(optimizer)):
        if i not in state:
            optimizer.state.pop(parameter, None)
            continue
        held = optimizer.state[parameter]
        held.clear()
        held.update(state[i])


def tensors_by_path(name: str, obj: Any) -> dict[str, torch.Tensor]:
    """The tensors of a module or an optimizer as it holds them (a distributed one whole), by path."""
    found: dict[str, torch.Tensor] = {}
    if isinstance(obj, nn.Module):
        for key, tensor in (*obj.named_parameters(), *obj.named_buffers()):
            found[f"{name}.{key}"] = tensor.detach()
    elif isinstance(obj, torch.optim.Optimizer):
        for g, group in enumerate(obj.param_groups):
            encode({k: v for k, v in group.items() if k != "params"}, f"{name}.groups.{g}", found.__setitem__)
        for i, parameter in enumerate(parameters_of(obj)):
            if parameter in obj.state:
                encode(obj.state[parameter], f"{name}.state.{i}", found.__setitem__)
    elif isinstance(obj, torch.Tensor):
        found[name] = obj
    return found
