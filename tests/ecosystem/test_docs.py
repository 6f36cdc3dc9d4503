"""The pages do what they say: every snippet runs, and every link and path leads somewhere.

A snippet runs by itself, with a temporary directory for /mnt, a model, and batches. If it needs more, or if it must do
more than make an optimizer that trains, there is a generator (see `starts`): it prepares the snippet before its
`yield`, and checks the result after it. Snippets that are not run are listed in NOT_RUN.
"""

import contextlib
import functools
import importlib.util
import io
import json
import os
import re
import resource
import shlex
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from support.cards import needs_xrt
from support.forked import module
from support.owners import Owner
from support.ranks import on_ranks
from support.snippets import ON_RANKS, PAGES, RECIPES, ROOT, SCRIPTS, Snippet, on_page, snippets
from torch import nn
from trainers import library, llama, texts

import csd_optim
from csd_optim import CSDAdam, CSDError, CSDOSError, Replica
from csd_optim.cli import benchmark, facts
from csd_optim.trainers import log_stats, scalars

CARD, RUNS_THIS, VITIS = "needs a SmartSSD", "is what runs this test", "needs Vitis"
TRAINERS = "make trainers does the same: tests/frameworks/"
NOT_RUN = {  # the beginning of a command, or of a Python snippet's first line: the reason why it is not run
    "make demo": "test_demo.py runs it, with fewer steps",
    "make emu-demo": "minutes; test_demo.py runs the demo, and test_xrt.py what it needs of cards",
    "make quick": "runs tests beside this",
    "make test": RUNS_THIS,
    "make ci": RUNS_THIS,
    "make trainers": "an hour, and downloads several GB",
    "make matrix": "hours, and downloads several GB",
    "make gpu-check": "needs an accelerator; tests/accelerator/test_accelerator_bench.py tests it",
    "make check": "make ci runs it beside this",
    "make lint": "make ci runs it beside this",
    "make wheels": "minutes; test_wheel.py builds one",
    "make release-check": "minutes, and downloads torch for each Python; test_wheel.py and test_release.py do a part",
    "make aarch64": "minutes, and needs a cross compiler",
    "make docs": "make ci runs it beside this",
    "make types": "make ci runs it beside this",
    "make sanitize": "make ci runs it beside this",
    "make soak": "minutes; test_crash.py does the same in short",
    "make tables": "test_bench.py runs it, on a copy of the page",
    "build/venv/bin/": RUNS_THIS,
    "make -C hls_kernels": VITIS,
    "sudo make -C hls_kernels": VITIS,
    "python -m bench.": "test_bench.py, test_kernel_model.py and test_accuracy.py run them, at tiny size",
    "mkdir -p ~/xrt": "leaves links in the home directory",
    "from csd_optim.integrations.torchtitan import": TRAINERS,
    "# timm": TRAINERS,
    "# skorch": TRAINERS,
    "# fastai": TRAINERS,
    "csd-optim follow policy": "follows until it is stopped; tests/publish/test_format.py has what it does",
    "from vllm.": "tests/publish/test_vllm.py has what it does",
    "csd-optim inspect policy": "tests/publish/test_format.py has what it does",
    "csd-optim serve ": "serves until it is stopped; tests/serve/ has what it does",
    "sudo xbmgmt": CARD,
    "xbutil": CARD,
    "sudo xbutil": CARD,
    "sudo mk": CARD,
    "csd-optim devices xrt:0": CARD,
    "csd-optim devices --probe xrt:0": CARD,
    "ddp = DistributedDataParallel(model)": "tests/distributed/test_push_hook.py has that hook",
    'opt = CSDAdam(model.parameters(), lr=3e-4, devices=["gpu:': "needs an accelerator; test_gpu.py has what it does",
    'opt = CSDAdam(model.parameters(), lr=3e-4, devices=["xrt:0"])': CARD + "; test_xrt.py has emulated ones",
}
# Arguments that are added to these commands.
SMALLER = {f"csd-optim {name}": ["--params", "1e5"] for name in ("bench", "doctor")}
SMALLER["csd-optim top"] = ["--interval", "0.1"]


