"""What calls and rows of both sides are called where they are matched: under mapping files, and across frameworks.

Calls with equal names belong together, in the order in which they ran. Names of MindSpore become those of PyTorch,
whichever side they are on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from trainermon.analysis.compare.frameworks import MINDSPORE, function_name, parameter_name
from trainermon.analysis.compare.items import MODULE, PARAMETERS, DumpCall, DumpRow, DumpRows
from trainermon.analysis.compare.mappings import TOP_LAYER, ApiRule, NameMappings
from trainermon.dump.files.records import PARAMETERS_GRAD

_NOTHING = "nothing"  # the place of a row that has no counterpart


class CallNaming:
    """Gives the calls of two dumps common names, such that calls which belong together are called the same.

    It applies the user's mappings, and removes what frameworks and wrappers add.
    """

    def __init__(self, mappings: NameMappings, target: DumpRows, golden: DumpRows) -> None:
        self._mappings = mappings
        self._crosses = target.framework != golden.framework
        self._is_scoped = bool(mappings.layer) or target.scoped or golden.scoped
        self._target_is_foreign = not self._crosses or target.framework == MINDSPORE
        pytorch = golden if self._target_is_foreign else target
        self._functions = {_full_name(call) for call in pytorch.calls if call.family != MODULE}
        self._classes = _classes(target.calls) if mappings.layer else {}
        self._paths: dict[str, str] = {}

    @property
    def is_needed(self) -> bool:
        """Whether names have to be translated; if not, calls are matched by their names as they stand."""
        return bool(self._mappings) or self._crosses or self._is_scoped

    @property
    def is_in_order(self) -> bool:
        """Whether calls of one name are matched in the order in which they ran, in whatever module that was."""
        return self._crosses or self._is_scoped

    def ours(self, call: DumpCall) -> str:
        """Return the common name of a call of the target."""
        if call.family == MODULE:
            return self._module(call)
        name = self._foreign_function(call) if self._target_is_foreign else _full_name(call)
        return self._scoped(self._path(call.scope), name)

    def theirs(self, call: DumpCall) -> str:
        """Return the common name of a call of the golden dump."""
        if call.family == MODULE:
            return call.path if self._drops_classes else f"{MODULE}.{call.name}"
        name = _full_name(call) if self._target_is_foreign else self._foreign_function(call)
        return self._scoped(call.scope, name)

    def _scoped(self, scope: str, name: str) -> str:
        """Return the name of a function: under a layer mapping that of its module with its own, whatever its family."""
        if not self._is_scoped:
            return name
        return f"{scope}/{name.partition('.')[2] if self._mappings.layer else name}"

    def places(self, target: DumpCall, golden: DumpCall) -> dict[str, str]:
        """Return the golden place (`input.1`) of each row of the target, by its own place.

        Those that agree are left out.
        """
        ours, theirs = (target, golden) if self._target_is_foreign else (golden, target)
        rule = self._mappings.api.get(_full_name(ours))
        found = {item.place: self._place(item, ours, rule) for item in ours.items}
        changed = {place: other for place, other in found.items() if place != other}
        if self._target_is_foreign or not changed:
            return changed
        back = {other: place for place, other in changed.items() if other != _NOTHING}
        gone = {item.place: _NOTHING for item in theirs.items if changed.get(item.place) == _NOTHING}
        return gone | back

    @property
    def _drops_classes(self) -> bool:
        return self._crosses or bool(self._mappings.layer)

    def _module(self, call: DumpCall) -> str:
        if self._mappings.layer:
            return self._path(call.path)
        if call.path in self._mappings.modules:
            return f"{MODULE}.{self._mappings.modules[call.path]}"
        name = self._cell(call.name)
        return name.rpartition(".")[0] if self._crosses else f"{MODULE}.{name}"

    def _cell(self, name: str) -> str:
        """Return the golden name of a module: that of the whole name, else with each part replaced that is mapped."""
        if name in self._mappings.cell:
            return self._mappings.cell[name]
        for part, other in self._mappings.cell.items():
            name = name.replace(part, other, 1)
        return name

    def _foreign_function(self, call: DumpCall) -> str:
        full = _full_name(call)
        rule = self._mappings.api.get(full)
        if rule is not None:
            return rule.pt_api
        return function_name(call.family, call.name, self._functions) if self._crosses else full

    def _place(self, item: DumpRow, call: DumpCall, rule: ApiRule | None) -> str:
        if rule is not None:
            state = "" if call.direction == PARAMETERS_GRAD else item.state
            return rule.places.get(item.place, _NOTHING if state in rule.listed else item.place)
        if not self._crosses or not (item.state == PARAMETERS or call.direction == PARAMETERS_GRAD):
            return item.place
        return f"{item.place.rpartition('.')[0]}.{parameter_name(item.place.rpartition('.')[2])}".lstrip(".")

    def _path(self, path: str) -> str:
        """Return the path of a module of the target in the golden dump, layer by layer."""
        if path not in self._paths:
            self._paths[path] = self._mapped(path.split(".")) if path else ""
        return self._paths[path]

    def _mapped(self, parts: list[str]) -> str:
        found: list[str] = []
        at = 0
        while at < len(parts):
            above = self._classes.get(".".join(parts[:at]), parts[at - 1]) if at else TOP_LAYER
            step, name = self._step(above, parts[at:])
            found += [name] if name else []
            at += step
        return ".".join(found)

    def _step(self, above: str, parts: list[str]) -> tuple[int, str]:
        for path, other in self._mappings.layer.get(above, ()):
            length = path.count(".") + 1
            if parts[:length] == path.split("."):
                return length, other
        return 1, parts[0]


def _full_name(call: DumpCall) -> str:
    return f"{call.family}.{call.name}" if call.family else call.key


def _classes(calls: Iterable[DumpCall]) -> Mapping[str, str]:
    modules = (call.name.rpartition(".") for call in calls if call.family == MODULE)
    return {path: name for path, _, name in modules}


def unused_names(mappings: NameMappings, target: DumpRows) -> Iterator[str]:
    """Yield a warning for every mapping file that names something which the target does not have."""
    modules = [call.name for call in target.calls if call.family == MODULE]
    known = {_full_name(call) for call in target.calls if call.family != MODULE}
    rows = {f"{call.key}.{item.place}" for call in target.calls for item in call.items} if mappings.data else set()
    functions = {} if target.framework != MINDSPORE else mappings.api
    missing = {
        "API mapping": [name for name in functions if name not in known],
        "cell mapping": [name for name in mappings.cell if not any(name in module for module in modules)],
        "data mapping": [name for name in mappings.data if name not in rows],
    }
    for kind, names in missing.items():
        if names:
            yield f"{len(names)} names of the {kind} are nowhere in the target; the first is {names[0]}"
