"""The recipes do what they say: each script runs as it stands, with a tiny model in place of a large one.

`/mnt` is a temporary directory. A script that promises to resume after a crash is stopped in the middle and run again;
it must end with the bits of a run that was not stopped.
"""

import json
import os
import re
import signal

import pytest
import torch
from support.comparing import assert_same
from support.snippets import ROOT, SCRIPTS, on_page
from trainers import library, llama

import csd_optim
from csd_optim import CSDAdam, CSDAdamL2, CSDMuon

ALPHABET = "adefhlmnortwy -;?#$"  # of the training text; the model has 20 tokens
RECIPES = sorted(page.stem for page in ROOT.glob("docs/recipes/*.md"))


class Stopped(Exception):
    pass


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """Run a script in a directory and return its names.

    `text`: what it contains, if the page has several.
    `constants` replace the script's own values. `stop`: stop the run after so many steps.
    """
    monkeypatch.chdir(tmp_path)

    def run(name, where="first", stop=None, text="", **constants):
        snippet, directory, steps = on_page(f"docs/recipes/{name}.md", text), tmp_path / where, []
        for folder in ("data", "nvme0", "nvme1"):
            (directory / folder).mkdir(parents=True, exist_ok=True)
        (directory / "data/train.txt").write_text("what a model may learn; " * 200)
        example = json.dumps({"prompt": "how many?", "completion": "forty-two"})
        (directory / "data/train.jsonl").write_text(f"{example}\n" * 10)
        text, step = snippet.text, CSDAdam.step
        for line in [line for line in text.splitlines() if " = " in line and line.partition(" = ")[0].isupper()]:
            names, values = (part.split(", ") for part in line.split("  #")[0].split(" = "))
            new = [str(constants.get(n, v)) for n, v in zip(names, values, strict=True)]
            text = text.replace(line, f"{', '.join(names)} = {', '.join(new)}")

        def counted(optimizer, *arguments, **named):
            result = step(optimizer, *arguments, **named)
            steps.append(optimizer)
            if stop and len(steps) == stop[0]:
                stop[1]()
            return result

        names = {"__name__": "__main__"}
        with pytest.MonkeyPatch.context() as patch:
            for of in (CSDAdam, CSDMuon):
                patch.setattr(of, "step", counted)
            try:
                type(snippet)(snippet.page, snippet.line, snippet.language, text).execute(names, directory)
            except Stopped:
                steps[-1].close()  # as if the process died: only what is committed remains
        return {**names, "steps": len(steps), "directory": directory}

    return run


def stopped():
    raise Stopped


