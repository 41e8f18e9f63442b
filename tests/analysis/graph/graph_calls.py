"""Calls of functions, made by hand."""

from trainermon.analysis.graph.calls import GraphCall


def function_call(name, *, place=0, number=0, kind="Torch", parent=None, values=()):
    """Return the forward of a function that began at `place`; call `number` of its name."""
    return GraphCall(
        key=f"{kind}.{name}.{number}.forward",
        module=name,
        class_name=kind,
        direction="forward",
        number=number,
        began=(0, place),
        micro_step=0,
        parent=parent,
        values=list(values),
        start=0,
        length=0,
    )
