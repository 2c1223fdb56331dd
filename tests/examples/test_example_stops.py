"""Test the exit codes of `examples/imagenet` after each kind of stop. Launchers use the exit code alone."""

import os
import re
import signal
import stat
import time

import pytest
import yaml

from runs import IMAGENET, end, start

pytestmark = pytest.mark.examples

SGD = ["--optimizer", "sgd", "--width", 4, "--schedule", "constant", "--log-every", 1, "--warmup-epochs", 1]
LONG = [*SGD, "--steps", 100_000]


def stopped_after(line, signals, *args, to="process", **options):
    """Start a script, and send it `signals` when it has printed a line that begins with `line`."""
    run = start(*args, **options)
    for text in run.stdout:
        if re.match(line, text):
            for number in signals:
                (run.send_signal if to == "process" else lambda n: os.killpg(run.pid, n))(number)
                time.sleep(0.05)
            break
    return end(run)


# In the default run, test_example_runs.py covers the slow cases: it checks the codes 0, 143 and 1, and kills a run.
@pytest.mark.parametrize(
    ("code", "args", "line", "signals"),
    [
        pytest.param(0, [*SGD, "--steps", 30], None, [], id="done", marks=pytest.mark.slow),
        pytest.param(0, [*LONG, "--stop-after", 3], None, [], id="stop-after"),
        pytest.param(0, [*LONG, "--target-accuracy", 0.05], None, [], id="target"),
        pytest.param(143, LONG, r"step +3/", [signal.SIGTERM], id="SIGTERM", marks=pytest.mark.slow),
        pytest.param(130, LONG, r"step +3/", [signal.SIGINT], id="Ctrl-C"),
        pytest.param(-2, LONG, r"digits", [signal.SIGINT], id="Ctrl-C as it starts"),
        pytest.param(-2, LONG, r"compiling", [signal.SIGINT], id="Ctrl-C as it compiles"),
        pytest.param(-9, LONG, r"step +3/", [signal.SIGKILL], id="SIGKILL", marks=pytest.mark.slow),
        pytest.param(1, [*LONG, "--learning-rate", 1e38], None, [], id="NaN", marks=pytest.mark.slow),
    ],
)
def test_the_exit_code_tells_how_a_run_was_stopped(tmp_path, code, args, line, signals):
    args = [*args, "--output", tmp_path / "a"]
    done = stopped_after(line, signals, *args) if signals else end(start(*args))
    assert done.returncode == code, done.stderr
    assert len(done.stderr.splitlines()) == (code == 1)
    assert code < 128 or f"stopped by {signals[0].name}" in done.stdout


def test_ctrl_c_before_anything_is_imported_is_no_traceback(tmp_path):
    run = start(*LONG, "--output", tmp_path / "a")
    time.sleep(1)
    run.send_signal(signal.SIGINT)
    done = end(run)
    assert done.returncode == -2 and not done.stderr


def test_a_comparison_ends_with_the_run_that_is_stopped(tmp_path):
    """Send Ctrl-C to the shell and to the run, as a terminal does."""
    env = {"SEEDS": "0 1", "OPTIMIZERS": "sgd", "FOLDER": str(tmp_path / "runs")}
    done = stopped_after(r"step +3/", [signal.SIGINT], *LONG[2:], to="group", name="launch/compare.sh", env=env)
    assert done.returncode in (130, -2), done.stderr
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["sgd-0"]


SCRIPT = """#!/bin/bash
# A process of a run, in the place of Python.
case "$*" in
  *socket*) echo 1234 ;;
  *)
    [[ " $* " == *" --processes localhost:1234 2 1 "* ]] && exit ${SECOND:-0}
    trap 'exit 143' TERM
    for ((k = 0; k < ${TENTHS:-1}; k++)); do sleep 0.1; done ;;
esac
"""


@pytest.mark.parametrize(
    ("code", "env", "number"),
    [
        (0, {}, None),
        (7, {"SECOND": "7", "TENTHS": "600", "PATIENCE": "1"}, None),
        (143, {"TENTHS": "600"}, signal.SIGTERM),
    ],
    ids=["done", "one fails", "SIGTERM"],
)
def test_several_processes_end_with_one_exit_code_and_without_a_word(tmp_path, code, env, number):
    python = tmp_path / "python"
    python.write_text(SCRIPT)
    python.chmod(python.stat().st_mode | stat.S_IEXEC)
    run = start(name="launch/processes.sh", env={**env, "PYTHON": str(python)})
    if number:
        time.sleep(1)
        run.send_signal(number)
    done = end(run)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", "")


def test_kubernetes_starts_again_what_a_signal_stopped():
    _, job = yaml.safe_load_all((IMAGENET / "launch" / "kubernetes.yaml").read_text())
    rules = job["spec"]["podFailurePolicy"]["rules"]
    assert job["spec"]["template"]["spec"]["restartPolicy"] == "Never"  # a policy needs it
    assert rules[0] == {"action": "Ignore", "onExitCodes": {"operator": "In", "values": [130, 143]}}
