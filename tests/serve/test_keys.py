"""Key files: their creation, and that a bad key file is always reported."""

import copy
import datetime
import os
import pickle
import shutil
import stat
import sys

import pytest
import torch
from cryptography import x509
from cryptography.hazmat.primitives.asymmetric import ec
from support.wires import files, pair, write_certificate

from csd_optim import CSDAdam
from csd_optim.errors import CSDOSError, CSDUnavailableError, CSDValueError
from csd_optim.serve.wire import init_key, keys
from csd_optim.serve.wire.keys import Accepted, Key, Role, read_certificates, resolve

__all__ = ["files"]


@pytest.fixture(params=["cryptography", "openssl"])
def made(request, tmp_path, monkeypatch):
    """A key file that each of the two has made."""
    if request.param == "openssl":
        if not shutil.which("openssl"):
            pytest.skip("the command openssl is not installed")
        monkeypatch.setitem(sys.modules, "cryptography", None)
    path = tmp_path / "made.pem"
    print_ = init_key.init_key(path)
    monkeypatch.undo()
    assert Key(path).fingerprint == print_
    return path


def test_what_is_made(made):
    """P-256, signed by itself, to 9999, for no other signatures; mode 0600."""
    assert stat.S_IMODE(made.stat().st_mode) == 0o600
    certificate = x509.load_pem_x509_certificate(made.read_bytes())
    assert certificate.not_valid_before_utc <= datetime.datetime.now(datetime.timezone.utc)
    assert certificate.not_valid_after_utc.year == 9999
    assert isinstance(certificate.public_key().curve, ec.SECP256R1)
    certificate.verify_directly_issued_by(certificate)
    assert not certificate.extensions.get_extension_for_class(x509.BasicConstraints).value.ca
    assert made.read_text().count("PRIVATE KEY") == 2


def test_both_ways_to_make_one_work_together(made, files, tmp_path):
    write_certificate(tmp_path / "made.crt", made.read_text())
    key = Key(made)
    with pair("tls", files, accept=[(Role.TRAINER, tmp_path / "made.crt")]) as to:
        assert to.admitted(key=key)
    with pair("tls", files, key=made) as to:
        assert to.admitted(owner=key.fingerprint)


def test_nothing_is_replaced(made, tmp_path):
    before = made.read_bytes()
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    for path in (made, tmp_path / "link", tmp_path, tmp_path / "missing" / "key"):
        with pytest.raises(CSDOSError, match=r"exists, and nothing is overwritten|there is no directory"):
            init_key.init_key(path)
    assert made.read_bytes() == before
    assert not (tmp_path / "nowhere").exists()


def test_a_full_disk_leaves_no_part_of_a_key(tmp_path, monkeypatch):
    def full(fd):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CSDOSError, match=r"cannot write .*: No space left"):
        init_key.init_key(tmp_path / "key")
    assert not [*tmp_path.iterdir()]


def test_neither_way_to_make_one(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "cryptography", None)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(CSDUnavailableError, match="neither the command openssl nor the package cryptography"):
        init_key.init_key(tmp_path / "key")


def bad(name, tmp_path, good):
    """Return the path of a key file that is not as it should be."""
    path, text = tmp_path / name, good.read_text()
    private, _, rest = text.partition("-----BEGIN CERTIFICATE-----")
    certificate = "-----BEGIN CERTIFICATE-----" + rest
    contents = {
        "empty": "",
        "no key": certificate,
        "no certificate": private,
        "two": text + certificate,
        "not PEM": "\x80\0\xff",
        "not ASCII": "ü" + text,
        "long": text + " " * (2 << 20),
        "damaged": text.replace("MII", "MIJ"),
        "garbled": private + "-----BEGIN CERTIFICATE-----\n!!!\n-----END CERTIFICATE-----\n",
    }
    if name == "directory":
        path.mkdir()
    elif name == "pipe":
        os.mkfifo(path, 0o600)
    elif name == "link":
        path.symlink_to(good)
    elif name == "of another":
        init_key.init_key(path)
        path.write_text(path.read_text().partition("-----BEGIN CERTIFICATE-----")[0] + certificate)
    elif name in contents:
        path.write_text(contents[name])
        path.chmod(0o600)
    return path


