"""`trainermon rl`: reports of a watch, stages, dumps and settings of two sides, digests of weights."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from trainermon.analysis.compare.answer.summary import render_text, summarise
from trainermon.analysis.compare.verdicts import NOT_COMPARED, PASS
from trainermon.analysis.rl.align import align
from trainermon.analysis.rl.checkpoint_digest import digest_checkpoint
from trainermon.analysis.rl.engine_names import NAMES
from trainermon.analysis.rl.logged_settings import compare_settings, read_settings
from trainermon.analysis.rl.page import render_page
from trainermon.analysis.rl.screen import lacking_steps, screen_of_run, screen_of_settings, screen_of_stages
from trainermon.analysis.rl.stage_differences import compare_stages
from trainermon.analysis.rl.stage_tables import write_tables
from trainermon.analysis.rl.token_text import read_tokenizer
from trainermon.core.errors import ConfigError
from trainermon.core.terminal.progress import ProgressBar
from trainermon.core.terminal.results import write_text
from trainermon.core.terminal.statuses import add_exit_code, exit_status
from trainermon.core.values import as_plain
from trainermon.rl.digest import WeightDigest
from trainermon.rl.files import read_reports, write_digest
from trainermon.rl.values import Report, Verdict


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments of `trainermon rl`."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    show = actions.add_parser("show", help="say whether the engine samples from the policy that is trained")
    show.add_argument("folder", type=Path, help="the folder that trainermon.rl.Watch was given")
    show.add_argument("--step", type=int, help="this step (default: the worst of the last that every rank has)")
    show.add_argument("--html", type=Path, metavar="FILE", help="write a page, too")
    show.add_argument("--tokenizer", type=Path, metavar="PATH", help="show tokens as text: a model's folder")
    show.add_argument("--json", action="store_true", help="print the reports as JSON")
    add_exit_code(show, "some step has a cause", "none has, and a rank lacks steps, or a step was not comparable")
    compare = actions.add_parser("compare", help="find the first stage of a step in which two runs differ")
    compare.add_argument("run", type=Path, help="a folder of stages, ours or of msprobe's SingleSave")
    compare.add_argument("other", type=Path, help="the one to hold it against")
    compare.add_argument(
        "-o", "--output", type=Path, metavar="DIR", help="write KEY.xlsx for every key, as msprobe does"
    )
    compare.add_argument("--json", action="store_true", help="print JSON instead of the screen")
    add_exit_code(compare, "they differ at all, or an array was not compared", "there is nothing to compare")
    digest = actions.add_parser("digest", help="write digests of a checkpoint's weights, to hold an engine against")
    digest.add_argument("checkpoint", type=Path, help="of any format that `trainermon checkpoint` reads")
    digest.add_argument("-o", "--output", type=Path, required=True, metavar="DIR", help="the folder of the watch")
    digest.add_argument("--version", type=int, required=True, dest="number", help="the version that these weights are")
    digest.add_argument("--engine", default="", help="an engine holds them (default: the trainer sent them)")
    digest.add_argument("--dtype", default="", help="cast floating-point tensors first, as bfloat16; needs torch")
    _add_align(actions.add_parser("align", help="compare a trainer's dump with an engine's, of the prompts' tokens"))
    config = actions.add_parser("config", help="compare the settings in two logs or files of settings")
    config.add_argument("run", type=Path, help="a log of verl, slime, OpenRLHF, Megatron …, or a json or yaml file")
    config.add_argument("other", type=Path, help="the one to hold it against")
    config.add_argument("--json", action="store_true", help="print JSON instead of the screen")
    add_exit_code(config, "they differ, or one has a setting alone", "there is nothing to compare")


def _add_align(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("trainer", type=Path, help="a dump with tensors (level L0 or mix) of a forward of the trainer")
    parser.add_argument("engine", type=Path, help="one of the engine's prefill of the same prompts, no prefix cache")
    parser.add_argument("--names", choices=NAMES, default="hf-vllm", help="whose module names (default: %(default)s)")
    parser.add_argument(
        "-o", "--output", type=Path, required=True, metavar="DIR", help="gets target, golden, match.yaml"
    )
    parser.add_argument(
        "--lengths", type=_numbers, metavar="N,N,…", help="of the engine's prompts, where its dump has no positions"
    )
    add_exit_code(parser, "a module is to blame", "none is, and not all could be compared")


def main(args: argparse.Namespace) -> int:
    """Carry out an action; return 0, or `DIFFERS` if that was asked for.

    Raises:
        DumpError: A folder or file has nothing that can be read.
        CheckpointError: A checkpoint cannot be read.
        ConfigError: An argument is wrong.
    """
    return {"show": _show, "compare": _compare, "digest": _digest, "align": _align, "config": _config}[args.action](
        args
    )


def _show(args: argparse.Namespace) -> int:
    ranks = read_reports(args.folder)
    rank, report = chosen_report(ranks, args.step)
    decode = None if args.tokenizer is None else read_tokenizer(args.tokenizer)
    if args.html is not None:
        write_text(args.html, render_page(args.folder, ranks, rank, report, decode))
    if args.json:
        _print([json.dumps(as_plain({str(number): reports for number, reports in ranks.items()}))])
    else:
        _print(screen_of_run(ranks, rank, report, decode))
    wrong = any(each.causes for reports in ranks.values() for each in reports)
    whole = not lacking_steps(ranks) and not any(
        each.verdict is Verdict.NOT_COMPARABLE for reports in ranks.values() for each in reports
    )
    return exit_status(args, found=wrong, whole=whole)


def chosen_report(ranks: dict[int, list[Report]], step: int | None) -> tuple[int, Report]:
    """Return the report to show and its rank: of the step, or of the last one that every rank has, the worst.

    Raises:
        ConfigError: No rank has that step.
    """
    steps = [{report.step for report in reports} for reports in ranks.values() if reports]
    if step is None:
        step = max(set.intersection(*steps) or set.union(*steps))
    found = [(rank, report) for rank, reports in ranks.items() for report in reports if report.step == step]
    if not found:
        known = sorted(set.union(*steps))
        raise ConfigError(f"--step: found {step}, expected one of {known[0]} to {known[-1]}")
    return max(found, key=lambda pair: (SEVERITY[pair[1].verdict], -pair[0]))


SEVERITY = {
    Verdict.CONSISTENT: 0,
    Verdict.NOISE: 1,
    Verdict.POLICY_DIFFERS: 2,
    Verdict.BOOKKEEPING: 3,
    Verdict.NOT_COMPARABLE: 4,
}


def _compare(args: argparse.Namespace) -> int:
    found = compare_stages(args.run, args.other)
    if args.output is not None:
        write_tables(found, args.output)
    if args.json:
        _print([json.dumps(as_plain(found))])
    else:
        _print(screen_of_stages(found))
    return exit_status(args, found=not found.is_equal, whole=True)


def _digest(args: argparse.Namespace) -> int:
    with ProgressBar():
        tensors = digest_checkpoint(args.checkpoint, dtype=args.dtype)
    write_digest(args.output, WeightDigest(version=args.number, tensors=tensors, engine=args.engine))
    side = f"held by {args.engine}" if args.engine else "sent"
    _print([f"{len(tensors)} tensors of {args.checkpoint}, {side} as version {args.number}: {args.output / 'weights'}"])
    return 0


def _align(args: argparse.Namespace) -> int:
    found = align(args.trainer, args.engine, names=args.names, output=args.output, lengths=args.lengths)
    comparison = found.compare()
    match = f" --match {found.match}" if found.match else ""
    _print(
        [
            f"{sum(found.lengths):,} tokens of {len(found.lengths)} prompts, {found.modules} modules by one name",
            "",
            *render_text([summarise(comparison)]).splitlines(),
            "",
            f"more: trainermon compare {found.target} {found.golden}{match}",
            f"      trainermon graph {found.target} {found.golden}{match}",
        ]
    )
    rows = comparison.row_counts()  # each side has functions of its own
    is_whole = bool(rows[PASS]) and not rows[NOT_COMPARED] and not comparison.gaps
    return exit_status(args, found=bool(comparison.blamed), whole=is_whole)


def _numbers(text: str) -> list[int]:
    try:
        return [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected numbers with commas between") from None


def _config(args: argparse.Namespace) -> int:
    found = compare_settings(read_settings(args.run), read_settings(args.other))
    if args.json:
        _print([json.dumps(as_plain(found))])
    else:
        _print(screen_of_settings(found))
    return exit_status(args, found=bool(found.differing), whole=bool(found.equal))


def _print(lines: Iterable[str]) -> None:
    sys.stdout.write("".join(f"{line}\n" for line in lines))
