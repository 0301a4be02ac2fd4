"""Dealing parameters to flat buffers."""

from __future__ import annotations

import torch
from torch import nn

from lightkeeper.manager.buckets import Slot, plan


def slots(*shapes, dtype=torch.float32) -> list[Slot]:
    return [Slot(str(i), nn.Parameter(torch.zeros(shape, dtype=dtype))) for i, shape in enumerate(shapes)]


def test_last_parameters_come_first_and_a_bucket_is_full_at_its_bound():
    buckets = plan(slots((100,), (100,), (100,), (10,)), bucket_bytes=800, first_bytes=440)
    assert [bucket.members for bucket in buckets] == [(3, 2), (1, 0)]
    assert [bucket.index for bucket in buckets] == [0, 1]
    assert [bucket.members for bucket in plan(slots((10,), (1000,), (10,)), 100, 40)] == [(2,), (1,), (0,)]


def test_dtypes_are_not_mixed():
    mixed = [*slots((10,), (10,)), *slots((10,), (10,), dtype=torch.bfloat16)]
    buckets = plan(mixed, 1 << 20)
    assert {bucket.flat.dtype for bucket in buckets} == {torch.float32, torch.bfloat16}
    assert len(buckets) == 2


def test_fill_copies_and_zeroes():
    bucket = plan(slots((2, 3), (4,)), 1 << 20)[0]
    bucket.flat.fill_(9.0)
    strided = torch.arange(6.0).reshape(3, 2).t()
    bucket.fill([None if i == 1 else strided for i in bucket.members])
    assert bucket.flat.tolist() == [0.0] * 4 + [0.0, 2.0, 4.0, 1.0, 3.0, 5.0]


def test_only_the_first_bucket_has_two_buffers():
    first, second = plan(slots((100,), (100,)), 400, 400)
    one = first.flat
    first.turn()
    assert first.flat is not one and first.other is one
    first.turn()
    assert first.flat is one
    flat = second.flat
    second.turn()
    assert second.flat is flat
    second.replace()
    assert second.flat is not flat and second.views[0].data_ptr() == second.flat.data_ptr()
