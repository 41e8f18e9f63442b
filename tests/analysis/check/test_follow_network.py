"""A follower and the host that runs its calls again: what passes between them, and what is refused."""

import argparse
import contextlib
import json
import re
import shutil
import socket
import ssl
import struct
import subprocess
import sys
import threading
import zlib
from typing import Any

import pytest
import torch

from tests.analysis.check.test_follow import results, train
from trainermon.analysis.check.follow import listener
from trainermon.analysis.check.follow.exchange import answer_to
from trainermon.analysis.check.follow.frames import Frame, FrameError, read_frame, send_frame
from trainermon.analysis.check.follow.link import HostAddress, tls_context
from trainermon.analysis.check.follow.listener import CallListener, ListenOptions
from trainermon.analysis.check.follow.network import add_network_options, read_network_file
from trainermon.cli import main
from trainermon.core.errors import ConfigError
from trainermon.dump.debugger_config import read_debugger_config

TOKEN = "0123456789abcdef"
DEADLINE_S = 300.0
FLOATS = torch.tensor([[1.5, -2.0, float("nan")]])
TENSORS = [
    FLOATS,
    FLOATS.to(torch.bfloat16).t(),
    FLOATS.to(torch.float8_e4m3fn),
    torch.tensor(7),
    torch.tensor([True, False]),
    torch.empty(0, 3, dtype=torch.float16),
    torch.tensor([1 + 2j]),
]


class Served:
    """A listener of this process, with what it says."""

    def __init__(self, context=None, **options):
        self.said = []
        given: dict[str, Any] = {
            "device": "cpu",
            "token": TOKEN,
            "max_bytes": 1 << 20,
            "max_waiting": 1,
            "ranks": (),
        } | options
        self.listener = CallListener(
            HostAddress("127.0.0.1", 0), ListenOptions(**given, context=context, say=self._say)
        )
        self._refused = threading.Condition()
        threading.Thread(target=self.listener.serve, daemon=True).start()

    @property
    def address(self):
        return str(self.listener.address)

    def _say(self, text):
        with self._refused:
            self.said.append(text)
            self._refused.notify_all()

    def refusal(self):
        """Return the one line about the client that was refused."""
        with self._refused:
            assert self._refused.wait_for(lambda: self.said, DEADLINE_S)
            [line] = self.said
            self.said.clear()
        return line


def served(**options):
    return Served(**options)


@pytest.fixture(scope="module")
def plain():
    found = served()
    yield found
    found.listener.close()


@pytest.fixture(scope="module")
def tls(tmp_path_factory):
    """Folders of the server's and the client's certificates, of one authority; and of a client of another."""
    folder = tmp_path_factory.mktemp("tls")
    return {
        name: certificates(folder, name, "other" if name == "stranger" else "ours")
        for name in ("server", "client", "stranger")
    }


def certificates(folder, name, authority):
    key = "-newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes"
    ca, ca_key = folder / f"{authority}.pem", folder / f"{authority}.key"
    if not ca.exists():
        openssl(f"req -x509 {key} -days 2 -subj /CN={authority} -keyout {ca_key} -out {ca}")
    mine = folder / name
    mine.mkdir()
    names = folder / "names"
    names.write_text("subjectAltName=DNS:localhost,IP:127.0.0.1")
    openssl(f"req {key} -subj /CN=localhost -keyout {mine}/key.pem -out {mine}/request")
    signed = f"-CA {ca} -CAkey {ca_key} -CAcreateserial -days 2 -extfile {names}"
    openssl(f"x509 -req -in {mine}/request {signed} -out {mine}/cert.pem")
    shutil.copy(folder / "ours.pem" if (folder / "ours.pem").exists() else ca, mine / "ca.pem")
    return mine


def openssl(words):
    subprocess.run(["openssl", *words.split()], check=True, capture_output=True)


def exchange(connection, *frames):
    """Send frames, and return the kinds of the answers."""
    with connection, connection.makefile("rb") as stream:
        kinds = []
        for frame in frames:
            send_frame(connection, frame)
            answer = read_frame(stream, 1 << 20)
            kinds.append(answer and answer.head["kind"])
        return kinds


