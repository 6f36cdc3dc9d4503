"""msgspec belongs to the extra `serve`: nothing else imports it, and without it one sentence says how to get it."""

import subprocess
import sys

import pytest

SENTENCE = "optimizer ranks need msgspec, which checks their messages: pip install csd_optim[serve]"
WITHOUT = "import sys; sys.modules['msgspec'] = None\n"
COMMAND = "from csd_optim.cli.commands import main; sys.argv[1:] = {!r}; main()"


def run(code):
    done = subprocess.run([sys.executable, "-c", WITHOUT + code], capture_output=True, text=True, check=False)
    return done.returncode, " ".join((done.stdout + done.stderr).split())


@pytest.mark.parametrize(
    "code",
    [
        "import csd_optim, torch; csd_optim.CSDAdam([torch.nn.Parameter(torch.ones(3))], devices='ram:')",
        COMMAND.format(["--help"]),
        COMMAND.format(["serve", "--help"]),
    ],
)
def test_what_does_without(code):
    status, said = run(code)
    assert status == 0, said


def test_a_key_is_made_without(tmp_path):
    status, said = run(COMMAND.format(["serve", "--init-key", str(tmp_path / "key.pem")]))
    assert (status, said[:7]) == (0, "sha256:")


@pytest.mark.parametrize("times", [1, 2])
def test_a_trainer_says_what_is_missing(times):
    again = (
        "import csd_optim, torch\nfor _ in range({}):\n  try: csd_optim.CSDAdam([torch.nn.Parameter(torch.ones(3))], "
    )
    again += "devices='serve://127.0.0.1:9')\n  except csd_optim.CSDUnavailableError as e: print(e)"
    assert run(again.format(times))[1].count(SENTENCE) == times


def test_an_owner_says_what_is_missing(tmp_path):
    status, said = run(COMMAND.format(["serve", str(tmp_path), "--listen", "127.0.0.1:0"]))
    assert status == 1
    assert SENTENCE in said
    assert "Traceback" not in said
