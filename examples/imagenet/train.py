"""Trains a network on images with K-FAC or another optimizer. To be read from top to bottom; to be copied is simple.py.

python examples/imagenet/train.py                          # digits, ten K-FAC steps an epoch, on a CPU
python examples/imagenet/train.py --config bs128k --data-dir imagenet --output runs/a    # the same again goes on
python examples/imagenet/train.py --eval runs/a            # its best checkpoint
python examples/imagenet/train.py --config bs128k --data synthetic --synthetic-images 1281167 --plan 128 512   # a plan
python examples/imagenet/train.py --distributed            # in each process: launch/
"""

import os
import signal

if __name__ == "__main__":  # until there is something to save, Ctrl-C ends it at once and without a word
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Before jax is imported, which reads both. With few cores, XLA's CPU schedule may start a convolution and a LAPACK call
# at once and let each wait for the other's threads forever.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "xla_cpu_enable_concurrency_optimized_scheduler" not in os.environ.get("XLA_FLAGS", ""):
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import dataclasses
import functools
import json
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

import batches
import checkpoints
import config as cfg
import data
import kfac
import models
import processes
import recipe
import report
from adaptive_interval import AdaptiveInterval
from files import UserError
from models import is_kernel
from recipe import AXIS, Mixed, Run
from report import say

SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)
INVERSES: dict[str, Callable[..., kfac.Inverse]] = {
    "soap": kfac.Soap, "cholesky": kfac.Cholesky, "eigh": kfac.Eigh, "ekfac": kfac.Ekfac,
}  # fmt: skip
# `keys` folds in the step instead, which is never as large as this.
FISHER_STREAM = 2**32 - 1
# Inverses go stale fast at first, so each of the first steps collects statistics whatever --factor-every says.
FACTOR_WARMUP = 10


class State(NamedTuple):
    """Everything that a step changes."""

    step: Any
    params: Any
    batch_stats: Any
    ema: Any  # running averages of both, if wanted
    opt_state: Any
    mixed: Any  # what running mixup carries on, split over devices like the batch
    loss_scale: Any  # of float16


# K-FAC, or another optimizer in its place: gradients and updates, on one of a row of devices.


def transform(config: Any, rate: optax.Schedule, steps_per_epoch: float, layers: Any) -> Any:
    """The optimizer as an optax transform whose `update` takes `factors=`, None for first-order methods."""
    try:
        return optax.with_extra_args_support(_transform(config, rate, steps_per_epoch, layers))
    except ValueError as error:
        raise UserError(f"the options of the optimizer do not go together: {error}") from error


def _transform(config: Any, rate: optax.Schedule, steps_per_epoch: float, layers: Any) -> Any:
    decay = config.weight_decay
    match config.optimizer:
        case "kfac" if config.trust_ratio == "auto":
            return kfac.kfac(
                rate, layers, momentum=recipe.momentum(config, rate), nesterov=config.nesterov, damping=config.damping,
                weight_decay=decay or None, weight_decay_mask=is_kernel if decay else None,
                inverse=INVERSES[config.inverse](), inverse_every=config.inverse_every or "auto",
                distribution=kfac.Distribution(AXIS),
            )  # fmt: skip
        case "kfac":
            return kfac.presets.large_batch(
                rate, layers, damping=recipe.damping(config, steps_per_epoch), momentum=recipe.momentum(config, rate),
                nesterov=config.nesterov, rate_in_momentum=config.rate_in_momentum,
                unitwise_damping=config.unitwise_damping, weight_decay=decay, weight_decay_mask=is_kernel,
                kl_clip=config.kl_clip or None, trust_ratio=config.trust_ratio or None,
                factor_decay=config.factor_decay, inverse_every=config.inverse_every,
                inverse=INVERSES[config.inverse](), distribution=kfac.Distribution(AXIS),
            )  # fmt: skip
        case "muon":
            return optax.contrib.muon(
                rate, beta=config.momentum, nesterov=config.nesterov, weight_decay=decay, weight_decay_mask=is_kernel,
                muon_weight_dimension_numbers=as_matrices,
            )  # fmt: skip
        case "sgd":
            sgd = optax.sgd(rate, config.momentum, nesterov=config.nesterov)
            return optax.chain(optax.add_decayed_weights(decay, is_kernel), sgd)
        case "lars":
            more = {"trust_ratio_mask": is_kernel, "momentum": config.momentum, "nesterov": config.nesterov}
            return optax.lars(rate, decay, is_kernel, **more)
        case "lamb":
            return optax.lamb(rate, b1=config.momentum, weight_decay=decay, mask=is_kernel)
    return optax.adamw(rate, b1=config.momentum, weight_decay=decay, mask=is_kernel, nesterov=config.nesterov)