def why_not(beginning):
    """Return the entry of NOT_RUN for a snippet or command, or None."""
    return next((key for key in NOT_RUN if beginning.startswith(key)), None)


def each(chosen):
    return pytest.mark.parametrize("snippet", list(chosen), ids=str)


ALONE = "opt = CSDAdam(model.parameters(), lr=1e-6"  # of the snippet about publishing that is for one process


# ---- what snippets need, and what they must do ------------------------------------------------


class Net(nn.Module):
    """A model with an embedding and blocks, as in docs/topk.md."""

    def __init__(self):
        super().__init__()
        self.embedding, self.blocks = nn.Embedding(64, 128), nn.Sequential(nn.Linear(128, 64), nn.Tanh())

    def forward(self, x):
        return self.blocks(self.embedding(x))


def batch(i):
    return torch.randint(64, (8,))  # from torch's generator, which a resumed run must restore


def loss(model, x):
    return model(x).square().mean()


def train_model(model, opt, steps):
    for i in range(steps):
        loss(model, batch(i)).backward()
        opt.step()
        opt.zero_grad()


def given():
    """Return the names that snippets of every page may use."""
    torch.manual_seed(0)
    model = Net()
    names = {"torch": torch, "os": os, "CSDAdam": CSDAdam, "CSDOSError": CSDOSError, "model": model, "loss": loss}
    names |= {
        name: getattr(torch.optim.lr_scheduler, name) for name in ("LinearLR", "CosineAnnealingLR", "SequentialLR")
    }
    return names | {"batch": batch, "steps": 6, "warmup": 4, "parameters": list(model.parameters())}


@dataclass
class Reading:
    """A snippet with its working directory and the names it sees."""

    snippet: Snippet
    directory: Path  # in place of /mnt
    run: object  # the fixture that runs commands
    names: dict


STARTS = []  # page, a text that the snippet contains, and a generator that prepares and checks it


def starts(page, text=""):
    def register(function):
        STARTS.append((on_page(page, text), contextlib.contextmanager(function)))
        return function

    return register


@contextlib.contextmanager
def trains(reading):
    """The default check: the snippet makes an optimizer that trains on the devices named in it."""
    yield
    opt, model = reading.names.get("opt") or reading.names["optimizer"], reading.names["model"]
    before = [p.detach().clone() for p in model.parameters()]
    train_model(model, opt, 2)
    assert all((p != b).any() and p.isfinite().all() for p, b in zip(model.parameters(), before, strict=True))
    opt.close()
    for name in re.findall(r"/mnt/(\w+)", reading.snippet.text):
        assert (reading.directory / name / "csd_optim.store").stat().st_size > 0


@starts("docs/settings.md", "opt.state[p]")
def an_optimizer(reading):
    model, f = reading.names["model"], io.BytesIO()
    opt, p = CSDAdam(model.parameters()), model.embedding.weight
    train_model(model, opt, 1)
    master = opt.state[p]["master"].clone()
    reading.names.update(opt=opt, p=p, f=f)
    yield
    f.seek(0)
    adamw = torch.optim.AdamW(model.parameters())
    adamw.load_state_dict(torch.load(f))
    assert torch.equal(adamw.state[p]["master"], master)
    with pytest.raises(CSDError, match="closed"):
        train_model(model, opt, 1)


@starts("docs/settings.md", "p.clamp_(-1, 1)")
def a_large_parameter(reading):
    p = reading.names["p"] = nn.Parameter(torch.full((100,), 3.0, dtype=torch.bfloat16))
    opt = CSDAdam([p], lr=0.0)
    p.grad = torch.zeros_like(p)
    opt.step()
    assert (p == 3).all()
    yield
    opt.step()
    assert (opt.state[p]["master"] == 1).all()
    assert (p == 1).all()


