"""Trains a residual network on images with K-FAC or a first-order optimizer.

python examples/imagenet/train.py                          # digits, ten K-FAC steps an epoch
python examples/imagenet/train.py --optimizer sgd
python examples/imagenet/train.py --data-dir imagenet      # train/<class>/, val/<class>/
python examples/imagenet/train.py --resume                 # goes on with the newest run
python examples/imagenet/train.py --global-batch 131072 --local-batch 32 --data-dir imagenet
python examples/imagenet/train.py --distributed            # in each process: launch/
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
from jax import lax
from jax.sharding import Mesh, NamedSharding

import config as cfg
import data
import devices
import kfac
import models
import optimizers
import report
from config import UserError
from devices import AXIS, SAME, SPLIT

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

    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)

    # The devices in a row, over which each batch is split. One device is a row too.
    devices.start(config.hardware)
    mesh = devices.make_mesh(config.hardware.devices)
    local_batch, micro_batches = devices.divide(optim, mesh.size)

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
    if len(set(devices.everyone(str(dataset.found())))) > 1:
        raise UserError("the processes do not see the same images")
    # Each process has named a new folder by its own clock.
    assert run.output is not None
    output = Path(devices.everyone(str(run.output))[0])
    devices.on_first(lambda: open_output(config, dataset))
    say(f"{dataset.name}: {size} training and {len(dataset.val)} validation images of "
        f"{'x'.join(map(str, dataset.shape))}, {dataset.num_classes} classes"
        + (f" ({dataset.note})" if dataset.note else ""))  # fmt: skip

    # The network and its loss, per device. `plain` is the network as it is outside of the row of devices.
    plain = models.create(config.model.arch, dataset.num_classes, config.model.dtype, config.model.width)
    model = plain.clone(axis_name=AXIS if config.model.sync_batch_norm else None)
    key = jax.random.key(run.seed)
    image = jax.ShapeDtypeStruct((1, *dataset.shape), jnp.float32)
    wide = jnp.promote_types(config.model.dtype, jnp.float32)

    def fresh(key: jax.Array) -> Any:
        variables = plain.init(key, jnp.zeros(image.shape, image.dtype), train=True)
        return jax.tree.map(lambda x: x.astype(wide), variables)

    variables = jax.eval_shape(fresh, key)
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    say(f"{config.model.arch} in {config.model.dtype}, {count / 1e6:.2f} M parameters; {optim.optimizer} on batches of "
        f"{batch}: {mesh.size} device(s) in {jax.process_count()} process(es), {micro_batches} micro-batch(es) of "
        f"{local_batch} images each; {per_epoch} steps an epoch, {total} steps in all")  # fmt: skip

    def normalise(images: jax.Array) -> jax.Array:
        mean, std = jnp.array(dataset.mean, wide), jnp.array(dataset.std, wide)
        return (images.astype(wide) / 255 - mean) / std

    def loss_fn(model: Any, params: Any, batch_stats: Any, batch: tuple[jax.Array, jax.Array]) -> Any:
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
    def images_like(count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        split = NamedSharding(mesh, SPLIT)
        return (jax.ShapeDtypeStruct((count, *dataset.shape), jnp.uint8, sharding=split),
                jax.ShapeDtypeStruct((count,), jnp.int32, sharding=split))  # fmt: skip

    layers = None
    if use_kfac:
        example = (jax.ShapeDtypeStruct((local_batch, *dataset.shape), jnp.uint8),
                   jax.ShapeDtypeStruct((local_batch,), jnp.int32))  # fmt: skip
        layers = kfac.find_layers(functools.partial(loss_fn, plain), variables["params"], variables["batch_stats"],
                                  example, has_aux=True)  # fmt: skip
    rate = optimizers.learning_rate(optim, per_epoch, total)
    tx = optimizers.transform(optim, rate, layers, AXIS)
    # Everything is the same on all devices but for the layers that each one owns.
    state_specs = State(SAME, SAME, kfac.state_specs(tx, variables["params"], AXIS))

    def init(key: jax.Array) -> State:
        new = fresh(key)
        return State(new["params"], new["batch_stats"], tx.init(new["params"]))

    def train_step(
        gradients: Callable[..., Any], state: State, batch: tuple[jax.Array, jax.Array]
    ) -> tuple[State, dict[str, jax.Array]]:
        (loss, aux), grads, factors = gradients(state.params, state.batch_stats, batch)
        loss, aux, grads = lax.pmean((loss, aux, grads), AXIS)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, factors=factors)
        params = optax.apply_updates(state.params, updates)
        metrics = {
            "loss": loss, "accuracy": aux["accuracy"], "gradient_norm": optax.global_norm(grads),
            "parameter_norm": optax.global_norm(params),
        }  # fmt: skip
        if use_kfac:
            metrics |= {f"kfac/{k}": v for k, v in kfac.diagnostics(opt_state).items()}
        return State(params, aux["batch_stats"], opt_state), metrics

    def eval_step(params: Any, batch_stats: Any, batch: data.Batch) -> tuple[jax.Array, ...]:
        logits: Any = plain.apply({"params": params, "batch_stats": batch_stats}, normalise(batch.images), train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
        right = jnp.argmax(logits, -1) == batch.labels
        sums = tuple(jnp.sum(x * batch.weights) for x in (losses, right, jnp.ones(right.shape)))
        return lax.psum(sums, AXIS)

    # Compiled here and not on the first call: it can be timed, and nothing can retrace later.
    say("compiling ...")
    compile_began = time.perf_counter()
    on_devices = functools.partial(jax.shard_map, mesh=mesh)
    state = jax.jit(on_devices(init, in_specs=SAME, out_specs=state_specs))(key)

    def compile_step(layers: Any) -> Callable[..., Any]:
        gradients = optimizers.gradient_fn(functools.partial(loss_fn, model), layers, micro_batches, AXIS)
        step = on_devices(functools.partial(train_step, gradients), in_specs=(state_specs, SPLIT),
                          out_specs=(state_specs, SAME))  # fmt: skip
        return jax.jit(step, donate_argnums=0).lower(state, images_like(batch)).compile()

    full_step = compile_step(layers)
    # Between statistics there is nothing of K-FAC in the backward pass.
    cheap_step = compile_step(None) if use_kfac and optim.factor_every > 1 else full_step
    eval_size = mesh.size * min(local_batch, -(-len(dataset.val) // mesh.size))
    weights_like = jax.ShapeDtypeStruct((eval_size,), jnp.float32, sharding=NamedSharding(mesh, SPLIT))
    evaluate = (
        jax.jit(on_devices(eval_step, in_specs=(SAME, SAME, SPLIT), out_specs=SAME))
        .lower(state.params, state.batch_stats, data.Batch(*images_like(eval_size), weights_like))
        .compile()
    )
    # A checkpoint holds the state of one device, which any number of devices can take up.
    placed = jax.tree.map(lambda spec: NamedSharding(mesh, spec), state_specs,
                          is_leaf=lambda node: isinstance(node, jax.P))  # fmt: skip

    @functools.partial(jax.jit, out_shardings=NamedSharding(mesh, SAME))
    def gather(state: State) -> State:
        return state._replace(opt_state=kfac.gather_state(state.opt_state)) if use_kfac else state

    @functools.partial(jax.jit, out_shardings=placed)
    def scatter(state: State) -> State:
        return state._replace(opt_state=kfac.scatter_state(state.opt_state, mesh.size)) if use_kfac else state

    compile_seconds = time.perf_counter() - compile_began
    programs = "step, cheap step" if cheap_step is not full_step else "step"
    say(f"compiled {programs}, validation and initialisation in {compile_seconds:.1f} s")

    # Where it begins: at the beginning, or at the last checkpoint.
    checkpoints = ocp.CheckpointManager(
        (output / "checkpoints").absolute(),
        options=ocp.CheckpointManagerOptions(max_to_keep=run.keep_checkpoints, enable_async_checkpointing=False),
    )
    start, broken = 0, set[str]()
    if checkpoints.latest_step() is not None:
        start = checkpoints.latest_step()
        saved = checkpoints.restore(
            start, args=ocp.args.Composite(state=ocp.args.StandardRestore(gather(state)),
                                           extra=ocp.args.JsonRestore())
        )  # fmt: skip
        state, broken = scatter(saved["state"]), set(saved["extra"]["broken"])
    if run.resume:
        say(f"resuming {output} at step {start} of {total}")
    metrics = report.Metrics(output / "metrics.jsonl" if devices.is_first() else None, start)

    # SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint; a second one ends it now.
    stop_at = min(total, run.stop_after or total)
    stop = devices.Stop()

    def note_broken(names: tuple[str, ...]) -> None:
        for name in names:
            if name not in broken:
                broken.add(name)
                print(f"skipped {name}: not a readable image", file=sys.stderr, flush=True)

    pending: list[tuple[int, dict[str, jax.Array]]] = []
    loop_began = last_line = window_began = time.perf_counter()
    window_steps, step, text = 0, start, ""
    rows = devices.own_rows(mesh, local_batch, micro_batches)
    batches = data.train_batches(dataset.train, batch, run.seed, start, stop_at, rows)
    for step, got in enumerate(data.prefetch(batches, functools.partial(devices.place, mesh)), start + 1):
        done = step - 1
        with_factors = done < FACTOR_WARMUP or done % optim.factor_every == 0
        state, values = (full_step if with_factors else cheap_step)(state, (got.images, got.labels))
        note_broken(got.broken)
        pending.append((step, values))
        if len(pending) > 1:
            # No more than one step ahead of the device, or else batches would pile up on it.
            jax.block_until_ready(pending[-2][1])
        window_steps += 1

        stopping = stop.asked(step)
        last = step == stop_at or stopping
        validate = step % eval_every == 0 or step == total
        save = step % checkpoint_every == 0 or last
        # Not by the clock where several processes must do the same.
        quiet = time.perf_counter() - last_line > 10 and jax.process_count() == 1
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
            result = validation(evaluate, state, dataset, eval_size, mesh, note_broken)
            broken |= devices.union(broken)
            metrics.write({"step": step, **result, "broken_images": len(broken),
                           "seconds": round(time.perf_counter() - began, 2)})  # fmt: skip
            text += f"  val loss {result['val_loss']:.4f}  val accuracy {result['val_accuracy']:.1%}"
        if save:
            broken |= devices.union(broken)
            checkpoints.save(step, args=ocp.args.Composite(
                state=ocp.args.StandardSave(gather(state)),
                extra=ocp.args.JsonSave({"broken": sorted(broken)})))  # fmt: skip
        now = time.perf_counter()
        left = (total - step) * (now - loop_began) / (step - start)
        say(f"{text}  {speed:.2f} steps/s  {report.duration(left)} left")
        last_line = window_began = now
        window_steps = 0
        if last:
            break

    stop.restore()
    checkpoints.close()
    title = f"{dataset.name}, {config.model.arch}, {optim.optimizer}, batch {batch}"
    if devices.is_first():
        report.plot(metrics.records, output / "curves.png", title)
    accuracies = [r["val_accuracy"] for r in metrics.records if "val_accuracy" in r]
    accuracy = f"{accuracies[-1]:.2%} (best {max(accuracies):.2%})" if accuracies else "not measured"
    if step < total:
        why = signal.Signals(stop.signal).name if stop.signal else f"--stop-after {stop_at}"
        state_of = f"stopped by {why} at step {step} of {total}, to go on with --resume"
    else:
        state_of = f"done: {total} steps"
    say(
        f"{state_of}; {title}; validation accuracy {accuracy}; {len(broken)} broken images; "
        f"{time.perf_counter() - began:.1f} s, of which {compile_seconds:.1f} s compiling; {output}"
    )


def open_output(config: cfg.Config, dataset: data.Dataset) -> None:
    """Makes the output folder, marked with the configuration; refuses one that is in use."""
    output = config.run.output
    assert output is not None
    if config.run.resume:
        return
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


def validation(
    evaluate: Callable[..., Any],
    state: State,
    dataset: data.Dataset,
    size: int,
    mesh: Mesh,
    note_broken: Callable[[tuple[str, ...]], None],
) -> dict[str, float]:
    """Loss and accuracy over all readable validation images, each counted once."""
    sums = [0.0, 0.0, 0.0]
    rows = devices.own_rows(mesh, size // mesh.size, 1)
    batches = data.val_batches(dataset.val, size, rows)
    for got in data.prefetch(batches, functools.partial(devices.place, mesh)):
        note_broken(got.broken)
        new = evaluate(state.params, state.batch_stats, got._replace(broken=()))
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


def say(text: str) -> None:
    if devices.is_first():
        print(text, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
