"""Run `submission.py` on AlgoPerf's workloads without TensorFlow, PyTorch and AlgoPerf's data sets.

    git clone https://github.com/mlcommons/algorithmic-efficiency
    python examples/algoperf/harness.py mnist --algoperf algorithmic-efficiency              # self-tuning
    python examples/algoperf/harness.py mnist --algoperf algorithmic-efficiency --ruleset external --trials 3
    python examples/algoperf/harness.py layers --algoperf algorithmic-efficiency             # the table of workloads

Models, losses, metrics, targets and the hyperparameter search are AlgoPerf's code. This script adds a loop that calls
the submission with the same arguments and in the same order as `submission_runner.py`. For MNIST it uses scikit-learn's
handwritten digits, enlarged. Empty stand-ins replace AlgoPerf's input packages. This script never calls them.
"""

from __future__ import annotations

import argparse
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import itertools
import json
import sys
import time
import types
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import kfac

HERE = Path(__file__).resolve().parent
ABSENT = ("torch", "torchvision", "tensorflow", "tensorflow_datasets", "tensorflow_text", "tensorflow_probability",
          "sentencepiece", "h5py", "wandb", "clu", "pandas", "docker", "GPUtil", "psutil", "sacrebleu")  # fmt: skip
# The modules and classes of the eight base workloads.
WORKLOADS = {
    "criteo1tb": ("criteo1tb.criteo1tb_jax", "Criteo1TbDlrmSmallWorkload"),
    "fastmri": ("fastmri.fastmri_jax", "FastMRIWorkload"),
    "imagenet_resnet": ("imagenet_resnet.imagenet_jax", "ImagenetResNetWorkload"),
    "imagenet_vit": ("imagenet_vit.imagenet_jax", "ImagenetVitWorkload"),
    "librispeech_conformer": ("librispeech_conformer.librispeech_jax", "LibriSpeechConformerWorkload"),
    "librispeech_deepspeech": ("librispeech_deepspeech.librispeech_jax", "LibriSpeechDeepSpeechWorkload"),
    "ogbg": ("ogbg.ogbg_jax", "OgbgWorkload"),
    "wmt": ("wmt.wmt_jax", "WmtWorkload"),
}


# -- AlgoPerf without its requirements ---------------------------------------------------------------------------------


class Derivable(type):
    def __getattr__(cls, name: str) -> Any:
        return getattr(Nothing(), name)


class Nothing:
    """A stand-in for any object in an absent package. It allows attributes, calls, indexing and subclassing."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return Nothing()

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # As a decorator, return the decorated function.
        return args[0] if len(args) == 1 and callable(args[0]) and not kwargs else Nothing()

    def __mro_entries__(self, bases: Any) -> tuple[type, ...]:
        return (Derivable("Base", (), {}),)

    def __or__(self, other: Any) -> Any:
        return self

    __ror__ = __getitem__ = __or__


class Empty(types.ModuleType):
    def __getattr__(self, name: str) -> Any:
        # SciPy checks arrays against the class `torch.Tensor`.
        return type(name, (), {}) if name == "Tensor" else getattr(Nothing(), name)


class Stand(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import absent packages as empty modules."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        absent = name.split(".")[0] in ABSENT or name == "algoperf._version"  # written by AlgoPerf's build
        return importlib.machinery.ModuleSpec(name, self, is_package=True) if absent else None

    def create_module(self, spec: Any) -> types.ModuleType:
        return Empty(spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        pass


def workload_class(name: str, folder: Path) -> Any:
    """Return a workload's class from a checkout of AlgoPerf."""
    if str(folder) not in sys.path:
        sys.path.insert(0, str(folder))
        sys.meta_path.insert(0, Stand())
    place, class_name = ("mnist.mnist_jax", "MnistWorkload") if name == "mnist" else WORKLOADS[name]
    return getattr(importlib.import_module(f"algoperf.workloads.{place}.workload"), class_name)


# -- MNIST -------------------------------------------------------------------------------------------------------------


def digits() -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return scikit-learn's digits at 28 x 28, split into training, validation and test data."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    images = np.kron(images.reshape(-1, 8, 8), np.ones((3, 3)))  # 24 x 24, then a margin with 2 pixels
    images = np.pad(images / 16, ((0, 0), (2, 2), (2, 2)))[..., None].astype(np.float32)
    # NumPy guarantees that RandomState's stream never changes.
    order = np.random.RandomState(0).permutation(len(labels))
    parts = zip(("train", "validation", "test"), np.split(order, [1297, 1547]), strict=True)
    return {name: ((images[rows] - 0.1307) / 0.3081, labels[rows].astype(np.int32)) for name, rows in parts}


