"""The first step of new parameters creates their states: it reads nothing from the devices, and no bit differs.

It writes the masters once more than later steps do, so that it can be undone.
"""

import pytest
import torch
from support.comparing import assert_same
from support.inside import engine_of

from csd_optim import CSDAdam, CSDWarning
from csd_optim.bindings import Native
from csd_optim.engine.engine import Engine
from csd_optim.store.format import read_contents
from csd_optim.store.reader import find_damage

SHAPES = (
    ((20000,), torch.float32),
    ((60, 70), torch.bfloat16),
    ((3001,), torch.float16),
    ((100, 90), torch.bfloat16),
    ((7,), torch.float32),
    ((33,), torch.complex64),
)


def model():
    generator = torch.Generator().manual_seed(1)
    params = [torch.randn(shape, generator=generator, dtype=torch.float32).to(dtype) for shape, dtype in SHAPES]
    params[3] = params[3].t()  # strides that no gradient of autograd's has
    return [torch.nn.Parameter(p) for p in params]


def give_gradients(params, step, without=()):
    generator = torch.Generator().manual_seed(100 + step)
    for i, p in enumerate(params):
        g = torch.randn(p.shape, generator=generator).to(p.dtype)
        p.grad = None if i in without else g


def image(opt, params):
    """The bits of parameters and states."""
    values = {}
    for i, p in enumerate(params):
        values[i] = p.detach().clone()
        values |= {(i, key): value.clone() for key, value in opt.state[p].items()}
    return values


def images_of(devices, steps, **options):
    params = model()
    with CSDAdam(params, lr=0.1, devices=devices, tile_size=1024, **options) as opt:
        images = []
        for step in range(steps):
            give_gradients(params, step)
            opt.step()
            images.append(image(opt, params))
    return images


