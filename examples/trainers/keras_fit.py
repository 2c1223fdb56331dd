"""Train two of Keras's own examples with K-FAC and with Keras's optimizers through `fit`, and compare them.

    python examples/trainers/keras_fit.py run --task images --data-dir /usr/share/datasets/fashion-mnist
    python examples/trainers/keras_fit.py run --task text --method adamw --rate 0.003 --seed 1
    python examples/trainers/keras_fit.py report            # prints a table of keras.jsonl

The tasks are small versions of keras.io's "Simple MNIST convnet", on Fashion-MNIST, and of its "Text generation with a
miniature GPT", on the documentation that comes with Python. `digits` is the first network on scikit-learn's digits. All
methods have the same batches, number of steps, warm-up and decay. A run appends a line to the results. Seconds are
processor seconds.
"""

import argparse
import gzip
import json
import os
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

os.environ.setdefault("KERAS_BACKEND", "jax")  # before the first import of keras
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import keras
import numpy as np

FOLDER = Path(__file__).resolve().parent
sys.path[:0] = [str(FOLDER), str(FOLDER.parent), str(FOLDER.parent / "language_model")]
from keras import layers  # noqa: E402

import kfac  # noqa: E402
import topics  # noqa: E402
from keras_kfac import KFAC, KFACModel  # noqa: E402

RESULTS = FOLDER / "keras.jsonl"
METHODS: dict[str, Callable[..., Any]] = {
    "kfac": KFAC,
    "adamw": keras.optimizers.AdamW,
    "muon": keras.optimizers.Muon,
}
Arrays = tuple[np.ndarray, np.ndarray]


@keras.saving.register_keras_serializable("kfac")
class WarmupLinearDecay(keras.optimizers.schedules.LearningRateSchedule):
    """Make a Keras schedule from an optax schedule. A model with it can be saved, because it has a configuration."""

    def __init__(self, peak: float, num_steps: int):
        self.peak, self.num_steps = peak, num_steps
        self.schedule = kfac.schedules.warmup_linear_decay(peak, num_steps)

    def __call__(self, step: Any) -> Any:
        return self.schedule(keras.ops.convert_to_tensor(step))

    def get_config(self) -> dict[str, Any]:
        return {"peak": self.peak, "num_steps": self.num_steps}


class Task(NamedTuple):
    """Hold the data, and a function that builds the model. The model returns logits."""

    build: Callable[[], KFACModel]
    train: Arrays
    validation: Arrays
    batch: int
    epochs: int

    @property
    def steps(self) -> int:
        return self.epochs * (len(self.train[0]) // self.batch)


def convnet(shape: tuple[int, ...], padding: str = "valid") -> KFACModel:
    """Build keras.io's "Simple MNIST convnet" with a quarter of its channels."""
    inputs = keras.Input(shape)
    x = inputs
    for width in (8, 16):
        x = layers.Conv2D(width, 3, padding=padding, activation="relu")(x)
        x = layers.MaxPooling2D(2)(x)
    x = layers.Dropout(0.5)(layers.Flatten()(x))
    return KFACModel(inputs, layers.Dense(10)(x))


def images(data_dir: Path | None) -> Task:
    """Return the task with the first 10,000 images of Fashion-MNIST, and the last 10,000 to validate."""

    def read(name: str, offset: int) -> np.ndarray:
        path = (data_dir or Path()) / f"train-{name}.gz"
        if not path.is_file():
            raise SystemExit(f"--data-dir {data_dir} has no {path.name}; Debian's package dataset-fashion-mnist has it")
        with gzip.open(path) as file:
            return np.frombuffer(file.read(), np.uint8, offset=offset)

    pixels = (read("images-idx3-ubyte", 16).reshape(-1, 28, 28, 1) / 255).astype(np.float32)
    labels = read("labels-idx1-ubyte", 8).astype(np.int32)
    train, validation = slice(10_000), slice(50_000, None)
    return Task(
        lambda: convnet((28, 28, 1)),
        (pixels[train], labels[train]),
        (pixels[validation], labels[validation]),
        batch=250,
        epochs=3,
    )


def digits(data_dir: Path | None) -> Task:
    """Return the task of scikit-learn's digits, for tests."""
    del data_dir
    from sklearn.datasets import load_digits

    pixels, labels = load_digits(return_X_y=True)
    pixels = (pixels / 16).astype(np.float32).reshape(-1, 8, 8, 1)
    labels = labels.astype(np.int32)
    train, validation = slice(1280), slice(1280, None)
    return Task(
        lambda: convnet((8, 8, 1), "same"),
        (pixels[train], labels[train]),
        (pixels[validation], labels[validation]),
        batch=128,
        epochs=4,
    )


def miniature_gpt(vocabulary: int, length: int, width: int = 64, heads: int = 2) -> KFACModel:
    """Build keras.io's "Text generation with a miniature GPT" with a quarter of its width."""
    inputs = keras.Input((length,), dtype="int32")
    positions = layers.Embedding(length, width)(keras.ops.broadcast_to(keras.ops.arange(length), (1, length)))
    x = layers.Embedding(vocabulary, width)(inputs) + positions
    attended = layers.MultiHeadAttention(heads, width)(x, x, use_causal_mask=True)
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(attended))
    hidden = layers.Dense(width)(layers.Dense(width, "relu")(x))
    x = layers.LayerNormalization(epsilon=1e-6)(x + layers.Dropout(0.1)(hidden))
    return KFACModel(inputs, layers.Dense(vocabulary)(x))