def as_matrices(params: Any) -> Any:
    """Kernels as Muon takes them, one column an output; the rest is for Adam."""
    of = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda w: of(tuple(range(w.ndim - 1)), w.ndim - 1) if w.ndim > 1 else None, params)


def plan(config: Any, layers: Any) -> str:
    """What a step would take on each number of devices of `--plan`."""
    every: dict[str, Any] = {} if isinstance(config.factor_every, str) else {"statistics_every": config.factor_every}
    every |= {} if config.inverse_every is None else {"inverse_every": config.inverse_every}
    options = dict(batch=config.global_batch, inverse=INVERSES[config.inverse]())
    return "\n\n".join(str(kfac.planning.plan(layers, devices=n, **options, **every)) for n in config.plan)


def gradient_fn(config: Any, loss_fn: Callable[..., Any], layers: Any, micro_batches: int) -> Callable[..., Any]:
    """`fn(step, opt_state, params, batch_stats, batch, ...) -> ((loss, aux), grads, factors)`, this device's own.

    Without `layers` the factors are None; else they come from every `config.subsample`-th image. Over micro-batches
    everything is averaged, the batch-norm averages in `aux` too.
    """
    if layers is None:
        plain = jax.value_and_grad(loss_fn, has_aux=True)

        def first_order(params: Any, *rest: Any) -> Any:
            # Of parameters that are the same on all devices shard_map would sum the gradients.
            value, grads = plain(lax.pcast(params, AXIS, to="varying"), *rest)
            return value, grads, None

        measure: Callable[..., Any] = first_order
    else:
        measure = kfac.value_and_grad(loss_fn, layers, has_aux=True, subsample=config.subsample, fisher=config.fisher)
    if micro_batches > 1:
        measure = kfac.microbatch(measure, micro_batches, batch_argnums=2)

    def gradients(step: jax.Array, opt_state: Any, *args: Any) -> Any:
        more: dict[str, Any] = {}
        if layers is not None and config.fisher == "sampled":
            # The same on all devices: each micro-batch of each device draws with one of its own.
            more["fisher_key"] = jax.random.fold_in(
                jax.random.fold_in(jax.random.key(config.seed), FISHER_STREAM), step
            )
        if layers is not None and config.inverse == "ekfac":
            more["basis"] = kfac.curvature.eigenbasis(opt_state, layers)
        return measure(*args, **more)

    return gradients


# What is compiled: each function works on one of a row of devices.


def loss_fn(run: Run, model: Any, params: Any, batch_stats: Any, batch: Mixed, scale: Any) -> Any:
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = model.apply(variables, recipe.normalise(run, batch.images), train=True, mutable=["batch_stats"])
    if run.config.fisher == "sampled":
        logits = kfac.output(logits, "categorical")
    targets = optax.smooth_labels(batch.targets, run.config.label_smoothing)
    loss = jnp.mean(optax.softmax_cross_entropy(logits, targets))
    # Of a mixed image its own label counts, which has the larger share.
    right = jnp.argmax(logits, -1) == jnp.argmax(batch.targets, -1)
    aux = {"batch_stats": new.get("batch_stats", {}), "accuracy": jnp.mean(right.astype(jnp.float32))}
    return loss if scale is None else loss * scale, aux


def fresh(run: Run, key: jax.Array) -> dict[str, Any]:
    variables = run.plain.init(key, jnp.zeros((1, *run.dataset.shape)), train=True)
    return jax.tree.map(lambda x: x.astype(run.wide), {"batch_stats": {}, **variables})


