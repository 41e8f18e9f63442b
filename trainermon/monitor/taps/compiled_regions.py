"""What modules take and return inside of `torch.compile`, where forward hooks that come later never run.

`compile_friendly(model)` puts hooks on the modules *before* the model is compiled. Where they are traced they leave an
operator of our own in the graph, which reads a tensor and returns nothing; where they run as Python they call
`ModuleTaps`, which does the work there. Whether the operator reads is decided when it runs: neither a schedule nor a
monitor that attaches or detaches causes a recompilation.

Gradients of activations are refused in compiled code. They would need an alias of each output with a backward of its
own: bit-equal where that was tried, but whatever then changes the output in place does not compile any more.
"""

from __future__ import annotations

import itertools
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from trainermon.core.errors import AttachError, ConfigError
from trainermon.core.values import Kind, Placement, SeriesKey
from trainermon.hooks.guard import NOTHING, FaultGuard
from trainermon.hooks.tree import tensors_of
from trainermon.monitor.taps.collector import Collector
from trainermon.monitor.taps.micro_steps import MicroSteps, in_backward
from trainermon.monitor.taps.training import TapHandle, WatchedModule

logger = logging.getLogger("trainermon")

# Who looks at which site. The operator is found by name and can hold nothing, so this is nobody's attribute. Empty
# while nothing is due.
_watchers: dict[int, Callable[[Tensor, str], object]] = {}
_numbers = itertools.count()

_library = torch.library.Library("trainermon", "DEF")  # type: ignore[no-untyped-call]
# `site` is said to be written to, which it is not: that keeps an operator whose result nobody uses. CUDA graphs are cut
# around it, for they would repeat what it did once.
_library.define(  # type: ignore[no-untyped-call]
    "look(Tensor tensor, Tensor(a!) site, str slot) -> ()",
    tags=[torch.Tag.cudagraph_unsafe] if hasattr(torch.Tag, "cudagraph_unsafe") else [],
)


def _look(tensor: Tensor, site: Tensor, slot: str) -> None:
    if _watchers:
        watcher = _watchers.get(int(site))
        if watcher is not None:
            watcher(tensor, slot)


_library.impl("look", _look, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call]
_library.impl("look", lambda *_: None, "Meta")  # type: ignore[no-untyped-call]


class _LastingHook:
    """A hook that stays: in a trace it leaves the operator in the graph, elsewhere it calls `eager` where that is set.

    To register and remove other hooks on a module whose hooks were traced would compile it again. `site` is the site's
    number as a tensor on the host: an input of the graph and no constant in it, so that modules which share their code
    share their graph. A copy of the hook does nothing, and a pickle likewise.
    """

    __slots__ = ("eager", "site")
    __torch_unserializable__: ClassVar[bool] = True

    def __init__(self, site: Tensor) -> None:
        self.site = site
        self.eager: Callable[..., Any] | None = None

    def remove(self) -> None:
        """Call nobody any more."""
        self.eager = None

    def _look(self, side: str, value: Any) -> None:
        for path, tensor in tensors_of(value):
            if type(tensor) is Tensor:
                torch.ops.trainermon.look(tensor, self.site, side + (path or ".0"))

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return getattr, NOTHING


