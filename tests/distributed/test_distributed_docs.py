"""The scripts of docs/distributed.md do what it says on two ranks, and when they are started again."""

import contextlib
import io
import os
import re
import socket
from pathlib import Path

import pytest
import torch.distributed as dist
from support.ranks import on_ranks

DOCS = Path(__file__).parents[2] / "docs" / "distributed.md"
SCRIPTS = dict(re.findall(r"```python\n# (\w+)\.py\n(.*?)```", DOCS.read_text(), re.DOTALL))


def runs(rank, script, ports):
    """What the script prints, each time that it is run: as torchrun does, by these environment variables."""
    dist.destroy_process_group()  # the script makes one
    printed = []
    for port in ports:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            exec(script, {"__name__": "__main__"})
        printed.append(out.getvalue().removeprefix(f"rank {rank}: ").strip())
    return printed


def free_ports(n):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


@pytest.mark.filterwarnings("ignore:there is no store")
@pytest.mark.parametrize("name", ["ddp", "fsdp2", "fsdp1"])
def test_script(name, tmp_path):
    script = SCRIPTS[name].replace("/mnt/", f"{tmp_path}/")
    for first, again in on_ranks(2, runs, script, free_ports(2), directory=tmp_path):
        if name == "fsdp2":  # goes on from its checkpoint in the middle
            assert first.startswith("loss ")
            assert again == first
        else:  # has nothing left to do
            assert first.startswith("step 20, ")
            assert " 0 " not in first
            assert again.startswith("step 20, 0 ")
    assert (tmp_path / "shared/checkpoint").exists() == (name == "fsdp2")
    assert {p.name for p in tmp_path.glob("nvme*")} == {"nvme0", "nvme1"}
