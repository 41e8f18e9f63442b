"""Two runs' signs compared: against numpy on whole tensors, msprobe's own similarities, and chance."""

import csv
import json
import signal
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from xml.etree import ElementTree

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.monitor.gradient_probe import test_gradient_monitor as tests
from trainermon.analysis.gradients.command import compare_gradients
from trainermon.analysis.gradients.runs import RankSigns, open_gradients, pack
from trainermon.analysis.gradients.similarity import SignSimilarity, Unmatched, compare_signs
from trainermon.analysis.gradients.verdict import faults_of
from trainermon.cli import main
from trainermon.core.errors import DumpError
from trainermon.core.gradient_signs import (
    GradientPart,
    IndexBox,
    SignBitmaps,
    SignCounts,
    SignsHeader,
    read_signs,
    signs_path,
    write_signs,
)

RECORDED = Path(__file__).parents[2] / "monitor/gradient_probe/recorded"


def part_of(name, whole, starts, sizes, values):
    flat = values.ravel()
    part = GradientPart(name=name, shape=whole, boxes=(IndexBox(starts, sizes),), length=flat.size)
    return part, SignCounts(num_nans=int(np.isnan(flat).sum())), SignBitmaps(pack(flat > 0), pack(flat < 0))


def write(folder, step, rank, held):
    write_signs(signs_path(folder, step, rank), SignsHeader(step=step, rank=rank), held)


def write_whole(folder, step, tensors):
    held = [part_of(name, t.shape, (0,) * t.ndim, t.shape, t) for name, t in tensors.items()]
    write(folder, step, 0, held)


def gradients(seed=0, shape=(6, 70)):
    values = np.random.default_rng(seed).standard_normal(shape)
    values[0, :3] = [0.0, np.nan, -0.0]
    return values


def test_what_was_written_is_what_is_read(tmp_path):
    values = gradients()
    write_whole(tmp_path, 3, {"w": values, "empty": np.zeros((0,)), "scalar": np.array(-1.0)})

    stored = read_signs(signs_path(tmp_path, 3, 0))

    assert list(stored.layout.parts) == ["w", "empty", "scalar"]
    bits = np.unpackbits(stored.bitmaps()["w"].negative.view(np.uint8), bitorder="little")[: values.size]
    assert (bits == (values.ravel() < 0)).all()


def test_a_file_without_parts_is_read(tmp_path):
    write(tmp_path, 0, 0, [])

    stored = read_signs(signs_path(tmp_path, 0, 0))

    assert (dict(stored.layout.parts), stored.counts.shape, len(stored.words)) == ({}, (0, 2), 0)


def test_counts_are_kept_and_parts_parsed_once(tmp_path):
    part, _, bitmaps = part_of("w", (6, 70), (0, 0), (6, 70), gradients())
    for step in (9, 10):
        header = SignsHeader(step=step, rank=0, bounds=(-1.0, 0.5))
        write_signs(signs_path(tmp_path, step, 0), header, [(part, SignCounts(step, 2, (3, 4)), bitmaps)])

    first, second = (read_signs(signs_path(tmp_path, step, 0)) for step in (9, 10))

    assert first.layout is second.layout
    assert (first.counts.tolist(), second.counts.tolist()) == ([[9, 2, 3, 4]], [[10, 2, 3, 4]])