@starts("docs/settings.md", "except CSDOSError")
def a_full_drive(reading):
    """Limit files to one page, as on a full drive, until room is made."""
    model = reading.names["model"]
    opt = reading.names["opt"] = CSDAdam(model.parameters(), devices=reading.directory / "nvme0")
    loss(model, batch(0)).backward()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with contextlib.redirect_stdout(io.StringIO()) as out:
            yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert out.getvalue().startswith("step 1: ")
    opt.step()
    opt.synchronize()
    assert opt.committed_step == 1


class Crash(Exception):
    pass


def crashes_and_goes_on(snippet, directory):
    """A run that crashes before its fourth step and is started again ends with the bits of one that does not crash."""

    def run(where, crash_at=None):
        def batch_or_crash(i):
            if i == crash_at:
                raise Crash
            batches.append(i)
            return batch(i)

        batches = []
        where.mkdir(exist_ok=True)
        names = given() | {"batch": batch_or_crash}
        with contextlib.suppress(Crash):
            snippet.execute(names, where)
        names["opt"].close()
        return batches, [p.detach() for p in names["model"].parameters()]

    crashed, _ = run(directory / "crashing", 3)
    resumed, params = run(directory / "crashing")
    whole, expected = run(directory / "whole")
    assert (crashed, resumed, whole) == ([0, 1, 2], [3, 4, 5], [0, 1, 2, 3, 4, 5])
    assert all(map(torch.equal, params, expected))


@starts("docs/resume.md", "opt.save(")
def a_store(reading):
    model, devices = reading.names["model"], [reading.directory / f"nvme{i}" for i in range(2)]
    opt = reading.names["opt"] = CSDAdam(model.parameters(), devices=devices)
    train_model(model, opt, 2)
    (reading.directory / "backup").mkdir()
    yield
    opt.synchronize()
    for i, p in enumerate(model.parameters()):
        for key, value in opt.state[p].items():
            assert torch.equal(reading.names["state"]["state"][i][key], value)
    opt.close()
    del reading.names["state"]  # it would keep the snapshot in use
    for step in ("step-1000", "step-2000"):
        snapshot = [reading.directory / f"backup/{step}/device-{i}" for i in range(2)]
        CSDAdam(model.parameters(), devices=snapshot, resume=True).close()


@contextlib.contextmanager
def overlapped():
    """Record the models with which overlap(model, backward=True) is called; the call itself goes through."""
    calls, overlap = [], CSDAdam.overlap

    def noted(optimizer, model, *, backward):
        assert backward
        calls.append(model)
        overlap(optimizer, model, backward=True)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CSDAdam, "overlap", noted)
        yield calls


@starts("docs/overlap.md", "backward=True")
def an_optimizer_without_overlap(reading):
    reading.names["opt"] = CSDAdam(reading.names["model"].parameters())
    with overlapped() as calls, trains(reading):
        yield
    assert calls == [reading.names["model"]]


@starts("docs/overlap.md", "free_gradients=True")
def an_optimizer_whose_gradients_stay(reading):
    reading.names["opt"] = CSDAdam(reading.names["model"].parameters())
    opt = reading.names["opt"]
    with trains(reading):
        yield
        train_model(reading.names["model"], opt, 1)
        assert opt.stats()["overlap"]["early_params"] > 0


@starts("docs/publish.md", ALONE)
def a_training_that_publishes(reading):
    yield
    assert (reading.names["pub"].version, reading.names["pub"].step) == (4, 3)


@starts("docs/publish.md", "csd_optim.Replica(")
def an_inference_process(reading):
    other = {}
    on_page("docs/publish.md", ALONE).execute(other, reading.directory)
    yield
    assert reading.names["replica"].version == 4
    assert all(map(torch.equal, reading.names["model"].parameters(), other["model"].parameters()))


