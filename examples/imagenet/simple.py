"""Train a residual network on photographs with K-FAC. Copy this file and change it.

python simple.py                # scikit-learn's handwritten digits
python simple.py photographs    # photographs/train/<class>/*.jpg and val/<class>/*.jpg; or photographs/<class>/*.jpg

The same command resumes a stopped run. All photographs stay in memory. At 64 pixels each image needs 16 kB.
"""

import argparse
import signal
import sys
import time
import zlib
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
from flax import linen as nn
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from PIL import Image, ImageOps
from sklearn.datasets import load_digits

import kfac


class ResNet(nn.Module):
    """Apply stages of residual blocks. Each stage has half the height and twice the channels of the previous stage."""

    classes: int
    width: int
    stages: tuple[int, ...] = (1, 1, 1)  # blocks per stage; (2, 2, 2, 2) is ResNet-18

    @nn.compact
    def __call__(self, x, train):
        conv = partial(nn.Conv, use_bias=False, kernel_init=nn.initializers.he_normal())
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9)
        x = x.astype(jnp.float32) / 127.5 - 1
        x = nn.relu(norm()(conv(self.width, (3, 3), 2 if x.shape[1] >= 64 else 1)(x)))
        for stage, blocks in enumerate(self.stages):
            for block in range(blocks):
                channels, stride = self.width * 2**stage, 2 if not block and (stage or x.shape[1] >= 64) else 1
                y = nn.relu(norm()(conv(channels, (3, 3), stride)(x)))
                y = norm(scale_init=nn.initializers.zeros)(conv(channels, (3, 3))(y))
                x = nn.relu(y + (x if x.shape == y.shape else norm()(conv(channels, (1, 1), stride)(x))))
        return nn.Dense(self.classes)(x.mean((1, 2)))


def digits():
    found = load_digits()
    images, val = (found.images[..., None] * (255 / 16)).astype(np.uint8), np.arange(len(found.target)) % 6 == 5
    return (images[~val], found.target[~val]), (images[val], found.target[val]), list("0123456789")


