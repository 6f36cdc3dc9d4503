"""Reading a parameter under way waits for it, in all ways to read one; and without any one of the guards a test fails.

A parameter under way holds nan until something waits for it, so a missing wait yields nan.
"""

import copy
import gc
import io
import pickle
import weakref

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parameters_to_vector
from torch.optim.swa_utils import AveragedModel
from torch.utils.checkpoint import checkpoint

from csd_optim import CSDRuntimeError
from csd_optim.overlap.guards import module as module_guards
from csd_optim.overlap.guards.compiled import CompiledCall
from csd_optim.overlap.guards.groups import WaitingList
from csd_optim.overlap.guards.model import ModelGuards
from csd_optim.overlap.guards.module import ModuleHook, WaitingDict

X = torch.linspace(-1, 1, 24).reshape(2, 3, 4)


class Late:
    """Arrivals whose parameters arrive exactly when they are waited for."""

    def __init__(self):
        self.active = False
        self.coming = {}  # by id: parameter, value
        self.waits = []

    def depart(self, params):
        for p in params:
            self.coming[id(p)] = p, p.detach().clone()
            p.detach().fill_(torch.nan)
        self.active = True

    def remove_if_dropped(self):
        return False

    def settle(self):
        self.land()

    def wait(self, params):
        assert self.active
        params = list(params)
        self.waits.append([id(p) for p in params])
        for p in params:
            if id(p) in self.coming:
                p.detach().copy_(self.coming.pop(id(p))[1])
        self.active = bool(self.coming)

    def land(self):
        """Waits for all, as step() does for those that no guard reaches, and the landing thread at the end."""
        self.wait([p for p, _ in self.coming.values()])


# ---- models, and ways to read their parameters --------------------------------------------


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)
        self.scale = nn.Parameter(torch.full((4,), 0.5))

    def forward(self, x):
        return x + self.down(torch.tanh(self.up(x))) * self.scale


class Tied(nn.Module):
    """A head that shares the first layer's weight, and a block used twice."""

    def __init__(self):
        super().__init__()
        self.first, self.block, self.head = nn.Linear(4, 4), Block(), nn.Linear(4, 4, bias=False)
        self.head.weight = self.first.weight

    def forward(self, x):
        return self.head(self.block(self.block(self.first(x))))


class Indexed(nn.Module):
    def __init__(self):
        super().__init__()
        self.list = nn.ParameterList([torch.ones(4), torch.full((4,), 2.0)])
        self.dict = nn.ParameterDict({"a": torch.full((4,), 3.0)})

    def forward(self, x):
        return x * self.list[1] + self.list[0] + self.dict["a"]


class Kept(nn.Linear):
    """Reads its weight without `_parameters`, as nn.LSTM once did."""

    def __init__(self):
        super().__init__(4, 4)
        self.kept = [self.weight]

    def forward(self, x):
        return x @ self.kept[0]


class Checkpointed(nn.Module):
    def __init__(self, reentrant):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.reentrant = reentrant

    def forward(self, x):
        for block in self.blocks:
            x = checkpoint(block, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


def blocks():
    return nn.Sequential(Block(), Block(), nn.Linear(4, 4))


def lstm():
    return nn.LSTM(4, 4, num_layers=2)


def attention():
    return nn.MultiheadAttention(4, 2)


def encoder():
    return nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0, batch_first=True).eval()


def normed():
    return nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)), nn.Linear(4, 4))


def old_normed():
    with pytest.warns(FutureWarning, match="weight_norm"):
        return nn.Sequential(nn.utils.weight_norm(nn.Linear(4, 4)))


def outputs_and_grads(model):
    """Outputs and gradients."""
    model.zero_grad()
    out = model(X.clone())
    out.sum().backward()
    return [out, *(p.grad.clone() for p in model.parameters())]


