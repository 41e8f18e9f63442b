"""Results with their golden ones, as both tools get them: msprobe when its numbers are recorded, ours in the tests.

numpy's old generator gives the same numbers in every version.
"""

import numpy as np
import torch

# operation, type of the result, elements, what was done to it
FAULTS = ("sound", "tiny", "rough", "wrong", "nan", "inf", "scaled", "zeroed", "both_inf")
OPERATIONS = ("add", "linear", "conv2d", "masked_fill", "softmax")
DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def cases():
    """Yield name, operation, golden result in float64, and result, of each case."""
    for number, (operation, dtype, fault) in enumerate(
        (operation, dtype, fault) for operation in OPERATIONS for dtype in DTYPES for fault in FAULTS
    ):
        random = np.random.RandomState(number)
        exact = torch.from_numpy(random.standard_normal((24, 16)) * 10.0 ** random.uniform(-5, 1, (24, 16)))
        given = faulty(exact, dtype, fault, random)
        yield f"{operation}.{str(dtype).removeprefix('torch.')}.{fault}", operation, exact, given
    yield from _odd_cases()


def faulty(exact, dtype, fault, random):
    unit = torch.finfo(dtype).eps
    noise = torch.from_numpy(random.standard_normal(tuple(exact.shape)))
    factor = {"rough": 40.0, "wrong": 1e3, "scaled": 0.0}.get(fault, 0.25)
    made = exact * (1 + min(factor * unit, 0.3) * noise)
    if fault == "scaled":
        exact *= 1e-4
        made = 2 * exact
    if fault == "tiny":
        exact *= 1e-6
        made = exact + 1e-7 * noise
    given = made.to(dtype)
    if fault == "nan":
        given[3, 5] = torch.nan
    if fault in ("inf", "both_inf"):
        given[7, 2] = -torch.inf
    if fault == "both_inf":
        exact[7, 2] = -torch.inf
        given[8, 2] = exact[8, 2] = torch.nan
    if fault == "zeroed":
        given[-1] = 0
    return given


def _odd_cases():
    zeros, ones = torch.zeros(4, dtype=torch.float64), torch.ones(4, dtype=torch.float64)
    yield "softmax.one_element", "softmax", torch.tensor([0.5], dtype=torch.float64), torch.tensor([0.75])
    yield "softmax.scalar", "softmax", torch.tensor(0.5, dtype=torch.float64), torch.tensor(0.5)
    yield "softmax.both_zero", "softmax", zeros, torch.zeros(4)
    yield "softmax.golden_zero", "softmax", zeros, torch.ones(4)
    yield "softmax.device_zero", "softmax", ones, torch.zeros(4)
    yield "softmax.empty", "softmax", torch.zeros(0, dtype=torch.float64), torch.zeros(0)
    yield "softmax.other_shape", "softmax", ones, torch.ones(5)
    yield "argmax.equal", "argmax", torch.tensor([1, 2]), torch.tensor([1, 2])
    yield "argmax.differs", "argmax", torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 3, 5])
    yield "eq.differs", "eq", torch.tensor([True, False, True]), torch.tensor([True, True, True])
    yield "int8.differs", "argmax", torch.tensor([1, 2], dtype=torch.int8), torch.tensor([1, 3], dtype=torch.int8)
    quantised = torch.tensor([1, 2], dtype=torch.int8), torch.tensor([2, 1], dtype=torch.int8)
    yield "quantised.one", "npu_dynamic_quant", *quantised
    yield "quantised.two", "npu_dynamic_quant", quantised[0], quantised[1] * 3


def golden(exact, dtype):
    """Return the golden result as msprobe has it: in float32 for a type of 16 bits, else in float64."""
    if not exact.is_floating_point():
        return exact
    return exact.to(torch.float32 if dtype in (torch.float16, torch.bfloat16) else torch.float64)