@starts("docs/distributed.md", 'torch.load("state.pt"')
def an_export(reading):
    """The snippet loads the export of another run, which the command before it makes, and has that run's states."""
    names, other = reading.names, given()["model"]
    page = reading.snippet.page
    (export,) = (s for s in snippets("sh") if s.page == page and s.text.startswith("csd-optim export"))
    run_commands(export, reading.directory, reading.run, other)
    with torch.no_grad():
        for p in names["parameters"]:
            p.fill_(7)
    opt = names["optimizer"] = CSDAdam(names["model"].parameters())
    yield
    assert all(map(torch.equal, names["parameters"], other.parameters()))
    assert all((opt.state[p]["exp_avg"] != 0).any() and opt.state[p]["step"] == 2 for p in names["parameters"])


@starts("docs/optimizer-ranks.md", "serve://")
def an_owner(reading):
    with Owner(reading.directory) as there:

        def served(*arguments, devices, **options):
            return CSDAdam(
                *arguments, devices=devices.replace("serve://storage0:29600?key=owner.pem", there.address), **options
            )

        reading.names["CSDAdam"] = served
        with trains(reading):
            yield


@starts("docs/plan.md", "engine_rate(")
def a_prediction(reading):
    """The prediction is at least what two Gen4 drives take for the bytes of 7 B parameters."""
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield
    seconds, unit = out.getvalue().split()
    assert float(seconds) >= 16.9
    assert unit == "seconds"


# ---- trainers ------------------------------------------------------------------------------


def hugging_face_names():
    library("transformers")
    from transformers import Trainer, TrainerCallback, TrainingArguments

    arguments = TrainingArguments("out", max_steps=2, save_steps=1, use_cpu=True, disable_tqdm=True, report_to=[])
    data = [{"input_ids": text, "labels": text} for text in texts(4)]
    names = {"Trainer": Trainer, "TrainerCallback": TrainerCallback, "arguments": arguments, "data": data}
    return names | {"model": llama()}


def check_trainer(trainer):
    """Check that the trainer trains all parameters with CSDAdam, and saves its states."""
    trainer.train()
    optimizer = trainer.optimizer.optimizer
    assert isinstance(optimizer, CSDAdam)
    assert optimizer.stats()["params"] == sum(p.numel() for p in trainer.model.parameters())
    optimizer.close()
    saved = torch.load("out/checkpoint-2/optimizer.pt")
    assert all("master" in entry for entry in saved["state"].values())


@starts("docs/trainers.md", "optimizer_cls_and_kwargs=")
@starts("docs/trainers.md", "optimizers=(optimizer, schedule)")
def hugging_face(reading):
    reading.names.update(hugging_face_names())
    yield
    check_trainer(reading.names["trainer"])


@starts("docs/trainers.md", "class Consolidate")
def hugging_face_with_a_callback(reading):
    names = reading.names
    names.update(hugging_face_names())
    yield
    options = {"train_dataset": names["data"], "optimizer_cls_and_kwargs": (CSDAdam, {})}
    options["callbacks"] = [names["Consolidate"]()]
    consolidated = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(CSDAdam, "consolidate_state_dict", lambda optimizer: consolidated.append(optimizer))
        check_trainer(names["Trainer"](names["model"], names["arguments"], **options))
    assert len(consolidated) >= 2  # before each checkpoint


@starts("docs/trainers.md", "log_stats(trainer)")
def hugging_face_with_a_log(reading):
    names = hugging_face_names()
    options = {"train_dataset": names["data"], "optimizer_cls_and_kwargs": (CSDAdam, {})}
    trainer = names["Trainer"](names["model"], names["arguments"], **options)
    reading.names.update(trainer=trainer, log_stats=log_stats)
    before = len(trainer.callback_handler.callbacks)
    yield
    assert len(trainer.callback_handler.callbacks) == before + 1