def connected(served):
    return socket.create_connection(served.listener.address, timeout=DEADLINE_S)


HELLO = Frame({"kind": "hello", "token": TOKEN})
FORM = {"type": "torch.Tensor", "dtype": "torch.float32", "shape": [1, 3]}


def call(key="Torch.exp.0.forward", **more):
    form = FORM | {"data_name": "0.pt"}
    return Frame({"kind": "call", "key": key, "entry": {"input_args": [form], "input_kwargs": {}, **more}}, (FLOATS,))


def raw(head, content=b"", *, size=None, checksum=None, head_size=None):
    text = head if isinstance(head, bytes) else json.dumps(head).encode()
    size = len(content) if size is None else size
    checksum = zlib.crc32(content, zlib.crc32(text)) if checksum is None else checksum
    return (
        struct.pack("<5sIQI", b"TMCF\x01", len(text) if head_size is None else head_size, size, checksum)
        + text
        + content
    )


def with_tensor(**form):
    return {"kind": "call", "tensors": [{"dtype": "float32", "shape": [1]} | form]}


def test_tensors_arrive_as_they_were_sent():
    one, other = socket.socketpair()
    with one, other, other.makefile("rb") as stream:
        send_frame(one, Frame({"kind": "x", "n": [1]}, tuple(TENSORS)))
        found = read_frame(stream, 1 << 20)

    assert (found.head["kind"], found.head["n"]) == ("x", [1])
    for tensor, sent in zip(found.tensors, TENSORS, strict=True):
        assert (tensor.dtype, tensor.shape) == (sent.dtype, sent.shape)
        wide = tensor.to(torch.complex128), sent.to(torch.complex128)
        torch.testing.assert_close(*wide, rtol=0, atol=0, equal_nan=True)


def test_a_call_is_run_and_its_numbers_come_back(plain):
    with connected(plain) as connection, connection.makefile("rb") as stream:
        send_frame(connection, HELLO)
        assert read_frame(stream, 0).head["kind"] == "welcome"
        send_frame(connection, call())
        [found] = read_frame(stream, 1 << 20).tensors

    assert torch.equal(found, FLOATS.exp()) or torch.allclose(found, FLOATS.exp(), equal_nan=True)


@pytest.mark.parametrize(
    ("message", "reason"),
    [
        (raw({"kind": "call", "tensors": []}, checksum=1), "the checksum is wrong"),
        (raw(b"{}", head_size=1 << 30), "the head has 1073741824 bytes, expected at most 1048576"),
        (raw(b"[" * 100_000), "the head is not JSON"),
        (raw({"kind": "call", "tensors": []}, size=1 << 60), "the tensors have 1152921504606846976 bytes"),
        (raw(with_tensor(dtype="object"), b"abcd"), "a tensor has the type 'object', expected one of float64"),
        (raw(with_tensor(shape=[1 << 40, 1 << 40, 0])), "is larger than any memory"),
        (raw(with_tensor(shape=[1 << 40]), b"abcd"), "have 4398046511104 bytes, 4 are announced"),
        (raw(with_tensor(shape=[-1]), b"abcd"), "a shape has something else than lengths"),
        (raw(with_tensor(shape=[1] * 17), b"abcd"), "no shape of at most 16 dimensions"),
        (raw({"kind": "shutdown", "tensors": []}), "of kind 'shutdown', expected a call"),
        (b"GET / HTTP/1.1\r\nHost: here\r\n\r\n" + b"x" * 32, "another protocol or version"),
        (raw({"kind": "call", "tensors": []})[:15], "the stream ended after 15 of 21 bytes"),
    ],
    ids=[
        *("checksum", "head-size", "no-json", "size", "dtype", "elements", "bytes", "negative", "dimensions"),
        *("kind", "http", "cut-off"),
    ],
)
def test_a_hostile_frame_costs_its_client_a_line_and_nobody_else(plain, message, reason):
    with connected(plain) as connection, connection.makefile("rb") as stream:
        send_frame(connection, HELLO)
        assert read_frame(stream, 0).head["kind"] == "welcome"
        connection.sendall(message)
        connection.shutdown(socket.SHUT_WR)
        assert stream.read() == b""

    assert reason in plain.refusal()
    assert exchange(connected(plain), HELLO, call()) == ["welcome", "result"]