NO_KEYS = ["missing", "empty", "directory", "pipe", "link", "no key", "no certificate", "two", "not PEM", "not ASCII"]


@pytest.mark.parametrize("name", [*NO_KEYS, "long", "damaged", "garbled", "of another"])
def test_files_that_are_no_key(name, files, tmp_path, monkeypatch):
    """Each is an error, in each way to name it, with the path and nothing of the content."""
    path = bad(name, tmp_path, files.trainer)
    monkeypatch.setenv("CSD_OPTIM_KEY", str(path))
    for use in (
        lambda: Key(path),
        lambda: resolve(None, None),
        lambda: resolve(str(path), None),
        lambda: Accepted(path, []),
    ):
        with pytest.raises((CSDOSError, CSDValueError)) as error:
            use()
        assert str(path) in str(error.value) or name in ("damaged", "garbled")
        assert files.trainer.read_text().splitlines()[1] not in str(error.value)


def test_permissions(files, tmp_path, monkeypatch):
    path = tmp_path / "key"
    shutil.copy(files.trainer, path)
    for mode in (0o600, 0o400):
        path.chmod(mode)
        Key(path)
    for mode in (0o640, 0o604, 0o620, 0o601, 0o644, 0o666):
        path.chmod(mode)
        monkeypatch.setattr(os, "fstat", lambda fd, of=os.stat: Status(of(fd), os.geteuid() or 1000))
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        with pytest.raises(CSDValueError, match="can be read by others: chmod 600"):
            Key(path)
        monkeypatch.undo()
    for mode, allowed in ((0o640, True), (0o600, True), (0o644, False), (0o660, False), (0o650, False)):
        path.chmod(mode)
        monkeypatch.setattr(os, "fstat", lambda fd, of=os.stat: Status(of(fd), 0))
        monkeypatch.setattr(os, "geteuid", lambda: 1000)
        if allowed:  # root's, as containers mount secrets
            Key(path)
        else:
            with pytest.raises(CSDValueError, match="can be read by others"):
                Key(path)
        monkeypatch.undo()
    path.chmod(0o600)
    monkeypatch.setattr(os, "fstat", lambda fd, of=os.stat: Status(of(fd), 1234))
    with pytest.raises(CSDValueError, match="belongs to another user"):
        Key(path)


class Status:
    """The status of a file that belongs to another user."""

    def __init__(self, status, uid):
        self.status, self.st_uid = status, uid

    def __getattr__(self, name):
        return getattr(self.status, name)


def test_certificates(files, tmp_path):
    both = tmp_path / "both.crt"
    both.write_bytes(b"".join(files.certificate(name).read_bytes() for name in ("trainer", "stranger")))
    both.chmod(0o644)
    assert len(read_certificates(both)) == 2
    accepted = Accepted(files.owner, [(Role.TRAINER, both)])
    assert [*accepted.roles.values()] == [Role.ADMIN, Role.TRAINER, Role.TRAINER]
    with pytest.raises(CSDValueError, match="accepted as trainer already, and cannot also be reader"):
        Accepted(files.owner, [(Role.TRAINER, both), (Role.READER, files.certificate("trainer"))])
    with pytest.raises(CSDValueError, match="accepted as admin already"):
        Accepted(files.owner, [(Role.TRAINER, files.certificate("owner"))])
    with pytest.raises(CSDValueError, match="contains a private key"):
        Accepted(files.owner, [(Role.TRAINER, files.trainer)])
    both.write_text("-----BEGIN CERTIFICATE-----\nAAAA\n-----END CERTIFICATE-----\n")
    with pytest.raises(CSDValueError, match="is damaged"):
        Accepted(files.owner, [(Role.TRAINER, both)])
    both.write_text("nothing")
    with pytest.raises(CSDValueError, match="contains no certificate"):
        read_certificates(both)
    both.chmod(0o666)
    with pytest.raises(CSDValueError, match="can be written by others"):
        read_certificates(both)


