"""A mode that is put in and taken out while others come and go, in any order."""

import torch
from torch.overrides import TorchFunctionMode, _get_current_function_mode_stack

from trainermon.dump.function_modes import put_in, take_out


class Counting(TorchFunctionMode):
    def __init__(self):
        super().__init__()
        self.seen = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.seen += 1
        return func(*args, **(kwargs or {}))


def test_blocks_that_are_left_take_their_own_mode():
    own, mine = Counting(), Counting()

    with mine:
        put_in(own)
        torch.ones(2).add(1)
    torch.ones(2).add(1)
    take_out(own)
    torch.ones(2).add(1)

    assert (mine.seen, own.seen) == (2, 4)
    assert _get_current_function_mode_stack() == []


def test_it_goes_from_below_a_block_that_is_still_on():
    own, mine = Counting(), Counting()

    put_in(own)
    with mine:
        take_out(own)
        torch.ones(2).add(1)
        take_out(own)

    assert (mine.seen, own.seen) == (2, 0)


def test_devices_that_are_set_are_put_back():
    own = Counting()

    with torch.device("meta"):
        put_in(own)
        assert torch.ones(2).is_meta
    assert not torch.ones(2).is_meta
    torch.set_default_device("meta")
    take_out(own)
    put_in(own)
    assert torch.ones(2).is_meta
    torch.set_default_device(None)
    take_out(own)

    assert _get_current_function_mode_stack() == []
