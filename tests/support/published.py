"""A training that publishes, with an oracle: a snapshot of all weights after each step, compared bit for bit."""

import functools

import numpy as np
import torch
from torch.distributed.tensor import distribute_tensor

from csd_optim import CSDAdam, Replica
from csd_optim.replica.versions import directory_of, numbers, read_version

bf16 = torch.bfloat16
BLIND = ("transposed", "empty")  # parameters of Model that updates do not record, and that are compared


class Model(torch.nn.Module):
    """Parameters of one dtype: several tiles, odd sizes, a tied one, one not in row-major order, two seldom updated."""

    def __init__(self, dtype=bf16, seed=0):
        super().__init__()
        generators = [torch.Generator().manual_seed(s) for s in (seed, 0)]

        def new(*shape, generator=generators[0]):
            return torch.nn.Parameter((0.02 * torch.randn(shape, generator=generator)).to(dtype))

        self.embedding = new(70001)  # more than a block
        self.odd = new(33, 65)
        self.one = new()
        self.empty = new(0, 3)
        self.head = self.embedding
        self.transposed = torch.nn.Parameter(new(20, 30).detach().t())
        own = {"generator": generators[1]}  # parameters without a state are the same for every seed
        self.frozen = new(500, **own).requires_grad_(False)
        self.late = new(1500, **own)
        self.bias = new(7)


def weights(model, as_bf16=False):
    """Return the bits of all parameters, name → uint16 array. Of DTensors on all ranks: a collective."""

    def bits(p):
        p = p.detach()
        p = (p.full_tensor() if hasattr(p, "full_tensor") else p).contiguous().view(-1)
        return (p.to(bf16) if as_bf16 else p).clone().view(torch.int16).cpu().numpy().view(np.uint16)

    return {name: bits(p) for name, p in model.named_parameters(remove_duplicate=False)}


def gradients(model, step, scale=1.0, without=("late",)):
    """Set gradients that depend only on the step."""
    generator = torch.Generator().manual_seed(1000 + step)
    for name, p in model.named_parameters():
        grad = (scale * torch.randn(p.shape, generator=generator)).to(p.device, p.dtype)
        if hasattr(p, "placements"):
            grad = distribute_tensor(grad, p.device_mesh, p.placements)
        p.grad = grad if p.requires_grad and name not in without else None


@functools.cache
def weights_by_step(n, **options):
    """Return the weights of a training in memory after each of n steps, by step."""
    model = Model()
    found = [weights(model)]
    with CSDAdam(model.parameters(), devices="ram:", **{"lr": 1e-4, **options}) as opt:
        for step in range(1, n + 1):
            gradients(model, step)
            opt.step()
            found.append(weights(model))
    return found


def chain(path):
    """Return the versions that are in a folder."""
    return [read_version(path / directory_of(n)) for n in numbers(path)]


