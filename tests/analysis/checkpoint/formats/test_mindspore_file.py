"""MindSpore's files are read as the protocol buffers that its schema describes."""

import base64

import numpy as np
import pytest
from google.protobuf import descriptor_pb2, descriptor_pool, message_factory  # type: ignore[import-untyped]

from tests.analysis.checkpoint.assembled import assembled
from trainermon.analysis.checkpoint.opening import open_checkpoint
from trainermon.core.errors import CheckpointError

# mindspore/ccsrc/utils/checkpoint.proto
FIELDS = {
    "TensorProto": [("dims", 1, 3, 3, ""), ("tensor_type", 2, 9, 2, ""), ("tensor_content", 3, 12, 2, "")],
    "Value": [("tag", 1, 9, 2, ""), ("tensor", 2, 11, 1, ".ckpt.TensorProto")],
    "Checkpoint": [("value", 1, 11, 3, ".ckpt.Value")],
}

# What mindspore 2.10.0 on a CPU wrote: save_checkpoint of a.weight (float32, standard_normal((3, 4)) of numpy's
# default_rng(0)), b (bfloat16, the next 5 of them), c (float16), step_num and flag, append_dict of epoch_num 3, lr 0.5
RECORDED = (
    "CksKCGEud2VpZ2h0Ej8IAwgEEgdGbG9hdDMyGjBsvwA+f0YHvr3yIz/f1dY9oSEJv/0iuT556aY/5nNyP/4nNL9V+aG/6o4fv25F"
    "KT0KHQoBYhIYCAUSCEJGbG9hdDE2GgoVwGC+n787vwu/ChYKAWMSEQgCEgdGbG9hdDE2GgQAPABAChkKCHN0ZXBfbnVtEg0SBUlu"
    "dDMyGgQHAAAAChQKBGZsYWcSDAgCEgRCb29sGgIBAAoeCgllcG9jaF9udW0SERIFSW50NjQaCAMAAAAAAAAAChUKAmxyEg8SB0Zs"
    "b2F0MzIaBAAAAD8="
)


@pytest.fixture(scope="module")
def checkpoint_class():
    """The message, made by the protobuf library from the schema."""
    file = descriptor_pb2.FileDescriptorProto(name="ckpt.proto", package="ckpt", syntax="proto2")
    for name, fields in FIELDS.items():
        message = file.message_type.add(name=name)
        for field, number, kind, label, type_name in fields:
            message.field.add(name=field, number=number, type=kind, label=label, type_name=type_name or None)
    pool = descriptor_pool.DescriptorPool()
    pool.Add(file)
    return message_factory.GetMessageClass(pool.FindMessageTypeByName("ckpt.Checkpoint"))


def write(path, checkpoint_class, entries):
    checkpoint = checkpoint_class()
    for name, dtype, dims, content in entries:
        value = checkpoint.value.add(tag=name)
        value.tensor.dims.extend(dims)
        value.tensor.tensor_type = dtype
        value.tensor.tensor_content = content
    path.write_bytes(checkpoint.SerializeToString())


def test_a_file_of_mindspore_itself_is_read(tmp_path):
    (tmp_path / "real.ckpt").write_bytes(base64.b64decode(RECORDED))
    generator = np.random.default_rng(0)
    weight = generator.standard_normal((3, 4)).astype(np.float32)
    bits = generator.standard_normal(5).astype(np.float32).view(np.uint32)

    found = open_checkpoint(tmp_path / "real.ckpt")

    arrays = {name: assembled(tensor) for name, tensor in found.tensors.items()}
    assert (found.format, found.step) == ("mindspore", 7)
    assert arrays["a.weight"].tobytes() == weight.tobytes()
    assert arrays["b"].tolist() == ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).tolist()  # rounded to even
    assert found.tensors["b"].dtype == "bfloat16"
    assert (arrays["c"].tolist(), arrays["flag"].tolist()) == ([1.0, 2.0], [True, False])
    assert (found.values, arrays["lr"].tolist()) == ({"step_num": 7, "epoch_num": 3}, 0.5)


def test_tensors_are_those_of_the_message(tmp_path, checkpoint_class):
    weight, half = np.arange(12, dtype="<f4").reshape(3, 4), np.array([0x3F80, 0x4000], "<u2")
    parts = [("weight", "Float32", (3, 4), part.tobytes()) for part in np.split(weight.reshape(-1), [5])]
    step = ("step_num", "Int32", (), np.array(7, "<i4").tobytes())
    write(tmp_path / "x.ckpt", checkpoint_class, [*parts, ("half", "BFloat16", (2,), half.tobytes()), step])

    found = open_checkpoint(tmp_path / "x.ckpt")

    assert (found.format, found.step) == ("mindspore", 7)
    assert assembled(found.tensors["weight"]).tolist() == weight.tolist()
    assert found.tensors["half"].dtype == "bfloat16"
    assert assembled(found.tensors["half"]).tolist() == half.tolist()


@pytest.mark.parametrize(
    ("dtype", "dims", "fault"),
    [("Float32", (3,), "has 8 bytes, its shape"), ("String", (2,), "elements of type 'String'")],
)
def test_an_entry_that_cannot_be_true_is_refused(tmp_path, checkpoint_class, dtype, dims, fault):
    write(tmp_path / "x.ckpt", checkpoint_class, [("a", dtype, dims, bytes(8))])

    with pytest.raises(CheckpointError, match=fault):
        open_checkpoint(tmp_path / "x.ckpt")


def test_a_file_that_was_cut_is_named(tmp_path, checkpoint_class):
    write(tmp_path / "x.ckpt", checkpoint_class, [("a", "Float32", (2,), bytes(8))])
    (tmp_path / "x.ckpt").write_bytes((tmp_path / "x.ckpt").read_bytes()[:-1])

    with pytest.raises(CheckpointError, match=r"x.ckpt is cut off: its entry at byte 0"):
        open_checkpoint(tmp_path / "x.ckpt")


def test_the_state_of_an_optimizer_is_its_own(tmp_path, checkpoint_class):
    def entry(name, values, dtype="Float32"):
        array = np.array(values, {"Float32": "<f4", "Int32": "<i4"}[dtype])
        return name, dtype, array.shape, array.tobytes()

    state = [entry(f"{prefix}.net.gamma", [float(number)] * 2) for number, prefix in enumerate(("moment1", "moment2"))]
    other = [entry("moments.of.none", [1.0, 2.0]), entry("beta1_power", 0.5), entry("global_step", [4], "Int32")]
    write(tmp_path / "x.ckpt", checkpoint_class, [entry("net.gamma", [5.0, 6.0]), *state, *other])

    found = open_checkpoint(tmp_path / "x.ckpt")

    assert list(found.tensors) == ["net.gamma", "moments.of.none"]
    assert {
        kind: {name: assembled(tensor).tolist() for name, tensor in of.items()} for kind, of in found.optimizer.items()
    } == {
        "exp_avg": {"net.gamma": [0.0, 0.0]},
        "exp_avg_sq": {"net.gamma": [1.0, 1.0]},
    }
    assert (found.step, found.values) == (4, {"global_step": 4, "beta1_power": 0.5})
