"""The eight moments of tensors on a GPU, in Triton: one pass over memory, whatever the number of tensors.

    scan    one program per chunk of elements: seven partial moments, written to a workspace
    finish  one program per tensor: merges its chunks in a fixed order and writes the row

There are no atomics: the same tensors give the same bits. A lane adds up the STEPS elements of its chunk in float32 (a
relative error of at most STEPS * 2^-24 < 1e-6); lanes and chunks are added in float64. A chunk whose sum of squares is
not finite, or whose largest magnitude does not suit float32, is read again by a loop in float64 that masks what is not
finite; float64 elements are read by that loop only. Importing this module needs triton; `launches.py` drives it.
"""

# A kernel's arguments are pointers and scalars that Triton types at each launch; capitals are compile-time constants.
# ruff: noqa: ANN001, ANN201, ANN202, N803, PLR0913, PLR0917, PLR0124
# mypy: disable-error-code="no-untyped-def, untyped-decorator, no-untyped-call"

from __future__ import annotations

import triton
import triton.language as tl

LANES = tl.constexpr(1024)  # elements that a program takes at a time: eight for each of its 128 threads
STEPS = tl.constexpr(16)
CHUNK = tl.constexpr(1024 * 16)  # elements of one program
MERGED = tl.constexpr(256)  # chunks that `finish` takes at a time

# Magnitudes whose squares float32 can add up.
LEAST = tl.constexpr(2.0**-40)
MOST = tl.constexpr(2.0**40)
INF = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["count", "length", "distance"], do_not_specialize_on_alignment=["partials"])
def scan_one(elements, count, length, distance, partials, DENSE: tl.constexpr, WIDE: tl.constexpr):
    """Write the partial moments of every chunk of one tensor; the layout is as in `scan_many`."""
    chunk = tl.program_id(0).to(tl.int64)
    first = chunk * CHUNK
    inside = tl.minimum(count - first, CHUNK).to(tl.int32)
    _scan(elements, first, inside, length, distance, partials + 7 * chunk, DENSE, WIDE)


@triton.jit(do_not_specialize=["first_chunk"], do_not_specialize_on_alignment=["like"])
def scan_many(like, first_chunk, tensor_of, addresses, layouts, partials, DENSE: tl.constexpr, WIDE: tl.constexpr):
    """Write the partial moments of chunks of many tensors that are of the dtype of `like`, which is not read.

    Chunks are numbered over all launches, those of this one from `first_chunk` on. `tensor_of` names a chunk's tensor.
    A tensor has one entry in `addresses` and four in `layouts`: its first chunk, its number of elements, and the length
    and distance of its runs. DENSE: there is one run, and the address is a multiple of 16.
    """
    chunk = tl.program_id(0).to(tl.int64) + first_chunk
    tensor = tl.load(tensor_of + chunk)
    layout = layouts + 4 * tensor
    first = (chunk - tl.load(layout)) * CHUNK
    inside = tl.minimum(tl.load(layout + 1) - first, CHUNK).to(tl.int32)
    elements = tl.load(addresses + tensor).to(like.dtype)
    if DENSE:
        elements = tl.multiple_of(elements, 16)
    length, distance = tl.load(layout + 2), tl.load(layout + 3)
    _scan(elements, first, inside, length, distance, partials + 7 * chunk, DENSE, WIDE)


@triton.jit(do_not_specialize=["num_chunks", "count", "repeats"], do_not_specialize_on_alignment=["row"])
def finish_one(partials, num_chunks, count, repeats, row):
    """Merge the chunks of one tensor and write its row; the arguments are as in `finish_many`."""
    _finish(partials, num_chunks, count, repeats, row)


@triton.jit(do_not_specialize_on_alignment=["rows"])
def finish_many(partials, tensors, rows):
    """Merge each tensor's chunks and write its row.

    A tensor has five entries in `tensors`: its row, its first chunk, its number of chunks, its number of elements in
    memory, and how many elements each of those stands for.
    """
    tensor = tensors + 5 * tl.program_id(0)
    first, num_chunks = tl.load(tensor + 1), tl.load(tensor + 2)
    _finish(partials + 7 * first, num_chunks, tl.load(tensor + 3), tl.load(tensor + 4), rows + 8 * tl.load(tensor))


@triton.jit
def _scan(elements, first, inside, length, distance, partial, DENSE: tl.constexpr, WIDE: tl.constexpr):
    """Write the partial moments of `inside` elements from number `first` on; `inside` is 1 to CHUNK."""
    if DENSE:
        elements += first
    if WIDE:
        low, high, total, squares, zeros, nans, infs = _wide(elements, first, inside, length, distance, DENSE)
    else:
        low, high, total, squares, zeros = _float32(elements, first, inside, length, distance, DENSE)
        nans, infs = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)
        magnitude = tl.maximum(-low, high)
        if not ((squares < INF) & ((magnitude == 0) | ((magnitude >= LEAST) & (magnitude <= MOST)))):
            low, high, total, squares, zeros, nans, infs = _wide(elements, first, inside, length, distance, DENSE)
    tl.store(partial, low)
    tl.store(partial + 1, high)
    tl.store(partial + 2, total)
    tl.store(partial + 3, squares)
    tl.store(partial + 4, zeros.to(tl.float64))
    tl.store(partial + 5, nans.to(tl.float64))
    tl.store(partial + 6, infs.to(tl.float64))