def init(run: Run, variables: dict[str, Any]) -> State:
    params, batch_stats, n = variables["params"], variables["batch_stats"], run.micro_batches * run.local_batch
    mixed: Any = ()
    if run.config.mixup_alpha:
        mixed = Mixed(jnp.zeros((n, *run.dataset.shape), run.config.dtype),
                              jnp.zeros((n, run.dataset.num_classes), run.wide))  # fmt: skip
    half, ema = run.config.dtype == "float16", (params, batch_stats) if run.config.ema else ()
    return State(jnp.int32(0), params, batch_stats, ema, run.tx.init(params), mixed,
                 recipe.LossScale(jnp.float32(recipe.INITIAL), jnp.int32(0)) if half else ())  # fmt: skip


def train_step(run: Run, gradients: Callable[..., Any], state: State, batch: Any) -> tuple[State, Any, Any]:
    config, half = run.config, run.config.dtype == "float16"
    seen, mixed = recipe.augmented(run, state.step, batch, state.mixed)
    scale = state.loss_scale.scale if half else None
    (loss, aux), grads, factors = gradients(state.step, state.opt_state, state.params, state.batch_stats, seen, scale)
    loss, aux, grads = lax.pmean((loss, aux, grads), AXIS)
    if half:
        loss, grads, factors = recipe.unscale(state.loss_scale, loss, grads, factors)
    updates, opt_state = run.tx.update(grads, state.opt_state, state.params, factors=factors)
    params = optax.apply_updates(state.params, updates)
    if config.rescale:
        params = models.rescale(params)
    batch_stats, loss_scale = aux["batch_stats"], state.loss_scale
    squares = {"gradient": report.squares(grads)}
    gradient_norm = jnp.sqrt(jnp.sum(squares["gradient"]))
    metrics = {"loss": loss, "accuracy": aux["accuracy"], "gradient_norm": gradient_norm}
    if half or config.skip_nonfinite:
        finite = jnp.isfinite(gradient_norm) & jnp.isfinite(jnp.sum(report.squares((params, batch_stats))))
        # K-FAC leaves such gradients out by itself, and counts them.
        kept = finite | (~jnp.isfinite(gradient_norm) & (config.optimizer == "kfac"))
        params, batch_stats = recipe.select(finite, (params, batch_stats), (state.params, state.batch_stats))
        opt_state, metrics["skipped"] = recipe.select(kept, opt_state, state.opt_state), 1.0 - finite
    if half:
        metrics["loss_scale"], loss_scale = scale, recipe.adjust(state.loss_scale, finite)
    ema = models.average(config.ema, state.step, state.ema, (params, batch_stats)) if config.ema else ()
    squares |= {"parameter": report.squares(params), "batch-norm average": report.squares(batch_stats)}
    metrics["parameter_norm"] = jnp.sqrt(jnp.sum(squares["parameter"]))
    if config.optimizer == "kfac":
        metrics |= {f"kfac/{name}": value for name, value in kfac.diagnostics(opt_state).items()}
        metrics["kfac/with_statistics"] = jnp.array(factors is not None)
        metrics["kfac/due"] = kfac.due(opt_state)
    return State(state.step + 1, params, batch_stats, ema, opt_state, mixed, loss_scale), metrics, squares


def eval_step(run: Run, weights: tuple[Any, Any], batch: batches.Batch) -> tuple[jax.Array, ...]:
    params, batch_stats = weights
    variables = {"params": params, "batch_stats": batch_stats}
    logits = run.plain.apply(variables, recipe.normalise(run, batch.images), train=False)
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch.labels)
    _, best = lax.top_k(logits, min(5, run.dataset.num_classes))
    hits = best == batch.labels[:, None]
    sums = tuple(jnp.sum(x * batch.weights) for x in (losses, hits[:, 0], hits.any(1), jnp.ones(losses.shape)))
    return lax.psum(sums, AXIS)


