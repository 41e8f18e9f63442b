"""Dumps that have lost a part, as it happens; what is left shows it."""

import json
import shutil

from tests.analysis.compare.dumps import forward, tensor, write_dump
from trainermon.dump.files.records import DUMP_FILE, INFO_FILE, PARTIAL_FILE

CALL = "Functional.gelu.0.forward"


def whole(folder, **more):
    """Write a dump of one call and return its folder."""
    return write_dump(folder, {CALL: forward(tensor(), output=tensor(**more))})


def run_of(folder, *, ranks=2, steps=1):
    """Write the dumps of a run and return its folder."""
    for step in range(steps):
        for rank in range(ranks):
            whole(folder / f"step{step}" / f"rank{rank}")
    return folder


def without_folder(dump):
    shutil.rmtree(dump)


def without_file(dump):
    (dump / DUMP_FILE).unlink()


def cut_off(dump):
    lines = [
        {"info": {}, "task": "statistics", "level": "mix"},
        {"key": CALL, "value": forward(tensor(), output=tensor())},
    ]
    (dump / PARTIAL_FILE).write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    without_file(dump)


def killed_before_a_call(dump):
    (dump / PARTIAL_FILE).write_text(json.dumps({"info": {}, "task": "statistics", "level": "mix"}) + "\n")
    without_file(dump)


def with_lost_entries(dump):
    (dump / INFO_FILE).write_text(json.dumps({"errors": 2, "first_error": "disk full"}))


def without_statistics(dump):
    form = tensor() | dict.fromkeys(("Max", "Min", "Mean", "Norm"))
    shutil.rmtree(dump)
    write_dump(dump, {CALL: forward(form, output=form)})


def half_written(dump):
    text = (dump / DUMP_FILE).read_text()
    (dump / DUMP_FILE).write_text(text[: len(text) // 2])


SEEN = (without_file, cut_off, killed_before_a_call, with_lost_entries, without_statistics)
"""What leaves a trace in the folder itself, and can be read in part."""