class Published:
    """A model, its optimizer with `options`, its publisher, and a replica that is compared after each step.

    `wrapped`: what publish() gets as the model.
    """

    def __init__(
        self,
        path,
        devices,
        optimizer=CSDAdam,
        dtype=bf16,
        publish=(),
        model=None,
        params=None,
        wrapped=None,
        done=0,
        **options,
    ):
        self.model, self.dtype = model or Model(dtype), dtype
        self.as_bf16 = dtype is torch.float32
        options = {"lr": 1e-5, "tile_size": 2048, **options}
        self.opt = optimizer(params or self.model.parameters(), devices=devices, **options)
        publish = {**({"dtype": "bf16"} if self.as_bf16 else {}), **dict(publish)}
        self.pub = self.opt.publish(path, model=wrapped or self.model, **publish)
        self.replica, self.copy, self.done = Replica(path), {}, done
        self.replica.load(self.copy)
        self.check()

    def step(self, **how):
        self.done += 1
        gradients(self.model, self.done, **how)
        self.opt.step()

    def step_and_wait(self):
        self.step()
        self.pub.wait()

    def names(self):
        return [name for name, _ in self.model.named_parameters()]

    def check(self, step=None):
        """Compare the replica, once it has followed, with the model as it is now. Returns how many elements were sent.

        `step`: the version's; None: the last one.
        """
        wanted = weights(self.model, self.as_bf16)
        self.pub.wait()
        assert self.pub.error == "", self.pub.error
        before = {name: values.copy() for name, values in self.copy.items()}
        sent = {p.name: len(p.values) for p in self.replica.patches()}
        self.replica.follow(self.copy)
        self.replica.verify(self.copy)
        assert self.replica.step == (self.done if step is None else step)
        wrong = [name for name in self.names() if not np.array_equal(self.copy[name], wanted[name])]
        assert wrong == []
        changed = {name: int((before[name] != wanted[name]).sum()) for name in self.names()}
        return changed, {name: sent.get(name, 0) for name in self.names()}

    def steps(self, n, **how):
        """Take n steps; check each."""
        for _ in range(n):
            self.step(**how)
            self.check()
        return self

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.opt.close()


def edits(t):
    """Return functions that change parameters and states of a Published, each in another way."""
    m, state = t.model, t.opt.state

    def counted():
        with torch.no_grad():
            m.odd[3:9] += 0.25

    def uncounted():
        m.embedding.data[100:200] *= -1
        m.odd.data.view(torch.int16)[0, 0] = 0x7FC1  # a NaN
        m.odd.data.view(torch.int16)[1, 1] = -0x8000  # -0.0

    def twice():  # seen by nobody but the checks
        m.embedding.data[64000:64002] += 1
        m.frozen.data[7] = 3

    def of_master():
        state[m.odd]["master"][2] += 1

    def of_moment():
        state[m.embedding]["exp_avg"].mul_(2)

    def of_frozen():
        with torch.no_grad():
            m.frozen.add_(0.5)
            m.late[10] = 2
            m.transposed[4, 4] = 1

    def of_loaded():
        loaded = t.opt.state_dict()
        loaded["state"] = {k: {n: v.clone() for n, v in entry.items()} for k, entry in loaded["state"].items()}
        for entry in loaded["state"].values():
            entry["master"].mul_(1.5)
        t.opt.load_state_dict(loaded)

    def swapped():  # other memory
        m.odd.data = m.odd.data.clone() + 1

    return counted, uncounted, twice, of_master, of_moment, of_frozen, of_loaded, swapped


def publishes_on(opt, policy, model, expected, meet=lambda: None):
    """Publish with a resumed optimizer in the folder of a run that was stopped, and train on for two steps.

    No version is ahead of the store, or of other weights than those of its step (`expected`, by step), and the chain
    goes on. `meet`: waits for other ranks. Returns how many versions there were.
    """
    versions = chain(policy) if policy.exists() else []
    step = opt.committed_step
    if not step:  # a store without a commit gives the model nothing
        model.load_state_dict(Model().state_dict())
    replica, copy = Replica(policy), {}
    if versions:
        replica.load(copy)
        assert replica.step <= step
        assert_weights(copy, expected[replica.step])
    meet()
    pub = opt.publish(policy, model=model, keep=1, full_every=3)
    assert pub.step == step
    replica.follow(copy)
    replica.verify(copy)
    assert_weights(copy, expected[step])
    newest = read_version(policy / directory_of(pub.version))
    if versions and step:
        assert newest.run == versions[-1].run
    assert not [*policy.glob(".v*")]
    meet()
    for i in (step + 1, step + 2):
        gradients(model, i)
        opt.step()
    pub.wait()
    replica.follow(copy)
    assert (replica.step, pub.error) == (step + 2, "")
    assert_weights(copy, expected[step + 2])
    return len(versions)


def assert_weights(found, expected):
    assert [name for name, values in found.items() if not np.array_equal(values, expected[name])] == []
