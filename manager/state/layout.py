"""Where every byte of a state is, and what the state is called.

The bytes of all tensors form one space: each tensor row-major, in the order of the layout, at an offset that is
a multiple of 64, with zeros between. The space is cut into ranges of one size; a range is what is sent, checked
and, if need be, sent again. Offsets follow from dtypes and shapes, so a reader computes them itself.

The digest covers all that is not bytes (paths, dtypes, shapes, placements, scalars); the fingerprint covers the
digest and the checksum of every range: two states with one fingerprint are equal bit by bit.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import xxhash

from lightkeeper.lighthouse.names import Entry, Epoch, Term
from lightkeeper.manager.state.codec import DTYPES, Json, dtype_name
from lightkeeper.manager.state.tree import Captured, Leaf

RANGE_BYTES = 16 << 20  # smaller ones cost more CPU per byte, larger ones share out worse between donors
ALIGN_BYTES = 64
TENSORS_MAX = 1 << 20
OBJECTS_MAX = 1 << 10
LAYOUT_BYTES_MAX = 64 << 20  # of the JSON
STATE_BYTES_MAX = 1 << 44
_RANGE_BYTES_MAX = 1 << 30
_DIMENSIONS_MAX = 64
_KINDS = ("module", "optimizer", "tensor", "object")
_SHOWN_MAX = 5


class LayoutError(ValueError):
    """What was read does not describe a state; one line."""


@dataclass(frozen=True)
class TensorHeader:
    """One tensor of a state.

    Attributes:
        path: Its name.
        dtype: Such as "float32".
        shape: Local shape, that of its bytes.
        global_shape: Of the distributed tensor that it is a shard of; else `shape`.
        placements: Of that tensor, as text.
        wrap: Which tensor subclass it is an inner tensor of; "" for none.
        device: "cpu" or "cuda": where a reader allocates it if it has none yet.
        offset: Of its first byte.
        nbytes: Their number.
    """

    path: str
    dtype: str
    shape: tuple[int, ...]
    global_shape: tuple[int, ...]
    placements: tuple[str, ...]
    wrap: str
    device: str
    offset: int
    nbytes: int

    @property
    def kind(self) -> str:
        """What must agree for it to fit, in words."""
        kind = f"{self.dtype}{list(self.shape)}"
        if self.placements:
            kind += f" of {list(self.global_shape)} placed {', '.join(self.placements)}"
        return kind + (f" in {self.wrap.strip()}" if self.wrap else "")


@dataclass(frozen=True)
class ObjectHeader:
    """One registered object: its name, its kind and everything in it but tensors."""

    name: str
    kind: str
    tree: Json


class Layout:
    """The description of one state.

    Args:
        name: The entry that was applied last; step -1 if none was.
        tensors: In the order of their bytes.
        objects: In the order of their registration.
        range_bytes: Size of all ranges but the last.
    """

    def __init__(
        self, name: Entry, tensors: Sequence[TensorHeader], objects: Sequence[ObjectHeader], range_bytes: int
    ) -> None:
        self.name = name
        self.tensors = tuple(tensors)
        self.objects = tuple(objects)
        self.range_bytes = range_bytes
        self.nbytes = tensors[-1].offset + tensors[-1].nbytes if tensors else 0

    @property
    def ranges(self) -> int:
        """How many ranges there are."""
        return -(-self.nbytes // self.range_bytes)

    def bounds(self, index: int) -> tuple[int, int]:
        """First byte of a range and the byte after its last."""
        assert 0 <= index < self.ranges, f"range {index} of {self.ranges}"
        start = index * self.range_bytes
        return start, min(self.nbytes, start + self.range_bytes)

    @cached_property
    def digest(self) -> str:
        """Hash of all but bytes, name and devices, 32 hexadecimal digits (xxh3_128)."""
        tensors = [[t.path, t.dtype, t.shape, t.global_shape, t.placements, t.wrap] for t in self.tensors]
        objects = [[o.name, o.kind, o.tree] for o in self.objects]
        data = json.dumps([self.range_bytes, tensors, objects], separators=(",", ":"), allow_nan=False)
        return xxhash.xxh3_128_hexdigest(data.encode())

    def fingerprint(self, checksums: Iterable[str]) -> str:
        """Hash of the whole state, 32 hexadecimal digits (xxh3_128); `checksums` are those of all ranges."""
        return xxhash.xxh3_128_hexdigest("\n".join((self.digest, *checksums)).encode())

    def to_bytes(self) -> bytes:
        """The layout as JSON.

        Raises:
            LayoutError: it is larger than any reader accepts.
        """
        tensors = [
            [t.path, t.dtype, t.shape, t.global_shape, t.placements, t.wrap, t.device] for t in self.tensors
        ]  # fmt: skip
        objects = [[o.name, o.kind, o.tree] for o in self.objects]
        data = {
            "state": state_name_to_json(self.name), "range_bytes": self.range_bytes, "bytes": self.nbytes,
            "tensors": tensors, "objects": objects,
        }  # fmt: skip
        text = json.dumps(data, separators=(",", ":"), allow_nan=False).encode()
        if len(text) > LAYOUT_BYTES_MAX:
            raise LayoutError(f"the description of the state has {len(text)} bytes: at most {LAYOUT_BYTES_MAX}")
        return text

    @staticmethod
    def from_bytes(text: bytes) -> Layout:
        """Read what `to_bytes` wrote.

        Raises:
            LayoutError: it is something else.
        """
        if len(text) > LAYOUT_BYTES_MAX:
            raise LayoutError(f"the description of the state has {len(text)} bytes: at most {LAYOUT_BYTES_MAX}")
        try:
            return _read(json.loads(text))
        except LayoutError:
            raise
        except (KeyError, TypeError, ValueError, IndexError, RecursionError) as e:
            raise LayoutError(f"the description of the state is malformed: {e!r}"[:300]) from e


def layout_of(name: Entry, captured: dict[str, Captured], range_bytes: int = RANGE_BYTES) -> Layout:
    """The layout of objects that were taken apart, in their order."""
    headers: list[TensorHeader] = []
    for one in captured.values():
        for leaf in one.leaves:
            headers.append(_header(leaf, headers[-1] if headers else None))
    objects = [ObjectHeader(key, one.kind, one.tree) for key, one in captured.items()]
    return Layout(name, headers, objects, range_bytes)


def with_tensors(layout: Layout, headers: Sequence[TensorHeader]) -> Layout:
    """The layout with its tensors as these headers say, but at the offsets that follow from them."""
    placed: list[TensorHeader] = []
    for header in headers:
        nbytes = math.prod(header.shape) * DTYPES[header.dtype].itemsize
        offset = _offset_after(placed[-1] if placed else None)
        placed.append(dataclasses.replace(header, offset=offset, nbytes=nbytes))
    return Layout(layout.name, placed, layout.objects, layout.range_bytes)


def differences(mine: Layout, theirs: Layout) -> list[str]:
    """One line for each tensor or object that does not fit, the first 5 and how many more.

    Only shapes, dtypes, placements and kinds count here, not scalars.
    """
    lines = compare({o.name: o.kind for o in mine.objects}, {o.name: o.kind for o in theirs.objects})
    lines += compare({t.path: t.kind for t in mine.tensors}, {t.path: t.kind for t in theirs.tensors})
    return shorten(lines)


def shorten(lines: list[str]) -> list[str]:
    """The first 5 lines, and how many more there are."""
    more = len(lines) - _SHOWN_MAX
    return [*lines[:_SHOWN_MAX], f"and {more} more"] if more > 0 else lines


def state_name_to_json(name: Entry) -> dict[str, Any]:
    """The name of a state: of the entry that was applied last."""
    term = name.epoch.term
    return {"epoch": name.epoch.number, "term": term.number, "lighthouse": term.lighthouse, "step": name.step}


def state_name_from_json(data: Any) -> Entry:
    """Read what `state_name_to_json` wrote.

    Raises:
        LayoutError: it is not the name of a state.
    """
    if not isinstance(data, dict) or not isinstance(data.get("lighthouse"), str) or len(data["lighthouse"]) > 256:
        raise LayoutError("this does not name a state")
    epoch, term, step = (_integer(data.get(key), -1 if key == "step" else 0) for key in ("epoch", "term", "step"))
    return Entry(Epoch(epoch, Term(term, data["lighthouse"])), step)


def compare(mine: dict[str, str], theirs: dict[str, str]) -> list[str]:
    """One line for each name on which two descriptions differ."""
    lines = []
    for path in dict.fromkeys([*mine, *theirs]):
        here, there = mine.get(path, "missing"), theirs.get(path, "missing")
        if here != there:
            lines.append(f"{path!r} is {here} here and {there} there")
    return lines


def _header(leaf: Leaf, before: TensorHeader | None) -> TensorHeader:
    tensor = leaf.tensor
    return TensorHeader(
        leaf.path, dtype_name(tensor.dtype, leaf.path), tuple(tensor.shape), leaf.shape, leaf.placements, leaf.wrap,
        tensor.device.type, _offset_after(before), tensor.numel() * tensor.element_size(),
    )  # fmt: skip


def _offset_after(before: TensorHeader | None) -> int:
    end = before.offset + before.nbytes if before else 0
    return -(-end // ALIGN_BYTES) * ALIGN_BYTES


def _read(data: Any) -> Layout:
    tensors, objects = data["tensors"], data["objects"]
    if not isinstance(tensors, list) or len(tensors) > TENSORS_MAX:
        raise LayoutError(f"a state has at most {TENSORS_MAX} tensors")
    if not isinstance(objects, list) or len(objects) > OBJECTS_MAX:
        raise LayoutError(f"a state has at most {OBJECTS_MAX} objects")
    headers: list[TensorHeader] = []
    for row in tensors:
        headers.append(_read_tensor(row, headers[-1] if headers else None))
    if len({t.path for t in headers}) < len(headers):
        raise LayoutError("a state names two tensors alike")
    made = [_read_object(row) for row in objects]
    range_bytes = _integer(data["range_bytes"], ALIGN_BYTES)
    if range_bytes > _RANGE_BYTES_MAX or range_bytes % ALIGN_BYTES:
        raise LayoutError(f"ranges of {range_bytes} bytes are not served")
    layout = Layout(state_name_from_json(data["state"]), headers, made, range_bytes)
    if layout.nbytes != data["bytes"] or layout.nbytes > STATE_BYTES_MAX:
        raise LayoutError(f"a state of {data['bytes']} bytes has tensors of {layout.nbytes}")
    return layout


def _read_tensor(row: Any, before: TensorHeader | None) -> TensorHeader:
    path, dtype, shape, global_shape, placements, wrap, device = row
    texts = (path, dtype, wrap, device, *placements)
    if not all(isinstance(text, str) and len(text) <= 4096 for text in texts) or device not in ("cpu", "cuda"):
        raise LayoutError("a tensor of the state is described wrongly")
    local = _shape(shape)
    nbytes = math.prod(local) * DTYPES[dtype].itemsize
    return TensorHeader(
        path, dtype, local, _shape(global_shape), tuple(placements), wrap, device, _offset_after(before), nbytes
    )


def _read_object(row: Any) -> ObjectHeader:
    name, kind, tree = row
    if not isinstance(name, str) or kind not in _KINDS:
        raise LayoutError("an object of the state is described wrongly")
    return ObjectHeader(name, kind, tree)


def _shape(data: Any) -> tuple[int, ...]:
    if not isinstance(data, list) or len(data) > _DIMENSIONS_MAX:
        raise LayoutError("a tensor of the state has no shape")
    return tuple(_integer(n, 0) for n in data)


def _integer(data: Any, least: int) -> int:
    if type(data) is not int or not least <= data < 1 << 63:
        raise LayoutError(f"{str(data)[:40]!r} is not a number of at least {least}")
    return data