@pytest.fixture
def hub(monkeypatch):
    """Replace parts of transformers by a model and a tokenizer that need no download."""
    transformers = library("transformers")

    tokenizers = library("tokenizers")
    characters = tokenizers.Tokenizer(tokenizers.models.WordLevel({c: i for i, c in enumerate(ALPHABET)}, "?"))
    characters.pre_tokenizer = tokenizers.pre_tokenizers.Split("", "isolated")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=characters, pad_token="#", eos_token="$")

    def from_pretrained(name, dtype):
        return llama().to(dtype)

    monkeypatch.setattr(transformers.AutoModelForCausalLM, "from_pretrained", from_pretrained)
    monkeypatch.setattr(transformers.AutoTokenizer, "from_pretrained", lambda name: tokenizer)


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:`gradient_checkpointing_enable` is deprecated")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_finetune(recipe, hub):
    ran = recipe("finetune", LENGTH=32)
    assert ran["steps"] == -(-(24 * 200 // 32) // 16)
    assert ran["trainer"].optimizer.optimizer.stats()["params"] == sum(p.numel() for p in ran["model"].parameters())
    ran["trainer"].optimizer.optimizer.close()
    assert (ran["directory"] / "data/model/model.safetensors").exists()
    assert all((ran["directory"] / f"nvme{i}/csd_optim.store").stat().st_size > 0 for i in range(2))


@pytest.mark.filterwarnings("ignore:.*treespec, LeafSpec")
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*is smaller than the logging interval")
def test_lightning(recipe):
    library("lightning")
    ran = recipe("lightning")
    assert ran["steps"] == ran["trainer"].global_step == 16
    assert (ran["directory"] / "nvme0/csd_optim.store").stat().st_size > 0


@pytest.mark.filterwarnings("ignore:there is no store")
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")  # repeated after a resume
@pytest.mark.filterwarnings("ignore:The epoch parameter in `scheduler.step")  # SequentialLR's own
def test_sft(recipe, hub):
    goes_on(recipe, "sft", STEPS=6, WARMUP=4, BATCH=2)


@pytest.mark.filterwarnings("ignore:`gradient_checkpointing` is deprecated")
@pytest.mark.filterwarnings("ignore:'pin_memory' argument is set")
def test_trl(recipe, hub, capsys):
    library("trl")
    ran = recipe("trl", STEPS=3)
    assert ran["steps"] == ran["trainer"].state.global_step == 3
    assert capsys.readouterr().out.count("'csd_optim/flash_write_bytes'") == 3
    assert all(labels.count(-100) == len("how many?") for labels in ran["trainer"].train_dataset["labels"])
    ran["trainer"].optimizer.optimizer.close()
    assert (ran["directory"] / "data/model/model.safetensors").exists()
    assert (ran["directory"] / "nvme0/csd_optim.store").stat().st_size > 0


@pytest.mark.filterwarnings("ignore:there is no store")
def test_several_optimizers(recipe):
    goes_on(recipe, "several-optimizers", STEPS=6)


@pytest.mark.filterwarnings("ignore:there is no store")
def test_muon(recipe):
    goes_on(recipe, "muon", text="# train.py", STEPS=6)


@pytest.mark.parametrize("whose", ["Keller Jordan's", "Moonlight's"])
def test_momentum_of_another_muon(tmp_path, whose):
    """The snippet loads states that those classes have after two steps, and then has torch's after the same steps."""
    torch.manual_seed(0)
    matrix, vector = (torch.nn.Parameter(torch.randn(shape)) for shape in ((6, 4), (5,)))
    gradients = [(torch.randn(6, 4), torch.randn(5)) for _ in range(2)]
    copies = [torch.nn.Parameter(p.detach().clone()) for p in (matrix, vector)]
    references = torch.optim.Muon(copies[:1]), torch.optim.AdamW(copies[1:])
    momentum = torch.zeros(6, 4)
    for of_matrix, of_vector in gradients:
        momentum = momentum.lerp(of_matrix, 0.05) if whose == "Keller Jordan's" else 0.95 * momentum + of_matrix
        copies[0].grad, copies[1].grad = of_matrix.clone(), of_vector.clone()
        for reference in references:
            reference.step()
    adams = references[1].state[copies[1]]
    names, flags = ("exp_avg", "exp_avg_sq"), ({}, {})
    if whose == "Moonlight's":
        names, flags = ("moment1", "moment2"), ({"use_muon": True}, {"use_muon": False})
    of_vector = {"step": 2, names[0]: adams["exp_avg"], names[1]: adams["exp_avg_sq"]}
    entries = {0: {"momentum_buffer": momentum, **flags[0]}, 1: {**of_vector, **flags[1]}}
    (tmp_path / "data").mkdir()
    torch.save({"state": entries, "param_groups": [{"momentum": 0.95}]}, tmp_path / "data/muon.pt")
    groups = [{"params": [matrix]}, {"params": [vector], "use_muon": False}]
    with CSDMuon(groups, devices="ram:") as opt:
        on_page("docs/recipes/muon.md", "# from_checkpoint.py").execute({"torch": torch, "optimizer": opt}, tmp_path)
        wanted = references[0].state[copies[0]]["momentum_buffer"]
        torch.testing.assert_close(opt.state[matrix]["momentum_buffer"], wanted, rtol=1e-6, atol=1e-7)
        assert opt.state[vector]["step"] == 2
        for name in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(opt.state[vector][name], adams[name])
        matrix.grad, vector.grad = torch.ones(6, 4), torch.ones(5)
        opt.step()
        assert opt.state[vector]["step"] == 3


def test_gaussian_splatting(recipe, run, monkeypatch, capsys):
    """It trains as with torch's Adam, and what it has at the end can be resumed."""
    ours = recipe("gaussian-splatting")
    printed = capsys.readouterr().out
    monkeypatch.setattr(csd_optim, "CSDAdamL2", AdamBeside)
    theirs = recipe("gaussian-splatting", "beside")
    assert capsys.readouterr().out == printed
    numbers, losses = zip(*re.findall(r": (\d+) Gaussians, loss (.*)", printed), strict=True)
    assert int(numbers[0]) < int(numbers[-1]) < int(numbers[0]) + 10 * 6  # some were added, some pruned
    assert float(losses[-1]) < 0.02 * float(losses[0])
    params, rights = ours["gaussians"](), theirs["gaussians"]()
    for name, right in rights.items():
        assert (params[name] - right).norm() <= 1e-5 * right.norm(), name
    where = ours["directory"] / "nvme0"
    inspected = json.loads(run("inspect", "--json", where)[1])["params"]
    shapes = [p["shape"] for p in sorted(inspected, key=lambda p: p["group"]) if p["group"] >= 0]
    groups = [
        {"params": [torch.nn.Parameter(torch.zeros(shape))], "name": group["name"], "lr": group["lr"]}
        for shape, group in zip(shapes, ours["optimizer"].param_groups, strict=True)
    ]
    with CSDAdamL2(groups, lr=0.0, eps=1e-15, devices=where, resume=True):
        assert_same([group["params"][0] for group in groups], [*params.values()])


class AdamBeside(torch.optim.Adam):
    """torch's Adam, for a script that names directories and closes its optimizer."""

    def __init__(self, params, *, devices, overwrite, **named):
        super().__init__(params, **named)

    def close(self):
        pass


@pytest.mark.filterwarnings("ignore:there is no store")
def test_from_deepspeed(recipe):
    ran = recipe("from-deepspeed")
    assert ran["steps"] == 20
    assert (ran["directory"] / "data/step-20/device-0/csd_optim.store").exists()


@pytest.mark.filterwarnings("ignore:there is no store")
def test_scheduler(recipe):
    """When told to stop, it completes its step, and exits with the status that the recipe promises."""
    before = signal.getsignal(signal.SIGTERM)
    try:
        with pytest.raises(SystemExit) as ended:
            recipe("scheduler", stop=(3, lambda: os.kill(os.getpid(), signal.SIGTERM)), STEPS=6)
        assert ended.value.code == 75
        again = recipe("scheduler", STEPS=6)
        whole = recipe("scheduler", "whole", STEPS=6)
    finally:
        signal.signal(signal.SIGTERM, before)
    assert (again["steps"], whole["steps"]) == (3, 6)
    assert_same_and_finite(again["model"], whole["model"])


def goes_on(recipe, name, **constants):
    first = recipe(name, stop=(3, stopped), **constants)
    again, whole = recipe(name, **constants), recipe(name, "whole", **constants)
    assert (first["steps"], again["steps"], whole["steps"]) == (3, constants["STEPS"] - 3, constants["STEPS"])
    assert_same_and_finite(again["model"], whole["model"])


def assert_same_and_finite(model, other):
    assert_same([*model.parameters()], [*other.parameters()])
    assert all(p.isfinite().all() for p in model.parameters())


def test_each_recipe_is_run():
    tests = {name.removeprefix("test_").replace("_", "-") for name in globals() if name.startswith("test_")}
    tests |= {snippet.page.stem for snippet in SCRIPTS}  # by test_docs.py
    assert set(RECIPES) <= tests