@starts("docs/trainers.md", "writer.add_scalar")
def tensorboard(reading):
    written = []
    writer = SimpleNamespace(add_scalar=lambda *scalar: written.append(scalar))
    opt = CSDAdam(reading.names["model"].parameters())
    train_model(reading.names["model"], opt, 1)
    reading.names.update(writer=writer, scalars=scalars, opt=opt, step=7)
    yield
    assert {(name, step) for name, _, step in written} >= {("csd_optim/step_seconds", 7)}


@starts("docs/trainers.md", "class Overlap")
def hugging_face_with_overlap(reading):
    names = reading.names
    names.update(hugging_face_names())
    yield
    options = {"train_dataset": names["data"], "optimizer_cls_and_kwargs": (CSDAdam, {})}
    with overlapped() as calls:
        check_trainer(names["Trainer"](names["model"], names["arguments"], callbacks=[names["Overlap"]()], **options))
    assert calls == [names["model"]]


@starts("docs/trainers.md", "schedule = accelerator.prepare(")
def accelerate(reading):
    library("accelerate")
    from accelerate import Accelerator

    accelerator, names = Accelerator(cpu=True), reading.names
    names.update(accelerator=accelerator, loader=torch.utils.data.DataLoader(torch.arange(8), batch_size=4))
    yield
    model, optimizer = names["model"], names["optimizer"]
    for tokens in names["loader"]:
        accelerator.backward(loss(model, tokens))
        optimizer.step()
        names["schedule"].step()
    assert optimizer.optimizer.stats()["params"] == sum(p.numel() for p in model.parameters())
    accelerator.save_state("saved")
    assert all("master" in entry for entry in torch.load("saved/optimizer.bin")["state"].values())
    optimizer.optimizer.close()


@starts("docs/trainers.md", "loader = accelerator.prepare(")
def accelerate_with_overlap(reading):
    names = reading.names
    optimizer = CSDAdam(names["model"].parameters())
    names.update(optimizer=optimizer, schedule=torch.optim.lr_scheduler.ConstantLR(optimizer))
    with overlapped() as calls:
        yield from accelerate(reading)
    assert calls == [names["model"]]


@starts("docs/trainers.md", "accelerator.save_state(")
def accelerate_with_states_of_all_ranks(reading):
    library("accelerate")
    from accelerate import Accelerator

    accelerator, model = Accelerator(cpu=True), reading.names["model"]
    model, optimizer = accelerator.prepare(model, CSDAdam(model.parameters()))
    train_model(model, optimizer, 1)
    reading.names.update(accelerator=accelerator, optimizer=optimizer)
    yield
    assert all("master" in entry for entry in torch.load("checkpoint/optimizer.bin")["state"].values())


def lightning_trainer(**options):
    from lightning.pytorch import Trainer

    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(max_epochs=1, **({"accelerator": "cpu"} | quiet | options))


def fit(trainer, configure_optimizers, **hooks):
    """Train, and return the checkpoint."""
    from lightning.pytorch import LightningModule

    class Module(LightningModule):
        def __init__(self):
            super().__init__()
            self.net = Net()

        def training_step(self, tokens, i):
            return loss(self.net, tokens)

    Module.configure_optimizers = configure_optimizers
    for name, hook in hooks.items():
        setattr(Module, name, hook)
    trainer.fit(Module(), torch.utils.data.DataLoader(torch.arange(8), batch_size=4))
    trainer.save_checkpoint("out/saved.ckpt")
    (state,) = torch.load("out/saved.ckpt", weights_only=False)["optimizer_states"]
    assert all("master" in entry and entry["step"] == 2 for entry in state["state"].values())


@starts("docs/trainers.md", "def configure_optimizers")
def lightning(reading):
    library("lightning")
    yield
    fit(lightning_trainer(), reading.names["configure_optimizers"])
    assert (reading.directory / "nvme0/csd_optim.store").stat().st_size > 0