@pytest.mark.parametrize(
    ("first", "reason"),
    [
        (raw({"kind": "hello", "token": TOKEN[:-1] + "x", "tensors": []}), "the token is wrong"),
        (raw({"kind": "hello", "token": [TOKEN], "tensors": []}), "the token is wrong"),
        (raw({"kind": "call", "tensors": []}), "it does not begin with a hello"),
        (raw({"kind": "hello", "padding": "x" * 5000, "tensors": []}), "expected at most 4096"),
        (raw(with_tensor(), b"abcd"), "the tensors have 4 bytes, expected at most 0"),
    ],
    ids=["wrong", "no-text", "none", "long", "tensor"],
)
def test_who_does_not_show_the_token_is_refused(plain, first, reason):
    with connected(plain) as connection, connection.makefile("rb") as stream:
        connection.sendall(first)
        connection.shutdown(socket.SHUT_WR)
        stream.read()

    assert reason in plain.refusal()
    assert exchange(connected(plain), HELLO) == ["welcome"]


@pytest.mark.parametrize(
    ("frame", "reason"),
    [
        (call("Torch.save.0.forward"), "torch has no function Torch.save that could be run again"),
        (call("Torch.load.0.forward"), "torch has no function"),
        (call("Torch.zeros.0.forward", input_args=[10**12]), "would make up to 1,000,000,000,000 elements"),
        (call("Torch.exp.0.forward", input_args=[FORM | {"data_name": "../../etc/passwd"}]), "cannot be read"),
        (call("Torch.exp.0.backward"), "no forward call"),
        (Frame({"kind": "call", "key": 5}), "the head describes no call"),
    ],
    ids=["save", "load", "large", "file", "backward", "no-call"],
)
def test_a_call_that_is_none_is_an_answer(frame, reason):
    answer = answer_to(frame, "cpu")

    assert answer.head["kind"] == "failed"
    assert reason in answer.head["reason"]


def test_a_full_queue_and_other_ranks_are_answered_and_not_run():
    found = served(ranks=(1,))
    with connected(found) as held:
        assert exchange(connected(found), HELLO, call()) == ["welcome", "refused"]
        assert held
    found.listener.close()
    found = served()
    found.listener._waiting.acquire()  # as if a call waited for the device
    assert exchange(connected(found), HELLO, call()) == ["welcome", "busy"]
    assert found.listener.counts["run"] == 0
    found.listener.close()


def test_both_sides_show_certificates(tls):
    found = served(context=tls_context(tls["server"], is_server=True))
    ours, stranger = (tls_context(tls[name], is_server=False) for name in ("client", "stranger"))
    without = ssl.create_default_context(cafile=str(tls["client"] / "ca.pem"))

    for context, reason in ((without, "peer did not return a certificate"), (stranger, "certificate verify failed")):
        with pytest.raises((OSError, FrameError)):
            exchange(context.wrap_socket(connected(found), server_hostname="localhost"), HELLO)
        assert reason in found.refusal().lower().replace("_", " ")
    with connected(found) as plain_text, plain_text.makefile("rb") as stream:
        send_frame(plain_text, HELLO)
        with contextlib.suppress(ConnectionResetError):
            stream.read()
    assert "refused: " in found.refusal()
    assert exchange(ours.wrap_socket(connected(found), server_hostname="localhost"), HELLO, call()) == [
        "welcome",
        "result",
    ]
    other = tls_context(tls["client"], is_server=False)
    with pytest.raises(ssl.SSLCertVerificationError):  # nor does a client take any server
        other.wrap_socket(connected(found), server_hostname="another.host")
    found.listener.close()