def test_files_of_the_first_version_are_compared(tmp_path, capsys):
    """Their header is one JSON object, with the counts in its parts."""
    one, two = make_pair(tmp_path)
    assert main(["gradients", "compare", str(one), str(two), "--json"]) == 0
    expected = capsys.readouterr().out
    for file in (one / "signs").iterdir():
        content = file.read_bytes()
        (length,) = struct.unpack_from("<I", content, 8)
        head, parts, _ = content[16 : 16 + length].split(b"\n", 2)
        whole = json.loads(head) | {"parts": json.loads(parts)}
        for part in whole["parts"]:
            part |= {"num_zeros": 7, "num_nans": 1, "at_most": []}
        text = json.dumps(whole).encode()
        text += b" " * (-(16 + len(text)) % 64)
        old = struct.pack("<8sII", b"TMSIGNS1", len(text), zlib.crc32(text)) + text + content[16 + length :]
        file.write_bytes(old)

    assert read_signs(signs_path(one, 0, 0)).counts.tolist()[0] == [7, 1]
    assert main(["gradients", "compare", str(one), str(two), "--json"]) == 0
    assert capsys.readouterr().out == expected


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_any_split_over_ranks_gives_the_similarity_of_the_whole(tmp_path_factory, data):
    folder = tmp_path_factory.mktemp("split")
    one, two = gradients(0), gradients(1)
    two = np.where(np.random.default_rng(2).random(one.shape) < 0.8, one, two)
    dim = data.draw(st.integers(0, 1))
    cut = data.draw(st.integers(1, one.shape[dim] - 1))
    write_whole(folder / "one", 0, {"w": one})
    for rank, (begin, end) in enumerate([(0, cut), (cut, one.shape[dim])]):
        local = two[begin:end] if dim == 0 else two[:, begin:end]
        starts = (begin, 0) if dim == 0 else (0, begin)
        write(folder / "two", 0, rank, [part_of("w", one.shape, starts, local.shape, local)])

    (found,) = compare_signs(open_gradients(folder / "one"), open_gradients(folder / "two"))

    same = np.sign(np.nan_to_num(one)) == np.sign(np.nan_to_num(two))
    assert (found.num_elements, found.num_equal) == (one.size, int(same.sum()))
    assert found.num_equal_positive == int(((one > 0) == (two > 0)).sum())


def test_flat_ranges_of_a_tensor_of_two_blocks_find_their_place(tmp_path):
    whole = gradients(3, (8, 5))
    local = np.concatenate([whole[2:4], whole[6:8]])  # rank 1 of 2, of a gated layer
    boxes = (IndexBox((2, 0), (2, 5)), IndexBox((6, 0), (2, 5)))
    write_whole(tmp_path / "one", 0, {"w": whole})
    for rank, (begin, end) in enumerate([(0, 7), (7, 20)]):
        flat = local.ravel()[begin:end]
        part = GradientPart(name="w", shape=(8, 5), boxes=boxes, dim=0, offset=begin, length=flat.size)
        write(tmp_path / "two", 0, rank, [(part, SignCounts(), SignBitmaps(pack(flat > 0), pack(flat < 0)))])

    missing, found = compare_signs(open_gradients(tmp_path / "one"), open_gradients(tmp_path / "two"))

    assert missing == Unmatched(0, "w", "20 of 40 elements are on no rank whose file is there")
    assert (found.num_elements, found.share) == (20, 1.0)


def test_similarities_are_msprobes_to_the_last_digit(tmp_path, capsys):
    """Its own file of its own two runs; ours are made of files that `test_gradient_monitor` holds against its."""
    for name, seed in (("one", 1), ("two", 2)):
        model = tests.make_model()
        optimizer = tests.torch.optim.SGD(model.parameters(), lr=0.1)
        tests.GradientMonitor(tests.config(tmp_path / name, "L1", sign_format="npy")).monitor(model, optimizer)
        tests.train(model, optimizer, seed=seed)
        signs = tmp_path / name / "signs"
        signs.rename(tmp_path / f"{name}.signs")  # so that msprobe's files are what is read

    status = main(
        [
            "gradients",
            "compare",
            *(str(tmp_path / n) for n in ("one", "two")),
            "-o",
            str(tmp_path / "out"),
            "-f",
            "msprobe",
            "--exit-code",
        ]
    )

    assert status == 3
    assert "signs part at step 0: 0.weight 57.14%" in capsys.readouterr().out
    assert (tmp_path / "out/rank0/similarities.csv").read_bytes() == (RECORDED / "similarities.csv").read_bytes()
    with (RECORDED / "similarities.csv").open(encoding="utf-8-sig", newline="") as text:
        recorded = {name: shares for name, *shares in csv.reader(text)}
    recorded.pop("step")
    pictures = {path.name: ElementTree.parse(path) for path in (tmp_path / "out/rank0/similarities_picture").iterdir()}
    assert pictures.keys() == {f"{name}_similarities.svg" for name in recorded}
    for name, shares in recorded.items():
        titles = pictures[f"{name}_similarities.svg"].iterfind(".//{http://www.w3.org/2000/svg}title")
        assert [title.text for title in titles] == [f"step {n}: {float(share):.3%}" for n, share in enumerate(shares)]


