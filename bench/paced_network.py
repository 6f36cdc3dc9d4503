"""A virtual network: its machines are network namespaces on a bridge, each with a link paced in both directions.

It needs no root if users may make namespaces: `unshare -rn` makes one, and everything in it disappears when its last
process ends. `tbf` on both ends of a veth paces what a machine sends and receives; bytes are those that the kernel
counts at the bridge's end.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

NEW_NETWORK, NEW_NAME = 0x40000000, 0x04000000  # CLONE_NEWNET, CLONE_NEWUTS
INSIDE = "CSD_OPTIM_BENCH_NETWORK"  # environment variable, set inside the namespace that enter() makes
ALONE = ("unshare", "--map-root-user", "--net", "--mount")
TOOLS = ("unshare", "mount", "ip", "tc")
BURST = 256 << 10  # bytes: larger than the kernel's packets, which tbf would otherwise cut into frames with headers
QUEUE_MS = 1000  # a packet that waits longer is dropped and sent again, and its bytes would count twice
MTU = 9000  # bytes: jumbo frames, usual in networks between such machines
CONGESTION = "reno"  # shares a link evenly between connections, and needs no privileges
SUBNET = "10.77.0"
libc = ctypes.CDLL(None, use_errno=True)


def missing() -> str:
    """Return why a paced network cannot be made here; empty if it can."""
    if lacking := [tool for tool in TOOLS if not shutil.which(tool, path=_path())]:
        return f"{', '.join(lacking)} not found (apt install util-linux iproute2)"
    link = "ip link add name csd0 type veth peer name csd1"
    trial = (
        f"mount --bind /dev/null /etc/hosts && {link} && tc qdisc add dev csd0 root tbf rate 1mbit burst 9kb latency 1s"
    )
    command = [*ALONE, "sh", "-c", trial]
    done = subprocess.run(command, capture_output=True, text=True, check=False, env=_environment())
    return f"no namespaces with paced links here: {done.stderr.strip()}" if done.returncode else ""


def enter(module: str) -> None:
    """Restart this program, `python -m module`, in a new namespace. Returns in the restarted program."""
    if os.environ.get(INSIDE) != str(os.getpid()):
        os.environ[INSIDE] = str(os.getpid())  # exec keeps the process id
        os.execvpe("unshare", [*ALONE, sys.executable, "-m", module, *sys.argv[1:]], _environment())


def _path() -> str:
    return os.environ.get("PATH", os.defpath) + ":/usr/sbin:/sbin"  # `ip` is there, which is not on every user's PATH


def _environment() -> dict[str, str]:
    return {**os.environ, "PATH": _path()}


class Network:
    """A network of machines. `rates`: bytes per second each way, by the machine's name (at most 13 letters)."""

    def __init__(self, rates: dict[str, float]) -> None:
        self._switch = os.open("/proc/self/ns/net", os.O_RDONLY)
        self._namespaces: dict[str, int] = {}  # open files
        self._addresses = {name: f"{SUBNET}.{k}" for k, name in enumerate(rates, 1)}
        with tempfile.NamedTemporaryFile("w") as hosts:  # gloo and TCPStore resolve names, without DNS
            for name, address in {"localhost": "127.0.0.1", **self._addresses}.items():
                hosts.write(f"{address} {name}\n::ffff:{address} {name}\n")
            hosts.flush()
            _run(["mount", "--bind", hosts.name, "/etc/hosts"])
        _run(["mount", "--bind", "/dev/null", "/etc/resolv.conf"])
        _ip("link add name bridge type bridge mcast_snooping 0; link set bridge up; link set lo up")
        for name, rate in rates.items():
            # `cat` keeps its new namespace alive until its input ends.
            with subprocess.Popen(["cat"], stdin=subprocess.PIPE, preexec_fn=_unshare) as there:
                self._namespaces[name] = os.open(f"/proc/{there.pid}/ns/net", os.O_RDONLY)
                pair = f"link add name {name} mtu {MTU} type veth peer name eth0 mtu {MTU} netns {there.pid}"
                _ip(f"{pair}; link set {name} master bridge up")
                inside = f"addr add {self._addresses[name]}/24 dev eth0; link set eth0 up; link set lo up"
                self._within(name, ["ip", "-batch", "-"], inside)
                self._within(name, ["sh"], f"echo {CONGESTION} > /proc/sys/net/ipv4/tcp_congestion_control")
            self.pace(name, rate)

    def address(self, name: str) -> str:
        return self._addresses[name]

    def pace(self, name: str, rate: float) -> None:
        paced = f"root tbf rate {int(rate * 8)}bit burst {BURST} latency {QUEUE_MS}ms"
        _run(["tc", *f"qdisc replace dev {name} {paced}".split()])
        self._within(name, ["tc", *f"qdisc replace dev eth0 {paced}".split()])

    def plug(self, name: str, is_in: bool) -> None:
        """Plug the cable of a machine in, or pull it out. Any process of the network may do so."""
        _run(["ip", "link", "set", name, "up" if is_in else "down"], namespace=self._switch)

    def move_in(self, name: str) -> None:
        """Move this process, and all processes started by it later, to machine `name`."""
        _join(self._namespaces[name])
        if libc.unshare(NEW_NAME):
            raise OSError(ctypes.get_errno(), "unshare")
        socket.sethostname(name)
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"

    def counters(self) -> dict[str, tuple[int, int]]:
        """Return the bytes that each machine has sent and received so far, including frame headers."""
        found = {}
        for line in Path("/proc/net/dev").read_text().splitlines()[2:]:
            name, _, numbers = line.partition(":")
            if (name := name.strip()) in self._namespaces:  # the bridge's end receives what it sends
                each = numbers.split()
                found[name] = (int(each[0]), int(each[8]))
        return found

    def _within(self, name: str, command: list[str], lines: str = "") -> None:
        _run(command, lines, self._namespaces[name])


def _ip(lines: str) -> None:
    _run(["ip", "-batch", "-"], lines)


def _run(command: list[str], lines: str = "", namespace: int | None = None) -> None:
    text = "".join(f"{line.strip()}\n" for line in lines.split(";"))
    join = None if namespace is None else lambda: _join(namespace)
    done = subprocess.run(
        command, input=text, capture_output=True, text=True, check=False, preexec_fn=join, env=_environment()
    )
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}: {done.stderr.strip()} ({lines})")


def _unshare() -> None:
    if libc.unshare(NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "unshare")


def _join(namespace: int) -> None:
    if libc.setns(namespace, NEW_NETWORK):
        raise OSError(ctypes.get_errno(), "setns")


def moved(before: dict[str, tuple[int, int]], after: dict[str, tuple[int, int]], names: Iterable[str]) -> list[int]:
    """Return the most bytes that one of the machines `names` has sent, and the most that one has received."""
    return [max(after[name][k] - before[name][k] for name in names) for k in (0, 1)]
