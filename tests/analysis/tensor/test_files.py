"""Every format gives the same numbers, and hostile or broken files give an error that says what to do."""

import json
import pickle
import sys
import zipfile

import numpy as np
import pytest
import safetensors.torch
import torch

from trainermon.analysis.tensor import files
from trainermon.analysis.tensor.convert import convert
from trainermon.analysis.tensor.dtypes import BITS, DTYPES, numbers
from trainermon.analysis.tensor.files import StoredTensor, open_tensors
from trainermon.analysis.tensor.selection import parse_target
from trainermon.core.errors import DumpError

FLOAT8 = [dtype for dtype in BITS if dtype.startswith("float8")]


class Boom:
    def __reduce__(self):
        return (print, ("executed",))


def only(path):
    (tensor,) = open_tensors(path)
    return tensor


def values_of(tensor):
    return np.concatenate([chunk.copy() for chunk in tensor.chunks()] or [np.zeros(0)]).reshape(tensor.shape)


@pytest.mark.parametrize("dtype", FLOAT8)
def test_every_code_of_eight_bits_is_the_number_that_torch_says(dtype):
    codes = np.arange(256, dtype=np.uint8)

    expected = torch.from_numpy(codes.copy()).view(getattr(torch, dtype)).float().numpy()

    np.testing.assert_array_equal(numbers(codes, dtype), expected)


def test_every_code_of_bfloat16_is_the_number_that_torch_says():
    codes = np.arange(1 << 16, dtype=np.uint16)

    expected = torch.from_numpy(codes.astype(np.int16)).view(torch.bfloat16).float().numpy()

    np.testing.assert_array_equal(numbers(codes, "bfloat16"), expected)


@pytest.mark.parametrize("dtype", [dtype for dtype in DTYPES if dtype != "complex128"])
def test_a_tensor_of_any_type_goes_through_every_format_unchanged(dtype, tmp_path):
    original = torch.linspace(0, 5, 6).reshape(2, 3).to(getattr(torch, dtype))
    torch.save(original, tmp_path / "a.pt")

    for before, after in (("a.pt", "b.bin"), ("b.bin", "c.safetensors"), ("c.safetensors", "d.pt"), ("d.pt", "e.npy")):
        assert convert(only(tmp_path / before), tmp_path / after).changed == 0

    assert torch.equal(torch.load(tmp_path / "d.pt", weights_only=True), original)
    theirs = safetensors.torch.load_file(tmp_path / "c.safetensors")["tensor"]
    assert theirs.dtype == original.dtype
    assert torch.equal(theirs.view(torch.uint8), original.view(torch.uint8))
    as_numpy = np.load(tmp_path / "e.npy", allow_pickle=False)
    wide = original.float() if dtype in BITS else original
    np.testing.assert_array_equal(as_numpy, wide.numpy())


def test_rounding_counts_what_has_changed(tmp_path):
    np.save(tmp_path / "a.npy", np.array([1.0, 1.5, 1.001, np.nan, 1e30], np.float32))

    written = convert(only(tmp_path / "a.npy"), tmp_path / "a.pt", dtype="float16")

    assert written.changed == 2
    expected = torch.tensor([1.0, 1.5, 1.001, float("nan"), 1e30]).half()
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True).nan_to_num(7), expected.nan_to_num(7))


@pytest.mark.parametrize("dtype", list(BITS))
def test_rounding_to_what_numpy_does_not_know_is_that_of_torch(dtype, tmp_path):
    original = torch.randn(200, generator=torch.Generator().manual_seed(0))
    original[:4] = torch.tensor([1.0, 0.0, float("nan"), 2.0])
    np.save(tmp_path / "a.npy", original.numpy())

    written = convert(only(tmp_path / "a.npy"), tmp_path / "a.pt", dtype=dtype)

    expected = original.to(getattr(torch, dtype))
    found = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    same = (expected.float() == original) | (expected.isnan() & original.isnan())
    assert written.changed == int((~same).sum())


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("b.safetensors", {}, "safetensors cannot hold complex128: choose --dtype, or another format"),
        ("none/b.npy", {}, "cannot write .*b.npy: .*No such file"),
        ("b.npy", {"dtype": "bfloat16"}, "files of numpy cannot hold bfloat16: leave --dtype out"),
    ],
)
def test_what_a_format_or_place_cannot_take_is_refused_and_leaves_nothing(name, options, message, tmp_path):
    np.save(tmp_path / "a.npy", np.array([1j]))

    with pytest.raises(DumpError, match=message):
        convert(only(tmp_path / "a.npy"), tmp_path / name, **options)

    assert [path.name for path in tmp_path.iterdir()] == ["a.npy"]


