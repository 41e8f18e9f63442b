"""Tensors' files against what torch and zipfile read."""

import zipfile

import numpy as np
import pytest
import torch

from tests.full_disk import room_for
from trainermon.core.native.library import library_or_none
from trainermon.dump.files import tensor_files
from trainermon.dump.files.tensor_files import load_tensor, save_tensor, suffix_for
from trainermon.dump.torch_tensors import checksum

COMMON = [
    *(torch.float64, torch.float32, torch.float16, torch.bfloat16),
    *(torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool),
]
OTHER = [torch.complex64, torch.float8_e4m3fn, torch.uint16]


@pytest.fixture(params=["library", "python"])
def _way(request, monkeypatch):
    if request.param == "python":
        monkeypatch.setattr(tensor_files, "_compiled", lambda: None)
    elif library_or_none() is None:
        pytest.skip("the library was not built")


@pytest.mark.parametrize("dtype", COMMON + OTHER, ids=str)
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (2, 0), (1, 7, 1, 2)], ids=str)
def test_torch_loads_the_bits_that_were_saved(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)

    size = save_tensor(tensor, tmp_path / "a.pt")

    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert (loaded.dtype, loaded.shape, loaded.stride()) == (tensor.dtype, tensor.shape, tensor.stride())
    assert loaded.untyped_storage().tolist() == tensor.untyped_storage().tolist()
    assert size == (tmp_path / "a.pt").stat().st_size
    assert (tmp_path / "a.pt").stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("dtype", COMMON + OTHER, ids=str)
@pytest.mark.parametrize("shape", [(1,), (3, 5), (2, 0)], ids=str)
def test_what_was_saved_is_read_without_unpickling_where_its_shape_is_known(tmp_path, dtype, shape, monkeypatch):
    tensor = torch.randint(0, 2, shape).to(dtype)
    save_tensor(tensor, tmp_path / "a.pt")
    if dtype in COMMON and 0 not in shape:
        monkeypatch.delattr(torch, "load")

    loaded = load_tensor(tmp_path / "a.pt", str(dtype), list(shape))

    assert (loaded.dtype, loaded.shape, loaded.tolist()) == (tensor.dtype, tensor.shape, tensor.tolist())


@pytest.mark.parametrize(("dtype", "shape"), [("float16", [2, 3]), ("float32", [3, 2]), ("float32", [10**9, 10**9])])
def test_a_file_of_another_type_or_shape_than_expected_is_read_as_what_it_is(tmp_path, dtype, shape):
    save_tensor(torch.arange(6.0).view(2, 3), tmp_path / "a.pt")

    assert torch.equal(load_tensor(tmp_path / "a.pt", dtype, shape), torch.arange(6.0).view(2, 3))


def test_a_flipped_bit_in_a_file_is_not_read_as_a_number(tmp_path):
    save_tensor(torch.ones(4), tmp_path / "a.pt")
    damaged = bytearray((tmp_path / "a.pt").read_bytes())
    damaged[damaged.index(torch.ones(4).numpy().tobytes())] ^= 1
    (tmp_path / "a.pt").write_bytes(damaged)

    assert tensor_files._as_written(tmp_path / "a.pt", "float32", [4]) is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=str)
def test_the_archive_is_sound_and_its_elements_can_be_mapped(tmp_path, dtype):
    tensor = torch.arange(100).to(dtype)
    save_tensor(tensor, tmp_path / "a.pt")

    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        assert archive.testzip() is None
        assert archive.read("archive/data/0") == tensor.numpy().tobytes()
    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True, mmap=True), tensor)


@pytest.mark.parametrize(
    "tensor",
    [
        torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1),
        torch.arange(6.0)[::2],
        torch.ones(3).expand(4, 3),
        torch.tensor([1 + 2j, 3 - 1j]).conj().imag,
        torch.randn(3, requires_grad=True) * 2,
        torch.nn.Parameter(torch.ones(2)),
        torch.eye(3).to_sparse(),
    ],
)
def test_any_layout_is_saved_with_its_values(tmp_path, tensor):
    save_tensor(tensor, tmp_path / "a.pt")

    loaded = torch.load(tmp_path / "a.pt", weights_only=True)
    assert torch.equal(loaded.to_dense(), tensor.detach().to_dense())
    assert not loaded.requires_grad


def test_common_tensors_are_not_left_to_torch(tmp_path, monkeypatch):
    monkeypatch.setattr(torch, "save", lambda *_: pytest.fail("torch.save was called"))

    save_tensor(torch.ones(3), tmp_path / "a.pt")


def test_a_subclass_is_saved_as_a_plain_tensor(tmp_path):
    class Own(torch.Tensor):
        pass

    save_tensor(torch.ones(3).as_subclass(Own), tmp_path / "a.pt")

    assert torch.equal(torch.load(tmp_path / "a.pt", weights_only=True), torch.ones(3))


