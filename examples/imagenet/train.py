"""Trains a residual network on images with K-FAC or a first-order optimizer.

python examples/imagenet/train.py                          # digits, ten K-FAC steps an epoch
python examples/imagenet/train.py --optimizer sgd
python examples/imagenet/train.py --data-dir imagenet      # train/<class>/, val/<class>/
python examples/imagenet/train.py --resume                 # goes on with the newest run
python examples/imagenet/train.py --help
"""

import os

# Before jax is imported, which reads both. With few cores, XLA's CPU schedule may start a
# convolution and a LAPACK call at once and let each wait for the other's threads forever.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "xla_cpu_enable_concurrency_optimized_scheduler" not in os.environ.get("XLA_FLAGS", ""):
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import functools
import math
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
import orbax.checkpoint as ocp

import config as cfg
import data
import kfac
import models
import optimizers
import report
from config import UserError

# Inverses go stale fast at first, so each of the first steps collects statistics whatever
# --factor-every says.
FACTOR_WARMUP = 10


class State(NamedTuple):
    """Everything that a step changes."""

    params: Any
    batch_stats: Any
    opt_state: Any


def main(args: list[str]) -> None:
    began = time.perf_counter()
    config, found = cfg.parse(args)
    optim, run = config.optim, config.run
    use_kfac = optim.optimizer == "kfac"

    # The data, and how long the training is.
    dataset = data.load(config.data)
    batch, size = optim.global_batch, len(dataset.train)
    if batch > size:
        raise UserError(f"--global-batch {batch} does not fit the {size} training images")
    per_epoch = size // batch
    total = optim.steps or max(1, round((optim.epochs or 0) * per_epoch))
    eval_every = run.eval_every or per_epoch
    checkpoint_every = run.checkpoint_every or per_epoch
    if found is not None and found != dataset.found():
        raise UserError(f"the data are not those of the run in {run.output}: {dataset.found()} "
                        f"now, {found} then; point --data-dir to the same images")  # fmt: skip
    output = open_output(config, dataset)
    say(f"{dataset.name}: {size} training and {len(dataset.val)} validation images of "
        f"{'x'.join(map(str, dataset.shape))}, {dataset.num_classes} classes"
        + (f" ({dataset.note})" if dataset.note else ""))  # fmt: skip

    # The network and its loss.
    model = models.create(config.model.arch, dataset.num_classes, config.model.dtype)
    key = jax.random.key(run.seed)
    image = jax.ShapeDtypeStruct((1, *dataset.shape), jnp.float32)
    variables = jax.eval_shape(lambda x: model.init(key, x, train=True), image)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    say(f"{config.model.arch} in {config.model.dtype}, {count / 1e6:.2f} M parameters; "
        f"{optim.optimizer}, batch {batch} in {optim.micro_batches} part(s), "
        f"{per_epoch} steps an epoch, {total} steps in all")  # fmt: skip

    def normalise(images: jax.Array) -> jax.Array:
        mean, std = jnp.array(dataset.mean), jnp.array(dataset.std)
        return (images.astype(jnp.float32) / 255 - mean) / std

    def loss_fn(params: Any, batch_stats: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
        images, labels = batch
        logits, new = model.apply(
            {"params": params, "batch_stats": batch_stats}, normalise(images), train=True,
            mutable=["batch_stats"],
        )  # fmt: skip
        targets = jax.nn.one_hot(labels, dataset.num_classes)
        targets = optax.smooth_labels(targets, config.model.label_smoothing)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, targets))
        accuracy = jnp.mean((jnp.argmax(logits, -1) == labels).astype(jnp.float32))
        return loss, {"batch_stats": new["batch_stats"], "accuracy": accuracy}

    # The optimizer. K-FAC traces the loss once to find the layers.
    part = batch // optim.micro_batches
    example = (jax.ShapeDtypeStruct((part, *dataset.shape), jnp.uint8),
               jax.ShapeDtypeStruct((part,), jnp.int32))  # fmt: skip
    layers = None
    if use_kfac:
        layers = kfac.find_layers(loss_fn, variables["params"], variables["batch_stats"], example, has_aux=True)
    rate = optimizers.learning_rate(optim, per_epoch, total)
    tx = optimizers.transform(optim, rate, layers)

    def init(key: jax.Array) -> State:
        new = model.init(key, jnp.zeros(image.shape, image.dtype), train=True)
        return State(new["params"], new["batch_stats"], tx.init(new["params"]))

    def train_step(
        gradients: Callable[..., Any], state: State, batch: tuple[jax.Array, jax.Array]
    ) -> tuple[State, dict[str, jax.Array]]:
        (loss, aux), grads, factors = gradients(state.params, state.batch_stats, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, factors=factors)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss, "accuracy": aux["accuracy"], "gradient_norm": optax.global_norm(grads),
            "parameter_norm": optax.global_norm(params),
        }  # fmt: skip
        if use_kfac:
            metrics |= {f"kfac/{k}": v for k, v in kfac.diagnostics(opt_state).items()}
        return State(params, aux["batch_stats"], opt_state), metrics

    def eval_step(state: State, batch: data.Batch) -> tuple[jax.Array, ...]:
        variables = {"params": state.params, "batch_stats": state.batch_stats}
        logits: Any = model.apply(variables, normalise(batch.images), train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        right = jnp.argmax(logits, -1) == batch.labels
        return tuple(jnp.sum(x * batch.weights) for x in (losses, right, jnp.ones(right.shape)))

    # Compiled here and not on the first call: it can be timed, and nothing can retrace later.
    say("compiling ...")
    compile_began = time.perf_counter()
    create = jax.jit(init).lower(key).compile()
    abstract = jax.eval_shape(init, key)

    def compile_step(layers: Any) -> Callable[..., Any]:
        gradients = optimizers.gradient_fn(loss_fn, layers, optim.micro_batches)
        batch_like = jax.tree.map(lambda x: jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype), example)
        step = jax.jit(functools.partial(train_step, gradients), donate_argnums=0)
        return step.lower(abstract, batch_like).compile()

    full_step = compile_step(layers)
    # Between statistics there is nothing of K-FAC in the backward pass.
    cheap_step = compile_step(None) if use_kfac and optim.factor_every > 1 else full_step
    eval_size = min(part, len(dataset.val))
    eval_like = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct((eval_size, *x.shape[1:]), x.dtype),
        data.Batch(*example, jax.ShapeDtypeStruct((part,), jnp.float32)),
    )
    evaluate = jax.jit(eval_step).lower(abstract, eval_like).compile()
    compile_seconds = time.perf_counter() - compile_began
    programs = "step, cheap step" if cheap_step is not full_step else "step"
    say(f"compiled {programs}, validation and initialisation in {compile_seconds:.1f} s")

    # Where it begins: at the beginning, or at the last checkpoint.
    state = create(key)
    checkpoints = ocp.CheckpointManager(
        (output / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=run.keep_checkpoints, enable_async_checkpointing=False),
    )
    start, broken = 0, set[str]()
    if checkpoints.latest_step() is not None:
        start = checkpoints.latest_step()
        saved = checkpoints.restore(
            start, args=ocp.args.Composite(state=ocp.args.StandardRestore(state),
                                           extra=ocp.args.JsonRestore())
        )  # fmt: skip
        state, broken = saved["state"], set(saved["extra"]["broken"])
    if run.resume:
        say(f"resuming {output} at step {start} of {total}")
    metrics = report.Metrics(output / "metrics.jsonl", start)

    # SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint; a second one ends it now.
    stop_at = min(total, run.stop_after or total)
    stopping: list[int] = []

    def stop(number: int, frame: Any) -> None:
        stopping.append(number)
        signal.signal(number, signal.SIG_DFL)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)

    def note_broken(names: tuple[str, ...]) -> None:
        for name in names:
            if name not in broken:
                broken.add(name)
                say(f"skipped {name}: not a readable image", file=sys.stderr)

    pending: list[tuple[int, dict[str, jax.Array]]] = []
    loop_began = last_line = window_began = time.perf_counter()
    window_steps, step, text = 0, start, ""
    batches = data.train_batches(dataset.train, batch, run.seed, start, stop_at)
    for step, got in enumerate(data.prefetch(batches), start + 1):
        done = step - 1
        with_factors = done < FACTOR_WARMUP or done % optim.factor_every == 0
        state, values = (full_step if with_factors else cheap_step)(state, (got.images, got.labels))
        note_broken(got.broken)
        pending.append((step, values))
        window_steps += 1

        last = step == stop_at or bool(stopping)
        validate = step % eval_every == 0 or step == total
        save = step % checkpoint_every == 0 or last
        quiet = time.perf_counter() - last_line > 10
        if not (validate or save or quiet or step % run.log_every == 0):
            continue

        # Reading the numbers waits for the device, hence not after each step.
        for at, values in pending:
            record = {name: float(value) for name, value in values.items()}
            metrics.write({"step": at, "epoch": round(at / per_epoch, 4),
                           "learning_rate": float(rate(at - 1)), **record})  # fmt: skip
            for name in ("loss", "gradient_norm", "parameter_norm"):
                if not math.isfinite(record[name]):
                    stop_at_nan(name, at, checkpoints.latest_step(), output, optim)
        pending.clear()
        now = time.perf_counter()
        speed = window_steps / (now - window_began)
        text = (f"step {step:>{len(str(total))}}/{total}  epoch {step / per_epoch:5.1f}  "
                f"loss {record['loss']:.4f}  accuracy {record['accuracy']:6.1%}")  # fmt: skip
        if validate:
            result = validation(evaluate, state, dataset, eval_size, note_broken)
            metrics.write({"step": step, **result, "broken_images": len(broken),
                           "seconds": round(time.perf_counter() - began, 2)})  # fmt: skip
            text += f"  val loss {result['val_loss']:.4f}  val accuracy {result['val_accuracy']:.1%}"
        if save:
            checkpoints.save(step, args=ocp.args.Composite(
                state=ocp.args.StandardSave(state),
                extra=ocp.args.JsonSave({"broken": sorted(broken)})))  # fmt: skip
        now = time.perf_counter()
        left = (total - step) * (now - loop_began) / (step - start)
        say(f"{text}  {speed:.2f} steps/s  {report.duration(left)} left")
        last_line = window_began = now
        window_steps = 0
        if last:
            break

    title = f"{dataset.name}, {config.model.arch}, {optim.optimizer}, batch {batch}"
    report.plot(metrics.records, output / "curves.png", title)
    accuracies = [r["val_accuracy"] for r in metrics.records if "val_accuracy" in r]
    accuracy = f"{accuracies[-1]:.2%} (best {max(accuracies):.2%})" if accuracies else "not measured"
    if step < total:
        why = signal.Signals(stopping[0]).name if stopping else f"--stop-after {stop_at}"
        state_of = f"stopped by {why} at step {step} of {total}, to go on with --resume"
    else:
        state_of = f"done: {total} steps"
    say(
        f"{state_of}; {title}; validation accuracy {accuracy}; {len(broken)} broken images; "
        f"{time.perf_counter() - began:.1f} s, of which {compile_seconds:.1f} s compiling; {output}"
    )


