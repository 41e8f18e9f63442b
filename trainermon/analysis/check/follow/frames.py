"""What passes between a follower and the host that runs its calls again: a head in JSON, then bytes of tensors.

    magic "TMCF", version 1 | length of the head, u32 | length of the bytes, u64 | CRC-32 of both, u32      20 bytes
    head: {"kind": …, "tensors": [{"dtype": "float32", "shape": [2, 3]}, …], …}
    the elements of the tensors, in order, little-endian

Everything is bounded before memory is asked for, and nothing is unpickled or evaluated.
"""

from __future__ import annotations

import dataclasses
import json
import math
import socket
import struct
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from trainermon.core.errors import DumpError
from trainermon.dump.files.tensor_files import bytes_of

MAX_HEAD_BYTES = 1 << 20
MAX_TENSORS = 1024
MAX_DIMENSIONS = 16
_MAGIC = b"TMCF\x01"
_CHUNK = 1 << 20
_MAX_ELEMENTS = 1 << 48
_PREFIX = struct.Struct("<5sIQI")
_DTYPES: Mapping[str, torch.dtype] = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (
        torch.float64,
        torch.float32,
        torch.float16,
        torch.bfloat16,
        torch.float8_e4m3fn,
        torch.float8_e5m2,
        torch.int64,
        torch.int32,
        torch.int16,
        torch.int8,
        torch.uint8,
        torch.bool,
        torch.complex64,
        torch.complex128,
    )
}


class FrameError(DumpError):
    """What arrived is no frame, or one that is refused."""


class ByteStream(Protocol):
    """A connection, as `socket.makefile` gives it."""

    def read(self, size: int) -> bytes:
        """Return so many bytes, or fewer at the end."""


@dataclasses.dataclass(frozen=True, slots=True)
class Frame:
    """One message.

    Attributes:
        head: What it says, in JSON values.
        tensors: The tensors, on the CPU.
    """

    head: Mapping[str, Any]
    tensors: tuple[Tensor, ...] = ()


def send_frame(connection: socket.socket, frame: Frame) -> None:
    """Send a frame.

    Raises:
        FrameError: It is too large, or a tensor has a type or layout that is not sent; nothing was sent.
        OSError: The connection failed.
    """
    if sys.byteorder != "little":
        raise FrameError("calls are sent between little-endian machines only")
    if any(tensor.layout is not torch.strided or tensor.is_quantized for tensor in frame.tensors):
        raise FrameError("a tensor is sparse or quantised")
    tensors = [tensor.detach().to("cpu").contiguous().resolve_conj().resolve_neg() for tensor in frame.tensors]
    forms = [{"dtype": _dtype_name(tensor), "shape": list(tensor.shape)} for tensor in tensors]
    head = json.dumps({**frame.head, "tensors": forms}).encode()
    if len(head) > MAX_HEAD_BYTES or len(tensors) > MAX_TENSORS:
        raise FrameError(f"{len(tensors)} tensors and {len(head)} bytes beside them are more than a frame holds")
    parts = [bytes_of(tensor) for tensor in tensors if tensor.nbytes]
    checksum = zlib.crc32(head)
    for part in parts:
        checksum = zlib.crc32(part, checksum)
    size = sum(part.nbytes for part in parts)
    connection.sendall(_PREFIX.pack(_MAGIC, len(head), size, checksum) + head)
    for part in parts:
        connection.sendall(part)


