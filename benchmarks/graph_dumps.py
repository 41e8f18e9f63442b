"""Dumps of many calls for `bench_graph`: one recorded step of a small transformer, its micro step repeated.

Each copy has its own call numbers, orders and statistics, as a longer accumulation of gradients has.
"""

from __future__ import annotations

import json
import random
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

LAYERS = 16
_STATISTICS = ("Max", "Min", "Mean", "Norm")
_number = re.compile(r"^(.*?)\.(?:(forward|backward|parameters_grad)\.(\d+)|(\d+)\.(forward|backward))$")


def record_step(folder: Path) -> Path:
    """Record a forward and a backward of a transformer of `LAYERS` layers at level mix; return the dump's folder."""
    import torch
    from torch import nn

    from trainermon import PrecisionDebugger

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.n1, self.n2 = nn.LayerNorm(8), nn.LayerNorm(8)
            self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)
            self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
            x = x + self.out(torch.softmax(q @ k.transpose(-1, -2) / 8**0.5, -1) @ v)
            return x + self.down(nn.functional.gelu(self.up(self.n2(x))))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(32, 8), *(Block() for _ in range(LAYERS)), nn.Linear(8, 32))
    tokens = torch.arange(12).reshape(2, 6)
    debugger = PrecisionDebugger(dump_path=str(folder), level="mix", task="statistics")
    debugger.start(model=model)
    nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()  # type: ignore[no-untyped-call]
    debugger.stop()
    debugger.step()
    PrecisionDebugger.close()
    [path] = folder.rglob("dump.json")
    return path.parent


def repeat_step(source: Path, folder: Path, calls: int, *, seed: int = 0) -> None:
    """Write a dump of at least `calls` entries into `folder`; those of other seeds differ by rounding."""
    folder.mkdir(parents=True)
    dump, parents, stacks = (
        json.loads((source / name).read_bytes()) for name in ("dump.json", "construct.json", "stack.json")
    )
    step, noise = dump["data"], random.Random(seed)
    uses, span = _uses(step), 1 + max(_orders(step))
    data, construct = {}, {}
    shared: dict[str, list[Any]] = {number: [[], frames] for number, (_, frames) in stacks.items()}
    for copy in range(-(-calls // len(step))):
        names = {key: _renumbered(key, copy, uses) for key in step}
        for key, name in names.items():
            factor = (1 + 0.01 * copy) * (1 + noise.gauss(0, 1e-7))
            data[name] = _copied(step[key], factor, span * copy, copy)
            construct[name] = names.get(parents.get(key))
        for number, (keys, _) in stacks.items():
            shared[number][0] += [names[key] for key in keys if key in names]
    lines = ",\n".join(f"  {json.dumps(key)}: {json.dumps(entry)}" for key, entry in data.items())
    head = json.dumps({**dump, "data": {}})
    (folder / "dump.json").write_text(head.replace('"data": {}', f'"data": {{\n{lines}\n }}'))
    (folder / "construct.json").write_text(json.dumps(construct, indent=1))
    (folder / "stack.json").write_text(json.dumps(shared))
    (folder / "dump_info.json").write_bytes((source / "dump_info.json").read_bytes())


def _uses(step: Mapping[str, Any]) -> Counter[str]:
    """Return how often each module or function is called in one micro step."""
    found = (_number.match(key) for key in step)
    return Counter(f"{one[1]} {one[2] or one[5]}" for one in found if one)


def _renumbered(key: str, copy: int, uses: Mapping[str, int]) -> str:
    found = _number.match(key)
    if found is None:
        return key
    name, of_module, number, of_function, direction = found.groups()
    after = int(number or of_function) + copy * uses[f"{name} {of_module or direction}"]
    return f"{name}.{of_module}.{after}" if of_module else f"{name}.{after}.{direction}"


def _orders(value: Any) -> Iterator[int]:
    if isinstance(value, dict):
        if isinstance(value.get("order"), int):
            yield value["order"]
        value = list(value.values())
    for item in value if isinstance(value, list) else ():
        yield from _orders(item)


def _copied(value: Any, factor: float, later: int, micro_step: int) -> Any:
    if isinstance(value, list):
        return [_copied(item, factor, later, micro_step) for item in value]
    if not isinstance(value, dict):
        return value
    copied = {name: _copied(item, factor, later, micro_step) for name, item in value.items()}
    if isinstance(value.get("order"), int):
        copied["order"] = value["order"] + later
    if "micro_step" in value:
        copied["micro_step"] = micro_step
    for name in _STATISTICS:
        if isinstance(value.get(name), float):
            copied[name] = value[name] * factor
    return copied
