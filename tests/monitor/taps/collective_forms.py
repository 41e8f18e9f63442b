"""Every form in which a collective is called, and what two ranks read and write in it."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as functional
from torch.distributed import all_reduce as early_all_reduce  # bound before anything is wrapped
from torch.distributed.distributed_c10d import _coalescing_manager

# torch 2.13 has other names for some; what was there before is still there.
all_gather_into = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)
reduce_scatter_into = getattr(dist, "reduce_scatter_single", dist.reduce_scatter_tensor)
functional_gather = "all_gather_single" if hasattr(functional, "all_gather_single") else "all_gather_tensor"
functional_scatter = "reduce_scatter_single" if hasattr(functional, "all_gather_single") else "reduce_scatter_tensor"


class Form(NamedTuple):
    """A call: the operation, how it is called, and the tensors that this rank reads and writes in it."""

    op: str
    call: Any
    read: list
    written: list


def values(rank, *shape, seed=0):
    """Return what rank `rank` hands in: every rank can compute it."""
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(*shape, generator=generator)


class Forms:
    """The forms of a group of two ranks; every call gets tensors of its own, output buffers are full of sevens."""

    def __init__(self, rank, group, mesh):
        self.rank, self.group, self.mesh = rank, group, mesh
        self.is_root = rank == 0
        self.mine, self.theirs = values(rank, 6), values(1 - rank, 6)
        self.both = [values(0, 6), values(1, 6)]
        self.total = self.both[0] + self.both[1]
        self.half = slice(3 * rank, 3 * rank + 3)
        self.x = self.mine.clone

    def all(self):
        yield from self.reductions()
        yield from self.gathers()
        yield from self.exchanges()
        yield from self.coalesced()
        yield from self.functional()

    def pieces(self):
        return [self.mine[:3].clone(), self.mine[3:].clone()]

    def buffers(self, size=6):
        return [sevens(size), sevens(size)]

    def reductions(self):
        group, x, mine, total = self.group, self.x, [self.mine], [self.total]
        total_piece = [self.total[self.half]]
        yield Form("all_reduce", lambda: dist.all_reduce(x(), group=group), mine, total)
        yield Form("all_reduce", lambda: early_all_reduce(x(), group=group), mine, total)
        yield Form("all_reduce", lambda: dist.all_reduce(x(), group=group, async_op=True).wait(), mine, total)
        yield Form("all_reduce", lambda: group.allreduce(tensors=[x()]).wait(), mine, total)
        yield Form("reduce", lambda: dist.reduce(x(), 0, group=group), mine, total if self.is_root else [])
        pieces, op = self.pieces(), "reduce_scatter_tensor"
        yield Form("reduce_scatter", lambda: dist.reduce_scatter(sevens(3), pieces, group=group), pieces, total_piece)
        yield Form(op, lambda: reduce_scatter_into(sevens(3), x(), group=group), mine, total_piece)
        yield Form(op, lambda: group._reduce_scatter_base(sevens(3), x()).wait(), mine, total_piece)
        yield Form(
            op, lambda: group._reduce_scatter_base(inputTensor=x(), outputTensor=sevens(3)).wait(), mine, total_piece
        )

    def gathers(self):
        group, x, mine, both = self.group, self.x, [self.mine], self.both
        joined, op = [torch.cat(both)], "all_gather_into_tensor"
        yield Form("all_gather", lambda: dist.all_gather(self.buffers(), x(), group=group), mine, both)
        yield Form(op, lambda: all_gather_into(sevens(12), x(), group=group), mine, joined)
        yield Form(op, lambda: group._allgather_base(sevens(12), x()).wait(), mine, joined)
        outputs = self.buffers() if self.is_root else None
        yield Form("gather", lambda: dist.gather(x(), outputs, 0, group=group), mine, both if self.is_root else [])

    def exchanges(self):
        group, x, half = self.group, self.x, self.half
        read, first = [self.mine] if self.is_root else [], [self.both[0]]
        yield Form("broadcast", lambda: dist.broadcast(x(), 0, group=group), read, first)
        yield Form("broadcast", lambda: group.broadcast(x(), 0).wait(), read, first)
        pieces = self.pieces() if self.is_root else []
        scatter = lambda: dist.scatter(sevens(3), pieces or None, 0, group=group)  # noqa: E731
        yield Form("scatter", scatter, pieces, [self.both[0][half]])
        received = [source[half] for source in self.both]
        single = lambda: dist.all_to_all_single(sevens(6), x(), group=group)  # noqa: E731
        yield Form("all_to_all_single", single, [self.mine], [torch.cat(received)])
        listed = lambda: dist.all_to_all(self.buffers(3), self.pieces(), group=group)  # noqa: E731
        yield Form("all_to_all", listed, self.pieces(), received)
        yield Form("barrier", lambda: dist.barrier(group=group), [], [])

    def coalesced(self):
        group, read = self.group, [self.mine, self.theirs]
        gathered = [torch.cat(self.both), torch.cat(self.both[::-1])]

        def reduce_in_block():
            with _coalescing_manager(group=group, async_ops=True) as block:
                for tensor in read:
                    dist.all_reduce(tensor.clone(), group=group)
            block.wait()

        def gather_in_block():
            with _coalescing_manager(group=group):
                for tensor in read:
                    all_gather_into(sevens(12), tensor.clone(), group=group)

        def gather_lists():
            group.allgather_coalesced([[buffer] for buffer in self.buffers()], [self.x()]).wait()

        yield Form("all_reduce_coalesced", reduce_in_block, read, [self.total, self.total])
        yield Form("all_gather_into_tensor_coalesced", gather_in_block, read, gathered)
        yield Form("all_gather_coalesced", gather_lists, [self.mine], self.both)

    def functional(self):
        group, x, mine, total = self.group, self.x, [self.mine], [self.total]
        exchanged = [torch.cat([source[self.half] for source in self.both])]
        two = [self.mine, self.theirs]
        waited = lambda: functional.wait_tensor(functional.all_reduce(x(), "sum", (self.mesh, 0)))  # noqa: E731
        several = lambda: [1 * y for y in functional.all_reduce_coalesced([t.clone() for t in two], "sum", group)]  # noqa: E731
        to_all = lambda: 1 * functional.all_to_all_single(x(), None, None, group)  # noqa: E731
        yield Form("all_reduce", lambda: 1 * functional.all_reduce(x(), "sum", group), mine, total)
        yield Form("all_reduce", lambda: 1 * functional.all_reduce(x(), "sum", group.group_name), mine, total)
        yield Form("all_reduce", waited, mine, total)
        yield Form("all_reduce", lambda: 1 * functional.all_reduce(x(), "sum", group).view(2, -1), mine, total)
        yield Form("all_reduce_coalesced", several, two, total * 2)
        gather = lambda: 1 * getattr(functional, functional_gather)(x(), 0, group)  # noqa: E731
        yield Form("all_gather_into_tensor", gather, mine, [torch.cat(self.both)])
        scatter = lambda: 1 * getattr(functional, functional_scatter)(x(), "sum", 0, group)  # noqa: E731
        yield Form("reduce_scatter_tensor", scatter, mine, [self.total[self.half]])
        yield Form("broadcast", lambda: 1 * functional.broadcast(x(), 0, group), mine, [self.both[0]])
        yield Form("all_to_all_single", to_all, mine, exchanged)


def sevens(size):
    return torch.full((size,), 7.0)
