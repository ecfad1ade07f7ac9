"""PageTable: lengths, slots, and that each malformed field is named."""

from __future__ import annotations

import array

import mlx.core as mx
import numpy as np
import pytest

from mlxcel_ext import PageTable
from tests.support.device import uploaded


def good(**change) -> PageTable:
    fields = {
        "kv_indptr": [0, 2, 2, 3],
        "kv_indices": [5, 2, 9],
        "kv_last_page_len": [3, 0, 8],
        "page_size": 8,
    }
    return PageTable(**(fields | change))


def test_lengths():
    table = good()
    assert table.batch == 3
    np.testing.assert_array_equal(table.num_pages, [2, 0, 1])
    np.testing.assert_array_equal(table.kv_len, [11, 0, 8])
    np.testing.assert_array_equal(good(first_page_offset=[5, 0, 7]).kv_len, [6, 0, 1])
    assert repr(table) == "PageTable(batch=3, pages=3, page_size=8, tokens=19)"


def test_from_pages_is_the_same_table():
    table = PageTable.from_pages([[5, 2], [], [9]], [11, 0, 8], 8)
    for field in ("kv_indptr", "kv_indices"):
        np.testing.assert_array_equal(getattr(table, field), getattr(good(), field))
    np.testing.assert_array_equal(table.kv_len, [11, 0, 8])
    moved = PageTable.from_pages([[5, 2], [], [9]], [6, 0, 1], 8, [5, 0, 7])
    np.testing.assert_array_equal(moved.kv_len, [6, 0, 1])
    with pytest.raises(ValueError, match=r"request 0: 17 tokens need 3 pages of 8, got 2"):
        PageTable.from_pages([[5, 2]], [17], 8)
    with pytest.raises(ValueError, match="one entry a request, got 1 and 2"):
        PageTable.from_pages([[5]], [1, 2], 8)


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"page_size": 12}, r"page_size must be a power of two from 1 to 256, got 12"),
        ({"page_size": 512}, r"page_size must be a power of two from 1 to 256, got 512"),
        ({"page_size": 0}, r"page_size must be a power of two from 1 to 256, got 0"),
        ({"kv_indptr": [0, 2, 3]}, r"kv_indptr must have batch \+ 1 = 4 elements, got 3"),
        ({"kv_indptr": [1, 2, 2, 3]}, r"kv_indptr must start at 0, got 1"),
        ({"kv_indptr": [0, 2, 1, 3]}, r"kv_indptr must not fall, got 2 then 1 at request 1"),
        ({"kv_indptr": [0, 2, 2, 4]}, r"kv_indices must have kv_indptr\[-1\] = 4 ids, got 3"),
        (
            {"kv_indices": [5, -1, 9]},
            r"kv_indices of request 0 must be page ids in 0\.\.9, got -1 at its page 1",
        ),
        (
            {"kv_indices": [5, 2, 10]},
            r"kv_indices of request 2 must be page ids in 0\.\.9, got 10 at its page 0",
        ),
        ({"kv_last_page_len": [0, 0, 8]}, r"kv_last_page_len of request 0 must be in 1\.\.8, got 0"),
        ({"kv_last_page_len": [3, 0, 9]}, r"kv_last_page_len of request 2 must be in 1\.\.8, got 9"),
        ({"first_page_offset": [0, 0]}, r"first_page_offset must have 3 elements, got 2"),
        ({"first_page_offset": [8, 0, 0]}, r"first_page_offset of request 0 must be .*, got 8"),
        ({"first_page_offset": [0, 0, 8]}, r"first_page_offset of request 2 must be .*, got 8"),
        ({"first_page_offset": [-1, 0, 0]}, r"first_page_offset of request 0 must be .*, got -1"),
    ],
)
def test_each_malformed_field_is_named(change, text):
    with pytest.raises(ValueError, match=r"^\[page_table\] " + text):
        good(**change).validate(10)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ([[0, 1]], "must be integers of one dimension"),
        ([0.0, 1.0], "must be integers of one dimension, got float64"),
        (["a"], "must be integers of one dimension"),
        ([0, 2**31], "must fit int32, got values from 0 to 2147483648"),
    ],
)
def test_arrays_of_another_form_are_refused_at_once(values, text):
    with pytest.raises(ValueError, match=r"^\[page_table\] kv_indptr " + text):
        good(kv_indptr=values)


def test_a_valid_table_is_checked_once_and_again_for_a_smaller_pool():
    table = good()
    table.validate(10)
    table._kv_last_page_len = np.array([99, 0, 8], np.int32)
    table.validate(10)
    table.validate(11)
    with pytest.raises(ValueError, match="kv_last_page_len"):
        table.validate(9)


@pytest.mark.parametrize(
    "field", ["kv_indptr", "kv_indices", "kv_last_page_len", "first_page_offset", "page_size"]
)
def test_fields_cannot_be_replaced(field):
    table = good(first_page_offset=[0, 0, 0])
    with pytest.raises(AttributeError):
        setattr(table, field, getattr(table, field))


@pytest.mark.parametrize("page_size", [15.9, 16.0, True, "16", None, np.array([16])])
def test_a_page_size_is_an_integer(page_size):
    for make in (good, lambda page_size: PageTable.from_pages([[0]], [5], page_size)):
        with pytest.raises(ValueError, match=r"^\[page_table\] page_size must be an integer, got "):
            make(page_size=page_size)
    assert good(page_size=np.int64(8)).page_size == 8


def test_a_malformed_table_can_be_printed():
    assert repr(PageTable([], [], [], 16)) == (
        "PageTable(malformed: [page_table] kv_indptr must have batch + 1 = 1 elements, got 0.)"
    )
    assert "page_size must be a power of two" in repr(good(page_size=12))
    assert PageTable([], [], [], 16).batch == 0


