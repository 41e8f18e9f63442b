"""Dumps of modules that give tensors of every dtype and layout, one module for each."""

import json

from torch import nn

from tests.tensor_kinds import DAMAGES, every_kind, numbers
from trainermon import PrecisionDebugger

TASKS = {
    "statistics": {"task": "statistics"},
    "tensor": {"task": "tensor"},
    "md5": {"task": "statistics", "summary_mode": "md5"},
}


class Shows(nn.Module):
    """Gives each tensor to a module of its own."""

    def __init__(self, names):
        super().__init__()
        self.kinds = nn.ModuleDict({name: nn.Identity() for name in names})

    def forward(self, tensors):
        for name, tensor in tensors.items():
            self.kinds[name](tensor)


def dumped(folder, values, task, kinds=every_kind):
    """Dump all that `kinds` makes of `values`, and return the folder of the dump's only rank."""
    tensors = {f"{name}_": tensor for name, tensor in kinds(values).items()}
    model = Shows(tensors)
    config = folder.with_suffix(".json")
    options = TASKS[task]
    config.write_text(
        json.dumps(
            {
                "task": options["task"],
                "dump_path": str(folder),
                "rank": [],
                "step": [],
                "level": "L0",
                options["task"]: {"summary_mode": options.get("summary_mode", "statistics")},
            }
        )
    )
    debugger = PrecisionDebugger(config_path=str(config))
    debugger.start(model)
    model(tensors)
    debugger.stop()
    debugger.close()
    return folder / "step0/rank0"


def all_dumps(folder, task):
    """Return the folders of dumps by name: `sound`, `again`, and one for each damage."""
    sides = {"sound": numbers(), "again": numbers()}
    sides |= {name: damage(numbers()) for name, damage in DAMAGES.items()}
    found = {name: dumped(folder / name, values, task) for name, values in sides.items()}
    PrecisionDebugger.close()
    return found


def kind_of(key):
    """Return the kind that a call's key is of, `Module.kinds.int8_.Identity.forward.0`."""
    return key.removeprefix("Module.kinds.").removesuffix("_.Identity.forward.0")