def chunked(model):
    hidden = model[:2](X).reshape(-1, 4)
    return [F.cross_entropy(F.linear(h, model[2].weight, model[2].bias), torch.tensor([1, 2])) for h in hidden.split(2)]


def fast_path(model):
    with torch.no_grad():
        return model(X)


def averaged(model):
    average = AveragedModel(model)
    average.update_parameters(model)
    return list(average.module.parameters())


def saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return list(torch.load(file, weights_only=False).parameters())


def loaded(model):
    """Loads a state dict in place, and returns the new one."""
    model.load_state_dict({name: value + 1 for name, value in model.state_dict().items()})
    return list(model.state_dict().values())


WAYS = {
    "forward": (blocks, outputs_and_grads),
    "tied": (Tied, outputs_and_grads),
    "indexed": (Indexed, outputs_and_grads),
    "lstm": (lstm, lambda m: m(X)[0]),
    "forward by its name": (blocks, lambda m: m[2].forward(X)),
    "kept": (Kept, lambda m: m(X)),
    "attention": (attention, lambda m: m(X, X, X)[0]),
    "attention's fast path": (lambda: attention().eval(), lambda m: m(X, X, X)[0].detach()),
    "encoder's fast path": (encoder, fast_path),
    "checkpoint": (lambda: Checkpointed(False), outputs_and_grads),
    "reentrant checkpoint": (lambda: Checkpointed(True), outputs_and_grads),
    "weight_norm": (normed, outputs_and_grads),
    "weight_norm as a hook": (old_normed, outputs_and_grads),
    "a function of the weight": (blocks, lambda m: F.linear(X, m[2].weight)),
    "a chunked loss": (blocks, chunked),
    "functional_call": (blocks, lambda m: torch.func.functional_call(m, {"2.bias": torch.ones(4)}, (X,))),
    "functional_call of all": (blocks, lambda m: torch.func.functional_call(m, dict(m.named_parameters()), (X,))),
    "vmap": (blocks, lambda m: torch.vmap(m)(X)),
    "AveragedModel": (blocks, averaged),
    "parameters_to_vector": (blocks, lambda m: parameters_to_vector(m.parameters())),
    "norm": (blocks, lambda m: [p.norm() for p in m.parameters()]),
    "clamp": (blocks, lambda m: [p.data.clamp_(-0.1, 0.1) for p in m.parameters()]),
    "state_dict": (blocks, lambda m: list(m.state_dict().values())),
    "load_state_dict": (blocks, loaded),
    "deepcopy": (blocks, lambda m: list(copy.deepcopy(m).parameters())),
    "save": (blocks, saved),
    "pickle": (blocks, lambda m: list(pickle.loads(pickle.dumps(m)).parameters())),
    "double": (blocks, lambda m: m.double()(X.double())),
    "replica": (blocks, lambda m: m[0]._replicate_for_data_parallel().up(X)),
    "values": (blocks, lambda m: list(m[2]._parameters.values())),
    "items": (blocks, lambda m: [p for _, p in m[2]._parameters.items()]),
    "get": (blocks, lambda m: m[2]._parameters.get("weight")),
    "setdefault": (blocks, lambda m: m[2]._parameters.setdefault("weight")),
    "pop": (blocks, lambda m: m[2]._parameters.pop("weight")),
    "popitem": (blocks, lambda m: m[2]._parameters.popitem()[1]),
    "copy": (blocks, lambda m: list(m[2]._parameters.copy().values())),
    "copy.copy": (blocks, lambda m: list(copy.copy(m[2]._parameters).values())),
    "dict": (blocks, lambda m: list(dict(m[2]._parameters).values())),
    "two stars": (blocks, lambda m: list({**m[2]._parameters}.values())),
    "or": (blocks, lambda m: list((m[2]._parameters | {}).values())),
    "or from the right": (blocks, lambda m: list(({} | m[2]._parameters).values())),
    "repr": (blocks, lambda m: torch.tensor("nan" not in repr(m[2]._parameters))),
}


