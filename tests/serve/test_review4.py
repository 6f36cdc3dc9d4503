import contextlib, copy
import torch, time
import torch.distributed as dist
from support.inside import engine_of
from support.owner_here import OwnerHere
from support.ranks import on_ranks
from test_remote_ranks import Net
from csd_optim import CSDError, CSDRankError
from csd_optim.serve.link import Link
from csd_optim.serve.owner_session import Owner

def half(rank):
    said = []
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address).until(2)
        loaded = copy.deepcopy(net.opt.state_dict())
        net.opt.synchronize()
        real = Link.request
        def request(self, op, *a, **k):
            if op == "loading" and rank == 1:
                Link.request = real
                raise CSDRankError("gone for a minute")
            return real(self, op, *a, **k)
        Link.request = request
        try: net.opt.load_state_dict(loaded)
        except CSDError as e: said.append(str(e))
        Link.request = real
        for _ in range(3):
            with contextlib.suppress(CSDError): net.step()
        dist.barrier()
        owner.owner.sessions[rank].end("crash")
        with contextlib.suppress(CSDError): net.opt.close()
    with OwnerHere(f"owner-{rank}") as owner:
        net = Net(rank, owner.address, resume=True)
        said.append(("resumed at step", engine_of(net.opt).states.step, "user_state", net.opt.user_state))
        try:
            net.step(); net.opt.synchronize(); said.append(("then", engine_of(net.opt).states.step, [float(s["step"]) for s in net.opt.state.values()][:2]))
        except CSDError as e: said.append(str(e))
        with contextlib.suppress(CSDError): net.opt.close()
    return said

def test_half(tmp_path):
    steps = [said[1][1] for said in on_ranks(2, half, directory=tmp_path)]
    assert steps == [2, 2]

def slow(rank):
    with OwnerHere(f"owner-{rank}", timeout=3) as owner:
        net = Net(rank, owner.address).until(2); net.opt.synchronize(); net.opt.close()
        real = Owner._choose
        def choose(self, *a):
            if rank == 1: time.sleep(6)
            return real(self, *a)
        Owner._choose = choose
        try:
            net = Net(rank, owner.address, resume=True); r = "resumed"; net.opt.close()
        except CSDError as e: r = str(e)
        return r, owner.lines[-1]

def test_slow(tmp_path):
    assert [said for said, _ in on_ranks(2, slow, directory=tmp_path)] == ["resumed"] * 2