@starts("docs/trainers.md", "def on_fit_start")
def lightning_with_overlap(reading):
    library("lightning")
    yield
    with overlapped() as calls:
        on_fit_start = reading.names["on_fit_start"]
        fit(lightning_trainer(), lambda module: CSDAdam(module.parameters()), on_fit_start=on_fit_start)
    assert [type(module.net) for module in calls] == [Net]


def within(address, line):
    """Return whether an address is in the mapping that a line of /proc/self/maps describes."""
    first, _, end = line.split()[0].partition("-")
    return int(first, 16) <= address < int(end, 16)


@starts("docs/trainers.md", "class MappedCheckpoints")
def lightning_with_large_state(reading):
    library("lightning")
    from lightning.pytorch.plugins.io import TorchCheckpointIO
    from lightning.pytorch.strategies import SingleDeviceStrategy

    reading.names.update(TorchCheckpointIO=TorchCheckpointIO, SingleDeviceStrategy=SingleDeviceStrategy)
    reading.names["Trainer"] = lightning_trainer
    yield
    trainer = reading.names["trainer"]
    fit(trainer, lambda module: CSDAdam(module.parameters()))
    saved = trainer.strategy.load_checkpoint("out/saved.ckpt", weights_only=False)
    begin = saved["optimizer_states"][0]["state"][0]["master"].data_ptr()
    (mapping,) = (line for line in Path("/proc/self/maps").read_text().splitlines() if within(begin, line))
    assert mapping.endswith("out/saved.ckpt")


@starts("docs/trainers.md", "peft.LoraConfig(")
def low_rank_adapters(reading):
    library("transformers")
    reading.names.update(peft=library("peft"), model=llama())
    yield
    model, opt = reading.names["model"], reading.names["optimizer"]
    (tokens,) = texts(1).split(4)
    model(tokens, labels=tokens).loss.backward()
    opt.step()
    assert opt.stats()["params"] == 2 * 2 * (32 * 8 + 8 * 32)  # of two layers, two matrices each


@starts("docs/trainers.md", "torch.compile(")
def without_a_compiler(reading):
    reading.names["torch"] = SimpleNamespace(compile=functools.partial(torch.compile, backend="aot_eager"))
    with trains(reading):
        yield


# ---- Python --------------------------------------------------------------------------------

PUBLISHES = on_page("docs/publish.md", "init_process_group()")


@pytest.mark.filterwarnings("ignore:there is no store")
@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")
@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@each(s for s in snippets("python") if s not in [*ON_RANKS, *RECIPES, PUBLISHES] and not why_not(s.text))
def test_python(snippet, tmp_path, run):
    if "resume=True" in snippet.text:
        return crashes_and_goes_on(snippet, tmp_path)
    reading = Reading(snippet, tmp_path, run, given())
    with next((start for which, start in STARTS if which == snippet), trains)(reading):
        snippet.execute(reading.names, tmp_path)


def script(rank, snippet, directory, ports):
    """Run a script several times, with the environment variables of torchrun. Returns what it printed each time."""
    dist.barrier()  # until all have joined: a rank that still joins would find connections closed
    dist.destroy_process_group()  # the script makes one
    printed = []
    for port in ports:
        os.environ.update(MASTER_ADDR="localhost", MASTER_PORT=str(port))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            snippet.execute({"__name__": "__main__"}, directory)
        printed.append(out.getvalue().removeprefix(f"rank {rank}: ").strip())
    return printed


def free_ports(n):
    with contextlib.ExitStack() as stack:
        sockets = [stack.enter_context(socket.create_server(("localhost", 0))) for _ in range(n)]
        return [s.getsockname()[1] for s in sockets]