def similarity(step, equal, total=1_000_000, name="w"):
    return SignSimilarity(step=step, name=name, rank=0, num_elements=total, num_equal=equal, num_equal_positive=equal)


@pytest.mark.parametrize(
    ("shares", "total", "expected"),
    [
        ([0.98, 0.96, 0.94], 1_000_000, []),  # slow drift, below msprobe's 3 % a step
        ([0.999, 0.96], 1_000_000, [1]),
        ([0.96], 1_000_000, [0]),
        ([1.0, 0.8], 10, []),  # 2 of 10 elements are chance
        ([0.9], 10, []),
        ([0.999, 0.5], 1000, [1]),
        ([0.999, 0.5, 0.999, 0.5], 1000, [1, 3]),
    ],
)
def test_a_fall_is_a_fault_beyond_both_the_limit_and_chance(shares, total, expected):
    ones = [similarity(step, round(share * total), total) for step, share in enumerate(shares)]

    assert [fault.similarity.step for fault in faults_of(ones)] == expected


def test_chance_raises_no_alarm_on_small_tensors():
    """Signs that are equal with probability 0.9 independently, 200 parameters of 16 elements, 50 steps."""
    random = np.random.default_rng(0)
    drawn = random.binomial(16, 0.9, (50, 200))
    ones = [similarity(step, int(drawn[step, n]), 16, f"w{n}") for step in range(50) for n in range(200)]

    assert len(faults_of(ones)) <= 1
    assert sum(abs(np.diff(drawn[:, n] / 16)).max() > 0.03 for n in range(200)) == 200, "msprobe's rule alone"


def make_pair(tmp_path):
    one = gradients(0, (64, 64))
    for step in range(4):
        other = one.copy()
        if step >= 2:
            other[:16] *= -1
        write_whole(tmp_path / "one", step, {"layers.0.w": one, "layers.1.w": one})
        write_whole(tmp_path / "two", step, {"layers.0.w": one, "layers.1.w": other})
    return tmp_path / "one", tmp_path / "two"


def test_all_formats_say_the_same(tmp_path, capsys):
    one, two = make_pair(tmp_path)
    assert main(["gradients", "compare", str(one), str(two), "-o", str(tmp_path / "out")]) == 0

    found = compare_gradients(one, two)
    assert found.headline.startswith("signs part at step 2: layers.1.w 75.0")
    assert found.headline in capsys.readouterr().out
    document = json.loads((tmp_path / "out/gradients.json").read_text())
    assert document["headline"] == found.headline
    assert [fault["parameter"] for fault in document["faults"]] == ["layers.1.w"]
    with (tmp_path / "out/gradients.csv").open(newline="") as text:
        marked = [row for row in csv.DictReader(text) if row["fault"]]
    assert [(row["step"], row["parameter"]) for row in marked] == [("2", "layers.1.w")]
    page = (tmp_path / "out/gradients.html").read_text()
    assert page.count('class="mark"') == 1
    assert "<script" not in page


def test_equal_runs_part_nowhere(tmp_path, capsys):
    one, _ = make_pair(tmp_path)

    assert main(["gradients", "compare", str(one), str(one), "--exit-code"]) == 0
    assert "signs do not part in steps 0 to 3" in capsys.readouterr().out