def mnist(folder: Path) -> Any:
    """Return AlgoPerf's MNIST workload on these digits."""
    data = digits()

    class Digits(workload_class("mnist", folder)):  # type: ignore[misc]
        num_train_examples = num_eval_train_examples = len(data["train"][1])
        num_validation_examples = len(data["validation"][1])
        num_test_examples = len(data["test"][1])

        def _build_input_queue(self, data_rng: Any, split: str, data_dir: Any, global_batch_size: int, **_: Any) -> Any:
            images, labels = data["train" if split == "eval_train" else split]
            rng = np.random.default_rng(np.asarray(jax.random.key_data(data_rng)))
            while True:
                order = rng.permutation(len(labels)) if split == "train" else np.arange(len(labels))
                for k in range(0, len(order) - (split == "train") * global_batch_size + 1, global_batch_size):
                    rows, count = order[k : k + global_batch_size], min(global_batch_size, len(order) - k)
                    if split == "train":
                        dy, dx = rng.integers(-2, 3, 2)
                        yield {"inputs": np.roll(images[rows], (dy, dx), (1, 2)), "targets": labels[rows]}
                        continue
                    padded = np.resize(rows, global_batch_size)
                    weights = (np.arange(global_batch_size) < count).astype(np.float32)
                    yield {"inputs": images[padded], "targets": labels[padded], "weights": weights}

        def _eval_model_on_split(self, split: str, num_examples: int, global_batch_size: int, params: Any,
                                 model_state: Any, rng: Any, data_dir: Any, global_step: int = 0) -> Any:  # fmt: skip
            # The same as AlgoPerf's method, but without PyTorch's device count.
            queue = self._build_input_queue(rng, split, data_dir, global_batch_size)
            batches = itertools.islice(queue, -(-num_examples // global_batch_size))
            found = [self._eval_model(params, batch, model_state, jax.random.split(rng, 1)) for batch in batches]
            total = jax.tree.map(lambda *x: sum(x), *found)
            return self._normalize_eval_metrics(num_examples, total)

    return Digits()


def points(folder: Path, ruleset: str, trials: int) -> list[Any]:
    """Return each trial's hyperparameters, from AlgoPerf's search. With the ruleset "self", return `[None]`."""
    if ruleset == "self":
        return [None]
    workload_class("mnist", folder)
    halton = importlib.import_module("algoperf.halton")
    space = json.loads((HERE / "tuning_search_space.json").read_text())
    return list(halton.generate_search(space, trials))


def train(workload: Any, submission: Any, hyperparameters: Any, seed: int, seconds: float, most: int) -> dict[str, Any]:
    """Run a trial like `submission_runner.py`. The score is the training seconds to the validation target."""
    data_rng, init_rng, model_rng, rng = jax.random.split(jax.random.key(seed), 4)
    queue = workload._build_input_queue(data_rng, "train", "", global_batch_size=submission.get_batch_size("mnist"))
    params, model_state = workload.init_model_fn(model_rng)
    state = submission.init_optimizer_state(workload, params, model_state, hyperparameters, init_rng)
    results: list[tuple[int, Any]] = []
    spent, step, last = 0.0, 0, time.perf_counter()
    common: dict[str, Any] = {"workload": workload, "hyperparameters": hyperparameters}
    while True:
        keys = jax.random.split(jax.random.fold_in(rng, step), 4)
        began = time.perf_counter()
        batch = submission.data_selection(workload, queue, state, params, model_state, hyperparameters, step, keys[0])
        more = {"current_params_types": workload.model_params_types, "loss_type": workload.loss_type,
                "eval_results": results, **common}  # fmt: skip
        state, params, model_state = submission.update_params(
            current_param_container=params, model_state=model_state, batch=batch, optimizer_state=state,
            global_step=step, rng=keys[1], train_state={}, **more,
        )  # fmt: skip
        jax.block_until_ready(params)
        step, spent = step + 1, spent + time.perf_counter() - began
        ended = step == most or spent > seconds
        if not ended and time.perf_counter() - last < workload.eval_period_time_sec and step % 100:
            continue
        began = time.perf_counter()
        state, params, model_state = submission.prepare_for_eval(
            current_param_container=params, model_state=model_state, optimizer_state=state, global_step=step,
            rng=keys[2], **more,
        )  # fmt: skip
        spent += time.perf_counter() - began
        found = workload.eval_model(256, params, model_state, keys[3], "", None, step)
        last = time.perf_counter()
        results.append((step, found))
        print(f"step {step}, {spent:.1f} s: validation {found['validation/accuracy']:.4f}, "
              f"test {found['test/accuracy']:.4f}", flush=True)  # fmt: skip
        reached = workload.has_reached_validation_target(found)
        if ended or (reached and workload.has_reached_test_target(found)):
            return {"step": step, "score": round(spent, 2) if reached else None, "seconds": round(spent, 2),
                    "validation accuracy": found["validation/accuracy"], "test accuracy": found["test/accuracy"],
                    "hyperparameters": hyperparameters and hyperparameters._asdict()}  # fmt: skip


# -- K-FAC's layers in the eight workloads -----------------------------------------------------------------------------


def fake_batch(name: str, n: int) -> dict[str, Any]:
    """Return the shapes of a batch with `n` examples, as in AlgoPerf's tests."""

    def real(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((n, *shape), jnp.float32)

    def whole(*shape: int) -> Any:
        return jax.ShapeDtypeStruct((n, *shape), jnp.int32)

    if name == "criteo1tb":
        return {"inputs": real(39), "targets": real(), "weights": real()}
    if name == "fastmri":
        return {"inputs": real(320, 320), "targets": real(320, 320), "weights": real()}
    if name.startswith("imagenet"):
        return {"inputs": real(224, 224, 3), "targets": whole(), "weights": real()}
    if name.startswith("librispeech"):
        return {"inputs": (real(320_000), real(320_000)), "targets": (whole(256), real(256))}
    if name == "wmt":
        return {"inputs": whole(256), "targets": whole(256), "weights": real(256)}
    jraph: Any = importlib.import_module("jraph")

    # For ogbg, each graph has ten nodes and twenty edges. AlgoPerf's graphs vary in size and are padded.
    def part(size: int, *shape: int, dtype: Any = jnp.float32) -> Any:
        return jax.ShapeDtypeStruct((n * size, *shape), dtype)

    ends = part(20, dtype=jnp.int32)
    graphs = jraph.GraphsTuple(part(10, 9), part(20, 3), ends, ends, real(128), whole(), whole())
    return {"inputs": graphs, "targets": real(128), "weights": real(128)}


def seen(name: str, folder: Path) -> dict[str, Any]:
    """Return a row for the layers in a workload's training loss: the number of parameters for each layer kind."""
    workload = workload_class(name, folder)()
    made: dict[str, Any] = {}

    def init(key: jax.Array) -> Any:
        params, made["state"] = workload.init_model_fn(key)
        return params, made["state"]

    params, model_state = jax.eval_shape(init, jax.random.key(0))
    submission = importlib.import_module("submission")
    loss = submission.functools.partial(submission.mean_loss, workload, submission._settings(None))
    began = time.process_time()
    layers = kfac.find_layers(loss, params, model_state, fake_batch(name, 2), jax.random.key(0), has_aux=True,
                              batch_argnums=2)  # fmt: skip
    row: dict[str, Any] = {"workload": name, "parameters": sum(x.size for x in jax.tree.leaves(params))}
    row |= {"layers": len(layers), "seconds to find": round(time.process_time() - began, 1)}
    for layer in layers:
        row[layer.kind] = row.get(layer.kind, 0) + layer.num_params
    row["why not exact"] = sorted(
        {x.note.split(": ")[-1] for x in layers if x.kind in ("gradient-factors", "diagonal")}
    )
    return row


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["mnist", "layers"])
    parser.add_argument("--algoperf", type=Path, required=True, help="a checkout of mlcommons/algorithmic-efficiency")
    parser.add_argument("--ruleset", choices=["self", "external"], default="self")
    parser.add_argument("--trials", type=int, default=5, help="trials with the external ruleset")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--seconds", type=float, help="training time: by default the workload's limit")
    parser.add_argument("--steps", type=int, default=10**9, help="largest number of steps")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--output", type=Path, help="file to append JSON lines to")
    options = parser.parse_args(arguments)
    sys.path.insert(0, str(HERE))

    def note(row: dict[str, Any]) -> None:
        print(json.dumps(row), flush=True)
        if options.output:
            with options.output.open("a") as file:
                file.write(json.dumps(row) + "\n")

    if options.action == "layers":
        for name in options.workloads:
            try:
                note(seen(name, options.algoperf))
            except Exception as error:  # continue with the other workloads if an import fails
                note({"workload": name, "failed": f"{type(error).__name__}: {error}"[:300]})
        return
    workload = mnist(options.algoperf)
    submission = importlib.import_module("submission")
    seconds = options.seconds or workload.max_allowed_runtime_sec * (1.5 if options.ruleset == "self" else 1)
    for point in points(options.algoperf, options.ruleset, options.trials):
        note({"workload": "mnist", "ruleset": options.ruleset}
             | train(mnist(options.algoperf), submission, point, options.seed, seconds, options.steps))  # fmt: skip


if __name__ == "__main__":
    main()
