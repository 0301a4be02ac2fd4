"""What becomes of the memory of local sums and of the copies that take their place."""

from __future__ import annotations

import torch

from lightkeeper.manager.buckets import Bucket
from lightkeeper.manager.copies import EarlyCopies


def bucket_of(*values: float) -> Bucket:
    bucket = Bucket(0, range(len(values)), [torch.Size([3])] * len(values), torch.float32, torch.device("cpu"), 1)
    bucket.fill([torch.full((3,), value) for value in values])
    return bucket


def test_a_copy_is_handed_out_once_and_is_not_the_bucket():
    bucket, copies = bucket_of(1.0, 2.0), EarlyCopies()
    copies.take(bucket)
    copy = copies.swap(1, torch.zeros(3))
    assert copy is not None and torch.equal(copy, torch.full((3,), 2.0))
    copy.zero_()
    assert torch.equal(bucket.views[1], torch.full((3,), 2.0))
    assert copies.swap(1, torch.zeros(3)) is None


def test_the_next_copy_goes_where_the_local_sum_was_and_never_where_the_last_one_is():
    bucket, copies, local = bucket_of(1.0), EarlyCopies(), torch.full((3,), 7.0)
    copies.take(bucket)
    first = copies.swap(0, local)
    copies.drop()
    bucket.fill([torch.full((3,), 5.0)])
    copies.take(bucket)
    second = copies.swap(0, torch.zeros(3))
    assert second is not None and second.data_ptr() == local.data_ptr()
    assert first is not None and torch.equal(first, torch.ones(3))


def test_what_a_failed_reduce_copied_is_void():
    bucket, copies = bucket_of(1.0), EarlyCopies()
    copies.take(bucket)
    copies.drop()
    assert copies.swap(0, torch.zeros(3)) is None


def test_reducing_again_copies_over_the_first_copy():
    bucket, copies = bucket_of(1.0), EarlyCopies()
    copies.take(bucket)
    bucket.fill([torch.full((3,), 4.0)])
    copies.take(bucket)
    copy = copies.swap(0, None)
    assert copy is not None and torch.equal(copy, torch.full((3,), 4.0))


def test_memory_of_another_dtype_is_not_reused():
    bucket, copies = bucket_of(1.0), EarlyCopies()
    copies.take(bucket)
    copies.swap(0, torch.zeros(3, dtype=torch.float64))
    copies.take(bucket)
    copy = copies.swap(0, None)
    assert copy is not None and copy.dtype == torch.float32
