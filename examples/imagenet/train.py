"""Trains a residual network on images with K-FAC or a first-order optimizer.

python examples/imagenet/train.py                          # digits, ten K-FAC steps an epoch
python examples/imagenet/train.py --optimizer sgd
python examples/imagenet/train.py --data-dir imagenet      # train/<class>/, val/<class>/
python examples/imagenet/train.py --config bs128k --data-dir imagenet
python examples/imagenet/train.py --config bs128k --data cifar10 --global-batch auto
python examples/imagenet/train.py --resume                 # goes on with the newest run
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

import dataclasses
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
from jax import lax
from jax.sharding import NamedSharding

import augment
import checkpoints
import config as cfg
import data
import devices
import kfac
import models
import optimizers
import precision
import report
import running
from config import UserError
from devices import AXIS, SAME, SPLIT

# Inverses go stale fast at first, so each of the first steps collects statistics whatever
# --factor-every says.
FACTOR_WARMUP = 10


class State(NamedTuple):
    """Everything that a step changes."""

    step: Any
    params: Any
    batch_stats: Any
    opt_state: Any
    mixed: Any  # what running mixup carries on, split over devices like the batch
    loss_scale: Any  # of float16


def main(args: list[str]) -> None:
    began = time.perf_counter()
    config, found = cfg.parse(args)
    if config.run.print_config:
        print(cfg.show(config))
        return
    if config.model.dtype == "float64":
        jax.config.update("jax_enable_x64", True)

    # The devices in a row, over which each batch is split. One device is a row too.
    devices.start(config.hardware)
    mesh = devices.make_mesh(config.hardware.devices)

    # The data, and how long the training is. An epoch has as many images as there are, whether or not batches fit in.
    dataset = data.load(config.data)
    size = len(dataset.train)
    config = cfg.fit_batch(config, size, mesh.size)
    optim, aug, run = config.optim, config.augment, config.run
    use_kfac = optim.optimizer == "kfac"
    ekfac = use_kfac and optim.inverse == "ekfac"
    local_batch, micro_batches = devices.divide(optim, mesh.size)
    batch = optim.global_batch
    per_epoch = size / batch
    total = cfg.total_steps(optim, per_epoch)
    stop_at = min(total, run.stop_after or total)
    if cfg.traced_steps(run.profile)[0] > stop_at:
        raise UserError(f"--profile {run.profile} begins after the last step, {stop_at}")
    eval_every = run.eval_every or max(1, round(per_epoch))
    checkpoint_every = run.checkpoint_every or max(1, round(per_epoch))
    if found is not None and found != dataset.found():
        raise UserError(f"the data are not those of the run in {run.output}: {dataset.found()} "
                        f"now, {found} then; point --data-dir to the same images")  # fmt: skip
    if len(set(devices.everyone(str(dataset.found())))) > 1:
        raise UserError("the processes do not see the same images")
    # Each process has named a new folder by its own clock.
    assert run.output is not None
    output = Path(devices.everyone(str(run.output))[0])
    devices.on_first(lambda: running.open_output(config, dataset))
    say(f"{dataset.name}: {size} training and {len(dataset.val)} validation images of "
        f"{'x'.join(map(str, dataset.shape))}, {dataset.num_classes} classes"
        + (f" ({dataset.note})" if dataset.note else ""))  # fmt: skip

    # The network and its loss, per device. `plain` is the network as it is outside of the row of devices.
    plain = models.create(config.model.arch, dataset.num_classes, config.model.dtype, config.model.width,
                          init_scheme=config.model.init, norm_epsilon=config.model.norm_epsilon)  # fmt: skip
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
        f"{local_batch} images each; {per_epoch:.4g} steps an epoch, {total} steps in all")  # fmt: skip

    def normalise(images: jax.Array) -> jax.Array:
        if images.dtype != jnp.uint8:  # mixed, and normalised before
            return images
        mean, std = jnp.array(dataset.mean, wide), jnp.array(dataset.std if aug.divide_by_std else 1, wide)
        return (images.astype(wide) / 255 - mean) / std

    def loss_fn(model: Any, params: Any, batch_stats: Any, batch: augment.Mixed, scale: jax.Array | None) -> Any:
        logits, new = model.apply(
            {"params": params, "batch_stats": batch_stats}, normalise(batch.images), train=True,
            mutable=["batch_stats"],
        )  # fmt: skip
        if optim.fisher == "sampled":
            logits = kfac.output(logits, "categorical")
        targets = optax.smooth_labels(batch.targets, aug.label_smoothing)
        loss = jnp.mean(optax.softmax_cross_entropy(logits, targets))
        # Of a mixed image its own label counts, which has the larger share.
        right = jnp.argmax(logits, -1) == jnp.argmax(batch.targets, -1)
        aux = {"batch_stats": new["batch_stats"], "accuracy": jnp.mean(right.astype(jnp.float32))}
        return loss if scale is None else loss * scale, aux

    # The optimizer. K-FAC traces the loss once to find the layers.
    def images_like(count: int) -> tuple[jax.ShapeDtypeStruct, jax.ShapeDtypeStruct]:
        split = NamedSharding(mesh, SPLIT)
        return (jax.ShapeDtypeStruct((count, *dataset.shape), jnp.uint8, sharding=split),
                jax.ShapeDtypeStruct((count,), jnp.int32, sharding=split))  # fmt: skip

    # Without mixup and erasing images stay uint8 until a micro-batch is normalised.
    augmented = bool(aug.mixup_alpha) or aug.erasing != "none"
    half = config.model.dtype == "float16"
    layers = None
    if use_kfac:
        seen = jnp.dtype(config.model.dtype) if augmented else jnp.uint8
        example = augment.Mixed(jax.ShapeDtypeStruct((local_batch, *dataset.shape), seen),
                                jax.ShapeDtypeStruct((local_batch, dataset.num_classes), wide))  # fmt: skip
        layers = kfac.find_layers(functools.partial(loss_fn, plain), variables["params"], variables["batch_stats"],
                                  example, jnp.float32(1) if half else None, has_aux=True)  # fmt: skip
    rate = optimizers.learning_rate(optim, per_epoch, total)
    try:
        tx = optimizers.transform(optim, rate, per_epoch, layers, AXIS)
    except ValueError as error:
        raise UserError(f"the options of the optimizer do not go together: {error}") from error
    # The same on all devices but for the layers that each one owns and the images that it has mixed.
    state_specs = State(SAME, SAME, SAME, kfac.state_specs(tx, variables["params"], AXIS), SPLIT, SAME)

    def init(key: jax.Array) -> State:
        new = fresh(key)
        mixed: Any = ()
        if aug.mixup_alpha:
            mixed = augment.Mixed(jnp.zeros((batch // mesh.size, *dataset.shape), config.model.dtype),
                                  jnp.zeros((batch // mesh.size, dataset.num_classes), wide))  # fmt: skip
        return State(jnp.int32(0), new["params"], new["batch_stats"], tx.init(new["params"]), mixed,
                     precision.initial() if half else ())  # fmt: skip

    def train_step(
        gradients: Callable[..., Any], state: State, batch: tuple[jax.Array, jax.Array]
    ) -> tuple[State, dict[str, jax.Array], dict[str, jax.Array]]:
        images, labels = batch
        seen, mixed = augment.Mixed(images, jax.nn.one_hot(labels, dataset.num_classes, dtype=wide)), state.mixed
        if augmented:
            seen = seen._replace(images=normalise(images).astype(config.model.dtype))
            keys = augment.keys(run.seed, state.step, devices.own_indices(mesh.size, local_batch, micro_batches))
            seen, mixed = augment.augment(keys, state.step, aug.mixup_alpha, aug.erasing, seen, mixed)
        scale = state.loss_scale.scale if half else None
        extra: dict[str, Any] = {}
        if optim.fisher == "sampled":
            extra["fisher_key"] = optimizers.fisher_key(run.seed, state.step)
        if ekfac:
            assert layers is not None
            extra["basis"] = kfac.eigenbasis(state.opt_state, layers)
        (loss, aux), grads, factors = gradients(state.params, state.batch_stats, seen, scale, **extra)
        loss, aux, grads = lax.pmean((loss, aux, grads), AXIS)
        if half:
            loss, grads, factors = precision.unscale(state.loss_scale, loss, grads, factors)
        updates, opt_state = tx.update(grads, state.opt_state, state.params, factors=factors)
        params = optax.apply_updates(state.params, updates)
        if optim.rescale:
            params = optimizers.rescale(params)
        batch_stats, loss_scale = aux["batch_stats"], state.loss_scale
        gradient_norm = jnp.sqrt(jnp.sum(precision.squares(grads)))
        if half:
            # What overflowed changes the scale, and nothing else but the counts that K-FAC keeps of such steps.
            finite = jnp.isfinite(gradient_norm)
            params, batch_stats = precision.select(finite, (params, batch_stats), (state.params, state.batch_stats))
            opt_state = opt_state if use_kfac else precision.select(finite, opt_state, state.opt_state)
            loss_scale = precision.adjust(state.loss_scale, finite)
        metrics = {
            "loss": loss, "accuracy": aux["accuracy"], "gradient_norm": gradient_norm,
            "parameter_norm": jnp.sqrt(jnp.sum(precision.squares(params))),
        }  # fmt: skip
        watched = {"gradient": grads, "parameter": params, "batch-norm average": batch_stats}
        squares = {name: precision.squares(tree) for name, tree in watched.items()}
        if half:
            metrics["loss_scale"] = state.loss_scale.scale
        if use_kfac:
            metrics |= {f"kfac/{k}": v for k, v in kfac.diagnostics(opt_state).items()}
        return State(state.step + 1, params, batch_stats, opt_state, mixed, loss_scale), metrics, squares

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
        gradients = optimizers.gradient_fn(
            functools.partial(loss_fn, model), layers, micro_batches, AXIS, optim.subsample, optim.fisher, ekfac
        )
        step = on_devices(functools.partial(train_step, gradients), in_specs=(state_specs, SPLIT),
                          out_specs=(state_specs, SAME, SAME))  # fmt: skip
        return jax.jit(step, donate_argnums=0).lower(state, images_like(batch)).compile()

    full_step = compile_step(layers)
    # Between statistics there is nothing of K-FAC in the backward pass.
    cheap_step = compile_step(None) if use_kfac and optim.factor_every != 1 else full_step
    eval_size = mesh.size * min(local_batch, -(-len(dataset.val) // mesh.size))
    weights_like = jax.ShapeDtypeStruct((eval_size,), jnp.float32, sharding=NamedSharding(mesh, SPLIT))
    evaluate = (
        jax.jit(on_devices(eval_step, in_specs=(SAME, SAME, SPLIT), out_specs=SAME))
        .lower(state.params, state.batch_stats, data.Batch(*images_like(eval_size), weights_like))
        .compile()
    )

    # A checkpoint holds the state of one device, which any number of devices can take up; mixed images in the order of
    # the batch, still split.
    gather = jax.jit(functools.partial(checkpoints.portable, mesh.size, local_batch),
                     out_shardings=devices.shardings(mesh, state_specs._replace(opt_state=SAME)))  # fmt: skip
    scatter = jax.jit(functools.partial(checkpoints.placed, mesh.size, local_batch),
                      out_shardings=devices.shardings(mesh, state_specs))  # fmt: skip

    compile_seconds = time.perf_counter() - compile_began
    programs = "step, cheap step" if cheap_step is not full_step else "step"
    say(f"compiled {programs}, validation and initialisation in {compile_seconds:.1f} s")

    # Where it begins: at the beginning, or at the last checkpoint.
    saved = checkpoints.Checkpoints(output / "checkpoints", run.keep_checkpoints)
    start, broken = saved.latest() or 0, set[str]()
    if stop_at < start:
        raise UserError(f"--stop-after {stop_at} is over: the run in {output} is at step {start}")
    interval = kfac.AdaptiveInterval(optim.statistics_threshold)  # with --factor-every adaptive
    if start:
        portable_state, extra = saved.restore(gather(state))
        state, broken = scatter(portable_state), set(extra["broken"])
        interval = kfac.AdaptiveInterval(**extra["interval"])
    if run.resume:
        say(f"resuming {output} at step {start} of {total}")
    metrics = report.Metrics(output / "metrics.jsonl" if devices.is_first() else None, start, run.tensorboard)
    seconds_before = metrics.seconds
    # The schedule does not go on in steps that float16 left out.
    left_out = sum(half and "gradient_norm" in r and r["gradient_norm"] is None for r in metrics.records)
    trace = running.Trace(cfg.traced_steps(run.profile), output / "profile")
    watched = {"gradient": variables["params"], "parameter": variables["params"],
               "batch-norm average": variables["batch_stats"]}  # fmt: skip

    # SIGTERM and Ctrl-C end the run after the step at hand, with a checkpoint; a second one ends it now.
    stop = devices.Stop()

    def note_broken(names: tuple[str, ...]) -> None:
        for name in names:
            if name not in broken:
                broken.add(name)
                print(f"skipped {name}: not a readable image", file=sys.stderr, flush=True)

    pending: list[tuple[int, dict[str, jax.Array], dict[str, jax.Array]]] = []
    best, loop_began = saved.best(), time.perf_counter()
    last_line = window_began = read_at = loop_began
    window_steps, step, text = 0, start, ""
    rows = devices.own_rows(mesh, local_batch, micro_batches)
    batches = data.train_batches(dataset.train, batch, run.seed, start, stop_at, rows)
    for step, got in enumerate(data.prefetch(batches, functools.partial(devices.place, mesh)), start + 1):
        done = step - 1
        due = interval.due(done) if isinstance(optim.factor_every, str) else done % optim.factor_every == 0
        with_factors = due or done < FACTOR_WARMUP
        trace.before(step)
        state, values, squares = (full_step if with_factors else cheap_step)(state, (got.images, got.labels))
        trace.after(step, state)
        note_broken(got.broken)
        if use_kfac:
            values = values | {"kfac/with_statistics": with_factors}
        if optim.factor_every == "adaptive" and with_factors:
            interval.record(done, float(values["kfac/statistics_change"]))  # waits for the device
        pending.append((step, values, squares))
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
        pending = jax.device_get(pending)
        before, read_at = read_at, time.perf_counter()
        for k, (at, values, squares) in enumerate(pending, 1):
            record = {name: float(value) for name, value in values.items()}
            # When the steps between two readings ended is not known: evenly spread.
            seconds = seconds_before + before - loop_began + (read_at - before) * k / len(pending)
            metrics.write({"step": at, "epoch": round(at / per_epoch, 4), "seconds": round(seconds, 3),
                           "learning_rate": float(rate(at - 1 - left_out)), **record})  # fmt: skip
            if half and record["loss_scale"] > precision.SMALLEST and not math.isfinite(record["gradient_norm"]):
                left_out += 1  # and the next loss scale is smaller
                continue
            if bad := precision.not_finite(record["loss"], squares, watched):
                running.stop_at_nan(bad, at, saved, config)
        pending.clear()
        now = time.perf_counter()
        speed = window_steps / (now - window_began)
        text = (f"step {step:>{len(str(total))}}/{total}  epoch {step / per_epoch:5.1f}  "
                f"loss {record['loss']:.4f}  accuracy {record['accuracy']:6.1%}")  # fmt: skip
        result: dict[str, float] = {}
        if validate:
            result = running.validate(evaluate, state, dataset, eval_size, mesh, note_broken)
            broken |= devices.union(broken)
            read_at = time.perf_counter()
            metrics.write({"step": step, "epoch": round(step / per_epoch, 4), **result, "broken_images": len(broken),
                           "seconds": round(seconds_before + read_at - loop_began, 3)})  # fmt: skip
            save |= result["val_accuracy"] > best
            best = max(best, result["val_accuracy"])
            text += f"  val loss {result['val_loss']:.4f}  val accuracy {result['val_accuracy']:.1%}"
        if save:
            broken |= devices.union(broken)
            extra = {"broken": sorted(broken), "interval": dataclasses.asdict(interval)}
            saved.save(step, gather(state), extra, result.get("val_accuracy"))
        now = time.perf_counter()
        left = (total - step) * (now - loop_began) / (step - start)
        say(f"{text}  {speed:.2f} steps/s  {report.duration(left)} left")
        last_line = window_began = now
        window_steps = 0
        if last:
            break

    trace.end()
    saved.close()
    stop.restore()
    metrics.close()
    title = f"{dataset.name}, {config.model.arch}, {optim.optimizer}, batch {batch}"
    if devices.is_first():
        report.plot([report.Curves(output.name, metrics.records)], output / "curves.png", title)
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


def say(text: str) -> None:
    if devices.is_first():
        print(text, flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except UserError as error:
        sys.exit(f"error: {error}")
