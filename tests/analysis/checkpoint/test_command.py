"""`trainermon checkpoint` on files that safetensors itself writes: what is printed, written, and how it ends."""

from __future__ import annotations

import csv
import html.parser
import json
import re
import subprocess
import sys

import numpy as np
import pytest
import torch
from playwright.sync_api import sync_playwright
from safetensors.numpy import save_file

from tests.server_programs import find_program
from trainermon.analysis.checkpoint.output import FORMATS
from trainermon.cli import main

EVIL = "</title></style><script>alert(1)</script><img src=x onerror=alert(2)>\"'&|`\x1b[2J\u202e"


def noise(seed, *shape):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """Return two files of one model: the second has one layer of another seed, a NaN, and a name that is no name."""
    folder = tmp_path_factory.mktemp("model")
    ours = {f"layers.{layer}.{part}.weight": noise(layer, 8, 6) for layer in range(3) for part in ("fc1", "fc2")}
    theirs = {name: array.copy() for name, array in ours.items()}
    theirs["layers.1.fc1.weight"] = noise(9, 8, 6)
    theirs["layers.2.fc2.weight"][3, 4] = np.nan
    theirs[EVIL] = noise(1, 2)
    save_file(ours, folder / "ours.safetensors")
    save_file(theirs, folder / "theirs.safetensors")
    save_file({name: array.astype(np.float16) for name, array in ours.items()}, folder / "half.safetensors")
    return folder


def test_what_differs_is_printed_and_said_by_the_exit_status(files, capsys):
    words = ["checkpoint", "compare", str(files / "ours.safetensors"), str(files / "theirs.safetensors")]

    assert (main(words), main([*words, "--exit-code"])) == (0, 3)
    printed = capsys.readouterr().out
    assert printed.startswith("differs in 3 of 7 tensors, NaN or Inf in 1, first layers.2.fc2.weight\n")
    assert "4 identical, 1 unmatched, 1 different, 1 nonfinite" in printed
    assert "\x1b[2J" not in printed


def test_rounding_is_no_difference_to_the_exit_status(files, capsys):
    words = ["checkpoint", "compare", str(files / "ours.safetensors"), str(files / "half.safetensors"), "--exit-code"]

    assert main(words) == 0
    assert capsys.readouterr().out.startswith("the same after rounding to float16\n")


def checkpoint_with(**others):
    state = {"state": {0: {"exp_avg": torch.zeros(3)}}, "param_groups": [{"lr": 0.1, "params": [0]}]}
    return {"model": {"w": torch.ones(3)}, "optimizer": state, "ema": {"w": torch.ones(3)}, **others}


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"optimizer": None}, "only the {} has 1 tensor of the optimizer's state"),
        ({"ema": None}, "only the {} has 1 tensor of `ema`"),
        ({"ema": None, "optimizer": None}, "only the {} has 1 tensor of the optimizer's state, 1 tensor of `ema`"),
        ({"ema": {}}, "only the {} has 1 tensor of `ema`"),
    ],
)
@pytest.mark.parametrize("lacking", [0, 1])
def test_tensors_of_one_side_alone_are_no_equality(tmp_path, capsys, changed, said, lacking):
    sides = [checkpoint_with(), {key: value for key, value in checkpoint_with(**changed).items() if value is not None}]
    paths = [str(tmp_path / f"{number}.pt") for number in (0, 1)]
    for side, path in zip(sides, paths if lacking else paths[::-1], strict=True):
        torch.save(side, path)
    words = ["checkpoint", "compare", *paths, "--exit-code"]
    ordinal = "first" if lacking else "second"

    assert main(words) == 4
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == f"the same model; {said.format(ordinal)}"
    assert any(f"not compared, as only the {ordinal} has it: " in line for line in lines)
    assert main([*words, "--weights-only"]) == 0
    assert capsys.readouterr().out.startswith("the same model\n")


