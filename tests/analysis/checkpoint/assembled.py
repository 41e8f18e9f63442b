"""Puts the pieces of a tensor together, which the package never does, and compares with what torch loaded."""

import warnings

import numpy as np
import torch
from torch.distributed.checkpoint import state_dict_saver

from trainermon.analysis.checkpoint.pieces import Box
from trainermon.analysis.tensor.dtypes import BITS, storage_dtype


def assembled(tensor):
    """Return the whole tensor in numpy, as stored; fail if an element is in no piece, or replicas differ."""
    whole = np.zeros(tensor.shape, storage_dtype(tensor.dtype))
    covered = np.zeros(tensor.shape, bool)
    for piece in tensor.pieces:
        assert piece.stored.dtype == tensor.dtype
        found = piece.stored.array()
        target, seen = (part_at(piece.region, array) for array in (whole, covered))
        assert target.shape == found.shape
        known = found[seen].tobytes()
        assert known == target[seen].tobytes()
        target[...], seen[...] = found, True
    assert covered.all()
    return whole


def part_at(region, array):
    """Return a view of the part of an array that a piece is."""
    if isinstance(region, Box):
        place = tuple(map(slice, region.starts, np.add(region.starts, region.sizes)))
        where = (*place, ...)
        return array[where]
    return array.reshape(-1)[region.start : region.start + region.length]


def bits(tensor):
    """Return a tensor of torch in numpy, as its bits are stored."""
    dtype = str(tensor.dtype).removeprefix("torch.")
    tensor = tensor.detach()
    return (tensor.view(getattr(torch, np.dtype(BITS[dtype]).name)) if dtype in BITS else tensor).numpy()


def assert_same(tensors, expected):
    """Fail unless both have the same names, and the same bits under each."""
    assert set(tensors) == set(expected)
    for name, value in expected.items():
        assert tensors[name].dtype == str(value.dtype).removeprefix("torch."), name
        assert tensors[name].shape == tuple(value.shape), name
        assert assembled(tensors[name]).tobytes() == bits(value).tobytes(), name


def save_alone(state, folder):
    """Write a distributed checkpoint of one process, about which torch warns."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        state_dict_saver.save(state, checkpoint_id=folder, no_dist=True)