def test_without_torch_its_files_are_refused_and_the_others_work(tmp_path, monkeypatch):
    torch.save(torch.ones(2), tmp_path / "a.pt")
    np.save(tmp_path / "a.npy", np.ones(2))
    monkeypatch.setitem(sys.modules, "torch", None)

    with pytest.raises(DumpError, match=r"a.pt is a file of torch, which is not installed: install it, or dump .npy"):
        only(tmp_path / "a.pt")
    with pytest.raises(DumpError, match=r"\.pt files need torch, which is not installed: choose npy or safetensors"):
        convert(only(tmp_path / "a.npy"), tmp_path / "b.pt")
    with pytest.raises(DumpError, match="rounding to bfloat16 needs torch: install it, or choose one of float64"):
        convert(only(tmp_path / "a.npy"), tmp_path / "b.bin", dtype="bfloat16")
    assert convert(only(tmp_path / "a.npy"), tmp_path / "b.safetensors", dtype="float16").changed == 0


def test_a_sparse_tensor_is_read_as_the_dense_one(tmp_path):
    dense = torch.diag(torch.arange(1.0, 5.0))
    torch.save(dense.to_sparse(), tmp_path / "a.pt")

    np.testing.assert_array_equal(values_of(only(tmp_path / "a.pt")), dense.numpy())


def test_a_file_or_folder_that_holds_no_tensor_is_refused(tmp_path):
    torch.save({"step": 3}, tmp_path / "a.pt")
    (tmp_path / "b.npy").mkdir()

    with pytest.raises(DumpError, match=r"a.pt holds a dict without a tensor"):
        open_tensors(tmp_path / "a.pt")
    with pytest.raises(DumpError, match=r"b.npy is not a file: expected a tensor in npy format"):
        open_tensors(tmp_path / "b.npy")


def test_a_file_is_not_overwritten_unasked(tmp_path):
    np.save(tmp_path / "a.npy", np.ones(3))
    np.save(tmp_path / "b.npy", np.zeros(3))

    with pytest.raises(DumpError, match="exists already: choose another name, or --force"):
        convert(only(tmp_path / "a.npy"), tmp_path / "b.npy")

    assert convert(only(tmp_path / "a.npy"), tmp_path / "b.npy", overwrite=True).path.exists()
    assert np.load(tmp_path / "b.npy").tolist() == [1, 1, 1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.npy", "b.npy"]


def test_views_that_are_not_contiguous_are_read_in_order_and_in_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "CHUNK", 7)
    original = torch.arange(60).reshape(3, 4, 5).transpose(0, 2)
    torch.save(original, tmp_path / "a.pt")

    tensor = only(tmp_path / "a.pt")

    assert max(len(chunk) for chunk in tensor.chunks()) <= 7
    np.testing.assert_array_equal(values_of(tensor), original.numpy())


@pytest.mark.parametrize("shape", [(), (0,), (3, 0, 2)])
def test_scalars_and_empty_tensors_are_read(shape, tmp_path):
    np.save(tmp_path / "a.npy", np.zeros(shape, np.float32))
    for name in ("a.pt", "a.bin", "a.safetensors"):
        convert(only(tmp_path / "a.npy"), tmp_path / name)

    for name in ("a.npy", "a.pt", "a.bin", "a.safetensors"):
        assert values_of(only(tmp_path / name)).shape == shape


def test_the_tensors_of_a_state_dict_have_names(tmp_path):
    torch.save({"model": {"w": torch.ones(2)}, "steps": [torch.zeros(1), 3]}, tmp_path / "a.pt")

    assert [tensor.name for tensor in open_tensors(tmp_path / "a.pt")] == ["model.w", "steps.0"]
    assert parse_target(f"{tmp_path / 'a.pt'}::model.w").one().shape == (2,)
    with pytest.raises(DumpError, match=r"several tensors that fit, a.pt::model.w and a.pt::steps.0"):
        parse_target(str(tmp_path / "a.pt")).one()


def test_a_file_of_an_old_torch_is_read(tmp_path):
    torch.save(torch.ones(3), tmp_path / "a.pt", _use_new_zipfile_serialization=False)

    assert values_of(only(tmp_path / "a.pt")).tolist() == [1, 1, 1]


def a_text(path):
    path.write_text("root:x:0:0")  # ends within torch's own reader of pickles


def pickled(path):
    path.write_bytes(pickle.dumps(Boom()))


def pickled_by_torch(path):
    torch.save(Boom(), path)


def pickled_by_numpy(path):
    np.save(path, np.array([Boom()], dtype=object), allow_pickle=True)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("a.pt", a_text, "is not a tensor file, or damaged"),
        ("a.pt", pickled, "holds more than tensors, or is damaged; such a file may run code, and is not opened"),
        ("a.pt", pickled_by_torch, "holds more than tensors, or is damaged; such a file may run code, and is not"),
        ("a.npy", pickled, "is not a tensor file, or damaged"),
        ("a.npy", pickled_by_numpy, "is not a tensor file, or damaged"),
    ],
)
def test_nothing_is_executed(name, write, message, tmp_path, capsys):
    write(tmp_path / name)

    with pytest.raises(DumpError, match=message):
        open_tensors(tmp_path / name)

    assert "executed" not in capsys.readouterr().out