@pytest.mark.filterwarnings("ignore:there is no store")
@each(SCRIPTS)
def test_script_on_two_ranks(snippet, tmp_path):
    checkpoint = "/mnt/shared/checkpoint" in snippet.text
    for first, again in on_ranks(2, script, snippet, tmp_path, free_ports(2), directory=tmp_path):
        if checkpoint:  # resumes from it, in the middle
            assert first.startswith("loss ")
            assert again == first
        else:  # has nothing left to do
            assert first.startswith("step 20, ")
            assert " 0 " not in first
            assert again.startswith("step 20, 0 ")
    assert (tmp_path / "shared/checkpoint").exists() == checkpoint
    assert {p.name for p in tmp_path.glob("nvme*")} == {"nvme0", "nvme1"}


def test_ranks_publish_together(tmp_path):
    assert on_ranks(2, script, PUBLISHES, tmp_path, free_ports(1), directory=tmp_path) == [["4 3"]] * 2
    replica, copy = Replica(tmp_path / "policy"), {}
    replica.load(copy)
    replica.verify(copy)
    assert sorted(copy) == ["0.bias", "0.weight", "1.bias", "1.weight"]


def test_ranks_go_on_together(tmp_path):
    snippet = on_page("docs/distributed.md", "opt.user_state")
    on_ranks(2, goes_on, snippet, tmp_path, directory=tmp_path)


def goes_on(rank, snippet, directory):
    crashes_and_goes_on(snippet, directory)


def test_states_of_all_ranks_on_one(tmp_path):
    save, load = (on_page("docs/distributed.md", text) for text in (".consolidate_", 'torch.load("optimizer.pt"'))
    on_ranks(2, saves_and_loads, save, load, directory=tmp_path)


def saves_and_loads(rank, save, load):
    states = []
    for snippet in (save, load):
        names = given()
        names |= {"rank": rank, "optimizer": CSDAdam(names["model"].parameters())}
        if snippet is save:
            train_model(names["model"], names["optimizer"], 2)
        snippet.execute(names, ".")
        dist.barrier()
        states.append(
            [{k: v.to_local() for k, v in e.items() if k != "step"} for e in names["optimizer"].state.values()]
        )
    assert (states[0][0]["exp_avg"] != 0).any()
    for saved, loaded in zip(*states, strict=True):
        assert all(torch.equal(loaded[key], value) for key, value in saved.items())


# ---- configuration files -------------------------------------------------------------------


def texts_in(node):
    """Return the strings in what a YAML file says."""
    if isinstance(node, (dict, list)):
        return [text for part in (node.values() if isinstance(node, dict) else node) for text in texts_in(part)]
    return [node] if isinstance(node, str) else []


@each(snippets("yaml"))
def test_configuration(snippet):
    """It is valid YAML, and each csd_optim name in it exists; `make trainers` runs such a configuration."""
    parsed = library("yaml").safe_load(snippet.text)
    named = [v.rpartition(".") for v in texts_in(parsed) if v.startswith("csd_optim")]
    assert named
    for where, _, name in named:
        assert importlib.util.find_spec(where or name)
        assert where != "csd_optim" or hasattr(csd_optim, name)


# ---- commands ------------------------------------------------------------------------------

EMULATED = "csd-optim emu "


def to_run(snippet):
    return [c for c in snippet.commands() if not c.startswith(EMULATED) and not why_not(c)]


def run_commands(snippet, directory, run, model):
    """Run a snippet's commands in order, with the stores of a short training on the drives that they name."""
    if drives := sorted(set(re.findall("/mnt/nvme[0-9]", snippet.text))):
        with CSDAdam(model.parameters(), devices=[d.replace("/mnt", str(directory)) for d in drives]) as opt:
            train_model(model, opt, 2)
    for command in to_run(snippet):
        words = shlex.split(command.replace("/mnt/", f"{directory}/"))
        assert words[0] == "csd-optim", "neither ours nor in NOT_RUN"
        more = [word for key, words in SMALLER.items() if command.startswith(key) for word in words]
        code, out, err = run(*words[1:], *more)
        assert code == 0, err
        assert out