def leaves(result):
    return [t.detach().clone() for t in torch.utils._pytree.tree_leaves(result) if isinstance(t, torch.Tensor)]


def twins(make):
    made = []
    for _ in range(2):
        torch.manual_seed(0)
        made.append(make())
    return made


def read_late(make, use):
    """What `use` reads from a model whose parameters are all under way, and what it should read."""
    model, expected = twins(make)
    late = Late()
    guards = ModelGuards(model, model.parameters(), late)
    assert guards.guarded == {id(p) for p in model.parameters()}
    assert guards.intact()
    late.depart(list(model.parameters()))
    return leaves(use(model)), leaves(use(expected))


def are_equal(got, expected):
    return len(got) == len(expected) > 0 and all(torch.equal(g, e) for g, e in zip(got, expected, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_who_reads_a_parameter_waits_for_it(way):
    got, expected = read_late(*WAYS[way])
    assert are_equal(got, expected)
    assert not any(e.isnan().any() for e in expected)


@pytest.mark.parametrize(
    ("kind", "method", "way"),
    [
        (ModuleHook, "__call__", "kept"),
        (ModuleHook, "wait_for", "a function of the weight"),
        (WaitingDict, "__getitem__", "attention"),
        (WaitingDict, "get", "get"),
        (WaitingDict, "items", "items"),
        (WaitingDict, "values", "values"),
        (WaitingDict, "setdefault", "setdefault"),
        (WaitingDict, "pop", "pop"),
        (WaitingDict, "popitem", "popitem"),
        (WaitingDict, "__iter__", "dict"),
        (WaitingDict, "__repr__", "repr"),
    ],
)
def test_without_a_guard_something_is_read_too_early(monkeypatch, kind, method, way):
    """The test above detects each missing guard: none of them is redundant."""
    if kind is WaitingDict:
        monkeypatch.delattr(kind, method)
    else:
        monkeypatch.setattr(kind, method, lambda *args: None)
    assert not are_equal(*read_late(*WAYS[way]))


def test_modules_wait_in_the_order_of_use_and_each_for_its_own():
    model = blocks()
    late = Late()
    ModelGuards(model, model.parameters(), late)
    late.depart(list(model.parameters()))
    model[0](X)
    coming, waits = set(late.coming), list(late.waits)
    names = {id(p): name for name, p in model.named_parameters()}
    assert [[names[i] for i in wait] for wait in waits if len(wait) > 1] == [
        ["0.up.weight", "0.up.bias"],
        ["0.down.weight", "0.down.bias"],
    ]
    assert waits[0] == [id(model[0].scale)]
    assert coming == {id(p) for p in model[1:].parameters()}


def test_nothing_waits_while_nothing_is_under_way():
    model = blocks()
    late = Late()
    ModelGuards(model, model.parameters(), late)
    for make, use in WAYS.values():
        if make is blocks:
            model = blocks()
            ModelGuards(model, model.parameters(), late)
            use(model)
    assert late.waits == []  # and wait() asserts that it is active


def test_others_parameters_are_not_waited_for():
    model = blocks()
    late = Late()
    guards = ModelGuards(model, model[0].parameters(), late)
    assert guards.guarded == {id(p) for p in model[0].parameters()}
    assert type(model[1]._parameters) is dict
    assert type(model[2]._parameters) is dict
    outside = nn.Parameter(torch.ones(1))
    assert ModelGuards(model[2], [outside], late).guarded == set()


def test_two_optimizers_share_a_model_but_no_module():
    model = blocks()
    one, other = Late(), Late()
    first = ModelGuards(model, model[0].parameters(), one)
    ModelGuards(model, model[1].parameters(), other)
    for guards, part in ((one, model[0]), (other, model[1])):
        guards.depart(list(part.parameters()))
    assert not model(X).isnan().any()
    with pytest.raises(CSDRuntimeError, match="Linear already waits for another optimizer's parameters"):
        ModelGuards(model, [model[0].up.bias], other)
    first.remove()
    assert ModelGuards(model, [model[0].up.bias], other).guarded == {id(model[0].up.bias)}


# ---- zero_grad ----------------------------------------------------------------------------


def with_gradients():
    model = blocks()
    model(X).sum().backward()
    late = Late()
    ModelGuards(model, model.parameters(), late)
    late.depart(list(model.parameters()))
    return model, late


def test_zero_grad_of_the_model_waits_for_nothing():
    model, late = with_gradients()
    model.zero_grad()
    assert late.waits == []
    assert not model(X).isnan().any()
    assert all(p.grad is None for p in model.parameters())


def test_zero_grad_in_place_waits_for_each_before_it_writes():
    model, late = with_gradients()
    seen = []
    wait = late.wait

    def looking(params):
        seen.extend(p.grad.abs().sum().item() for p in params if id(p) in late.coming)
        wait(params)

    late.wait = looking
    model.zero_grad(set_to_none=False)
    assert late.coming == {}
    assert len(seen) == len(list(dict(model.named_parameters())))
    assert any(seen)  # all zeros, had zero_grad() written before it waited
    assert not any(p.grad.any() for p in model.parameters())


def test_a_zero_grad_of_ones_own_waits():
    class Own(Block):
        def zero_grad(self, set_to_none=True):
            for p in self.parameters():
                p.grad = None

    model = Own()
    late = Late()
    ModelGuards(model, model.parameters(), late)
    late.depart(list(model.parameters()))
    model.zero_grad()
    assert late.coming == {}


# ---- torch.compile -------------------------------------------------------------------------


def compiled_whole(model, counter):
    whole = torch.compile(model, backend=counter, fullgraph=True)
    return whole, whole


def compiled_blocks(model, counter):
    model[0].compile(backend=counter, fullgraph=True)
    model[1] = torch.compile(model[1], backend=counter, fullgraph=True)
    return model, model


def compiled_class(model, counter):
    class Compiled(nn.Sequential):
        forward = torch.compile(nn.Sequential.forward, backend=counter, fullgraph=True)

    model.__class__ = Compiled
    return model, model


def compiled_around(model, counter):
    return torch.compile(lambda x: model(x) + model[2].weight.sum(), backend=counter, fullgraph=True), model


def steps_of(how):
    """Runs twenty steps. Returns outputs, those of a twin, frames compiled by the end of each step, and the guards."""
    torch.compiler.reset()
    model, expected = twins(blocks)
    counter, late = CompileCounterWithBackend("eager"), Late()
    call, outer = how(model, counter)
    call(X)  # compiles before the guards are in place
    guards = ModelGuards(outer, model.parameters(), late)
    got, wanted, frames = [], [], []
    for step in range(20):
        for one, other in zip(model.parameters(), expected.parameters(), strict=True):
            with torch.no_grad():
                one.add_(0.01)
                other.add_(0.01)
        if step % 3:
            late.depart(list(model.parameters()))
            late.wait([p for p, _ in list(late.coming.values()) if id(p) not in guards.guarded])
        out = call(X)
        if late.active:
            late.land()
        got.append(out)
        wanted.append(expected(X) + (expected[2].weight.sum() if how is compiled_around else 0))
        frames.append(counter.frame_count)
    assert guards.intact()
    return leaves(got), leaves(wanted), frames, guards


@pytest.mark.parametrize("how", [compiled_whole, compiled_blocks, compiled_class])
def test_compiled_modules_wait_outside_of_their_graphs(how):
    got, wanted, frames, guards = steps_of(how)
    assert are_equal(got, wanted)
    assert frames[0] == frames[-1] <= 4  # compiled once more than without guards
    assert len(guards.guarded) == 12


def test_what_a_compiled_function_reads_is_no_longer_guarded():
    got, wanted, frames, guards = steps_of(compiled_around)
    assert are_equal(got, wanted)
    assert frames[0] == frames[-1] == 2  # compiled once more than without guards
    assert guards.guarded == set()


def test_without_its_guard_a_compiled_module_computes_with_old_weights(monkeypatch):
    def through(self, *args):
        self.state.is_running = True
        return self.compiled(*args)

    monkeypatch.setattr(CompiledCall, "__call__", through)
    got, wanted, _, _ = steps_of(compiled_whole)
    assert not are_equal(got, wanted)


def test_a_compiled_function_that_gave_nothing_up_would_compute_with_old_weights(monkeypatch):
    monkeypatch.setattr(module_guards, "give_up", lambda number: True)
    got, wanted, _, _ = steps_of(compiled_around)
    assert not are_equal(got, wanted)


def test_what_is_compiled_after_the_nets_is_noticed():
    model = blocks()
    guards = ModelGuards(model, model.parameters(), Late())
    model[1].compile(backend="eager")
    assert not guards.intact()
    guards.remove()
    guards = ModelGuards(model, model.parameters(), Late())
    assert guards.intact()
    model.forward = torch.compile(model.forward, backend="eager")
    assert not guards.intact()
    guards.remove()
    assert not isinstance(model[1]._compiled_call_impl, CompiledCall)


def test_between_two_graphs_modules_wait_for_themselves():
    """Python code between two graphs is not compiled, so it does not give up parameters."""

    class Eager(Block):
        @torch.compiler.disable
        def forward(self, x):
            return super().forward(x) @ self.up.weight.T

    torch.compiler.reset()
    model, expected = twins(Eager)
    late = Late()
    guards = ModelGuards(model, model.parameters(), late)
    model.register_forward_pre_hook(lambda module, args: torch._dynamo.graph_break(), prepend=True)
    late.depart(list(model.parameters()))
    assert torch.equal(torch.compile(lambda x: model(x), backend="eager")(X), expected(X))
    assert late.waits
    assert guards.guarded == {id(p) for p in model.parameters()}


# ---- models that are copied, saved, changed, restored ----------------------------------------


def test_copies_have_plain_dicts_and_hooks_that_do_nothing():
    model = blocks()
    late = Late()
    ModelGuards(model, model.parameters(), late)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert {type(m._parameters) for m in other.modules()} == {dict}
        assert [type(h) for m in other.modules() for h in m._forward_pre_hooks.values()].count(ModuleHook) == 0
        late.active = True
        assert torch.equal(other(X), model(X))
        assert late.waits
        late.waits.clear()
        other(X)
        assert late.waits == []
        late.active = False
    assert list(copy.deepcopy(model).state_dict()) == list(model.state_dict())


def test_a_pickled_model_can_be_read_without_csd_optim():
    model = blocks()
    ModelGuards(model, model.parameters(), Late())
    assert b"csd_optim" not in pickle.dumps(nn.Sequential(model[2]))


def test_a_compiled_forward_is_copied_as_it_was():
    model = Block()
    model.forward = torch.compile(model.forward, backend="eager")
    forward = model.forward
    guards = ModelGuards(model, model.parameters(), Late())
    assert isinstance(model.forward, CompiledCall)
    assert copy.copy(model.forward) is forward
    guards.remove()
    assert model.forward is forward


def moved(model):
    model.tail = nn.Linear(4, 4)
    model.tail.weight = model.first.weight


def assigned(model):
    model.load_state_dict({n: v.clone() for n, v in model.state_dict().items()}, assign=True)


def unhooked(model):
    model.first._forward_pre_hooks.clear()


def new_dict(model):
    model.first.__dict__["_parameters"] = dict(model.first._parameters)


def new_class(model):
    model.first.__class__ = type("Sharded", (nn.Linear,), {})


def deleted(model):
    del model.first.bias


@pytest.mark.parametrize("change", [moved, assigned, unhooked, new_dict, new_class, deleted])
def test_a_model_that_was_changed_is_noticed(change):
    model = Tied()
    guards = ModelGuards(model, model.parameters(), Late())
    assert guards.intact()
    change(model)
    assert not guards.intact()
    guards.remove()
    guards = ModelGuards(model, model.parameters(), Late())
    assert guards.intact()


def test_a_module_without_parameters_of_ours_may_come_and_go():
    model = Tied()
    guards = ModelGuards(model, list(model.parameters()), Late())
    model.dropout = nn.Dropout()
    model.other = nn.Linear(4, 4)
    assert guards.intact()


def test_all_is_as_before_once_the_nets_are_removed():
    model = Tied()
    model.first.register_forward_pre_hook(lambda module, args: None)
    before = {name: (m._parameters, list(m._parameters.items()), set(m.__dict__)) for name, m in model.named_modules()}
    late = Late()
    guards = ModelGuards(model, model.parameters(), late)
    shallow = copy.copy(model.first)
    assert {type(m._parameters) for m in model.modules() if m._parameters} == {WaitingDict}
    guards.remove()
    for name, module in model.named_modules():
        plain, items, attributes = before[name]
        assert module._parameters is plain
        assert type(plain) is dict
        assert [(n, id(p)) for n, p in plain.items()] == [(n, id(p)) for n, p in items]
        assert set(module.__dict__) == attributes
        assert not any(isinstance(hook, ModuleHook) for hook in module._forward_pre_hooks.values())
    assert guards.guarded == set()
    late.active = True
    model(X)
    shallow(X)  # this copy still has the guards
    assert late.waits == []


def test_removed_nets_leave_what_was_assigned_meanwhile():
    model = nn.Linear(4, 4)
    guards = ModelGuards(model, model.parameters(), Late())
    model.extra = nn.Parameter(torch.ones(1))
    del model.bias
    guards.remove()
    assert list(model._parameters) == ["weight", "extra"]


def test_a_model_is_freed_at_once():
    model = blocks()
    guards = ModelGuards(model, model.parameters(), Late())
    gone = weakref.ref(model[0])
    gc.disable()
    try:
        del model, guards
        assert gone() is None
    finally:
        gc.enable()


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")
def test_a_script_module_is_not_guarded():
    script = torch.jit.script(nn.Linear(4, 4))
    model = nn.Sequential(nn.Linear(4, 4), script)
    late = Late()
    guards = ModelGuards(model, model.parameters(), late)
    assert guards.guarded == {id(p) for p in model[0].parameters()}
    assert guards.intact()
    late.depart(list(model[0].parameters()))
    assert not model(X).isnan().any()
    guards.remove()


def test_what_makes_a_step_fail_reaches_who_waits():
    model = blocks()
    late = Late()
    ModelGuards(model, model.parameters(), late)
    late.depart(list(model.parameters()))

    def wait(params):
        raise CSDRuntimeError("the drive is gone")

    late.wait = wait
    for use in (lambda: model(X), lambda: model[2].weight, lambda: list(model.parameters())):
        with pytest.raises(CSDRuntimeError, match="the drive is gone"):
            use()


@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # it returns views
@pytest.mark.parametrize("grouped", [False, True])
def test_fsdp_gathers_what_has_arrived(grouped, tmp_path):
    """Shards arrive before they are all-gathered, by a forward, another unit's forward (prefetch), or unshard()."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    dist.init_process_group("gloo", init_method=f"file://{tmp_path / 'ranks'}", rank=0, world_size=1)
    try:
        model, expected = twins(blocks)
        mesh = init_device_mesh("cpu", (1,))
        for units in [[*model[:2]]] if grouped else model[:2]:
            fully_shard(units, mesh=mesh)
        fully_shard(model, mesh=mesh)
        model[0].set_modules_to_forward_prefetch([model[1]])
        late = Late()
        guards = ModelGuards(model, model.parameters(), late)
        assert len(guards.guarded) == 12
        model(X).sum().backward()  # FSDP inspects all parameters once
        params = list(model.parameters())
        for _ in range(3):
            late.depart(params)
            late.waits.clear()
            out = model(X)
            assert torch.equal(out, expected(X))
            out.sum().backward()
            assert guards.intact()
            assert not late.coming
            # If grouped, the first block gathers both blocks at once.
            assert [len(wait) for wait in late.waits if len(wait) > 2] == ([10] if grouped else [5, 5])
            late.depart(params)
            model[1].unshard()
            assert len(late.coming) == (2 if grouped else 7)
            model[1].reshard()
            late.land()
        guards.remove()
        assert {type(m._parameters) for m in model.modules()} == {dict}
        assert not any("unshard" in vars(m._get_fsdp_state()._fsdp_param_group) for m in model[:2])
        assert torch.equal(model(X), expected(X))
    finally:
        dist.destroy_process_group()


# ---- group["params"] -----------------------------------------------------------------------


def late_list():
    params = [nn.Parameter(torch.full((2,), float(i + 1))) for i in range(3)]
    late = Late()
    return WaitingList(params, late), late, params


LIST_WAYS = {
    "__iter__": lambda ps: [p.clone() for p in ps],
    "list": lambda ps: [p.clone() for p in list(ps)],
    "star": lambda ps: [p.clone() for p in [*ps]],
    "tuple": lambda ps: [p.clone() for p in tuple(ps)],
    "__reversed__": lambda ps: [p.clone() for p in reversed(ps)],
    "__getitem__": lambda ps: [ps[0].clone()],
    "slice": lambda ps: [p.clone() for p in ps[1:]],
    "__add__": lambda ps: [p.clone() for p in ps.__add__([])],
    "__mul__": lambda ps: [p.clone() for p in ps * 2],
    "pop": lambda ps: [ps.pop().clone()],
    "copy": lambda ps: [p.clone() for p in ps.copy()],
    "__repr__": lambda ps: [torch.tensor(float("nan") if "nan" in repr(ps) else 1.0)],
    "deepcopy": lambda ps: copy.deepcopy(ps),
    "__reduce_ex__": lambda ps: pickle.loads(pickle.dumps(ps)),
    "clip": lambda ps: [torch.nn.utils.get_total_norm(ps)],
}


@pytest.mark.parametrize("way", LIST_WAYS)
def test_the_list_of_a_group_waits(way):
    params, late, _ = late_list()
    late.depart(list.copy(params))
    got = LIST_WAYS[way](params)
    assert got
    assert not any(t.isnan().any() for t in got)
    assert late.coming == {}


@pytest.mark.parametrize("method", [way for way in LIST_WAYS if hasattr(list, way)])
def test_a_list_that_does_not_wait_shows(monkeypatch, method):
    if method == "__reduce_ex__":
        monkeypatch.setattr(WaitingList, method, lambda self, protocol: (list, (list.copy(self),)))
    else:
        monkeypatch.delattr(WaitingList, method)
    params, late, _ = late_list()
    late.depart(list.copy(params))
    assert any(t.isnan().any() for t in LIST_WAYS[method](params))


def test_the_list_is_a_list():
    params, late, plain = late_list()
    late.active = True
    assert len(params) == 3
    params.append(extra := nn.Parameter(torch.ones(1)))
    assert [id(p) for p in list.copy(params)] == [id(p) for p in [*plain, extra]]
    assert late.waits == []
    late.active = False
    for other in (
        copy.deepcopy(params),
        copy.copy(params),
        pickle.loads(pickle.dumps(params)),
        params.__add__([]),
        params[:],
    ):
        assert type(other) is list
        assert len(other) == 4
    assert late.waits == []
