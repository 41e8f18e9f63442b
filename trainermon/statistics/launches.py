"""Drives the Triton kernels: which tensors go into which launch, and the tables that tell a launch where they lie.

A list of tensors costs at most three launches per dtype, whatever its length. Its tables are built on the host once and
kept on the device, so that a list which comes again costs no copy. Everything happens in the order of the current
stream, and nothing waits for the device.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from typing import Generic, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from trainermon.statistics import fallback, triton_kernel
from trainermon.statistics.layout import (
    ElementRuns,
    OtherDeviceError,
    are_contiguous,
    are_plain,
    no_memory,
    plain,
    runs,
)

DTYPES = frozenset((torch.float32, torch.bfloat16, torch.float16, torch.float64))
CHUNK: int = triton_kernel.CHUNK.value
PARTIAL_BYTES = 56
# Bounds of what is kept on the device: partial moments of the chunks of one launch, and the tables of lists seen last.
WORKSPACE_BYTES = 32 << 20
TABLE_BYTES = 8 << 20
MAX_CHUNKS = WORKSPACE_BYTES // PARTIAL_BYTES


class _TensorLayout(NamedTuple):
    """How the tensors of a list lie in memory, and which rows they have; equal layouts share their tables."""

    places: Sequence[int]  # rows
    dtypes: Sequence[torch.dtype]
    counts: Sequence[int]  # elements in memory
    runs: Sequence[ElementRuns] | None  # None: each tensor is one run


class _ChunkLaunch(NamedTuple):
    """The chunks of tensors of one dtype, all dense and aligned or all not."""

    dtype: torch.dtype
    is_dense: bool
    first_chunk: int
    num_chunks: int


class _LaunchTables(NamedTuple):
    launches: Sequence[_ChunkLaunch]
    tensor_of: Tensor  # int32, one per chunk
    layouts: Tensor  # int64, four per tensor
    tensors: Tensor  # int64, five per tensor

    @property
    def nbytes(self) -> int:
        return self.tensor_of.nbytes + self.layouts.nbytes + self.tensors.nbytes


class KernelLauncher:
    """Computes moments on one device by the Triton kernels; see `kernel.moments` for the contract.

    Keeps at most 32 MiB of partial moments (per stream that was used) and 16 MiB of tables on the device. A tensor that
    the kernels cannot read (no float of 16 to 64 bits, or of more than two strides) is left to torch calls.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_gpu = device.type == "cuda"  # else Triton's interpreter, in tests
        self._likes = {dtype: torch.empty(1, dtype=dtype, device=device) for dtype in DTYPES}
        self._workspaces: dict[int, Tensor] = {}
        self._tables: _KeptTables[_LaunchTables] = _KeptTables(TABLE_BYTES)
        self._addresses: _KeptTables[Tensor] = _KeptTables(TABLE_BYTES)

    @torch.no_grad()
    def moments(self, tensors: Sequence[Tensor], out: Tensor, first_row: int) -> None:
        """Write the moments of tensors on this device into the rows of `out` from `first_row` on."""
        if self._is_gpu and torch.cuda.current_device() != self._device.index:
            with torch.cuda.device(self._device):
                self._moments(tensors, out[first_row:])
        else:
            self._moments(tensors, out[first_row:])

    def _moments(self, tensors: Sequence[Tensor], rows: Tensor) -> None:
        for tensor in tensors:
            if tensor.device != self._device:
                raise OtherDeviceError(tensor.device, self._device)
        if len(tensors) == 1:
            self._one(plain(tensors[0]), rows[0])
        elif (
            are_plain(tensors)
            and are_contiguous(tensors)
            and DTYPES.issuperset(dtypes := [tensor.dtype for tensor in tensors])
        ):
            counts = tuple(map(Tensor.numel, tensors))
            self._many(tensors, _TensorLayout(range(len(tensors)), tuple(dtypes), counts, None), rows)
        else:
            self._mixed(tensors, rows)

    def _one(self, tensor: Tensor, row: Tensor) -> None:
        """Take one tensor without tables: as an argument of the kernel."""
        lies = _runs_of(tensor)
        if lies is None or lies.num_runs * lies.length > MAX_CHUNKS * CHUNK:
            row.copy_(fallback.row_of(tensor))
            return
        count = lies.num_runs * lies.length
        if count and not tensor.data_ptr():
            raise no_memory(tensor)
        num_chunks = -(-count // CHUNK)
        partials = self._workspace(num_chunks)
        if num_chunks:
            is_dense, is_wide = lies.num_runs == 1, tensor.dtype is torch.float64
            triton_kernel.scan_one[(num_chunks,)](
                tensor, count, lies.length, lies.stride, partials, DENSE=is_dense, WIDE=is_wide
            )
        triton_kernel.finish_one[(1,)](partials, num_chunks, count, lies.repeats, row)

    def _mixed(self, tensors: Sequence[Tensor], rows: Tensor) -> None:
        """Take what the kernels can read together, and the others one by one."""
        places: list[int] = []
        readable: list[Tensor] = []
        found: list[ElementRuns] = []
        for place, tensor in enumerate(map(plain, tensors)):
            lies = _runs_of(tensor)
            if lies is None:
                self._one(tensor, rows[place])
            else:
                places.append(place)
                readable.append(tensor)
                found.append(lies)
        if readable:
            dtypes = tuple(tensor.dtype for tensor in readable)
            counts = tuple(lies.num_runs * lies.length for lies in found)
            self._many(readable, _TensorLayout(tuple(places), dtypes, counts, tuple(found)), rows)

    def _many(self, tensors: Sequence[Tensor], layout: _TensorLayout, rows: Tensor) -> None:
        if sum(layout.counts) > (MAX_CHUNKS - len(tensors)) * CHUNK:
            self._in_parts(tensors, layout, rows)
            return
        addresses = np.fromiter(map(Tensor.data_ptr, tensors), np.int64, len(tensors))
        for place in np.flatnonzero(addresses == 0).tolist():
            if layout.counts[place]:
                raise no_memory(tensors[place])
        aligned = addresses & 15 == 0
        stream = self._stream()
        tables = self._tables.get((stream, aligned.tobytes(), layout), lambda: self._build(layout, aligned))
        where = self._addresses.get((stream, addresses.tobytes()), lambda: self._upload(addresses))
        partials = self._workspace(len(tables.tensor_of))
        for launch in tables.launches:
            triton_kernel.scan_many[(launch.num_chunks,)](
                self._likes[launch.dtype],
                launch.first_chunk,
                tables.tensor_of,
                where,
                tables.layouts,
                partials,
                DENSE=launch.is_dense,
                WIDE=launch.dtype is torch.float64,
            )
        triton_kernel.finish_many[(len(tensors),)](partials, tables.tensors, rows)

    def _in_parts(self, tensors: Sequence[Tensor], layout: _TensorLayout, rows: Tensor) -> None:
        """Take a list that is too large for the workspace in two halves, or alone what is too large alone."""
        if len(tensors) == 1:
            self._one(tensors[0], rows[layout.places[0]])
            return
        middle = len(tensors) // 2
        for part in (slice(None, middle), slice(middle, None)):
            half = _TensorLayout(
                layout.places[part],
                layout.dtypes[part],
                layout.counts[part],
                layout.runs and layout.runs[part],
            )
            self._many(tensors[part], half, rows)

    def _build(self, layout: _TensorLayout, aligned: NDArray[np.bool_]) -> _LaunchTables:
        """Build the tables of a layout: chunks in the order of launches, tensors in that of the list."""
        counts = np.array(layout.counts, np.int64)
        lies = np.array(layout.runs or [ElementRuns(1, count, count, 1) for count in layout.counts], np.int64)
        is_dense = aligned & (lies[:, 0] == 1)
        chunks_of = -(-counts // CHUNK)
        first_of = np.zeros_like(counts)
        launches, tensor_of = [], [np.empty(0, np.int32)]
        num_chunks = 0
        for dtype, dense in {*zip(layout.dtypes, is_dense.tolist(), strict=True)}:
            members = np.flatnonzero((is_dense == dense) & [other is dtype for other in layout.dtypes])
            ends = num_chunks + np.cumsum(chunks_of[members])
            first_of[members] = ends - chunks_of[members]
            tensor_of.append(np.repeat(members, chunks_of[members]).astype(np.int32))
            if ends[-1] > num_chunks:
                launches.append(_ChunkLaunch(dtype, dense, num_chunks, int(ends[-1]) - num_chunks))
            num_chunks = int(ends[-1])
        return _LaunchTables(
            launches,
            self._upload(np.concatenate(tensor_of)),
            self._upload(np.stack((first_of, counts, lies[:, 1], lies[:, 2]), axis=1)),
            self._upload(np.stack((np.array(layout.places), first_of, chunks_of, counts, lies[:, 3]), axis=1)),
        )

    def _upload(self, table: NDArray[np.int64 | np.int32]) -> Tensor:
        """Return a table on the device. Its pinned copy is reused by torch when it has been read, and not before."""
        host = torch.from_numpy(table)
        return host.pin_memory().to(self._device, non_blocking=True) if self._is_gpu else host

    def _workspace(self, num_chunks: int) -> Tensor:
        stream = self._stream()
        workspace = self._workspaces.get(stream)
        if workspace is None or len(workspace) < 7 * num_chunks:
            size = 1 << max(12, (7 * num_chunks - 1).bit_length())
            workspace = torch.empty(min(size, 7 * MAX_CHUNKS), dtype=torch.float64, device=self._device)
            self._workspaces[stream] = workspace
        return workspace

    def _stream(self) -> int:
        """Return the current stream. Its kernels run one after the other, so they share tables and workspace."""
        return int(torch.cuda.current_stream(self._device).cuda_stream) if self._is_gpu else 0


class _SizedTables(Protocol):
    @property
    def nbytes(self) -> int: ...


Table = TypeVar("Table", bound=_SizedTables)


class _KeptTables(Generic[Table]):
    """The tables that were used last, of at most `budget` bytes together (but for the last one)."""

    def __init__(self, budget: int) -> None:
        self._budget = budget
        self._used = 0
        self._tables: OrderedDict[Hashable, Table] = OrderedDict()

    def get(self, key: Hashable, make: Callable[[], Table]) -> Table:
        """Return the table of `key`; make it if it is not here."""
        table = self._tables.get(key)
        if table is None:
            table = self._tables[key] = make()
            self._used += table.nbytes
            while self._used > self._budget and len(self._tables) > 1:
                self._used -= self._tables.popitem(last=False)[1].nbytes
        else:
            self._tables.move_to_end(key)
        return table


def _runs_of(tensor: Tensor) -> ElementRuns | None:
    """Return how a tensor's elements lie; None if the kernels cannot read them."""
    if tensor.dtype not in DTYPES or tensor.layout is not torch.strided:
        return None
    return runs(tensor.shape, tensor.stride())