@each(s for s in snippets("sh") if to_run(s))
def test_commands(snippet, tmp_path, run, monkeypatch):
    monkeypatch.setattr(facts, "PROBE_BYTES", 16 << 20)
    monkeypatch.setattr(benchmark, "UPDATER_ELEMS", 1 << 16)
    monkeypatch.setattr(benchmark, "RAW_RUNS", 1)
    run_commands(snippet, tmp_path, run, given()["model"])


@each(snippets("console"))
def test_what_a_command_prints(snippet, run):
    command, _, shown = snippet.text.partition("\n")
    _, *words = shlex.split(command)
    if words[:2] == ["python", "-m"]:
        done = module(*words[2:])
        code, out = done.returncode, done.stdout
    else:
        assert words[0] == "csd-optim"
        code, out, _ = run(*words[1:])
    assert code == 0
    assert [line.rstrip() for line in out.rstrip().splitlines()] == shown.splitlines()


@needs_xrt
@pytest.mark.parametrize("command", sorted({c for s in snippets("sh") for c in s.commands() if c.startswith(EMULATED)}))
def test_emulated_cards(command, tmp_path):
    """Commands with emulated cards run a train.py that uses a card for each row of its parameter."""
    n = int(re.search(r"--devices (\d)", command)[1])
    (tmp_path / "train.py").write_text(
        "import torch\n"
        "from csd_optim import CSDAdam\n"
        f"p = torch.nn.Parameter(torch.ones({n}, 2000))\n"
        f"opt = CSDAdam([p], lr=0.1, devices=[f'xrt:{{i}}' for i in range({n})], tile_size=2048)\n"
        "p.grad = torch.ones_like(p)\n"
        "opt.step()\n"
        "print([[d['params'] for d in opt.stats()['devices']], p.mean().item()])\n"
    )
    words = shlex.split(command)
    words = [sys.executable, "-m", "csd_optim", *(sys.executable if w == "python" else w for w in words[1:])]
    done = subprocess.run(words, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    counts, mean = json.loads(done.stdout)
    assert sum(counts) == 2000 * n
    assert 0 not in counts
    assert mean == pytest.approx(1 - 0.1 * 0.01 - 0.1, abs=1e-4)


# ---- pages ---------------------------------------------------------------------------------

each_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@each_page
def test_every_block_says_what_it_is(page):
    """Every block has a language: otherwise a snippet would be overlooked, and not run."""
    fences = [line for line in page.read_text().splitlines() if line.lstrip().startswith("```")]
    assert all(fence == "```" for fence in fences[1::2])
    assert {*fences[::2]} <= {"```python", "```sh", "```console", "```text", "```yaml"}


def test_what_is_not_run_is_there():
    """Every entry of NOT_RUN matches a snippet; others must be removed."""
    beginnings = [c for s in snippets("sh") for c in s.commands()] + [s.text for s in snippets("python")]
    assert {why_not(b) for b in beginnings} - {None} == NOT_RUN.keys()


def anchors(page):
    titles = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


@each_page
def test_links(page):
    """Links within the project lead somewhere. Others cannot be tested without a network."""
    for link in re.findall(r"\]\((?!https://)([^)]+)\)", page.read_text()):
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_relative_to(ROOT), link
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


@each_page
def test_paths(page):
    """Files of the project that a page names exist. Names in capitals stand for what a reader will add."""
    named = re.findall(r"`((?:csd_optim|native|hls_kernels|bench|tests|docs)/[\w./-]*)`", page.read_text())
    assert [path for path in named if not re.search("[A-Z]{3}", path) and not (ROOT / path).exists()] == []


def test_the_index_has_every_page():
    docs = ROOT / "docs"
    linked = set(re.findall(r"\]\(([\w./-]+\.md)\)", (docs / "README.md").read_text()))
    pages = {page.relative_to(docs).as_posix() for page in docs.rglob("*.md")}
    assert {link for link in linked if not link.startswith("../")} == pages - {"README.md"}