def test_which_key_a_trainer_uses(files, monkeypatch):
    mine, other = Key(files.trainer).fingerprint, Key(files.owner).fingerprint
    assert resolve(None, None) == (None, None)
    with pytest.raises(CSDValueError, match="there is no key"):
        resolve(None, other)
    monkeypatch.setenv("CSD_OPTIM_KEY", str(files.stranger))
    assert resolve(str(files.trainer), None)[1] == mine
    assert resolve(None, None)[1] == Key(files.stranger).fingerprint
    assert resolve(None, other.upper())[1] == other
    assert resolve(None, f"{other},{mine}")[1] == f"{other},{mine}"
    for wrong in (
        "",
        ",",
        f"{other},",
        "sha256:",
        other[:-1],
        other + "0",
        other.replace("sha256:", ""),
        "sha1:" + "0" * 40,
    ):
        with pytest.raises(CSDValueError, match="Invalid owner"):
            resolve(None, wrong)
    monkeypatch.setenv("CSD_OPTIM_KEY", "")
    with pytest.raises(CSDValueError, match="it is empty"):
        resolve(None, None)


def test_a_key_is_not_copied(files):
    key = Key(files.trainer)
    for how in (pickle.dumps, copy.copy, copy.deepcopy):
        with pytest.raises(TypeError, match="not pickled or copied"):
            how(key)
    assert repr(key) == str(key) == f"Key({key.fingerprint})"


def test_a_passphrase_is_not_asked_for(files, tmp_path):
    from cryptography.hazmat.primitives import serialization

    text = files.trainer.read_bytes()
    key = serialization.load_pem_private_key(text, None)
    locked = key.private_bytes(
        serialization.Encoding.PEM,
        serialization.PrivateFormat.PKCS8,
        serialization.BestAvailableEncryption(b"secret"),
    )
    path = tmp_path / "locked.pem"
    path.write_bytes(locked + text[text.index(b"-----BEGIN CERTIFICATE") :])
    path.chmod(0o600)
    with pytest.raises(CSDValueError, match="has a passphrase"):
        Key(path)


def test_the_file_is_read_once(files, tmp_path, monkeypatch):
    """What is checked is what is used: replacing the file meanwhile changes nothing."""
    path = tmp_path / "key.pem"
    shutil.copy(files.trainer, path)
    check = keys._check

    def replaced(*arguments):
        check(*arguments)
        os.replace(shutil.copy(files.stranger, tmp_path / "other"), path)

    monkeypatch.setattr(keys, "_check", replaced)
    key = Key(path)
    assert key.fingerprint == Key(files.trainer).fingerprint
    with pair("tls", files) as to:
        assert to.admitted(key=key)


def test_the_command_makes_a_key_once(tmp_path, run):
    path = tmp_path / "key.pem"
    assert run("serve", "--init-key", path)[:2] == (0, Key(path).fingerprint + "\n")
    code, out, err = run("serve", "--init-key", path)
    assert (code, out) == (1, "")
    assert "exists, and nothing is overwritten" in err


@pytest.mark.parametrize(
    ("options", "why"),
    [
        (["--listen", "127.0.0.1:0", "--max-model", "many"], "Invalid size: 'many'"),
        (["--listen", "0.0.0.0:0"], "and there is no key"),
        (["--listen", "127.0.0.1:0", "--accept", "owner=x"], "Invalid --accept: 'owner=x'"),
    ],
)
def test_a_command_that_cannot_be(options, why, tmp_path, run):
    code, _, err = run("serve", tmp_path / "store", *options)
    assert code == 1
    assert why in " ".join(err.split())


@pytest.mark.parametrize(
    ("address", "why"),
    [
        ("serve://storage", "write serve://host:port"),
        ("serve://storage:29600/x", "write serve://host:port"),
        ("serve://storage:99999", "Port out of range"),
        ("serve://storage:29600?timeout=0", "a number of seconds from 0.1"),
        ("serve://storage:29600?timeout=x", "could not convert"),
        ("serve://storage:29600?keys=x", "the options are timeout, key, owner, share and connections"),
    ],
)
def test_an_address_that_is_none(address, why):
    with pytest.raises(CSDValueError, match=why):
        CSDAdam([torch.zeros(3, requires_grad=True)], devices=address)
