"""The studies of accuracy at their smallest sizes: they verify, train, and report all promised values."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib import pyplot
from support.forked import module

from bench.studies import accuracy, accuracy_plot, accuracy_tasks, accuracy_training, pretraining

ROOT = Path(__file__).parents[2]


def test_quick(tmp_path, monkeypatch):
    monkeypatch.chdir(ROOT)
    png = tmp_path / "accuracy.png"
    done = module(
        "bench.studies.accuracy", "--quick", f"--directory={tmp_path}", "--json", f"--plot={png}", seconds=300
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["schema"] == "csd_optim.bench.accuracy/1"
    assert {"cpu", "cores", "torch", "scikit-learn", "isa", "back end", "date"} <= set(report["machine"])
    assert set(report["verified"]["dense"]) == {"cloze", "digits"}
    assert all(0 < v["least"] <= v["pushed"] <= v["most"] for v in report["verified"]["bytes"])
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "Top-K 1%, feedback" in done.stderr

    rows = {(r["task"], r["variant"]): r for r in report["rows"]}
    assert len(rows) == len(report["runs"]) == 2 * 5
    assert all(0 < report["verified"]["8bit"][task] < accuracy_training.CODED_DRIFT for task in ("cloze", "digits"))
    assert all(0 < r["held_out_noise"] < 2 for r in rows.values())
    for task, learnt in (("cloze", 30), ("digits", 90)):  # by chance: 17 and 10
        adamw, dense, sparse, coded, coded_sparse = (rows[task, v.name] for v in accuracy.QUICK_VARIANTS)
        assert adamw["accuracy"][0] > learnt
        assert adamw["difference"] == [0]
        assert abs(dense["difference"][0]) < 3  # held-out examples: about 1000
        assert dense["difference"][0] == dense["accuracy"][0] - adamw["accuracy"][0]
        assert dense["link_bytes_per_param"] == {"push": 2, "pull": 2}
        assert sparse["link_bytes_per_param"]["pull"] == 2
        assert sparse["accuracy"][0] > 20
        assert abs(coded["difference"][0]) < 3
        assert coded["link_bytes_per_param"] == dense["link_bytes_per_param"]
        assert coded_sparse["link_bytes_per_param"] == pytest.approx(sparse["link_bytes_per_param"], rel=0.05)
        assert adamw["drift"] == adamw["loss_difference"] == [0]
        assert 0 < dense["drift"][0] < 1
        assert 0 < coded["drift"][0] < 1
    # 1 % of two matrices at 4 B per entry; biases and the last layer at 2 B per element; and at most a padded word of
    # 64 B for each block of the tile and each dense parameter.
    entries, dense_elements, params = round(0.01 * 64 * 128) + round(0.01 * 128 * 128), 1280 + 128 + 128 + 10, 26122
    pushed = rows["digits", "Top-K 1%, feedback"]["link_bytes_per_param"]["push"] * params
    assert 4 * entries + 2 * dense_elements <= pushed <= 4 * entries + 2 * dense_elements + 64 * (4 + 4)


def test_resume_takes_what_is_finished(tmp_path):
    size = replace(accuracy.QUICK, digits=accuracy_tasks.SHORT)
    job = ("digits", 0, accuracy.ADAMW, size, tmp_path / "encoder.pt")
    first = accuracy.run(job, again=True)
    assert accuracy.run(job, again=False) == first
    repeated = accuracy.run(job, again=True)
    assert repeated["seconds"] != first["seconds"]
    assert repeated | {"seconds": 0} == first | {"seconds": 0}  # the same bits


@pytest.mark.parametrize("rule", ["adam", "sgd-momentum", "adagrad", "rmsprop", "lion"])
def test_other_optimizers_beside_torchs(rule, tmp_path):
    size = replace(accuracy.QUICK, digits=accuracy_tasks.Training(60, 32, 3e-3))
    variants = [v for v in accuracy.OTHERS if v.rule == rule]
    runs = []
    for variant in variants:
        job = ("digits", 0, variant, size, tmp_path / "encoder.pt")
        runs.append(accuracy.run(job, again=True))
        runs[-1]["drift"] = accuracy.drifts(job, variants[0])[-1]
    reference, ours = accuracy.summary(runs, {"digits": 898})
    assert [reference["variant"], ours["variant"]] == [f"{rule} fp32", f"{rule}, ours"]
    assert reference["difference"] == reference["drift"] == [0]
    assert ours["difference"] == [runs[1]["accuracy"] - runs[0]["accuracy"]]
    assert min(runs[0]["accuracy"], runs[1]["accuracy"]) > 60  # by chance: 10
    assert 0 < ours["drift"][0] < 1


def test_drift():
    """The drift of weights that stayed where they were is 1: as far as AdamW moved its own."""
    begun, ended = torch.zeros(4), torch.full((4,), 2.0)
    assert accuracy_training.drifted(ended, ended, begun) == 0
    assert accuracy_training.drifted(begun, ended, begun) == 1
    assert accuracy_training.drifted(torch.full((4,), 2.5), ended, begun) == 0.25


def test_over_time(tmp_path):
    """Marks are at equal intervals. If gradients are scaled down, exp_avg_sq falls, but the reported loss does not."""
    falling = accuracy_tasks.Training(60, 32, 3e-3, fall=0.1, wrong=0.1, marks=3)
    runs = {}
    for fall in (0.1, 1.0):
        size = replace(accuracy.QUICK, falling=falling._replace(fall=fall))
        for variant in (accuracy.ADAMW, accuracy_training.EIGHT_BIT[0]):
            job = ("falling", 0, variant, size, tmp_path / "encoder.pt")
            done = accuracy.run(job, again=True)
            drifts = accuracy.drifts(job, accuracy.ADAMW)
            runs[fall, variant.name] = done | {"drift": drifts[-1], "drift_over_time": drifts}
    for name in (accuracy.ADAMW.name, "8-bit"):
        fell, stayed = runs[0.1, name], runs[1.0, name]
        assert fell["marks"] == stayed["marks"] == [20, 40, 60]
        assert fell["mean_root"][0] == stayed["mean_root"][0]  # before the middle
        assert fell["mean_root"][2] < 0.9 * stayed["mean_root"][2]
        assert fell["training_loss"] > 0.5 * stayed["training_loss"]
    assert runs[0.1, accuracy.ADAMW.name]["drift_over_time"] == [0, 0, 0]
    assert 0 < min(runs[0.1, "8-bit"]["drift_over_time"]) < max(runs[0.1, "8-bit"]["drift_over_time"]) < 1
    assert runs[0.1, "8-bit"]["mean_root"] == pytest.approx(runs[0.1, accuracy.ADAMW.name]["mean_root"], rel=0.05)

    rows = accuracy.summary([run for (fall, _), run in runs.items() if fall == 0.1], {"falling": 898})
    figure, axis = pyplot.subplots()
    accuracy_plot.drift_over_time("falling", {r["variant"]: r for r in rows}, axis)
    (line,) = axis.get_lines()  # no line for AdamW, with which variants are compared
    assert line.get_xydata().T.tolist() == [[20, 40, 60], runs[0.1, "8-bit"]["drift_over_time"]]
    pyplot.close(figure)
    accuracy_plot.plot(rows, tmp_path / "time.png")
    assert (tmp_path / "time.png").read_bytes().startswith(b"\x89PNG")


def test_a_factor_is_of_the_gradients_alone():
    model, (images, labels) = accuracy_tasks.perceptron(), accuracy_tasks.digits_examples(0)[0]
    losses, gradients = [], []
    for factor in (1.0, 0.1):
        losses.append(accuracy_tasks.backward(model, images, labels, factor))
        gradients.append(torch.cat([p.grad.flatten() for p in model.parameters()]))
    assert losses[0] == losses[1]
    torch.testing.assert_close(gradients[1], 0.1 * gradients[0])


def test_wrong_labels():
    examples = accuracy_tasks.digits_examples(0)[0]
    for (inputs, labels), (same, some_wrong) in zip(
        *(accuracy_tasks.batches(examples, 2, 800, 0, wrong) for wrong in (0.0, 0.2)), strict=True
    ):
        assert torch.equal(inputs, same)
        assert 0.1 < (labels != some_wrong).float().mean() < 0.25  # of 20 %, a tenth is right by chance


def test_nudged():
    begun, moved = (accuracy_training.nudged(accuracy_tasks.start("digits", 0, Path()), n) for n in (0.0, 1e-6))
    assert torch.equal(begun[0].weight, accuracy_tasks.start("digits", 0, Path())[0].weight)
    assert 1e-7 < ((moved[0].weight - begun[0].weight) / begun[0].weight).abs().max() < 1e-5


def test_torchao_is_no_variant_where_it_is_not_installed(monkeypatch):
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr("sys.argv", ["accuracy"])
    assert accuracy.TORCHAO.name not in accuracy.parse().variants
    monkeypatch.setattr("sys.argv", ["accuracy", "--variants", accuracy.TORCHAO.name])
    with pytest.raises(SystemExit):
        accuracy.parse()
    monkeypatch.setattr(accuracy.importlib.util, "find_spec", lambda name: name)
    assert accuracy.TORCHAO.name in accuracy.parse().variants


def test_examples(monkeypatch):
    size = replace(accuracy.QUICK, examples=512, held_out=512)
    training, held_out = accuracy_tasks.sources()
    assert not {t.tobytes() for t in training} & {t.tobytes() for t in held_out}
    some = training[::12], held_out[::3]  # all of them take seconds
    monkeypatch.setattr(accuracy_tasks, "sources", lambda: some)
    for task, (_, classes) in accuracy_tasks.TEXT_TASKS.items():
        for tokens, labels in accuracy_tasks.text_examples(task, size):
            assert tokens.shape == (512, accuracy_tasks.LENGTH)
            assert labels.bincount(minlength=classes).min() > 512 / classes / 2
            assert tokens.unique(dim=0).shape[0] > 450

    tokens, labels = (t.numpy() for t in accuracy_tasks.text_examples("para", size)[0])
    half = accuracy_tasks.LENGTH // 2 - 1
    first, second = (
        np.sort(np.char.lower(t.astype("u1").view("S1")), 1) for t in (tokens[:, 1 : 1 + half], tokens[:, -half:])
    )
    np.testing.assert_array_equal((first == second).all(1), labels == 1)

    text = b"import os  # why\ndef f(x):\n    return g('s')\n"
    found = {text[at : at + 1]: accuracy_tasks.KINDS[kind] for kind, at in accuracy_tasks.kinds(text)}
    assert found == {b"s": "string", b"w": "comment", b"f": "defined", b"x": "other name", b"g": "called"}


def test_verification_notices_what_is_wrong(monkeypatch):
    top_k, nowhere, made = accuracy.QUICK_VARIANTS[2], Path(), accuracy_training.csdadam

    def instead(change):
        monkeypatch.setattr(accuracy_training, "csdadam", lambda model, variant, lr: made(*change(model, variant, lr)))

    instead(lambda model, variant, lr: (model, replace(variant, topk=None), lr))
    with pytest.raises(SystemExit, match="bytes pushed"):
        accuracy.verify_bytes("digits", top_k, accuracy.QUICK, nowhere)
    instead(lambda model, variant, lr: (model, variant, 1.01 * lr))
    with pytest.raises(SystemExit, match="differs from AdamW"):
        accuracy.verify_dense("digits", accuracy.QUICK, nowhere)
    instead(lambda model, variant, lr: (model, variant, 1.5 * lr))
    with pytest.raises(SystemExit, match="drift"):
        accuracy.verify_codes("digits", accuracy.QUICK, nowhere)


def test_rules(tmp_path, monkeypatch):
    """bench/studies/accuracy_rules.py: all variants of a rule, their differences, and runs that are not repeated."""
    monkeypatch.chdir(ROOT)
    arguments = ["--quick", "--rules", "muon", "adagrad", "--dtypes", "bfloat16", f"--json={tmp_path / 'found.json'}"]
    done = module("bench.studies.accuracy_rules", *arguments, seconds=300)
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "found.json").read_text())
    assert [(r["rule"], r["variant"]) for r in found["runs"]] == [
        (rule, variant) for rule in ("muon", "adagrad") for variant in ("fp32", "nudged", "8bit")
    ]
    losses = [r["loss"] for r in found["runs"]]
    assert all(2 < loss < 6 for loss in losses)
    assert losses[0] != losses[2]
    (row,) = (r for r in found["summary"] if (r["rule"], r["variant"], r["dtypes"]) == ("muon", "8bit", ["bfloat16"]))
    assert row["difference"] == losses[2] - losses[0]
    again = module("bench.studies.accuracy_rules", *arguments, seconds=300)
    assert "seed" not in again.stderr  # nothing was run
    assert json.loads((tmp_path / "found.json").read_text()) == found


def test_pretraining(tmp_path, monkeypatch):
    """bench/studies/pretraining.py: differences to AdamW, and trainings that go on."""
    monkeypatch.chdir(ROOT)
    arguments = ["--quick", "--variants", "adamw", "8bit", "--directory", str(tmp_path / "runs")]
    json_file, picture = tmp_path / "found.json", tmp_path / "plot.png"
    done = module("bench.studies.pretraining", *arguments, f"--json={json_file}", f"--plot={picture}", seconds=300)
    assert done.returncode == 0, done.stderr
    found = json.loads(json_file.read_text())
    adamw, coded = found["runs"]
    assert (adamw["variant"], coded["variant"]) == ("adamw", "8bit")
    for run in found["runs"]:
        assert (run["step"], run["begun"], len(run["held_out"])) == (40, 2, 4)
        assert 3 < run["loss"] < run["held_out"][0] < 7
    assert found["summary"][1]["difference"] == coded["loss"] - adamw["loss"] != 0
    assert picture.read_bytes().startswith(b"\x89PNG")
    again = module("bench.studies.pretraining", *arguments, f"--json={json_file}", seconds=300)
    assert again.returncode == 0, again.stderr
    assert [r["loss"] for r in json.loads(json_file.read_text())["runs"]] == [adamw["loss"], coded["loss"]]


def test_pretraining_compares_parts(tmp_path, monkeypatch):
    until = pretraining.Training.until

    def otherwise(training, last):
        with torch.no_grad():
            training.params[0].add_(0.1 if training.done["step"] else 0.0)
        until(training, last)

    pretraining.verify_parts(["8bit"], tmp_path / "runs")
    monkeypatch.setattr(pretraining.Training, "until", otherwise)
    with pytest.raises(SystemExit, match="8bit: in parts"):
        pretraining.verify_parts(["8bit"], tmp_path / "runs")