class _BeforeRegion(_LastingHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        if torch.compiler.is_dynamo_compiling():
            if _trains(module):
                self._look("input", args)
                self._look("input", kwargs)
        elif self.eager is not None:
            self.eager(module, args, kwargs)


class _BehindRegion(_LastingHook):
    __slots__ = ()

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if torch.compiler.is_dynamo_compiling():
            if _trains(module):
                self._look("output", output)
        elif self.eager is not None:
            self.eager(module, args, output)


def _trains(module: nn.Module) -> bool:
    """Return what in a trace is a constant, on which torch guards by itself."""
    return module.training and torch.is_grad_enabled()


def register(module: nn.Module, before: Callable[..., Any], behind: Callable[..., Any]) -> list[TapHandle]:
    """Have `before` and `behind` called around each forward of `module` that is not compiled code.

    Return the hook handles. On a prepared module its own hooks do it, elsewhere `behind` is called after an exception
    too (non-reentrant checkpointing leaves a recomputed forward by one).
    """
    hooks = _hooks_of(module)
    if hooks is None:
        return [
            module.register_forward_pre_hook(before, with_kwargs=True),
            module.register_forward_hook(behind, always_call=True),
        ]
    for hook, function in zip(hooks, (before, behind), strict=True):
        hook.eager = function
    return list(hooks)


def _hooks_of(module: nn.Module) -> tuple[_BeforeRegion, _BehindRegion] | None:
    before = next((hook for hook in module._forward_pre_hooks.values() if isinstance(hook, _BeforeRegion)), None)
    behind = next((hook for hook in module._forward_hooks.values() if isinstance(hook, _BehindRegion)), None)
    return None if before is None or behind is None else (before, behind)


def compile_friendly(model: nn.Module) -> nn.Module:
    """Prepare `model` for a monitor that reads activations inside `torch.compile`; return the same model.

    Call it before `torch.compile` (or `model.compile()`, or the compilation of any of its parts). The compiled code
    then reads what every module takes and returns on the steps on which that is due; on the others each read costs a
    call of an operator that does nothing. fullgraph works; losses and gradients keep their bits in float32. With
    Inductor a bfloat16 or float16 tensor that is read has to exist and is rounded, where it may have stayed in a
    register with more bits.

    Raises:
        AttachError: `model`, or a module of it, is compiled already: its code would not be traced again.
    """
    compiled = next((name or "the model" for name, module in model.named_modules() if is_compiled(module)), None)
    if compiled is not None:
        raise AttachError(f"model: {compiled} is compiled already; call compile_friendly before torch.compile")
    for name, module in model.named_modules():
        if name and site_of(module) is None:
            site = torch.tensor(next(_numbers), device="cpu")
            module.register_forward_pre_hook(_BeforeRegion(site), with_kwargs=True)
            module.register_forward_hook(_BehindRegion(site))
    return model


def is_compiled(module: nn.Module) -> bool:
    """Return whether this very module was compiled, by `torch.compile(module)` or `module.compile()`."""
    return isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def site_of(module: nn.Module) -> int | None:
    """Return the number by which the compiled graph of `module` finds its watcher; None if it was not prepared."""
    hooks = _hooks_of(module)
    return None if hooks is None else int(hooks[0].site)


def modules_inside(roots: Sequence[nn.Module]) -> Iterator[nn.Module]:
    """Yield every module below `roots` that is compiled or lies inside one that is."""
    for root in roots:
        for module in root.modules():
            if is_compiled(module):
                yield from module.modules()


class _PreparedModule:
    """A prepared module: its series numbers, and how often each of its tensors was seen in which forward."""

    __slots__ = ("calls", "module", "serial", "series")

    def __init__(self, module: WatchedModule) -> None:
        self.module = module
        self.serial = -1
        self.calls: dict[str, int] = {}
        self.series: dict[tuple[str, int, int | None], int] = {}


_IN_COMPILED = (
    "the script has compiled code (torch.compile), in which hooks that come later never fire: call "
    "trainermon.compile_friendly(model) before torch.compile"
)
_UNCALLED = "none was called; if the script computes with its weights otherwise, no hook sees what"


def _passed_by(name: str) -> str:
    return (
        f"{name} was called while no forward of the model ran, as where children or a method of it are called "
        "directly, or its forward is a generator: call the model itself, or hand set_monitor a list of the modules "
        "that are called"
    )


def has_compiled() -> bool:
    """Return whether torch.compile has compiled anything in this process."""
    return getattr(sys.modules.get("torch._dynamo.convert_frame"), "FRAME_COUNTER", 0) > 0


class CompiledRegions:
    """Records inputs and outputs of the prepared `modules` when compiled code runs them.

    Series are those of `ModuleTaps`. A tensor that several modules pass on is read for each of them: compiled code may
    write to the same memory in between without a trace. Evaluation and recomputation are not counted.

    Attributes:
        num_seen: Tensors seen since `attach`.
        unseen_steps: Due steps with a backward on which not a single module was seen, here or by hooks: the model runs
            in compiled code that was not prepared. The log and the journal say so once.
    """

    def __init__(
        self, modules: Sequence[WatchedModule], collector: Collector, steps: MicroSteps, guard: FaultGuard
    ) -> None:
        self.num_seen = self.unseen_steps = 0
        self._num_modules = len(modules)
        self._watched = {site: _PreparedModule(m) for m in modules if (site := site_of(m.module)) is not None}
        self._collector = collector
        self._steps = steps
        self._guard = guard
        self._several_micro_steps = False

    def attach(self, *, micro_steps: int) -> None:
        """Begin to record what compiled code passes to the prepared modules; `micro_steps` is the number per step."""
        self._several_micro_steps = micro_steps > 1
        self.num_seen = 0
        for site, watched in self._watched.items():
            _watchers[site] = self._guard.wrap(self._see, watched)

    def detach(self) -> None:
        """Stop recording what compiled code passes to the prepared modules."""
        for site in self._watched:
            _watchers.pop(site, None)

    def step_ended(self, num_seen_by_hooks: int, called_outside: str = "") -> None:
        """Warn if modules should have been seen in this step, but none was, neither here nor by hooks.

        `called_outside` names a module that hooks saw while no forward of the model ran.
        """
        if not self._num_modules or self.num_seen or num_seen_by_hooks or not self._steps.has_backward:
            return
        if not self.unseen_steps:
            why = _passed_by(called_outside) if called_outside else _IN_COMPILED if has_compiled() else _UNCALLED
            self._collector.tell(f"activations are asked for, but not one module was seen in a step: {why}")
        self.unseen_steps += 1

    def _see(self, watched: _PreparedModule, tensor: Tensor, slot: str) -> None:
        if in_backward() or self._steps.muted or self._collector.muted:
            return
        stage = watched.module.stage
        if self._steps.is_crowded(stage):
            return
        self.num_seen += 1
        # a root that was compiled in place does not tell when its forward begins: the backwards that ended do
        by_backward = not self._steps.counting
        serial = self._steps.serial(stage, recomputing=by_backward)
        if watched.serial != serial:
            watched.serial, watched.calls = serial, {}
        call = watched.calls[slot] = watched.calls.get(slot, -1) + 1
        micro_step = self._steps.micro_step(stage, recomputing=by_backward) if self._several_micro_steps else None
        series = watched.series.get((slot, call, micro_step))
        if series is None:
            key = SeriesKey(Kind.ACTV, watched.module.name, slot, call, micro_step, stage)
            placement = Placement(dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))
            series = watched.series[slot, call, micro_step] = self._collector.table.id_of(key, placement)
        self._collector.take((series,), (tensor,))


def check(modules: Sequence[WatchedModule], roots: Sequence[nn.Module], *, backward: bool) -> None:
    """Raise an error if the activations of `modules`, or with `backward` their gradients, are hidden in compiled code.

    Raises:
        ConfigError: Some lie inside of compiled regions and were not prepared, or their gradients are asked for.
    """
    inside = {id(module) for module in modules_inside(roots)}
    found = [m for m in modules if id(m.module) in inside]
    missing = [m.name for m in found if site_of(m.module) is None]
    if missing:
        raise ConfigError(
            f"xy_distribution is true, but {len(missing)} modules ({missing[0]}, ...) lie in compiled code, where "
            "hooks that come later never fire: call trainermon.compile_friendly(model) before torch.compile, or set "
            "xy_distribution to false"
        )
    if found and backward:
        raise ConfigError(
            f"xy_distribution asks for the gradients of activations, but {len(found)} modules ({found[0].name}, ...) "
            "lie in compiled code, where they cannot be seen without changing it: set forward_only to true"
        )
