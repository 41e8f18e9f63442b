"""Files of torch hold what torch.load returns, and nothing of them runs."""

import argparse
import enum
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.analysis.checkpoint.assembled import assert_same
from trainermon.analysis.checkpoint.formats import inert, slim
from trainermon.analysis.checkpoint.formats.inert import InertObject
from trainermon.analysis.checkpoint.formats.torch_file import load_torch_file
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError


class Stage(enum.Enum):
    WEIGHTS = 3


class RunsCommand:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.system, (f"touch {self.path}",)


def tensors():
    torch.manual_seed(1)
    base = torch.randn(6, 10)
    half = {str(dtype): base.to(dtype) for dtype in (torch.float16, torch.bfloat16, torch.float64)}
    small = [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e8m0fnu, torch.uint16, torch.int8, torch.bool]
    views = {"rows": base[1:3], "turned": base.t()[2:7], "column": base[:, 3], "wide": base[:1].expand(4, 10)}
    odd = {"scalar": torch.tensor(3.0), "none": torch.zeros(0, 3), "complex": torch.randn(3, dtype=torch.complex64)}
    parameter = {"parameter": torch.nn.Parameter(torch.randn(3, 2))}
    return {"base": base, **half, **views, **odd, **parameter, **{str(d): torch.ones(3).to(d) for d in small}}


def test_the_tensors_of_a_file_are_those_that_torch_loads(tmp_path):
    torch.save(tensors(), tmp_path / "x.pt")

    assert_same(open_checkpoint(tmp_path / "x.pt").tensors, torch.load(tmp_path / "x.pt"))


def test_weights_optimizer_and_the_rest_are_told_apart(tmp_path):
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    model(torch.ones(2, 3)).sum().backward()
    optimizer.step()
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": 7, "note": "x"}
    torch.save(state, tmp_path / "x.pt")

    found = open_checkpoint(tmp_path / "x.pt")

    assert_same(found.tensors, model.state_dict())
    moments = {name: optimizer.state[parameter]["exp_avg"] for name, parameter in model.named_parameters()}
    assert_same(found.optimizer["exp_avg"], moments)
    assert found.step == 7
    assert found.values["note"] == "x"
    assert found.values["optimizer.param_groups"][0]["lr"] == 0.25


class Tied(torch.nn.Module):
    """Has what a state_dict treats apart: a tied weight, a buffer that is not saved, no bias, a list of modules."""

    def __init__(self):
        super().__init__()
        self.embedding = torch.nn.Embedding(5, 4)
        layers = [torch.nn.Linear(4, 4, bias=False), torch.nn.BatchNorm1d(4)]
        self.layers = torch.nn.ModuleList([torch.nn.Sequential(*layers)])
        self.head = torch.nn.Linear(4, 5)
        self.head.weight = self.embedding.weight
        self.scale = torch.nn.Parameter(torch.ones(2))
        self.register_buffer("mask", torch.ones(3), persistent=False)


@pytest.mark.parametrize(
    "wrap", [lambda model: model, lambda model: {"model": model, "epoch": 3}, torch.nn.DataParallel]
)
def test_a_pickled_module_has_the_tensors_of_its_state_dict(tmp_path, wrap):
    torch.manual_seed(1)
    model = Tied()
    torch.save(wrap(model), tmp_path / "x.pt")

    found = open_checkpoint(tmp_path / "x.pt")

    prefix = "module." if wrap is torch.nn.DataParallel else ""
    assert_same(found.tensors, {f"{prefix}{name}": value for name, value in model.state_dict().items()})
    assert "is a pickled module: its parameters and buffers are read, and no code of it is run" in found.notes[0]


def test_a_pickled_module_whose_class_would_run_a_command_is_read_without_it(tmp_path):
    module = torch.nn.Linear(2, 2)
    vars(module)["evil"] = RunsCommand(tmp_path / "ran")
    torch.save(module, tmp_path / "x.pt")

    assert list(open_checkpoint(tmp_path / "x.pt").tensors) == ["weight", "bias"]
    assert not (tmp_path / "ran").exists()


def test_a_module_that_contains_itself_is_refused(tmp_path):
    module = torch.nn.Sequential(torch.nn.Linear(2, 2))
    module._modules["self"] = module
    torch.save(module, tmp_path / "x.pt")

    with pytest.raises(CheckpointError, match="is nested too deep or wide: save the state_dict"):
        open_checkpoint(tmp_path / "x.pt")


def test_objects_become_stand_ins_that_keep_what_they_held(tmp_path):
    state = {"args": argparse.Namespace(lr=0.5, dtype=torch.bfloat16), "stage": Stage.WEIGHTS, "array": np.arange(3)}
    torch.save(state, tmp_path / "x.pt")

    found = load_torch_file(tmp_path / "x.pt")

    assert found["args"].name == "argparse.Namespace"
    assert found["args"].attributes() == {"lr": 0.5, "dtype": "torch.bfloat16"}
    assert found["stage"].name.rpartition(".")[2] == "Stage"
    assert found["stage"].arguments in [(3,), ("WEIGHTS",)]  # as this Python pickles a member
    assert isinstance(found["array"], InertObject)


def test_a_member_that_is_pickled_by_its_name_is_known_by_it():
    """As Python 3.11.0 to 3.11.3 pickle an enumeration, whichever runs this."""

    class ByName:
        def __reduce__(self):
            return getattr, (Stage, "WEIGHTS")

    found = inert.unpickle(pickle.dumps({"stage": ByName()}), Path("x.pt"), {})

    assert (found["stage"].name.rpartition(".")[2], found["stage"].arguments) == ("Stage", ("WEIGHTS",))