def read_frame(stream: ByteStream, max_bytes: int, *, max_head_bytes: int = MAX_HEAD_BYTES) -> Frame | None:
    """Return the next frame of a stream; None: the stream has ended. Its tensors have at most `max_bytes` together.

    Raises:
        FrameError: It is damaged, too large, or no frame; the stream is of no further use.
        OSError: The connection failed.
    """
    prefix = _exactly(stream, _PREFIX.size, may_end=True)
    if not prefix:
        return None
    magic, head_size, size, checksum = _PREFIX.unpack(prefix)
    if magic != _MAGIC:
        raise FrameError(f"found {prefix[:5]!r} where a frame begins, expected {_MAGIC!r}: another protocol or version")
    if head_size > max_head_bytes:
        raise FrameError(f"the head has {head_size} bytes, expected at most {max_head_bytes}")
    if size > max_bytes:
        raise FrameError(f"the tensors have {size} bytes, expected at most {max_bytes}")
    text = _exactly(stream, head_size)
    head = _head(text)
    forms = _forms(head.pop("tensors", None), size)
    content = _exactly(stream, size)
    if zlib.crc32(content, zlib.crc32(text)) != checksum:
        raise FrameError("the checksum is wrong: bytes were changed on the way")
    return Frame(head, tuple(_tensors(forms, content)))


def _exactly(stream: ByteStream, size: int, *, may_end: bool = False) -> bytearray:
    """Return so many bytes; memory grows as they arrive. b"" if the stream ends before the first one and may."""
    found = bytearray()
    while len(found) < size:
        part = stream.read(min(_CHUNK, size - len(found)))
        if not part:
            if may_end and not found:
                break
            raise FrameError(f"the stream ended after {len(found)} of {size} bytes")
        found += part
    return found


def _head(text: bytes | bytearray) -> dict[str, Any]:
    try:
        head = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise FrameError(f"the head is not JSON: {str(error)[:100]}") from None
    if not isinstance(head, dict) or not isinstance(head.get("kind"), str):
        raise FrameError("the head is no object with a kind")
    return head


def _forms(values: Any, size: int) -> list[tuple[torch.dtype, list[int], int]]:
    """Return type, shape and bytes of each tensor that a head announces.

    Raises:
        FrameError: A type is not known, or they do not make up the `size` bytes that follow.
    """
    if not isinstance(values, list) or len(values) > MAX_TENSORS:
        raise FrameError(f"tensors: expected a list of at most {MAX_TENSORS}")
    forms = [_form(value) for value in values]
    total = sum(num_bytes for *_, num_bytes in forms)
    if total != size:
        raise FrameError(f"the tensors of the head have {total} bytes, {size} are announced")
    return forms


def _form(value: Any) -> tuple[torch.dtype, list[int], int]:
    name, shape = (value.get("dtype"), value.get("shape")) if isinstance(value, dict) else (None, None)
    dtype = _DTYPES.get(name) if isinstance(name, str) else None
    if dtype is None:
        raise FrameError(f"a tensor has the type {str(name)[:40]!r}, expected one of {', '.join(_DTYPES)}")
    if not isinstance(shape, list) or len(shape) > MAX_DIMENSIONS:
        raise FrameError(f"a tensor has no shape of at most {MAX_DIMENSIONS} dimensions")
    if not all(type(length) is int and 0 <= length < _MAX_ELEMENTS for length in shape):
        raise FrameError("a shape has something else than lengths")
    if math.prod(max(1, length) for length in shape) >= _MAX_ELEMENTS:
        raise FrameError(f"a tensor of shape {str(shape)[:80]} is larger than any memory")
    return dtype, shape, math.prod(shape) * dtype.itemsize


def _tensors(forms: Sequence[tuple[torch.dtype, list[int], int]], content: bytearray) -> Iterator[Tensor]:
    offset = 0
    for dtype, shape, num_bytes in forms:
        part = content[offset : offset + num_bytes]  # a copy, so that each is aligned and lives on its own
        offset += num_bytes
        if not num_bytes:
            yield torch.empty(shape, dtype=dtype)
        elif dtype is torch.bool:
            yield torch.frombuffer(part, dtype=torch.uint8).ne(0).reshape(shape)  # other bytes are no truth values
        else:
            yield torch.frombuffer(part, dtype=dtype).reshape(shape)


def _dtype_name(tensor: Tensor) -> str:
    name = str(tensor.dtype).removeprefix("torch.")
    if name not in _DTYPES:
        raise FrameError(f"a tensor has the type {name}, which is not sent")
    return name