def test_a_moment_that_is_not_finite_stands_in_the_first_line(tmp_path, capsys):
    bad = checkpoint_with()
    bad["optimizer"]["state"][0]["exp_avg"][1] = float("nan")
    for name, content in (("bad", bad), ("sound", checkpoint_with())):
        torch.save(content, tmp_path / f"{name}.pt")
    words = ["checkpoint", "compare", str(tmp_path / "bad.pt"), "--exit-code"]

    assert main([*words, str(tmp_path / "sound.pt")]) == 3
    told = "the same model; optimizer state differs in 1 of 1, NaN or Inf in 1 of it\n"
    assert capsys.readouterr().out.startswith(told)
    assert main([*words, str(tmp_path / "bad.pt")]) == 0
    assert capsys.readouterr().out.startswith("the same model; NaN or Inf in 1 tensor of the optimizer's state\n")


def test_only_tensors_that_match_are_compared(files, capsys):
    words = ["checkpoint", "compare", str(files / "ours.safetensors"), str(files / "theirs.safetensors")]

    assert main([*words, "--match", r"layers\.0", "--exit-code"]) == 0
    assert main([*words, "--match", "no such name"]) == 1
    assert "nothing to compare" in capsys.readouterr().err


def test_a_file_of_names_pairs_what_it_says(files, tmp_path, capsys):
    save_file({"x": noise(0, 8, 6)}, tmp_path / "x.safetensors")
    (tmp_path / "names.json").write_text(json.dumps({"layers.0.fc1.weight": "x"}))
    words = ["checkpoint", "compare", str(files / "ours.safetensors"), str(tmp_path / "x.safetensors")]

    assert main([*words, "--names", str(tmp_path / "names.json"), "--match", "^x$|^layers.0.fc1"]) == 0
    assert capsys.readouterr().out.startswith("the same model\n")


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--names", "no-such-file"], "is neither megatron nor hf nor a file"),
        (["--match", "("], "is no regular expression"),
        (["-f", "pdf"], "expected some of json, csv, md, html, msprobe"),
    ],
)
def test_wrong_arguments_are_refused(files, capsys, words, said):
    assert (
        main(["checkpoint", "compare", str(files / "ours.safetensors"), str(files / "ours.safetensors"), *words]) == 1
    )
    assert said in capsys.readouterr().err


@pytest.fixture(scope="module")
def written(files, tmp_path_factory):
    folder = tmp_path_factory.mktemp("output")
    sides = [str(files / f"{side}.safetensors") for side in ("ours", "theirs")]
    assert main(["checkpoint", "compare", *sides, "-o", str(folder), "-f", ",".join(FORMATS)]) == 0
    return folder


def test_json_and_csv_have_every_tensor(written):
    document = json.loads((written / "checkpoint_compare.json").read_text())
    with (written / "checkpoint_compare.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))

    assert document["counts"] == {"nonfinite": 1, "different": 1, "unmatched": 1, "identical": 4}
    assert [tensor["name"] for tensor in document["tensors"]] == [row["name"] for row in rows]
    assert len(rows) == 7


def test_similarities_have_msprobes_fields_and_values(files, written):
    found = json.loads((written / "ckpt_similarity.json").read_text())["layers.1.fc1.weight"]
    a, b = noise(1, 8, 6).astype(np.float64), noise(9, 8, 6).astype(np.float64)

    assert list(found) == ["l2", "cos", "numel", "shape"]
    assert found["l2"] == pytest.approx(np.linalg.norm(a - b))
    assert found["cos"] == pytest.approx(float((a * b).sum() / np.linalg.norm(a) / np.linalg.norm(b)))
    assert (found["numel"], found["shape"]) == (48, [8, 6])


class TagsOfPage(html.parser.HTMLParser):
    """Collects the tags of a page."""

    def __init__(self, content):
        super().__init__()
        self.tags = set()
        self.feed(content)

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)


def test_names_are_no_markup(written):
    for name in ("html", "md"):
        text = (written / f"checkpoint_compare.{name}").read_text()
        assert "<script" not in text
        assert "<img" not in text
    assert "script" not in TagsOfPage((written / "checkpoint_compare.html").read_text()).tags


@pytest.mark.parametrize(("width", "scheme"), [(1200, "light"), (390, "dark")])
def test_a_browser_shows_the_map_and_loads_nothing(written, width, scheme):
    path, complaints = written / "checkpoint_compare.html", []

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=find_program("chromium"), args=["--no-sandbox"])
        page = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme).new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("request", lambda request: complaints.append(request.url))
        page.goto(path.as_uri())
        seen = page.locator(".heat td[title]").count()
        first = page.locator(".heat td[title]").first.bounding_box()
        wide = page.evaluate("document.documentElement.scrollWidth")
        numbers = page.locator(".tensors tr").nth(1).locator("td.n")
        ends = [box["x"] + box["width"] for box in (cell.bounding_box() for cell in numbers.all())]
        browser.close()

    assert complaints == [path.as_uri()]
    assert len(ends) == 4
    assert max(ends) <= width
    assert (seen, wide <= width, first["x"] + first["width"] < width) == (7, True, True)