@pytest.mark.parametrize("protocol", [2, 4])
def test_a_pickle_that_would_run_a_command_does_not(tmp_path, protocol):
    trace = tmp_path / "it_ran"
    torch.save({"w": torch.ones(2), "x": RunsCommand(trace)}, tmp_path / "x.pt", pickle_protocol=protocol)

    found = load_torch_file(tmp_path / "x.pt")

    assert not trace.exists()
    assert found["x"].name.endswith(".system")
    torch.load(tmp_path / "x.pt", weights_only=False)
    assert trace.exists()  # it would have


@pytest.mark.parametrize(
    ("pickled", "fault"),
    [
        pytest.param(b"\x80\x04r\xff\xff\xff\xff.", "0x72", id="a memo of 64 GB"),
        pytest.param(b"\x80\x04I1\np4294967295\n.", "beyond its end", id="a memo of 64 GB in text"),
        pytest.param(b"\x80\x04\x8e\xff\xff\xff\xff\xff\xff\xff\x7f.", "ends within", id="bytes of 8 EB"),
        pytest.param(b"\x80\x04\x96\xff\xff\xff\xff\x00\x00\x00\x00.", "ends within", id="a bytearray of 4 GB"),
        pytest.param(b"\x80\x04\x82\x01.", "0x82", id="an extension of copyreg"),
        pytest.param(b"cbuiltins\nlist\n}X\x01\x00\x00\x00aK\x01sb.", "", id="a change of a builtin"),
        pytest.param(b"cos\nsystem\nN}X\x04\x00\x00\x00nameK\x01s\x86b.", "__setstate__", id="a change of a stand-in"),
        pytest.param(
            b"ccollections\nOrderedDict\nN}X\x04\x00\x00\x00nameK\x01s\x86b.", "changes a function", id="ours"
        ),
        pytest.param(b"cbuiltins\nbytearray\n\x8a\x05\xff\xff\xff\xff\x7f\x85R.", "makes a bytes", id="zeros"),
        pytest.param(b"\x80\x02(", "no end", id="cut"),
        pytest.param(b"", "no end", id="empty"),
        pytest.param(b"\x80\x04" + b"N" * 3_000 + b".", "bytes of codes", id="values without end"),
        pytest.param(b"\x80\x04" + b"]" * 2_000 + b".", "objects", id="lists without end"),
        pytest.param(b"\x80\x04" + b"\x8f" * 900 + b".", "sets", id="sets without end"),
        pytest.param(b"\x80\x02Pnowhere\n.", "no storage", id="a reference"),
        pytest.param(
            b"\x80\x02ctorch._utils\n_rebuild_tensor_v2\n((X\x07\x00\x00\x00storagectorch\nFloatStorage\nNNK\x01t"
            b"QK\x00K\x01\x85" + b"2\x86" * 99 + b"K\x01\x85tR.",
            "a tensor of shape (((((",
            id="a shape that is long when written out",
        ),
        *(
            pytest.param(
                b"\x80\x02(" + b"N" * 1_000 + codes + b"q\x01c" + name + b"\nq\x00(" + b"h\x00" + call * 200 + b"t.",
                "far larger",
                id=f"copies by {name!r}",
            )
            for name, codes, call in (
                (b"builtins\nlist", b"t", b"h\x00h\x01\x85R"),
                (b"torch\nSize", b"l", b"h\x00h\x01\x85R"),
                (b"collections\nOrderedDict", b"d", b"h\x00h\x01\x85R"),
                (b"argparse\nNamespace", b"t", b"h\x00h\x01R"),
                (b"argparse\nNamespace", b"t", b"h\x00h\x01\x81"),
            )
        ),
    ],
)
@pytest.mark.parametrize("is_compiled", [True, False])
def test_a_hostile_pickle_is_refused_in_one_line(tmp_path, monkeypatch, pickled, fault, is_compiled):
    if not is_compiled:
        monkeypatch.setattr(slim, "_compiled", lambda: None)
    limits = {
        "_MAX_CODE_BYTES": 2_500,
        "_MAX_OBJECTS": 1_500,
        "_MAX_SETS": 800,
        "_MAX_COPIED": 10_000,
    }  # those that hold are larger
    for name, limit in limits.items():
        assert getattr(inert, name) > 1000 * limit
        monkeypatch.setattr(inert, name, limit)
    write_archive(tmp_path / "x.pt", pickled)

    with pytest.raises(CheckpointError) as error:
        load_torch_file(tmp_path / "x.pt")

    text = str(error.value)
    assert "x.pt" in text
    assert "\n" not in text
    assert fault in text


def test_tuples_nested_deeper_than_the_stack_do_no_harm(tmp_path):
    write_archive(tmp_path / "x.pt", b"\x80\x02})" + b"\x85" * 300_000 + b"K\x01s.")

    assert len(load_torch_file(tmp_path / "x.pt")) == 1


def test_lists_that_repeat_each_other_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(inert, "_MAX_PARTS", 10_000)
    level = pickle.dumps(0, 2)[2:-1]
    nested = (
        b"\x80\x02(" + level * 10 + b"lq\x00" + b"".join(b"(" + b"h%c" % i * 10 + b"lq%c" % (i + 1) for i in range(20))
    )
    write_archive(tmp_path / "x.pt", nested + b".")

    with pytest.raises(CheckpointError, match=r"too deep or wide"):
        open_checkpoint(tmp_path / "x.pt")


def write_archive(path, pickled):
    """Write a file of torch with another pickle in it."""
    torch._C.PyTorchFileWriter(str(path)).write_end_of_file()
    writer = torch._C.PyTorchFileWriter(str(path))
    writer.write_record("data.pkl", pickled, len(pickled))
    writer.write_end_of_file()
