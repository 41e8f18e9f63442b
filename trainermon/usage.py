"""What `--help` shows beside the options: examples of every command, each run by a test as it stands here.

The names in them (`run`, `dump`, `golden` …) are those of the folder that the test works in.
"""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Collection, Iterator, Sequence
from typing import NoReturn

OVERVIEW = """\
where to begin:
  is a training going well?      the page that its log names, trainermon serve, or trainermon query
  a loss is NaN, or jumps        trainermon diagnose
  two runs should be equal       trainermon compare, graph, source, env compare, checkpoint compare
  a device computes wrongly?     trainermon check
  a reward collapses?            trainermon rl show
`trainermon COMMAND --help` has examples of each.
"""

EXAMPLES: dict[str, tuple[tuple[str, str], ...]] = {
    "run": (
        ("trainermon run -- python train.py", "with an agent; stays until everything is stored"),
        ("trainermon run --quiet -- python train.py", "print no summary at the end"),
    ),
    "query": (
        ("trainermon query run", "list the tables, their columns, and example queries"),
        ("trainermon query run 'SELECT step, loss FROM steps ORDER BY step'", "any SQL"),
        ("trainermon query run 'FROM alerts' --format csv", "for another program"),
    ),
    "serve": (
        ("trainermon serve", "all runs of $TRAINERMON_OUTPUT or ./trainermon_output, in the browser"),
        ("trainermon serve --list", "the same in the terminal, newest first"),
        ("trainermon serve /data/runs run --open", "a folder of runs and one more, opened at once"),
    ),
    "diagnose": (
        ("trainermon diagnose run", "the first bad module of the first bad step"),
        ("trainermon diagnose run --step 2 --html why.html", "another step, as a page with code and plots"),
        ("trainermon diagnose dump --against golden", "the first difference from a run or dump that is right"),
    ),
    "replay": (("trainermon replay run --model train.py:build_model", "the kept step, with the model built anew"),),
    "compare": (
        ("trainermon compare dump golden", "what differs by more than rounding, and which operation is to blame"),
        ("trainermon compare dump golden -o results -f csv -f html", "files too"),
        ("trainermon compare dump golden --exit-code", "for a script: status 3 if they differ"),
    ),
    "graph": (
        ("trainermon graph dump", "the calls as a tree: what is alike folded, what is wrong unfolded"),
        ("trainermon graph dump golden -o graph.html", "one page, with both sides' values"),
    ),
    "source": (("trainermon source dump golden", "the lines of code behind what differs"),),
    "check run": (
        ("trainermon check run tensors", "every recorded call against float64"),
        ("trainermon check run tensors --only '*.linear.*' -o results -f html", "some of them, as a page"),
    ),
    "check ops": (("trainermon check ops --device cpu --dtype float32 --only 'linalg.norm'", "needs no dump"),),
    "check against": (("trainermon check against npu.csv gpu.csv", "the details that check run wrote on two devices"),),
    "check calibrate": (("trainermon check calibrate tensors -o baseline.json", "what is usual on this device"),),
    "check overflow": (("trainermon check overflow dump", "the calls at which values stop being finite"),),
    "check follow": (("trainermon check follow dumps --once", "judge the steps that are there, and end"),),
    "script": (("trainermon script tensors Functional.linear.0 -o linear", "one call as a script for torch alone"),),
    "env collect": (("trainermon env collect -o here.zip", "machine, packages, variables, without secrets"),),
    "env compare": (("trainermon env compare here.zip here.zip", "settings that change numbers come first"),),
    "env show": (("trainermon env show here.zip", "what a pack holds"),),
    "restore": (("trainermon restore killed", "finish the files of a dump whose process was killed"),),
    "gradients compare": (("trainermon gradients compare signs signs", "the step at which two runs part"),),
    "tensor show": (
        ("trainermon tensor show tensors", "a line for each tensor of a dump"),
        ("trainermon tensor show weight.npy -i '0, :'", "a part of one, as in numpy"),
    ),
    "tensor diff": (("trainermon tensor diff weight.npy weight.npy", "how far two are apart, and where"),),
    "tensor top": (("trainermon tensor top weight.npy -n 3", "the largest elements"),),
    "tensor hist": (("trainermon tensor hist weight.npy --log", "a bin for each power of two"),),
    "tensor convert": (("trainermon tensor convert weight.npy weight.safetensors", "pt, npy, bin, safetensors"),),
    "checkpoint show": (("trainermon checkpoint show model.safetensors", "format, split, tensors, NaN and Inf"),),
    "checkpoint verify": (("trainermon checkpoint verify model.safetensors", "status 3 if it is damaged"),),
    "checkpoint compare": (
        ("trainermon checkpoint compare model.safetensors model.safetensors", "any format, split and naming"),
    ),
    "rl show": (
        ("trainermon rl show rl_out", "the last step's verdict, its cause and what to do"),
        ("trainermon rl show rl_out --step 1 --html rl.html", "another step, as a page"),
    ),
    "rl compare": (("trainermon rl compare stages stages", "the first stage in which two runs differ"),),
    "rl digest": (
        ("trainermon rl digest model.safetensors -o rl_out --version 12", "what a trainer sent, from its file"),
    ),
    "rl align": (
        ("trainermon rl align trainer_dump engine_dump -o aligned", "the module in which trainer and engine part"),
    ),
    "rl config": (("trainermon rl config train.log train.log", "settings that matter to rollouts come first"),),
    "anomalies": (("trainermon anomalies anomaly_detected", "those of all ranks, in the order of a step"),),
    "alerts": (
        ("trainermon alerts run", "the alerts of all nodes, and what was said about them"),
        ("trainermon alerts run --json", "the same for another program"),
        (
            "trainermon alerts run --acknowledge 5f1c0a9e7b3d2468 --note 'node 7, being replaced'",
            "say that you know of it",
        ),
        (
            "trainermon alerts run --silence step-time-slow --for 8h",
            "no dump and no call because of this rule for a while",
        ),
    ),
    "rules list": (("trainermon rules list", "the built-in rules"),),
    "rules check": (("trainermon rules check rules.yaml", "whether agents will take it"),),
    "rules test": (("trainermon rules test rules.yaml run", "which alerts these rules would have raised"),),
    "rules prometheus": (("trainermon rules prometheus", "the same alerts for Prometheus"),),
    "dashboards push": (
        ("trainermon dashboards push http://grafana.example.com --token-file token", "into a running Grafana"),
    ),
    "dashboards write": (("trainermon dashboards write grafana", "as files, for provisioning"),),
    "export": (("trainermon export run --format csv", "what a run has stored, in another form"),),
    "convert csv2tensorboard": (("trainermon convert csv2tensorboard run/csv -o events", "event files"),),
    "convert mindformers": (
        ("trainermon convert mindformers norms -o tables", "what MindFormers' monitor has left, as csv files"),
    ),
    "convert csv2db": (("trainermon convert csv2db run/csv --db trends", "a database"),),
    "node": (("trainermon node --spool /var/spool/trainermon", "for a systemd unit, a sidecar or a prolog"),),
    "agent": (("trainermon agent /var/tmp/trainermon-1000/run", "store what an agent that was killed left behind"),),
    "controller": (("trainermon controller --agents node1:9461 node2:9461 --state state", "a job of two nodes"),),
    "completion": (
        ("trainermon completion bash", 'the script; put eval "$(trainermon completion bash)" into ~/.bashrc'),
        ("trainermon completion zsh", "to be saved as _trainermon in a folder of $fpath"),
    ),
}