@pytest.mark.parametrize("suffix", files.SUFFIXES)
def test_a_file_that_was_cut_off_anywhere_is_refused(suffix, tmp_path):
    np.save(tmp_path / "a.npy", np.arange(40, dtype=np.float32))
    whole = tmp_path / f"b{suffix}"
    convert(only(tmp_path / "a.npy"), whole)
    content = whole.read_bytes()

    for length in {0, 1, 7, 8, 9, 60, len(content) // 2, len(content) - 1}:
        whole.write_bytes(content[:length])
        with pytest.raises(DumpError, match=f"b{suffix}"):
            open_tensors(whole)


def forged(path, old, new):
    """Rewrite the pickle inside of a file of torch."""
    torch.save(torch.randn(4, 5), path)
    with zipfile.ZipFile(path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    with zipfile.ZipFile(path, "w") as archive:
        for name, content in contents.items():
            if name.endswith("data.pkl"):
                assert old in content
                content = content.replace(old, new)
            archive.writestr(name, content)


def test_a_shape_beyond_the_file_is_refused(tmp_path):
    forged(tmp_path / "a.pt", b"K\x04K\x05\x86", b"K\xf4K\xf5\x86")

    with pytest.raises(DumpError, match="not a tensor file, or damaged"):
        open_tensors(tmp_path / "a.pt")


def test_a_function_in_the_place_of_torch_s_own_is_refused(tmp_path):
    forged(tmp_path / "a.pt", b"ctorch._utils\n_rebuild_tensor_v2", b"cos\nsystem")

    with pytest.raises(DumpError, match="may run code"):
        open_tensors(tmp_path / "a.pt")


def test_a_view_that_would_never_end_is_refused(tmp_path):
    torch.save(torch.zeros(1).expand(10**6, 10**6), tmp_path / "a.pt")
    torch.save(
        torch.sparse_coo_tensor(torch.tensor([[0], [0]]), [1.0], (10**6, 10**6), check_invariants=True),
        tmp_path / "b.pt",
    )

    with pytest.raises(DumpError, match=r"a view of 1,000,000,000,000 elements on a few: save it with .contiguous\(\)"):
        open_tensors(tmp_path / "a.pt")
    with pytest.raises(DumpError, match="is sparse, and dense it would have 1,000,000,000,000 elements"):
        open_tensors(tmp_path / "b.pt")


def safetensors_file(path, header, elements=b"\0" * 8):
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + elements)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 9]}, "'w' should take 8 bytes, but its header says 0 to 9"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "but its header says -8 to 0"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8, 16]}, "is cut off: 'w' ends at byte"),
        ({"dtype": "F32", "shape": [-2, -1], "data_offsets": [0, 8]}, "is no shape"),
        ({"dtype": "F4", "shape": [2], "data_offsets": [0, 8]}, "elements of type F4 cannot be read"),
        ({"dtype": "F32", "shape": [2]}, "not a tensor file, or damaged"),
        ([], "not a tensor file, or damaged"),
    ],
)
def test_a_header_that_does_not_fit_is_refused(entry, message, tmp_path):
    safetensors_file(tmp_path / "a.safetensors", {"w": entry})

    with pytest.raises(DumpError, match=message):
        open_tensors(tmp_path / "a.safetensors")


def test_bare_elements_need_a_description_that_fits(tmp_path):
    path = tmp_path / "a.bin"
    path.write_bytes(b"\0" * 10)

    with pytest.raises(DumpError, match=r"a.bin.json, which describes them, is not beside it"):
        open_tensors(path)
    (tmp_path / "a.bin.json").write_text('{"dtype": "bfloat16", "shape": [2, 3]}')
    with pytest.raises(DumpError, match=r"has 10 bytes, but bfloat16\[2, 3\] of a.bin.json makes 12"):
        open_tensors(path)


def test_what_is_no_file_or_no_format_is_refused(tmp_path):
    np.savez(tmp_path / "a.npz", np.ones(2))
    (tmp_path / "a.npz").rename(tmp_path / "a.npy")
    np.save(tmp_path / "text.npy", np.array(["words"]))

    with pytest.raises(DumpError, match="archive of numpy: unpack it"):
        open_tensors(tmp_path / "a.npy")
    with pytest.raises(DumpError, match="elements of type str"):
        open_tensors(tmp_path / "text.npy")
    with pytest.raises(DumpError, match=r"expected one that ends in .pt, .npy"):
        open_tensors(tmp_path / "a.txt")
    with pytest.raises(DumpError, match="does not exist"):
        parse_target(str(tmp_path / "none.pt::x"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(DumpError, match=r"empty holds no tensor file: expected files that end in"):
        list(parse_target(str(tmp_path / "empty")).tensors())


def test_a_large_file_is_not_read_into_memory(tmp_path):
    with (tmp_path / "a.bin").open("wb") as file:
        file.truncate(1 << 40)  # sparse: takes no room on the disk
    (tmp_path / "a.bin.json").write_text(json.dumps({"dtype": "float32", "shape": [1 << 38]}))

    tensor = only(tmp_path / "a.bin")

    assert isinstance(tensor, StoredTensor)
    assert next(tensor.chunks()).size == files.CHUNK