def main(args: list[str]) -> int:
    """The run; returns the exit code, which tells one that was stopped by a signal from one that is done."""
    began = time.perf_counter()
    config = cfg.parse(args)
    if config.print_config:
        print(json.dumps({k: v for k, v in vars(config).items() if v is not None}, indent=2, default=str))
        return 0

    # The devices in a row, over which each batch is split. One device is a row too.
    processes.meet(config)
    mesh = processes.row_of_devices(config.devices)
    same, split = NamedSharding(mesh, SAME), NamedSharding(mesh, SPLIT)
    on_devices = functools.partial(jax.shard_map, mesh=mesh)

    # The data, and how long the training is. An epoch has as many images as there are, whether or not batches fit in.
    dataset = data.load(config)
    size = len(dataset.train)
    config = cfg.fit(config, size, mesh.size, mesh.devices[0].platform)
    batch, per_epoch, total = config.global_batch, size / config.global_batch, cfg.total_steps(config, size)
    local_batch = config.local_batch or batch // mesh.size
    micro_batches = batch // (mesh.size * local_batch)
    stop_at = min(total, config.stop_after or total)
    eval_every = config.eval_every or max(1, round(per_epoch))
    trace = report.Trace(config.profile, stop_at)
    if config.input_speed:
        report.input_speed(dataset.train, batch, config.input_speed, config.workers)
        return 0
    # The folder of the run: a new one, or one to go on in. From here on something is written.
    output, lock, begin_with = config.output, None, None
    if not (config.eval or config.plan):
        begin_with = checkpoints.to_begin_with(config)
        output, lock = processes.open_output(config, dataset.found())
    say(f"{dataset.name}: {size} training and {len(dataset.val)} validation images of "
        f"{'x'.join(map(str, dataset.shape))}, {dataset.num_classes} classes"
        + (f" ({dataset.note})" if dataset.note else ""))  # fmt: skip
    broken = batches.Broken(config.max_broken * (size + len(dataset.val)))
    rows = batches.own_rows(mesh, jax.process_index(), local_batch, micro_batches)
    # Global arrays, split over the devices, from what this process has loaded of them.
    place = functools.partial(jax.tree.map, functools.partial(jax.make_array_from_process_local_data, split))

    def train_batches(first: int, last: int) -> Iterator[batches.Batch]:
        return batches.prefetch(batches.train_batches(dataset.train, batch, config.seed, first, last, rows), place)

    # The network.
    plain = models.create(config.arch, dataset.num_classes, config.dtype, config.width, init_scheme=config.init,
                          norm_epsilon=config.norm_epsilon)  # fmt: skip
    model = plain.clone(axis_name=AXIS if config.sync_batch_norm else None)
    run = Run(config, dataset, model, plain, mesh.size, local_batch, micro_batches)
    variables = jax.eval_shape(functools.partial(fresh, run), jax.random.key(config.seed))
    count = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    say(f"{config.arch} in {config.dtype}, {count / 1e6:.2f} M parameters; {config.optimizer} on batches of {batch}: "
        f"{mesh.size} device(s) in {jax.process_count()} process(es), {micro_batches} micro-batch(es) of {local_batch} "
        f"images each; {per_epoch:.4g} steps an epoch, {total} steps in all, {config.warmup_epochs:.4g} epochs of "
        "warm-up")  # fmt: skip

    # Validation: loss and accuracies over all readable images, each counted once.
    eval_local = min(local_batch, -(-len(dataset.val) // mesh.size))
    eval_rows = batches.own_rows(mesh, jax.process_index(), eval_local, 1)
    evaluate: Any = jax.jit(on_devices(functools.partial(eval_step, run), in_specs=(SAME, SPLIT), out_specs=SAME))

    def validate(weights: Any) -> dict[str, float]:
        sums = np.zeros(4)
        for got in batches.prefetch(batches.val_batches(dataset.val, mesh.size * eval_local, eval_rows), place):
            broken.note(got.broken)
            sums += np.array(jax.device_get(evaluate(weights, got._replace(broken=()))), np.float64)
        if not sums[3]:
            raise UserError("none of the validation images can be read")
        return dict(zip(("val_loss", "val_accuracy", "val_top5_accuracy"), (sums[:3] / sums[3]).tolist(), strict=True))

    if config.eval:
        *weights, at = checkpoints.weights(config.eval)
        found = validate(jax.device_put(tuple(weights), same))
        say(f"{config.eval}, step {at}: validation loss {found['val_loss']:.4f}, accuracy {found['val_accuracy']:.2%}, "
            f"top-5 {found['val_top5_accuracy']:.2%}, of {len(dataset.val)} images")  # fmt: skip
        return 0

    # The optimizer. K-FAC traces the loss once to find the layers.
    half, use_kfac, layers = config.dtype == "float16", config.optimizer == "kfac", None
    if use_kfac:
        seen = jnp.dtype(config.dtype) if run.augmented else jnp.uint8
        example = Mixed(jax.ShapeDtypeStruct((local_batch, *dataset.shape), seen),
                        jax.ShapeDtypeStruct((local_batch, dataset.num_classes), run.wide))  # fmt: skip
        layers = kfac.find_layers(functools.partial(loss_fn, run, plain), variables["params"], variables["batch_stats"],
                                  example, jnp.float32(1) if half else None, has_aux=True)  # fmt: skip
    if config.plan:
        say(plan(config, layers))
        return 0
    rate = recipe.learning_rate(config, per_epoch, total)
    run = run._replace(tx=transform(config, rate, per_epoch, layers))

    # The state: the same on all devices but for the layers that each one owns and the images that it has mixed.
    say("compiling ...")
    compile_began = time.perf_counter()
    specs = State(SAME, SAME, SAME, SAME, kfac.state.state_specs(run.tx, variables["params"], AXIS), SPLIT, SAME)
    variables = jax.jit(functools.partial(fresh, run), out_shardings=same)(jax.random.key(config.seed))
    if begin_with is not None:
        variables = checkpoints.taken_over(begin_with, variables)
    state = jax.jit(on_devices(functools.partial(init, run), in_specs=SAME, out_specs=specs))(variables)

    # The step, compiled here and not on the first call: it can be timed, and nothing can retrace later.
    def compile_step(layers: Any) -> Callable[..., Any]:
        gradients = gradient_fn(config, functools.partial(loss_fn, run, model), layers, micro_batches)
        step = on_devices(functools.partial(train_step, run, gradients), in_specs=(specs, SPLIT),
                          out_specs=(specs, SAME, SAME))  # fmt: skip
        images = jax.ShapeDtypeStruct((batch, *dataset.shape), jnp.uint8, sharding=split)
        labels = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=split)
        return jax.jit(step, donate_argnums=0).lower(state, (images, labels)).compile()

    full_step = compile_step(layers)
    # Between statistics there is nothing of K-FAC in the backward pass.
    cheap_step = compile_step(None) if use_kfac and config.factor_every != 1 else full_step
    validated = state.ema if config.ema else (state.params, state.batch_stats)
    n = mesh.size * eval_local
    shapes: Any = ((n, *dataset.shape), jnp.uint8), ((n,), jnp.int32), ((n,), jnp.float32)
    images, labels, shares = (jax.ShapeDtypeStruct(*shape, sharding=split) for shape in shapes)
    evaluate = evaluate.lower(validated, batches.Batch(images, labels, shares)).compile()
    compile_seconds = time.perf_counter() - compile_began
    say(f"compiled {'step' if cheap_step is full_step else 'step, cheap step'} in {compile_seconds:.1f} s")

    # Where it begins: at the beginning, or at the last checkpoint, which fits any number of devices. One of a large
    # batch leaves the mixed images out: they are made again of the last batches.
    lean = checkpoints.is_lean(config.checkpoint_mixed, state.mixed)
    saved = checkpoints.Checkpoints(output / "checkpoints", config.keep_checkpoints,
                                    *checkpoints.for_any_devices(mesh, specs, local_batch, lean))  # fmt: skip
    start, interval = 0, AdaptiveInterval(config.statistics_threshold)  # with --factor-every adaptive
    due = True  # with --factor-every auto
    if saved.latest():
        mixed = state.mixed
        state, extra = saved.restore(state)
        start, interval, due = int(state.step), AdaptiveInterval(**extra["interval"]), extra["due"]
        broken.update(extra["broken"])
        say(f"resuming {output} at step {start} of {total}")
        if stop_at < start:
            raise UserError(f"the run in {output} is at step {start}, and is to end at step {stop_at}; give --steps, "
                            "--epochs or --stop-after beyond it")  # fmt: skip
        if lean:
            first = max(0, start - checkpoints.REMADE)
            state = state._replace(mixed=checkpoints.mixed_again(run, mesh, first, train_batches(first, start), mixed))
    processes.on_first(lambda: processes.save(config, dataset.found(), output))
    metrics = report.Metrics(output, start, per_epoch, variables, config.tensorboard, writes=processes.is_first())

    # The loop. SIGTERM and Ctrl-C end it after the step at hand, with a checkpoint; a second one ends it now.
    stop, step, target = processes.Stop(), start, config.target_accuracy or math.inf
    why = f"--stop-after {stop_at}"
    if max(metrics.accuracies, default=0) >= target:
        stop_at, why = start, "--target-accuracy, reached"
    progress, last_save = report.Progress(start, total, batch, per_epoch), time.perf_counter()
    for step, got in enumerate(train_batches(start, stop_at), start + 1):
        done = step - 1
        if config.factor_every == "adaptive":
            due = interval.due(done)
        elif use_kfac and config.factor_every != "auto":
            due = done % config.factor_every == 0
        with_factors = due or done < FACTOR_WARMUP
        trace.before(step, output)
        state, values, squares = (full_step if with_factors else cheap_step)(state, (got.images, got.labels))
        broken.note(got.broken)
        if config.factor_every == "adaptive" and with_factors:
            interval.record(done, float(values["kfac/statistics_change"]))  # waits for the device
        if config.factor_every == "auto":
            due = bool(values["kfac/due"])  # and this does
        metrics.add(step, values, squares)
        progress.bar.update()

        # What there is to do after this step. By the clock only where a single process decides, or at fixed steps.
        now = time.perf_counter()
        last = step == stop_at or stop.asked(step)
        trace.after(step, state, last)
        check = step % eval_every == 0 or step == total
        quiet = now - progress.last_line > 10 and jax.process_count() == 1
        log = check or last or quiet or step % config.log_every == 0
        late = now - last_save > 60 * config.checkpoint_minutes
        if jax.process_count() > 1:
            late = log and processes.everyone(str(late))[0] == "True"
        save = late or last or bool(config.checkpoint_every and step % config.checkpoint_every == 0)
        if not (log or save):
            continue

        # Reading the numbers waits for the device, hence not after each step.
        record = metrics.flush(rate)
        progress.read(step)
        if record["bad"]:
            saved.close()
            raise UserError(f"{record['bad']}; {saved.describe()}; a new run may do with --skip-nonfinite, "
                            f"{f'a --damping above {config.damping} or ' if use_kfac and config.damping else ''}"
                            f"a --learning-rate below {config.learning_rate}")  # fmt: skip
        result: dict[str, float] = {}
        if check:
            result = validate(state.ema if config.ema else (state.params, state.batch_stats))
            if result["val_accuracy"] >= target:
                save, last, why = True, True, "--target-accuracy, reached"
        broken |= processes.union(broken)
        if check:
            metrics.validated(step, result, len(broken))
        if save:
            extra = {"broken": sorted(broken), "interval": dataclasses.asdict(interval), "due": due}
            saved.save(step, state, extra, result.get("val_accuracy"))
            last_save = time.perf_counter()
        progress.line(step, record | result)
        if last:
            break

    # The end.
    progress.bar.close()
    saved.close()
    processes.release(lock)
    title = f"{dataset.name}, {config.arch}, {config.optimizer}, batch {batch}"
    metrics.close(title)
    why = signal.Signals(stop.signal).name if stop.signal else why
    say(f"{f'stopped by {why} at step {step} of {total}' if step < total else f'done: {total} steps'}; {title}; "
        f"validation accuracy {metrics.best()}; {len(broken)} broken images; {metrics.skipped} steps left out; "
        f"{time.perf_counter() - began:.1f} s, of which {compile_seconds:.1f} s compiling; {output}")  # fmt: skip
    return stop.restore()


if __name__ == "__main__":
    checkpoints.hush()
    processes.script(main)