@pytest.mark.usefixtures("_way")
@pytest.mark.filterwarnings("ignore")  # of torch: quantized tensors may change
@pytest.mark.parametrize("dtype", [torch.qint8, torch.quint8, torch.quint4x2])
@pytest.mark.parametrize("zero", [3, 3.5])
def test_what_tensors_quantized_by_channels_mean_is_saved(tmp_path, dtype, zero):
    values = torch.linspace(0, 1, 32).reshape(4, 8)
    zeros = torch.full((4,), zero, dtype=torch.float32 if dtype is torch.quint4x2 else None)
    tensor = torch.quantize_per_channel(values, torch.full((4,), 0.1), zeros, 0, dtype)

    save_tensor(tensor, tmp_path / "x.pt")

    found = load_tensor(tmp_path / "x.pt")
    assert torch.equal(found.dequantize(), tensor.dequantize())


def test_a_full_disk_is_told(tmp_path):
    with pytest.raises(OSError, match=r"\d+ (of \d+ )?bytes were written to .*a\.pt: no space left"), room_for(100):
        save_tensor(torch.ones(3), tmp_path / "a.pt")


@pytest.mark.usefixtures("_way")
def test_a_file_that_cannot_be_made_is_told(tmp_path):
    (tmp_path / "link.pt").symlink_to(tmp_path / "there.pt")

    with pytest.raises(FileNotFoundError, match=r"missing/a\.pt"):
        save_tensor(torch.ones(3), tmp_path / "missing" / "a.pt")
    with pytest.raises(OSError, match=r"link\.pt"):
        save_tensor(torch.ones(3), tmp_path / "link.pt")
    assert not (tmp_path / "there.pt").exists()


@pytest.mark.parametrize("dtype", COMMON, ids=str)
def test_the_library_writes_the_same_bytes(tmp_path, monkeypatch, dtype):
    tensor = (torch.randn(7, 65) * 9).to(dtype)
    sizes = [save_tensor(tensor, tmp_path / "library.pt")]
    monkeypatch.setattr(tensor_files, "_compiled", lambda: None)
    sizes.append(save_tensor(tensor, tmp_path / "python.pt"))

    library, python = (tmp_path / f"{name}.pt" for name in ("library", "python"))
    assert library.read_bytes() == python.read_bytes()
    assert sizes == [len(python.read_bytes())] * 2
    assert library.stat().st_mode & 0o777 == python.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("reads", [lambda tensor, _: checksum(tensor), lambda tensor, path: save_tensor(tensor, path)])
def test_a_tensor_that_was_read_can_still_be_resized(tmp_path, reads):
    """FSDP frees gathered parameters so: a training died of `numpy()`, which takes that from a tensor for good."""
    tensor = torch.ones(4)

    reads(tensor, tmp_path / "tensor.pt")
    tensor.untyped_storage().resize_(0)

    assert tensor.untyped_storage().nbytes() == 0


WIDER = [torch.float8_e5m2, torch.float8_e4m3fnuz, torch.uint64, torch.complex128]


@pytest.mark.parametrize("dtype", COMMON + OTHER + WIDER, ids=str)
@pytest.mark.parametrize("shape", [(), (3, 5), (2, 0)], ids=str)
def test_numpy_loads_the_values_that_were_saved(tmp_path, dtype, shape):
    tensor = torch.randint(0, 2, shape).to(dtype)

    size = save_tensor(tensor, tmp_path / "a.npy")

    loaded = np.load(tmp_path / "a.npy", allow_pickle=False)
    assert loaded.shape == shape
    assert np.array_equal(loaded.astype(np.complex128), tensor.to(torch.complex128).numpy())
    assert size == (tmp_path / "a.npy").stat().st_size
    assert (tmp_path / "a.npy").stat().st_mode & 0o777 == 0o600
    back = load_tensor(tmp_path / "a.npy", str(dtype))
    assert back.dtype == dtype
    assert torch.equal(back.to(torch.complex128), tensor.to(torch.complex128))


def test_every_bfloat16_survives_numpys_file(tmp_path):
    every = torch.arange(-(1 << 15), 1 << 15, dtype=torch.int16).view(torch.bfloat16)

    save_tensor(every, tmp_path / "a.npy")

    back = load_tensor(tmp_path / "a.npy", "torch.bfloat16")
    assert torch.equal(back.isnan(), every.isnan())
    assert torch.equal(back.nan_to_num().view(torch.int16), every.nan_to_num().view(torch.int16))


def test_a_strided_view_is_one_array_and_what_is_none_stays_a_file_of_torch(tmp_path):
    turned = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)
    save_tensor(turned, tmp_path / "a.npy")

    assert np.array_equal(np.load(tmp_path / "a.npy"), turned.numpy())
    assert suffix_for(turned, "npy") == suffix_for(torch.nn.Parameter(turned), "npy") == ".npy"
    assert suffix_for(torch.eye(3).to_sparse(), "npy") == suffix_for(turned, "pt") == ".pt"
