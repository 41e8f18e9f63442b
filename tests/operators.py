"""The operations of torch with samples of their arguments, as torch's own tests use them."""

import functools
import importlib

import torch


@functools.cache
def operator_database():
    """Return the entries of the database; the first call imports it, which takes seconds, so no test file does.

    That import would freeze the switches of `torch.backends` for the whole process, so for every test after it.
    """
    with torch.backends.__allow_nonbracketed_mutation():
        return importlib.import_module("torch.testing._internal.common_methods_invocations").op_db