def test_what_is_in_no_layer_has_a_row_of_its_own_before_or_after_the_layers(tmp_path):
    names = [
        "lm_head.weight",
        "model.embed.weight",
        *(f"model.layers.{n}.up.weight" for n in (0, 1)),
        "model.norm.weight",
    ]
    for seed, side in enumerate("ab"):
        save_file({name: noise(seed, 4, 3) for name in names}, tmp_path / f"{side}.safetensors")
    sides = [str(tmp_path / f"{side}.safetensors") for side in "ab"]

    main(["checkpoint", "compare", *sides, "-o", str(tmp_path), "-f", "html"])

    page = (tmp_path / "checkpoint_compare.html").read_text()
    table = page[page.index('<table class="heat">') :].partition("</table>")[0].replace("<wbr>", "")
    rows = [
        re.findall(r"<code>(.*?)</code>|<th class=n>(\d+)|<td class=\"l\d\"( colspan=\"2\")?", row)
        for row in table.split("<tr>")
    ]
    assert [[next(filter(None, found), "cell").strip() for found in row] for row in rows[1:]] == [
        ["model.embed.weight", 'colspan="2"'],
        ["0", "1"],
        ["up.weight", "cell", "cell"],
        ["lm_head.weight", 'colspan="2"'],
        ["model.norm.weight", 'colspan="2"'],
    ]


@pytest.mark.parametrize(
    "name", ["", ".", "0", "layers.²", "layers.٣.w", f"layers.{'9' * 5_000}.w", "a\nb", "\x00", "x" * 100_000]
)
def test_any_name_is_written_to_every_file(tmp_path, name):
    for seed, side in enumerate("ab"):
        save_file({name: noise(seed, 4, 3)}, tmp_path / f"{side}.safetensors")
    sides = [str(tmp_path / f"{side}.safetensors") for side in "ab"]

    assert main(["checkpoint", "compare", *sides, "-o", str(tmp_path), "-f", ",".join(FORMATS), "--exit-code"]) == 3


def test_show_lists_tensors_with_norms_and_nan(files, capsys):
    assert main(["checkpoint", "show", str(files / "theirs.safetensors"), "layers.2.fc2", "--json"]) == 0
    (found,) = json.loads(capsys.readouterr().out)["tensors"]
    rest = np.delete(noise(2, 8, 6).astype(np.float64).ravel(), 3 * 6 + 4)

    assert (found["nans"], found["shape"], found["dtype"]) == (1, [8, 6], "float32")
    assert found["norm"] == pytest.approx(np.linalg.norm(rest))


def test_verify_ends_with_its_status(files, tmp_path, capsys):
    assert main(["checkpoint", "verify", str(files / "theirs.safetensors")]) == 0
    assert "whole: 7 tensors; 7 pieces; NaN or Inf in 1" in capsys.readouterr().out


def test_no_framework_is_loaded(files):
    code = (
        "import sys; from trainermon.cli import main; main(sys.argv[1:]);"
        " print([name for name in ('torch', 'megatron', 'deepspeed', 'safetensors') if name in sys.modules])"
    )
    sides = [str(files / f"{side}.safetensors") for side in ("ours", "theirs")]
    done = subprocess.run(
        [sys.executable, "-c", code, "checkpoint", "compare", *sides], capture_output=True, text=True, check=True
    )

    assert done.stdout.splitlines()[-1] == "[]"


def test_only_the_subcommand_that_is_asked_for_is_imported(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3, np.float32))
    words = ["checkpoint", "compare", str(tmp_path / "a.npy"), str(tmp_path / "a.npy")]
    code = (
        f"import sys; from trainermon.cli import main; assert main({words!r}) == 0;"
        "print(*(name for name in sys.modules if name.startswith('trainermon.analysis.compare')))"
    )

    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)

    assert done.stdout.splitlines()[-1] == ""
