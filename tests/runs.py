"""Run the examples' scripts as separate processes and read the files of their runs."""

import contextlib
import io
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np

ROOT = Path(__file__).parents[1]
IMAGENET = ROOT / "examples" / "imagenet"


def start(*args, name="train.py", devices=1, cached=True, cwd=None, env=None):
    """Start a script from `examples/imagenet` on some CPU devices, in a process group of its own.

    Most of its time goes into compiling, so little is optimised. With `cached`, the script shares a compilation cache
    with the other scripts of this test run.
    """
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "DEVICES": str(devices),
        "PYTHON": sys.executable,
        **(env or {}),
    }
    # Scripts set their own flags. Pass on only those test flags that speed up compilation.
    sooner = "optimization_level", "expensive_passes", "fusion_emitters", "split_count"
    env["XLA_FLAGS"] = " ".join(flag for flag in env["XLA_FLAGS"].split() if any(name in flag for name in sooner))
    env["JAX_ENABLE_COMPILATION_CACHE"] = "true" if cached else "false"
    env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH", "")]))
    return subprocess.Popen(
        ["bash" if name.endswith(".sh") else sys.executable, str(IMAGENET / name), *map(str, args)],
        env=env,
        cwd=cwd,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def end(process):
    """Wait for a started script to end and return its completed process."""
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(process, code=0):
    """Wait for a started script to end, and check that it exits with `code` and without a traceback.

    A script that handles a signal exits with 128 + the signal's number.
    """
    done = end(process)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def train(*args, **options):
    return finish(start(*args, **options))


def here(*args):
    """Run `train.py` in this process on one device and return its output.

    This is some seconds faster than a new process. Do not use this function for a run that ends with an error, because
    the run's folder would stay locked.
    """
    sys.path.insert(0, str(IMAGENET))
    try:
        import train as script
    finally:
        sys.path.remove(str(IMAGENET))
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        script.main([*map(str, args), "--devices", "1"])
    return out.getvalue()


def refused(*args, **options):
    """Return the error message with which a script refuses `args`.

    The script may also report skipped images, but must print nothing else.
    """
    done = end(start(*args, **options))
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("skipped ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def records(folder):
    """Return a run's metrics without its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def state(folder, step):
    """Return the state in a checkpoint as NumPy arrays."""
    import orbax.checkpoint as ocp

    path = folder / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(path).item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return checkpointer.restore(path, restore_args=plain)
