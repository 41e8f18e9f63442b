"""What a step had that can change its gradients and that no replay contains: a clean replay says nothing of it."""

from __future__ import annotations

from torch import nn

from trainermon.replay.keep import ForwardKeeper

# Whose hooks on accumulated gradients reduce or look at them.
_FRAMEWORKS = ("torch", "trainermon", "deepspeed", "megatron", "transformer_engine")


def absent_from_replay(keeper: ForwardKeeper) -> tuple[str, ...]:
    """Return what the step of `keeper` had and its replay has not, each in words that follow "of"; () for nothing.

    A replay begins with the gradients of what the model returned, and ends before they are accumulated.
    """
    parameters = (parameter for stage in keeper.stages for parameter in stage.model.parameters())
    known = (
        ("a backward through a backward (create_graph)", keeper.is_differentiated),
        ("a transform of torch.func", keeper.is_transformed),
        ("a communication hook", any(getattr(stage.wrapper, "_comm_hooks", ()) for stage in keeper.stages)),
        ("a hook on accumulated gradients", any(map(has_own_hook, parameters))),
    )
    return tuple(words for words, is_there in known if is_there)


def has_own_hook(parameter: nn.Parameter) -> bool:
    """Return whether the script itself has a hook on the accumulated gradient of `parameter`."""
    hooks = (getattr(parameter, "_post_accumulate_grad_hooks", None) or {}).values()
    homes = (getattr(hook, "__module__", None) or type(hook).__module__ for hook in hooks)
    return any(home.partition(".")[0] not in _FRAMEWORKS for home in homes)
