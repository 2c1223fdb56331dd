"""Scripts of the examples as processes of their own, and what a run leaves in its folder."""

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
    """A script of `examples/imagenet` on some CPU devices, in a process group of its own.

    Most of its time goes into compiling: little is optimised, and with `cached` it shares what it compiles with the
    other scripts of this run of the tests.
    """
    env = {
        **os.environ,
        "JAX_PLATFORMS": "cpu",
        "JAX_NUM_CPU_DEVICES": str(devices),
        "DEVICES": str(devices),
        "PYTHON": sys.executable,
        **(env or {}),
    }
    # Scripts set their own flags. Of those of the tests they get the ones with which code is compiled sooner.
    sooner = "fusion_emitters", "split_count"
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
    """What a script that was started has done, after its end."""
    out, err = process.communicate(timeout=900)
    return subprocess.CompletedProcess(process.args, process.returncode, out, err)


def finish(process, code=0):
    """The same, which must be no error: it exits with `code`, 128 + its number after a signal."""
    done = end(process)
    assert done.returncode == code, done.stderr
    assert "Traceback" not in done.stderr, done.stderr
    return done


def train(*args, **options):
    return finish(start(*args, **options))


def here(*args):
    """`train.py` in this process, on one device, which takes seconds less; returns what it prints.

    Not for a run that ends with an error: it would keep its folder.
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
    """The sentence with which a script refuses `args`: but for broken images, there is no other."""
    done = end(start(*args, **options))
    assert done.returncode == 1, done.stderr
    lines = [line for line in done.stderr.strip().splitlines() if not line.startswith("skipped ")]
    assert len(lines) == 1 and lines[0].startswith("error: "), done.stderr
    return lines[0]


def records(folder):
    """The metrics of a run but for its times."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "seconds"} for line in lines]


def state(folder, step):
    """The state in a checkpoint, as NumPy arrays."""
    import orbax.checkpoint as ocp

    path = folder / "checkpoints" / str(step) / "state"
    checkpointer = ocp.PyTreeCheckpointer()
    tree = checkpointer.metadata(path).item_metadata.tree
    plain = jax.tree.map(lambda _: ocp.RestoreArgs(restore_type=np.ndarray), tree)
    return checkpointer.restore(path, restore_args=plain)