def undone_in(opt, params, step, monkeypatch, after):
    """A step that fails after it has pushed `after` tiles."""
    give_gradients(params, step)
    push, pushed = Native.push, []

    def failing(*arguments):
        pushed.append(arguments)
        if len(pushed) > after:
            raise MemoryError
        push(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(Native, "push", failing)
        with pytest.raises(MemoryError):
            opt.step()


@pytest.mark.parametrize(
    "options",
    [{}, {"amsgrad": True}, {"topk": 0.05}, {"grad_dtype": torch.bfloat16}, {"max_grad_norm": 0.1}],
    ids=lambda options: next(iter(options), "plain"),
)
@pytest.mark.parametrize("kind", ["one", "several", "scratch"])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_it_reads_nothing_and_changes_no_bit(kind, options, tmp_path, monkeypatch):
    def devices(name):
        return {"one": [tmp_path / name], "several": [tmp_path / name, "ram:"], "scratch": ["file:"]}[kind]

    params = model()
    with CSDAdam(params, lr=0.1, devices=devices("new"), tile_size=1024, **options) as opt:
        give_gradients(params, 0)
        opt.step()
        stats = opt.stats()
        assert stats["flash_read_bytes"] == 0
        sections = 4 if "amsgrad" in options else 3
        if kind != "several" and "topk" not in options:  # else residuals are written, too, or states are in memory
            assert stats["flash_write_bytes"] == len(engine_of(opt).tiles) * (sections + 1) * 4 * 1024
        found = [image(opt, params)]
        for step in (1, 2):
            give_gradients(params, step)
            opt.step()
            found.append(image(opt, params))
    monkeypatch.setattr(Engine, "next_step_fills", lambda *_: False)
    for one, other in zip(found, images_of(devices("filled"), 3, **options), strict=True):
        assert_same(one, other)
    if kind == "one":
        assert not find_damage([read_contents(tmp_path / "new")])


@pytest.mark.here("an owner ends the session if it lacks memory")
@pytest.mark.parametrize("kind", ["store", "scratch"])
@pytest.mark.parametrize("options", [{}, {"topk": 0.05}, {"grad_dtype": torch.bfloat16}], ids=["plain", "topk", "cast"])
@pytest.mark.parametrize("after", [0, 5, 20])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_undone_it_leaves_nothing_and_comes_again(kind, options, after, tmp_path, monkeypatch):
    wanted = images_of("ram:", 3, **options)
    params = model()
    with CSDAdam(params, lr=0.1, devices=tmp_path if kind == "store" else "file:", tile_size=1024, **options) as opt:
        before = [p.detach().clone() for p in params]
        for _ in range(2):
            undone_in(opt, params, 0, monkeypatch, after)
            assert all(map(torch.equal, params, before))
            assert not any(opt.state.values())
        for step in range(3):
            give_gradients(params, step)
            opt.step()
            assert_same(image(opt, params), wanted[step])


@pytest.mark.here("an owner ends the session if it lacks memory")
@pytest.mark.parametrize("kind", ["store", "scratch"])
@pytest.mark.parametrize("then", ["without a gradient", "set", "moved", "loading", "saved"])
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_what_happens_between_an_undone_one_and_the_next(kind, then, tmp_path, monkeypatch):
    """Then all places are filled before the next step, also those in tiles that are partly written."""
    devices = "file:" if kind == "scratch" else tmp_path / "store"
    all_params, others = model(), model()
    options = {"lr": 0.1, "tile_size": 1024}
    with (
        CSDAdam(all_params, devices=devices, **options) as opt,
        CSDAdam(others, devices="ram:", **options) as reference,
    ):
        undone_in(opt, all_params, 0, monkeypatch, 20)
        without = ()
        for params in (all_params, others):
            if then == "without a gradient":
                without = (1, 4)
            elif then == "set":
                with torch.no_grad():
                    params[1].fill_(0.5)
            elif then == "moved":
                params[1].data = params[1].data.clone() * 2
        if then == "loading":
            with opt.loading():
                pass
        elif then == "saved" and kind != "scratch":
            give_gradients(all_params, 0)
            opt.save(tmp_path / "snapshot")
            assert not find_damage([read_contents(tmp_path / "snapshot" / "device-0")])
        for step in range(3):
            give_gradients(all_params, step, without if step == 0 else ())
            give_gradients(others, step, without if step == 0 else ())
            opt.step()
            reference.step()
        assert_same(image(opt, all_params), image(reference, others))


@pytest.mark.here("an owner ends the session if it lacks memory")
@pytest.mark.fp32_states("counts tiles, bytes or elements of fp32 states")
def test_closed_after_an_undone_one_there_is_no_store(tmp_path, monkeypatch):
    params = model()
    with CSDAdam(params, devices=tmp_path, tile_size=1024) as opt:
        undone_in(opt, params, 0, monkeypatch, 20)
    with pytest.warns(CSDWarning, match="no store"):
        CSDAdam(model(), devices=tmp_path, resume=True).close()


@pytest.mark.here("an owner ends the session if it lacks memory")
def test_parameters_that_join_later_after_an_undone_step(tmp_path, monkeypatch):
    """The store stays at the previous step, without the parameters that joined."""
    p, q = (torch.nn.Parameter(torch.full((5000,), value)) for value in (1.0, 2.0))
    with CSDAdam([p], devices=tmp_path, tile_size=1024) as opt:
        p.grad = torch.ones(5000)
        opt.step()
        first = p.detach().clone()
        opt.add_param_group({"params": [q]})
        q.grad = torch.ones(5000)
        with monkeypatch.context() as patch:
            patch.setattr(Native, "finish", _first_raises(Native.finish))
            with pytest.raises(MemoryError):
                opt.step()
        opt.state[p]["exp_avg"].add_(1)  # lost, because no further step commits it
    assert torch.equal(p, first)
    assert read_contents(tmp_path).superblock.step == 1
    p, q = (torch.nn.Parameter(torch.zeros(5000)) for _ in range(2))
    with CSDAdam([p], devices=tmp_path, resume=True) as opt:
        assert torch.equal(p, first)
        opt.add_param_group({"params": [q]})
        p.grad, q.grad = torch.ones(5000), torch.ones(5000)
        opt.step()
        assert opt.state[p]["step"] == 2
        assert opt.state[q]["step"] == 1


@pytest.mark.here("an owner ends the session if it lacks memory")
@pytest.mark.parametrize("devices", ["file:?scratch=1", None])
@pytest.mark.parametrize("state_dtype", ["fp32", "8bit"])
def test_parameters_that_join_an_undone_step_after_loading(state_dtype, devices, tmp_path, monkeypatch):
    """The step repeats as if it had not failed, wherever it did."""

    def image_after(after):
        params = model()
        place = devices or f"file:{tmp_path}/{after}"
        options = {"state_dtype": state_dtype, "tile_size": 1024}
        with CSDAdam(params[:3], lr=0.1, devices=place, **options) as opt:
            for step in range(3):
                give_gradients(params, step)
                opt.step()
            opt.load_state_dict(opt.state_dict())
            opt.add_param_group({"params": params[3:]})
            if after is not None:
                undone_in(opt, params, 3, monkeypatch, after)
            for step in range(3, 6):
                give_gradients(params, step)
                opt.step()
            return image(opt, params)

    expected = image_after(None)
    for after in (0, 1, 10):
        assert_same(image_after(after), expected)


def _first_raises(call):
    calls = []

    def finish(native, keep, ending=None):
        calls.append(keep)
        if len(calls) == 1:
            call(native, False)
            raise MemoryError
        call(native, keep, ending)

    return finish