@triton.jit
def _float32(elements, first, inside, length, distance, DENSE: tl.constexpr):
    """Return low, high, sum, sum of squares (float64) and zeros (int32) of finite elements that suit float32.

    Where one is not finite, so is the sum of squares.
    """
    low, high = tl.full((LANES,), INF, tl.float32), tl.full((LANES,), -INF, tl.float32)
    total, squares = tl.zeros((LANES,), tl.float32), tl.zeros((LANES,), tl.float32)
    zeros = tl.zeros((LANES,), tl.int32)
    if DENSE & (inside == CHUNK):
        for step in tl.static_range(STEPS):
            value = _as_float32(tl.load(elements + (step * LANES + tl.arange(0, LANES))))
            low, high = tl.minimum(low, value), tl.maximum(high, value)
            total += value
            squares += value * value
            zeros += (value == 0).to(tl.int32)
    else:
        for start in range(0, inside, LANES):
            value, is_inside = _load(elements, first, start, inside, length, distance, DENSE)
            value = _as_float32(value)
            low = tl.minimum(low, tl.where(is_inside, value, INF))
            high = tl.maximum(high, tl.where(is_inside, value, -INF))
            total += value
            squares += value * value
            zeros += ((value == 0) & is_inside).to(tl.int32)
    return (
        tl.min(low).to(tl.float64),
        tl.max(high).to(tl.float64),
        tl.sum(total.to(tl.float64)),
        tl.sum(squares.to(tl.float64)),
        tl.sum(zeros),
    )


@triton.jit
def _wide(elements, first, inside, length, distance, DENSE: tl.constexpr):
    """Return low, high, sum, sum of squares (float64), zeros, NaNs and infinities (int32) of any elements."""
    low, high = tl.full((LANES,), INF, tl.float64), tl.full((LANES,), -INF, tl.float64)
    total, squares = tl.zeros((LANES,), tl.float64), tl.zeros((LANES,), tl.float64)
    zeros, nans, infs = tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32), tl.zeros((LANES,), tl.int32)
    for start in range(0, inside, LANES):
        value, is_inside = _load(elements, first, start, inside, length, distance, DENSE)
        value = value if value.dtype == tl.float64 else _as_float32(value).to(tl.float64)
        is_nan, is_inf = value != value, tl.abs(value) == INF
        is_finite = is_inside & ~is_nan & ~is_inf
        low = tl.minimum(low, tl.where(is_finite, value, INF))
        high = tl.maximum(high, tl.where(is_finite, value, -INF))
        value = tl.where(is_finite, value, 0.0)
        total += value
        squares += value * value
        zeros += ((value == 0) & is_finite).to(tl.int32)
        nans += is_nan.to(tl.int32)
        infs += is_inf.to(tl.int32)
    return tl.min(low), tl.max(high), tl.sum(total), tl.sum(squares), tl.sum(zeros), tl.sum(nans), tl.sum(infs)


@triton.jit
def _load(elements, first, start, inside, length, distance, DENSE: tl.constexpr):
    """Return LANES elements from the chunk's `start` on, zero where the chunk has ended, and where it has not."""
    index = start + tl.arange(0, LANES)
    is_inside = index < inside
    if DENSE:
        return tl.load(elements + index, mask=is_inside, other=0.0), is_inside
    number = first + index
    place = number // length * distance + number % length
    return tl.load(elements + place, mask=is_inside, other=0.0), is_inside


@triton.jit
def _as_float32(value):
    if value.dtype == tl.bfloat16:  # by its definition: the interpreter's own conversion makes zeros of subnormals
        return (value.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    return value.to(tl.float32)


@triton.jit
def _finish(partials, num_chunks, count, repeats, row):
    low, high = tl.full((MERGED,), INF, tl.float64), tl.full((MERGED,), -INF, tl.float64)
    total, squares = tl.zeros((MERGED,), tl.float64), tl.zeros((MERGED,), tl.float64)
    zeros, nans, infs = (
        tl.zeros((MERGED,), tl.float64),
        tl.zeros((MERGED,), tl.float64),
        tl.zeros((MERGED,), tl.float64),
    )
    for start in range(0, num_chunks, MERGED):
        chunk = start + tl.arange(0, MERGED)
        partial, is_one = partials + 7 * chunk, chunk < num_chunks
        low = tl.minimum(low, tl.load(partial, mask=is_one, other=INF))
        high = tl.maximum(high, tl.load(partial + 1, mask=is_one, other=-INF))
        total += tl.load(partial + 2, mask=is_one, other=0.0)
        squares += tl.load(partial + 3, mask=is_one, other=0.0)
        zeros += tl.load(partial + 4, mask=is_one, other=0.0)
        nans += tl.load(partial + 5, mask=is_one, other=0.0)
        infs += tl.load(partial + 6, mask=is_one, other=0.0)
    times = repeats.to(tl.float64)
    tl.store(row, count.to(tl.float64) * times)
    tl.store(row + 1, tl.min(low))
    tl.store(row + 2, tl.max(high))
    tl.store(row + 3, tl.sum(total) * times)
    tl.store(row + 4, tl.sum(squares) * times)
    tl.store(row + 5, tl.sum(zeros) * times)
    tl.store(row + 6, tl.sum(nans) * times)
    tl.store(row + 7, tl.sum(infs) * times)