def test_ids_past_the_end_and_lengths_of_empty_requests_are_ignored():
    good(kv_indices=[5, 2, 9, -3, 2**31 - 1], kv_last_page_len=[3, -5, 8]).validate(10)
    PageTable([0], [], [], 16).validate(0)


def test_batches_of_2_31_tokens_are_refused():
    n = 2**23
    table = PageTable([0, n], np.zeros(n, np.int32), [1], 256)
    with pytest.raises(ValueError, match=r"less than 2\^31 tokens"):
        table.validate()


def test_slots():
    table = good()
    np.testing.assert_array_equal(table.slots([0, 4, 4, 5]), [5 * 8 + 7, 16, 17, 18, 9 * 8 + 7])
    decode = PageTable.from_pages([[5, 2], [9]], [9, 8], 8)
    np.testing.assert_array_equal(decode.slots(), [16, 79])
    moved = good(first_page_offset=[5, 0, 7])
    np.testing.assert_array_equal(moved.slots([0, 6, 6, 6]), [45, 46, 47, 16, 17, 18])
    assert table.slots([0, 0, 0, 0]).shape == (0,)
    assert table.slots([0, 1, 1, 1]).dtype == np.int32


def test_slots_refuse_what_has_no_place():
    with pytest.raises(ValueError, match="request 1 has 1 new tokens, but only 0 tokens"):
        good().slots()
    with pytest.raises(ValueError, match="request 2 has 9 new tokens, but only 8 tokens"):
        good().slots([0, 0, 0, 9])
    with pytest.raises(ValueError, match="qo_indptr must have batch"):
        good().slots([0, 1])
    with pytest.raises(ValueError, match=r"slots must fit int32, got 17179869183"):
        PageTable([0, 1], [2**26 - 1], [256], 256).slots()


def test_slots_on_device_are_made_once_and_checked_against_the_pool():
    table = PageTable.from_pages([[5, 2], [9]], [9, 8], 8)
    slots = table.slots_on_device(None, 10)
    assert slots.dtype == mx.int32
    assert uploaded(slots) == [16, 79]
    assert table.slots_on_device(None, 10) is slots
    indptr = np.array([0, 2, 3], np.int32)
    assert table.slots_on_device(indptr, 10, mx.cpu).tolist() == [47, 16, 79]
    with pytest.raises(ValueError, match=r"kv_indices of request 1 must be page ids in 0\.\.8, got 9"):
        table.slots_on_device(None, 9)


def test_an_array_that_was_written_to_is_another_one():
    table = PageTable.from_pages([[5, 2], [9]], [9, 8], 8)
    indptr = np.array([0, 2, 3], np.int32)
    # Read by the host here: what is made for a GPU's ops need not be there yet.
    first, arrays = table.slots_on_device(indptr, 10, mx.cpu), table.on_device(indptr)
    assert table.slots_on_device(indptr.copy(), 10, mx.cpu) is first
    assert table.on_device(indptr.copy()) is arrays
    indptr[1] = 1
    assert first.tolist() == [47, 16, 79]
    assert table.slots_on_device(indptr, 10, mx.cpu).tolist() == [16, 78, 79]
    assert table.on_device(indptr) is not arrays


@pytest.mark.parametrize("shared", [lambda a: a, lambda a: array.array("i", a), memoryview, np.asarray])
@pytest.mark.parametrize("view", [lambda a: a, lambda a: np.broadcast_to(np.asarray(a), 3)])
def test_what_was_checked_is_what_kernels_read(shared, view):
    ids = shared(np.array([5, 2, 9], np.int32))
    table = good(kv_indices=view(ids))
    table.validate(10)
    ids[0] = 3_000_000
    np.testing.assert_array_equal(table.kv_indices, [5, 2, 9])
    with pytest.raises(ValueError, match="read-only"):
        table.kv_indices[0] = 3_000_000


def test_a_table_one_token_later():
    table = PageTable.from_pages([[5, 2], [9], [4]], [10, 5, 3], 8, np.array([0, 0, 2]))
    moved = table
    for step in range(1, table.room + 1):
        moved = moved.advance()
        fresh = PageTable.from_pages([[5, 2], [9], [4]], [10 + step, 5 + step, 3 + step], 8, [0, 0, 2])
        np.testing.assert_array_equal(moved.kv_len, fresh.kv_len)
        np.testing.assert_array_equal(moved.slots(), fresh.slots())
        assert moved.slots_on_device(None, 10, mx.cpu).tolist() == fresh.slots().tolist()
        assert moved.room == fresh.room == 3 - step
        assert moved.kv_indptr is table.kv_indptr
    assert table.kv_len.tolist() == [10, 5, 3]
    with pytest.raises(ValueError, match=r"^\[page_table\] advance: room must be 1 or more, got 0"):
        moved.advance()
    with pytest.raises(ValueError, match="room must be 1 or more"):
        good(kv_last_page_len=[3, 0, 3]).advance()  # a request without a page
    with pytest.raises(ValueError, match="kv_last_page_len of request 0"):
        good(kv_last_page_len=[9, 0, 3]).advance()


def test_slots_cannot_be_changed():
    """The next step's are made from them."""
    for slots in (PageTable.from_pages([[5]], [3], 8).slots(), good().slots([0, 4, 4, 5])):
        with pytest.raises(ValueError, match="read-only"):
            slots[0] = 7


def test_from_pages_names_what_is_wrong():
    with pytest.raises(ValueError, match="page_size must be a power of two"):
        PageTable.from_pages([[0]], [5], 0)
    with pytest.raises(ValueError, match="kv_indices must fit int32"):
        PageTable.from_pages([[2**40]], [5], 16)