def test_three_of_four_ranks_are_compared_and_the_rest_is_said(tmp_path, capsys):
    whole = gradients(3, (8, 5))
    for folder, ranks in (("one", range(4)), ("two", [0, 1, 3])):
        for rank in ranks:
            local = whole[2 * rank : 2 * rank + 2]
            write(tmp_path / folder, 0, rank, [part_of("w", (8, 5), (2 * rank, 0), (2, 5), local)])
    write_whole(tmp_path / "plain", 0, {"w": whole})

    assert main(["gradients", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "1 not compared; first, at step 0: w: 10 of 40 elements are on no rank" in capsys.readouterr().out
    missing, found = compare_signs(open_gradients(tmp_path / "plain"), open_gradients(tmp_path / "two"))
    assert missing == Unmatched(0, "w", "10 of 40 elements are on no rank whose file is there")
    assert (found.num_elements, found.share) == (30, 1.0)


KILLED = """
import os, signal, sys
from pathlib import Path
import numpy as np
from tests.analysis.gradients.test_compare import gradients, write_whole
folder = Path(sys.argv[1])
write_whole(folder, 0, {"w": gradients()})
os.writev = lambda *_: os.kill(os.getpid(), signal.SIGKILL)  # in the middle of the second file
write_whole(folder, 1, {"w": gradients()})
"""


def test_a_run_that_was_killed_while_it_wrote_leaves_whole_steps(tmp_path, capsys):
    killed = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path / "two")], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert [path.suffix for path in (tmp_path / "two/signs").iterdir() if path.name.startswith(".")] == [".tmp"]
    for step in range(2):
        write_whole(tmp_path / "one", step, {"w": gradients()})

    assert main(["gradients", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0
    assert "signs do not part in step 0;" in capsys.readouterr().out


def test_what_one_run_lacks_is_said(tmp_path, capsys):
    write_whole(tmp_path / "one", 0, {"a": gradients(), "b": gradients()})
    write_whole(tmp_path / "two", 0, {"a": gradients(), "c": gradients(0, (3, 4))})
    assert main(["gradients", "compare", str(tmp_path / "one"), str(tmp_path / "two")]) == 0

    assert "2 not compared; first, at step 0: b: only the first run has it" in capsys.readouterr().out


def test_the_last_attempt_of_a_step_counts(tmp_path):
    for attempt, seed in ((2, 5), (10, 6)):
        folder = tmp_path / f"signs/attempt{attempt}/step0.rank0"
        held = [part_of("w", (6, 70), (0, 0), (6, 70), gradients(seed))]
        write_signs(folder / "step0.rank0.bits", SignsHeader(step=0, rank=0), held)

    found = open_gradients(tmp_path).steps[0][0]()

    assert isinstance(found, RankSigns)
    assert (found.bitmaps["w"].positive == pack(gradients(6).ravel() > 0)).all()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda content: content[:-8], "it was cut short"),
        (lambda content: content[:30], "its header is damaged"),
        (lambda content: content[:40] + b"X" + content[41:], "its header is damaged"),
        (lambda content: b"", "no file of gradients' signs"),
        (lambda content: b"PK" + content, "no file of gradients' signs"),
    ],
)
def test_a_damaged_file_is_named(tmp_path, capsys, damage, message):
    one, two = make_pair(tmp_path)
    file = signs_path(two, 1, 0)
    file.write_bytes(damage(file.read_bytes()))

    assert main(["gradients", "compare", str(one), str(two)]) == 1
    error = capsys.readouterr().err
    assert str(file) in error
    assert message in error


def test_nothing_to_compare_is_an_error(tmp_path):
    one, _ = make_pair(tmp_path)
    with pytest.raises(DumpError, match="found no folder"):
        compare_gradients(one, tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match=r"found neither signs/step<N>\.rank<R>\.bits nor"):
        compare_gradients(one, tmp_path / "empty")
    write_whole(tmp_path / "later", 9, {"w": gradients()})
    with pytest.raises(DumpError, match="none in common"):
        compare_gradients(one, tmp_path / "later")


def test_a_folder_of_runs_is_refused_with_one_of_them(tmp_path):
    (tmp_path / "20270101-000000-abcd" / "signs").mkdir(parents=True)

    with pytest.raises(DumpError, match=r"found a folder of runs, expected one of them: .*20270101-000000-abcd"):
        open_gradients(tmp_path)


def test_a_gate_does_not_pass_where_nothing_was_compared(tmp_path, capsys):
    one, two = make_pair(tmp_path)

    assert main(["gradients", "compare", str(one), str(two), "--params", "nix", "--exit-code"]) == 1
    assert "no step has a parameter that both runs have and --params chooses" in capsys.readouterr().err


def test_steps_of_one_run_alone_are_not_compared_and_said(tmp_path, capsys):
    for side, steps in (("a", (0, 1, 2)), ("b", (0, 1))):
        for step in steps:
            write_whole(tmp_path / side, step, {"w": gradients()})

    assert main(["gradients", "compare", str(tmp_path / "b"), str(tmp_path / "b"), "--exit-code"]) == 0
    capsys.readouterr()
    assert main(["gradients", "compare", str(tmp_path / "a"), str(tmp_path / "b"), "--exit-code"]) == 4

    out = capsys.readouterr().out
    assert "; 1 parameters or steps were not compared" in out.splitlines()[0]
    assert "1 not compared; first, at step 2: all parameters: only the first run has the step" in out