@pytest.mark.parametrize("is_secured", [False, True])
def test_who_says_nothing_does_not_hold_a_place_for_long(tls, monkeypatch, is_secured):
    monkeypatch.setattr(listener, "HELLO_LIMIT_S", 0.2)
    found = served(context=tls_context(tls["server"], is_server=True) if is_secured else None)

    with connected(found) as silent:
        if is_secured:
            silent = tls_context(tls["client"], is_server=False).wrap_socket(silent, server_hostname="localhost")
        assert silent.recv(1) == b""
        silent.close()

    assert "refused: " in found.refusal()
    found.listener.close()


def test_a_step_gets_a_second_opinion_and_goes_on_without(tmp_path, tls, capsys):
    (tmp_path / "token").write_text(TOKEN)
    shared = ["--token-file", str(tmp_path / "token"), "--tls"]
    command = [sys.executable, "-m", "trainermon", "check", "follow", "--listen", "127.0.0.1:0", *shared]
    folder = train(tmp_path / "dumps", 3)
    shutil.copytree(folder / "step0", tmp_path / "later", copy_function=shutil.copy2)
    with subprocess.Popen([*command, str(tls["server"])], stderr=subprocess.PIPE, text=True) as process:
        address = re.search(r"listening on (\S+)", process.stderr.readline())[1]
        push = ["check", "follow", str(folder), "--once", "--push", f"tls://{address}", *shared, str(tls["client"])]
        assert main(push) == 0
        process.terminate()
        assert "stopped; calls: " in process.stderr.read()
    shutil.move(tmp_path / "later", folder / "step4")
    assert main(push) == 0

    found = results(folder)
    assert [(one["verdict"], one["ranks"][0]["lost"] > 0) for one in found] == [
        ("pass", False),
        ("pass", False),
        ("failed", False),
        ("pass", True),
    ]
    assert f"here: {address} gives the right result" in found[2]["ranks"][0]["reason"]
    assert "its opinion is missing until it is back" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (["--listen", "0.0.0.0:7000"], "expected --tls DIR"),
        (["--listen", "127.0.0.1:0"], "expected --token-file"),
        (["--listen", "nonsense"], "expected HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--push", "127.0.0.1:1"], "expected neither"),
        ([".", "--push", "tls://127.0.0.1:1"], "expected --tls DIR"),
        ([".", "--push", "10.0.0.1:1"], "expected --tls DIR"),
        (["--listen", "127.0.0.1:0", "--token-file", "/dev/null"], "found 0 characters, expected 16 or more"),
    ],
)
def test_an_option_that_cannot_be_met_is_refused(words, reason, capsys):
    assert main(["check", "follow", *words]) == 1
    assert reason in capsys.readouterr().err


def options_of(path):
    parser = argparse.ArgumentParser()
    add_network_options(parser)
    args = parser.parse_args(["--config", str(path)])
    args.folders = []
    read_network_file(args)
    return args


def test_msprobes_configuration_says_the_same(tmp_path):
    path = tmp_path / "config.json"
    block = {"is_online": True, "host": "127.0.0.1", "port": 7001, "tls_path": "/certificates", "rank_list": [0, 3]}
    path.write_text(json.dumps({"run_ut": block}))
    args = options_of(path)
    path.write_text(json.dumps({"run_ut": {"is_online": True, "nfs_path": "/shared/dumps"}}))

    assert (args.listen, str(args.tls), args.rank_list) == ("127.0.0.1:7001", "/certificates", (0, 3))
    assert [str(folder) for folder in options_of(path).folders] == ["/shared/dumps"]
    path.write_text(json.dumps({"run_ut": {"is_online": False, "port": 1}}))
    with pytest.raises(ConfigError, match='expected "run_ut" with "is_online": true'):
        options_of(path)


def test_the_debugger_says_which_command_does_it():
    block = {
        "online_run_ut": True,
        "nfs_path": "",
        "host": "gpu",
        "port": 7,
        "tls_path": "t",
        "online_run_ut_recompute": False,
    }
    _, notes = read_debugger_config({"task": "tensor", "dump_path": "d", "tensor": block})
    _, none = read_debugger_config({"task": "tensor", "dump_path": "d", "tensor": block | {"online_run_ut": False}})

    assert [note for note in notes if "check follow DUMP_PATH --push tls://HOST:PORT" in note]
    assert none == ()