MAX_PORT = 65535


class HelpFormatter(argparse.HelpFormatter):
    """Fills descriptions as ever, and keeps the lines of what stands below the options."""

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return text if "\n" in text else super()._fill_text(text, width, indent)


def add_examples(parser: argparse.ArgumentParser) -> None:
    """Show below the help of `parser`, and of each of its subcommands, the examples of that command."""
    below = subcommands(parser)
    name = parser.prog.partition(" ")[2]
    shown = [example for word, found in EXAMPLES.items() if f"{word} ".startswith(f"{name} ") for example in found]
    if shown:
        lines = [f"  {line}\n      {text}" for line, text in shown]
        parser.formatter_class = HelpFormatter
        parser.epilog = "\n".join(["examples:", *lines])
    for one in below:
        add_examples(one)


def subcommands(parser: argparse.ArgumentParser) -> list[argparse.ArgumentParser]:
    """Return the parsers of the subcommands of `parser`."""
    return list(_below(parser))


def refuse(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> NoReturn:
    """End the process with status 2: print the usage of `parser`, the words it does not know, and what may be meant."""
    known = [option for action in parser._actions for option in action.option_strings]
    meant = [near for word in unknown for near in difflib.get_close_matches(word.partition("=")[0], known, n=1)]
    hint = f"; did you mean {' '.join(meant)}?" if meant else ""
    parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")


def refuse_command(parser: argparse.ArgumentParser, word: str, known: Collection[str]) -> NoReturn:
    """End the process with status 2: say that there is no command `word`, and which may be meant."""
    near = difflib.get_close_matches(word, known, n=1)
    hint = f"did you mean {near[0]}?" if near else "`trainermon --help` lists them"
    parser.error(f"found no command {word!r}; {hint}")


def port_number(text: str) -> int:
    """Return a port as options take it.

    Raises:
        argparse.ArgumentTypeError: It is no number from 0 to 65535.
    """
    if not text.isascii() or not text.isdecimal() or int(text) > MAX_PORT:
        raise argparse.ArgumentTypeError(f"found {text!r}, expected a port from 0 to {MAX_PORT:d}")
    return int(text)


def _below(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    for action in parser._actions:  # argparse has no other way to ask
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.values()
