"""Dumps made by hand, of MindSpore and of PyTorch."""

import json


def tensor(dtype="torch.float32", shape=(2, 3), value=1.0, **more):
    kind = "torch.Tensor" if dtype.startswith("torch.") else "mindspore.Tensor"
    numbers = {"Max": value, "Min": -value, "Mean": 0.0, "Norm": value}
    return {"type": kind, "dtype": dtype, "shape": list(shape), **numbers, **more}


def forward(*inputs, output, parameters=None, **kwargs):
    value = {"input_args": list(inputs), "input_kwargs": kwargs, "output": [output]}
    return value | ({"parameters": parameters} if parameters else {})


def write_dump(folder, data, *, construct=None, info=None, framework="pytorch"):
    """Write the files of a dump and return the folder."""
    folder.mkdir(parents=True)
    head = {"task": "statistics", "level": "mix", "framework": framework, "dump_data_dir": None}
    (folder / "dump.json").write_text(json.dumps(head | {"data": data}))
    (folder / "construct.json").write_text(json.dumps(construct or {}))
    if info is not None:
        (folder / "dump_info.json").write_text(json.dumps(info))
    return folder
