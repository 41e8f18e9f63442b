"""`compare` and `compare_distributed` as scripts call them: by our own arguments, or by msprobe's."""

from __future__ import annotations

import dataclasses
import difflib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypedDict

from trainermon.analysis.compare.answer.summary import ComparisonOutcome
from trainermon.analysis.compare.comparison import CompareOptions, Comparison, compare_pair, num_cores, pairs_of
from trainermon.analysis.compare.distributed import outcomes
from trainermon.analysis.compare.inputs import is_compare_input, read_compare_input
from trainermon.analysis.compare.mappings import matched_by_hand, read_mappings
from trainermon.analysis.compare.output.files import OutputDestination, write_files
from trainermon.core.errors import ConfigError
from trainermon.dashboards.graph_notes import read_notes

if TYPE_CHECKING:
    from typing_extensions import Unpack

FORMATS = ("csv", "json")


class MsprobeArguments(TypedDict, total=False):
    """The arguments of msprobe's two functions beside their paths.

    `stack_mode`: whether call stacks are in the table (here they are unless it is False). `auto_analyze`: whether
    advisor_*.txt is written (True). `fuzzy_match`: as `CompareOptions.fuzzy`. `highlight`: a spreadsheet with coloured
    rows besides. `data_mapping` … `layer_mapping`: files of names. `suffix`, `diff_analyze`, `is_print_compare_log`
    have no effect: files are named by step and rank, and what is to blame stands in each of them.
    """

    stack_mode: bool
    auto_analyze: bool
    fuzzy_match: bool
    highlight: bool
    suffix: str
    diff_analyze: bool
    is_print_compare_log: bool
    api_mapping: str | Path
    cell_mapping: str | Path
    data_mapping: str | Path
    layer_mapping: str | Path


def compare(
    target: Path | str | Mapping[str, Any] | None = None,
    golden: Path | str | None = None,
    *,
    options: CompareOptions | None = None,
    output_path: Path | str | None = None,
    input_param: Path | str | Mapping[str, Any] | None = None,
    **theirs: Unpack[MsprobeArguments],
) -> list[Comparison]:
    """Compare the dumps at or below `target` with those at or below `golden`.

    Return one `Comparison` per step and rank.

    Args:
        target: The dump in question; or what `input_param` is, and `golden` is then what `output_path` is.
        golden: The dump that is taken to be right.
        options: How they are compared.
        output_path: Folder that csv, JSON and advisor_*.txt are written into; None: nothing is written.
        input_param: What compare.json holds (`npu_path`, `bench_path`, …), or the path of such a file.
        **theirs: See `MsprobeArguments`.

    Raises:
        DumpError: a side has no dump, none of them belong together, or they hold nothing that can be compared.
        ConfigError: it is not said what to compare, or an argument is none.
    """
    _require_known("compare", theirs)
    if input_param is None and (isinstance(target, Mapping) or is_compare_input(target)):
        input_param, target = target, None
        output_path, golden = (golden, None) if output_path is None else (output_path, golden)
    if input_param is not None:
        if target is not None or golden is not None:
            raise ConfigError("compare: found input_param and two dumps, expected one of them")
        target, golden = read_compare_input(input_param)
    if target is None or golden is None:
        raise ConfigError("compare: name two dumps, or npu_path and bench_path in input_param")
    assert not isinstance(target, Mapping)
    options = _options(options, theirs, Path(target))
    destination = _destination(output_path, FORMATS, theirs)
    found = []
    for pair in pairs_of(Path(target), Path(golden), options).pairs:
        comparison = compare_pair(pair, options, threads=num_cores())
        if destination is not None:
            write_files(comparison, destination)
        found.append(comparison)
    return found


def compare_distributed(  # noqa: PLR0913  # as above; msprobe's names of the paths are taken too
    target: Path | str | None = None,
    golden: Path | str | None = None,
    output: Path | str | None = None,
    *,
    options: CompareOptions | None = None,
    formats: tuple[str, ...] = FORMATS,
    npu_dump_dir: Path | str | None = None,
    bench_dump_dir: Path | str | None = None,
    output_path: Path | str | None = None,
    **theirs: Unpack[MsprobeArguments],
) -> list[ComparisonOutcome]:
    """Compare every rank and step of two runs, write a set of files for each, and return the outcomes in their order.

    One process per core, at most as many as there are pairs; a single pair is compared in this process. With
    `options.ray` the processes of that cluster do it. `npu_dump_dir`, `bench_dump_dir` and `output_path` are msprobe's
    words for `target`, `golden` and `output`; `theirs` are its other arguments, see `MsprobeArguments`.

    Raises:
        DumpError: a side has no dump, none of them belong together, or one is damaged.
        ConfigError: it is not said what to compare, an argument is none, or there is no such cluster.
    """
    _require_known("compare_distributed", theirs)
    target, golden = target or npu_dump_dir, golden or bench_dump_dir
    if target is None or golden is None:
        raise ConfigError("compare_distributed: name two folders of dumps")
    destination = _destination(output or output_path, formats, theirs)
    options = _options(options, theirs, Path(target))
    return list(outcomes(Path(target), Path(golden), destination, options=options))


def _require_known(function: str, theirs: Mapping[str, Any]) -> None:
    known = MsprobeArguments.__annotations__
    for name in theirs:
        if name not in known:
            near = difflib.get_close_matches(name, known, n=1)
            advice = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(known)}"
            raise ConfigError(f"{function}: unknown argument {name!r}; {advice}")


def _options(options: CompareOptions | None, theirs: MsprobeArguments, target: Path) -> CompareOptions:
    """Return the options that both kinds of arguments, and what was matched by hand beside `target`, come to."""
    options = options or CompareOptions()
    paths = {
        kind: Path(str(path))
        for kind in ("api", "cell", "data", "layer")
        if (path := theirs.get(f"{kind}_mapping")) is not None
    }
    return dataclasses.replace(
        options,
        stack=theirs.get("stack_mode", options.stack),
        fuzzy=theirs.get("fuzzy_match", options.fuzzy),
        mappings=matched_by_hand(read_mappings(**paths) if paths else options.mappings, read_notes(target).matches),
    )


def _destination(
    folder: Path | str | None, formats: tuple[str, ...], theirs: MsprobeArguments
) -> OutputDestination | None:
    if folder is None:
        return None
    more = ("xlsx",) if theirs.get("highlight") and "xlsx" not in formats else ()
    return OutputDestination(folder=Path(folder), formats=(*formats, *more), advisor=theirs.get("auto_analyze", True))
