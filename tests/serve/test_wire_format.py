"""An owner, spoken to with what docs/wire-format.md says: own sockets, structs and JSON, and no code of the package."""

import hashlib
import json
import re
import socket
import ssl
import struct
from pathlib import Path

import numpy as np
import pytest
from support.owner_here import OwnerHere
from support.wires import files

from csd_optim.serve import requests

__all__ = ["files"]

PAGE = (Path(__file__).parents[2] / "docs" / "wire-format.md").read_text()
PROTOCOL = re.search(r"`(csd-optim/\d+)`", PAGE).group(1)
N, TILE, RATE = 3000, 1024, 0.5  # elements of the parameter and of a tile; learning rate
SGD = 4


class Spoken:
    """A connection to an owner, as the page describes it."""

    def __init__(self, port, files, first):
        self.sock = socket.create_connection(("127.0.0.1", port), 30)
        if files:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.set_alpn_protocols([PROTOCOL])
            context.load_cert_chain(files.owner)
            self.sock = context.wrap_socket(self.sock)
            mine = ssl.PEM_cert_to_DER_cert(files.certificate("owner").read_text())
            assert hashlib.sha256(self.sock.getpeercert(True)).digest() == hashlib.sha256(mine).digest()
            assert self.sock.selected_alpn_protocol() == PROTOCOL
        self.n = 0
        self.send({"protocol": PROTOCOL, **first})
        self.opened, _ = self.receive()
        assert self.opened["refused"] == ""

    def send(self, message, *arrays):
        text, data = json.dumps(message).encode(), b"".join(arrays)
        self.sock.sendall(struct.pack(">IQ", len(text), len(data)) + text + data)

    def exactly(self, n):
        data = b""
        while len(data) < n:
            data += (more := self.sock.recv(n - len(data)))
            assert more, "the owner has ended the connection"
        return data

    def receive(self):
        n, m = struct.unpack(">IQ", self.exactly(12))
        return json.loads(self.exactly(n)), self.exactly(m)

    def ask(self, op, *arrays, expects="done", **fields):
        self.n += 1
        self.send({"op": op, "n": self.n, "sizes": [*map(len, arrays)], **fields}, *arrays)
        while (answer := self.receive())[0]["answer"] == "working":
            pass
        assert (answer[0]["n"], answer[0]["answer"]) == (self.n, expects), answer
        return answer


def elements_of(tile):
    return min(TILE, N - TILE * tile)


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_step_from_the_page_alone(encrypted, files, tmp_path):
    keys = {"key": files.owner} if encrypted else {}
    with OwnerHere(tmp_path / "owner", **keys) as owner:
        how = owner.port, files if encrypted else None
        control = Spoken(*how, {"kind": "control", "streams": 1})
        joins = {"kind": "data", "session": control.opened["session"], "stream": 0}
        up, down = (Spoken(*how, {**joins, "way": way}) for way in ("up", "down"))
        hello = {"trainer": 0, "trainers": 1, "here": 1, "token": "a", "mode": "new", "model": "", "tile_elems": TILE}
        hello |= {"who": "a page", "store": "0" * 32}
        welcome, _ = control.ask("hello", **hello, expects="welcome")
        assert (welcome["step"], welcome["recovered"], len(welcome["devices"])) == (0, False, 1)

        about = {"sections": ["master"], "codec": "fp32", "param_dtype": "", "first_param": 0, "tile_elems": None}
        extended, devices = control.ask("extend", struct.pack(">Q", N), **about, expects="extended")
        assert extended["tile_elems"] == TILE
        assert devices == bytes(4 * 3)
        param = {"name": "w", "group": 0, "position": 0, "shape": [N], "stride": [1], "dtype": "float32"}
        param |= {"extent": 0, "start": 0, "numel": N}
        control.ask("describe", manifest={"rule": "sgd", "params": [param], "waiting": []})
        before = np.linspace(-1, 1, N, dtype="<f4")
        control.ask("write", before.tobytes(), row=0, section=0, first=0)

        row = struct.pack(">4Id6B2x", 0, 0, 0, 0, 0.0, 0, 0, 0, 0, 1, 0)
        constants = struct.pack(">I9f", SGD, RATE, *[0.0] * 7, 1.0)
        begin = {"begin": 1, "step": 0, "order": 0, "record_bytes": 1000}
        control.ask("begin", row, constants, struct.pack(">3I", 0, 1, 2), **begin)
        grads = np.random.default_rng(1).standard_normal(N).astype("<f4")
        wanted = before - np.float32(RATE) * grads
        for tile in range(3):
            up.send({"tile": tile, "begin": 1}, grads[TILE * tile :][: elements_of(tile)].tobytes())
        found = {}
        while len(found) < 3:
            message, data = down.receive()
            if message["kind"] == "parameters":
                assert message["begin"] == 1
                found[message["tile"]] = np.frombuffer(data, "<f4")
        assert np.array_equal(np.concatenate([found[tile] for tile in range(3)]), wanted)

        record = {"groups": [], "given": [], "seconds": 0.5}
        finish = {"begin": 1, "step": 0, "keep": True, "frames": 3, "round": 1, "record": record}
        finished, _ = control.ask("finish", struct.pack(">I", 1), b"", **finish, expects="finished")
        assert (finished["kept"], finished["step"], finished.get("failed")) == (True, 1, None)
        waited, _ = control.ask("wait")
        assert waited["committed"] == 1
        _, values = control.ask("read", tile=2, sections=[0], first=2, count=50, expects="values")
        assert np.array_equal(np.frombuffer(values, "<f4"), wanted[2 * TILE + 2 :][:50])
        control.ask("close")
        for connection in (control, up, down):
            connection.sock.close()


def test_the_page_names_every_message_and_field():
    """In the words that travel."""
    words = {*re.findall(r"`([a-z_ /0-9-]+)`", PAGE)}
    structs = [*requests.REQUESTS.values(), *requests.Answer.__subclasses__(), *requests.Down.__subclasses__()]
    structs += [requests.TileGradients, requests.StoreFound, requests.ExtentFields, requests.Failure]
    missing = {
        name
        for kind in structs
        for name in (kind.__struct_config__.tag, *kind.__struct_encode_fields__)
        if name and name not in words
    }
    assert not missing