def decode(path, size):
    """Return the central square of an image, a seventh larger than `size`, or None if the file is not an image."""
    try:
        with Image.open(path) as image:
            image.draft("RGB", (2 * size, 2 * size))
            return np.asarray(ImageOps.fit(ImageOps.exif_transpose(image).convert("RGB"), (size * 8 // 7,) * 2))
    except Exception as error:  # Pillow raises nearly anything on damaged files
        print(f"left out {path}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def photographs(folder, size):
    """Return images and labels for training, images and labels for validation, and the class names."""
    parts = [folder / "train", folder / "val"] if (folder / "train").is_dir() else [folder]
    found = [sorted(path for path in part.glob("*/**/*") if path.is_file()) for part in parts]
    if len(parts) == 1:
        parts, found = parts * 2, [[p for k, p in enumerate(found[0]) if (k % 10 == 9) == val] for val in (0, 1)]
    names = [[path.relative_to(part).parts[0] for path in paths] for part, paths in zip(parts, found, strict=True)]
    classes = sorted({*names[0]})
    if len(classes) < 2 or classes != sorted({*names[1]}):
        sys.exit(f"error: {folder} must hold a folder for each class (two or more, with ten images or more), or train/ "
                 f"and val/ with such folders; training has {classes}, validation {sorted({*names[1]})}")  # fmt: skip
    with ThreadPoolExecutor() as pool:
        decoded = [list(pool.map(partial(decode, size=size), paths)) for paths in found]
    kept = [[k for k, image in enumerate(images) if image is not None] for images in decoded]
    labels = [np.array([classes.index(name) for name in part]) for part in names]
    train, val = ((np.stack([x[k] for k in rows]), y[rows]) for x, y, rows in zip(decoded, labels, kept, strict=True))
    return train, val, classes


def batches(split, batch, size, start, stop, seed):
    """Yield shifted and mirrored training batches for steps `start` to `stop`. They depend on seed and step alone."""
    images, labels = split
    for step in range(start, stop):
        rng, (epoch, part) = np.random.default_rng([seed, step]), divmod(step, len(labels) // batch)
        rows = np.random.default_rng(seed + epoch).permutation(len(labels))[part * batch : (part + 1) * batch]
        flips = rng.choice([-1, 1], batch) if images.shape[3] == 3 else np.ones(batch, int)
        places = zip(rows, *rng.integers(0, images.shape[1] - size + 1, (2, batch)), flips, strict=True)
        yield np.stack([images[i, y : y + size, x : x + size][:, ::flip] for i, y, x, flip in places]), labels[rows]


def loss_fn(model, params, stats, images, labels):
    """Return the mean loss, and as auxiliary output the batch-norm averages and the accuracy."""
    logits, new = model.apply({"params": params, "batch_stats": stats}, images, train=True, mutable=["batch_stats"])
    loss = optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()
    return loss, (new["batch_stats"], (logits.argmax(-1) == labels).mean())


@partial(jax.jit, static_argnums=0)
def evaluate(model, params, stats, images, labels):
    logits = model.apply({"params": params, "batch_stats": stats}, images, train=False)
    return jnp.stack([optax.softmax_cross_entropy_with_integer_labels(logits, labels), logits.argmax(-1) == labels], 1)


def checksum(state):
    return zlib.crc32(b"".join(np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)))


def restore(saved, state, run):
    """Return the last undamaged state and its step, or the given state and step 0. Rename damaged checkpoints."""
    for step in sorted(saved.all_steps(), reverse=True):
        with suppress(Exception):  # orbax raises nearly anything on damaged files
            about = saved.restore(step, args=ocp.args.Composite(about=ocp.args.JsonRestore()))["about"]
            if about["run"] != run:
                sys.exit(f"error: {saved.directory} is from {about['run']}, not {run}; name a new --output")
            found = saved.restore(step, args=ocp.args.Composite(state=ocp.args.StandardRestore(state)))["state"]
            if checksum(found) == about["checksum"]:
                return found, step
        aside = (saved.directory / str(step)).rename(saved.directory.parent / f"damaged-{step}-{time.time_ns()}")
        print(f"the checkpoint of step {step} is damaged, or from another model; it was renamed to {aside}")
        saved.reload()
    return state, 0


def main(args=None):
    """Train and validate. Return the exit code: 0, or 128 plus the number of the signal that stopped the run."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)  # until there is a state to save
    began, parser = time.perf_counter(), argparse.ArgumentParser()
    parser.add_argument("folder", nargs="?", type=Path, help="folder with the photographs (default: digits)")
    parser.add_argument("--size", type=int, default=64, help="side length in pixels of the network's input (64)")
    parser.add_argument("--width", type=int, default=16, help="channels in the first stage (16)")
    parser.add_argument("--batch", type=int, help="images per step (default: a tenth of the training images)")
    parser.add_argument("--steps", type=int, default=100, help="number of steps (100)")
    parser.add_argument("--rate", type=float, default=0.1, help="learning rate; try half and twice this (0.1)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, default=Path("runs/simple"), help="folder of checkpoints (runs/simple)")
    options = parser.parse_args(args)
    cache = jax.config.values["jax_compilation_cache_dir"] or str(Path.home() / ".cache" / "kfac-simple")
    jax.config.update("jax_compilation_cache_dir", cache)
    train, val, classes = photographs(options.folder, options.size) if options.folder else digits()
    size, devices, count = options.size if options.folder else 8, jax.device_count(), len(train[1])
    batch = options.batch or max(1, count // 10 // devices) * devices
    if not 0 < batch <= count or batch % devices:
        sys.exit(f"error: --batch {batch} must be from 1 to {count}, and a multiple of the {devices} devices")

    # Model, optimizer and state are the same on all devices. Each batch is split over the devices.
    jax.set_mesh(mesh := jax.make_mesh((devices,), ("devices",), axis_types=(AxisType.Auto,)))
    same, split = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("devices"))
    example = jax.device_put(next(batches(train, batch, size, 0, 1, options.seed)), split)
    model = ResNet(len(classes), options.width)
    variables = jax.jit(partial(model.init, train=False), out_shardings=same)(jax.random.key(options.seed), example[0])
    params, stats = variables["params"], variables["batch_stats"]
    rate = kfac.schedules.warmup_linear_decay(options.rate, options.steps)
    step = kfac.train_step(partial(loss_fn, model), rate, has_aux=True)
    opt_state = step.init(params, stats, *example)

    # Restore the last checkpoint, if any. From here on, Ctrl-C and SIGTERM end the run with a checkpoint.
    saved = ocp.CheckpointManager((options.output / "checkpoints").absolute(), options=ocp.CheckpointManagerOptions(2))
    run = {name: str(value) for name, value in vars(options).items() if name != "output"} | {"devices": devices}
    (params, stats, opt_state), start = restore(saved, (params, stats, opt_state), run)
    print(f"{count} images of {len(classes)} classes, and {len(val[1])} for validation; {start} steps are done")
    stopped: list[int] = []
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: stopped.append(number))
    for done, got in enumerate(batches(train, batch, size, start, options.steps, options.seed), start + 1):
        params, opt_state, (loss, (stats, accuracy)) = step(params, opt_state, stats, *jax.device_put(got, split))
        last, epoch = done == options.steps or bool(stopped), done % (count // batch) == 0
        if last or epoch or done % 10 == 0 or done == start + 1:
            if not np.isfinite(loss):
                sys.exit(f"error: loss {loss} at step {done}; try half of --rate {options.rate}, with a new --output")
            seconds = time.perf_counter() - began
            print(f"step {done}/{options.steps}  loss {loss:.3f}  accuracy {accuracy:.1%}  {seconds:.1f} s", flush=True)
        if last or epoch:
            sums, edge = np.zeros(2), (val[0].shape[1] - size) // 2
            for at in range(0, len(val[1]), batch):  # the last batch is filled up, so that all have one shape
                rows = np.arange(at, at + batch) % len(val[1])
                images = val[0][rows, edge : edge + size, edge : edge + size]
                each = evaluate(model, params, stats, *jax.device_put((images, val[1][rows]), split))
                sums += np.asarray(each)[: len(val[1]) - at].sum(0)
            print("    validation loss {:.3f}, accuracy {:.1%}".format(*sums / len(val[1])), flush=True)
            state = ocp.args.StandardSave((params, stats, opt_state))
            about = ocp.args.JsonSave({"run": run, "checksum": checksum((params, stats, opt_state))})
            saved.save(done, args=ocp.args.Composite(state=state, about=about))
        if last:
            break
    saved.close()
    return 128 + stopped[0] if stopped else 0


if __name__ == "__main__":
    sys.exit(main())