def open_output(config: cfg.Config, dataset: data.Dataset) -> Path:
    """The output folder, made and marked with the configuration; refuses one that is in use."""
    output = config.run.output
    assert output is not None
    if config.run.resume:
        return output
    if output.exists() and not output.is_dir():
        raise UserError(f"--output {output} is a file, not a folder")
    if output.exists() and any(output.iterdir()):
        raise UserError(f"--output {output} is in use; go on with that run by --resume, or name a "
                        "new folder")  # fmt: skip
    try:
        output.mkdir(parents=True, exist_ok=True)
        cfg.save(config, dataset.found(), output)
    except OSError as error:
        raise UserError(f"--output {output} cannot be written: {error.strerror}") from error
    return output


def validation(
    evaluate: Callable[..., Any],
    state: State,
    dataset: data.Dataset,
    size: int,
    note_broken: Callable[[tuple[str, ...]], None],
) -> dict[str, float]:
    """Loss and accuracy over all readable validation images, each counted once."""
    sums = [0.0, 0.0, 0.0]
    for got in data.prefetch(data.val_batches(dataset.val, size)):
        note_broken(got.broken)
        new = evaluate(state, got._replace(broken=()))
        sums = [a + float(b) for a, b in zip(sums, new, strict=True)]
    if not sums[2]:
        raise UserError("none of the validation images can be read")
    return {"val_loss": sums[0] / sums[2], "val_accuracy": sums[1] / sums[2]}


def stop_at_nan(name: str, step: int, checkpoint: int | None, output: Path, optim: cfg.Optimization) -> None:
    """Ends the run; what is on disk is from before."""
    kept = "no checkpoint was written yet" if checkpoint is None else (
        f"the checkpoint of step {checkpoint} in {output} is good"
    )  # fmt: skip
    remedy = f"a --learning-rate below {optim.learning_rate}"
    if optim.optimizer == "kfac":
        remedy += f" or a --damping above {optim.damping}"
    raise UserError(f"the {name.replace('_', ' ')} became NaN or infinite at step {step}; {kept}; "
                    f"a new run may do with {remedy}")  # fmt: skip


def say(text: str, file: Any = None) -> None:
    print(text, file=file, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