def text(data_dir: Path | None) -> Task:
    """Return the task of predicting the next character. A sequence has 64 characters."""
    del data_dir
    length = 64

    def sequences(tokens: np.ndarray) -> Arrays:
        rows = tokens[: len(tokens) // (length + 1) * (length + 1)].reshape(-1, length + 1)
        return rows[:, :-1], rows[:, 1:]

    train, validation = map(sequences, topics.tokens())
    return Task(lambda: miniature_gpt(len(topics.ALPHABET), length), train, validation, batch=64, epochs=2)


TASKS = {"images": images, "digits": digits, "text": text}


class Clock(keras.callbacks.Callback):
    """Record processor seconds after each step. The first step compiles."""

    def __init__(self) -> None:
        super().__init__()
        self.ends: list[float] = []

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        self.ends.append(time.process_time())


def run(task: Task, method: str, rate: float, seed: int) -> dict[str, Any]:
    """Train once, and return the record."""
    keras.backend.clear_session()
    keras.utils.set_random_seed(seed)
    model = task.build()
    model.compile(
        METHODS[method](WarmupLinearDecay(rate, task.steps)),
        loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
        metrics=["accuracy"],
    )
    whole = task.steps // task.epochs * task.batch  # without a last, smaller batch
    x, y = (part[:whole] for part in task.train)
    clock = Clock()
    began = time.process_time()
    model.fit(x, y, batch_size=task.batch, epochs=task.epochs, callbacks=[clock], verbose=0)
    later = clock.ends[-1] - clock.ends[0]
    seconds = later * task.steps / (task.steps - 1)
    loss, accuracy = model.evaluate(*task.validation, batch_size=task.batch, verbose=0)
    return {
        "method": method,
        "rate": rate,
        "seed": seed,
        "loss": round(loss, 4),
        "accuracy": round(accuracy, 4),
        "seconds": round(seconds, 1),
        "compile": round(clock.ends[-1] - began - seconds, 1),
    }


def report(results: Path) -> None:
    """Print a table. Each method has the rate with the lowest mean validation loss."""
    found: dict[tuple[str, str], dict[float, list[Any]]] = defaultdict(lambda: defaultdict(list))
    for line in results.read_text().splitlines():
        record = json.loads(line)
        found[record["task"], record["method"]][record["rate"]].append(record)
    print("| task | method | rate | rates tried | seeds | validation loss | accuracy | s | s to compile |")
    print("|---|---|---|---|---|---|---|---|---|")
    for (task, method), rates in sorted(found.items()):
        means = {rate: np.mean([r["loss"] for r in records]) for rate, records in rates.items()}
        best = min(rates, key=means.__getitem__)
        chosen = rates[best]
        loss, accuracy, seconds, compiling = (np.array([r[name] for r in chosen]) for name in COLUMNS)
        print(
            f"| {task} | {method} | {best:g} | {len(rates)} | {len(loss)} | {loss.mean():.4f} ± {loss.std():.4f} "
            f"| {accuracy.mean():.1%} | {seconds.mean():.0f} | {compiling.mean():.0f} |"
        )


COLUMNS = ("loss", "accuracy", "seconds", "compile")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    commands = parser.add_subparsers(dest="command", required=True)
    runs = commands.add_parser("run", help="train once")
    runs.add_argument("--task", choices=TASKS, default="images")
    runs.add_argument("--method", choices=METHODS, default="kfac")
    runs.add_argument("--rate", type=float, default=0.1)
    runs.add_argument("--seed", type=int, default=0)
    runs.add_argument("--data-dir", type=Path, help="folder with the files of Fashion-MNIST, for --task images")
    reports = commands.add_parser("report", help="print the table")
    for command in (runs, reports):
        command.add_argument("--results", type=Path, default=RESULTS, help="file with a line for each run")
    options = parser.parse_args(arguments)
    if options.command == "report":
        report(options.results)
        return
    task = TASKS[options.task](options.data_dir)
    record = {"task": options.task, **run(task, options.method, options.rate, options.seed)}
    with options.results.open("a") as file:
        file.write(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
