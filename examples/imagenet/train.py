"""Train a network on images with K-FAC or another optimizer. Read it from top to bottom, and copy simple.py instead.

python examples/imagenet/train.py                          # digits, ten K-FAC steps an epoch, on a CPU
python examples/imagenet/train.py --config bs128k --data-dir imagenet --output runs/a    # repeat it to resume
python examples/imagenet/train.py --eval runs/a            # validate its best checkpoint
python examples/imagenet/train.py --config bs128k --data synthetic --synthetic-images 1281167 --plan 128 512   # predict
"""

import os
import signal

if __name__ == "__main__":  # Ctrl-C ends the script silently until a state can be saved
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# Set both variables before the import of jax, which reads them. With few cores, XLA's CPU schedule may start a
# convolution and a LAPACK call together, and then each waits for the other's threads forever.
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
if "xla_cpu_enable_concurrency_optimized_scheduler" not in os.environ.get("XLA_FLAGS", ""):
    flag = "--xla_cpu_enable_concurrency_optimized_scheduler=false"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {flag}".strip()

import functools
import json
import logging
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
from files import UserError
from models import is_kernel
from recipe import AXIS, Mixed, Run
from report import say

SAME, SPLIT = PartitionSpec(), PartitionSpec(AXIS)
INVERSES: Any = {"soap": kfac.SOAP, "cholesky": kfac.Cholesky, "eigh": kfac.Eigh}
# Inverses become outdated fast at first, so each of these steps collects statistics, whatever --statistics-period says.
FACTOR_WARMUP = 10


class State(NamedTuple):
    """Hold everything that a step changes."""

    step: Any
    params: Any
    batch_stats: Any
    ema: Any  # running averages of params and batch_stats, with --ema
    opt_state: Any
    mixed: Any  # the last batch for running mixup, split over the devices


# The optimizer.


def transform(config: Any, rate: optax.Schedule, layers: Any) -> Any:
    """Return the optimizer, an optax transform."""
    c, decay = config, config.weight_decay
    if c.optimizer == "kfac":
        momentum, where = recipe.momentum(c, rate), kfac.Distribution(AXIS)
        if c.step_norm == "spectral":
            return kfac.kfac(
                rate, layers, momentum=momentum, nesterov=c.nesterov, damping=c.damping, weight_decay=decay or None,
                weight_decay_mask=is_kernel if decay else None, preconditioner=INVERSES[c.preconditioner](),
                inverse_update_period=c.inverse_update_period, distribution=where,
            )  # fmt: skip
        return kfac.natural_gradient(
            rate, layers, damping=c.damping, momentum=momentum, nesterov=c.nesterov, weight_decay=decay,
            weight_decay_mask=is_kernel, lr_in_momentum=c.lr_in_momentum,
            unitwise_damping_scale=c.unitwise_damping_scale,
            kl_clip=c.kl_clip or None, trust_ratio=c.trust_ratio or None, factor_ema_decay=c.factor_ema_decay,
            inverse_update_period=c.inverse_update_period, preconditioner=INVERSES[c.preconditioner](),
            distribution=where,
        )  # fmt: skip
    first_order = {
        "muon": lambda: optax.contrib.muon(rate, beta=c.momentum, nesterov=c.nesterov, weight_decay=decay,
                                           weight_decay_mask=is_kernel, muon_weight_dimension_numbers=as_matrices),
        "sgd": lambda: optax.chain(optax.add_decayed_weights(decay, is_kernel),
                                   optax.sgd(rate, c.momentum, nesterov=c.nesterov)),
        "lars": lambda: optax.lars(rate, decay, is_kernel, trust_ratio_mask=is_kernel, momentum=c.momentum,
                                   nesterov=c.nesterov),
        "adamw": lambda: optax.adamw(rate, b1=c.momentum, weight_decay=decay, mask=is_kernel, nesterov=c.nesterov),
    }  # fmt: skip
    return first_order[c.optimizer]()


def as_matrices(params: Any) -> Any:
    """Return the axes by which Muon reads kernels as matrices. None leaves a parameter to Adam."""
    of = optax.contrib.MuonDimensionNumbers
    return jax.tree.map(lambda w: of(tuple(range(w.ndim - 1)), w.ndim - 1) if w.ndim > 1 else None, params)


# Compiled functions. All except `fresh` run inside `shard_map`, on each device.


def loss_fn(run: Run, model: Any, params: Any, batch_stats: Any, batch: Mixed) -> Any:
    variables = {"params": params, "batch_stats": batch_stats}
    logits, new = model.apply(variables, recipe.normalise(run, batch.images), train=True, mutable=["batch_stats"])
    targets = optax.smooth_labels(batch.targets, run.config.label_smoothing)
    # For a mixed image, its own label counts, because it has the larger share.
    right = jnp.argmax(logits, -1) == jnp.argmax(batch.targets, -1)
    aux = {"batch_stats": new.get("batch_stats", {}), "accuracy": jnp.mean(right.astype(jnp.float32))}
    return jnp.mean(optax.softmax_cross_entropy(logits, targets)), aux


def fresh(run: Run, key: jax.Array) -> dict[str, Any]:
    variables = run.plain.init(key, jnp.zeros((1, *run.dataset.shape)), train=True)
    return jax.tree.map(lambda x: x.astype(run.wide), {"batch_stats": {}, **variables})


def init(run: Run, variables: dict[str, Any]) -> State:
    params, batch_stats, n = variables["params"], variables["batch_stats"], run.micro_batches * run.local_batch
    mixed = Mixed(jnp.zeros((n, *run.dataset.shape), run.config.dtype),
                  jnp.zeros((n, run.dataset.num_classes), run.wide)) if run.config.mixup_alpha else ()  # fmt: skip
    ema = (params, batch_stats) if run.config.ema else ()
    return State(jnp.int32(0), params, batch_stats, ema, run.tx.init(params), mixed)


def local_gradients(loss_fn: Callable[..., Any], params: Any, *args: Any) -> tuple[Any, Any]:
    """Return the loss, its auxiliary output and the gradients for this device's images."""
    return jax.value_and_grad(loss_fn, has_aux=True)(lax.pcast(params, AXIS, to="varying"), *args)


def observe(run: Run, statistics: Callable[..., Any], state: State, batch: Any) -> State:
    """Take statistics of the images that the next step sees."""
    seen, _ = recipe.augmented(run, state.step, batch, state.mixed)
    factors = statistics(state.params, state.batch_stats, seen)
    return state._replace(opt_state=kfac.observe(state.opt_state, factors))


def train_step(run: Run, gradients: Callable[..., Any], state: State, batch: Any) -> tuple[State, Any, Any]:
    config, opt_state = run.config, state.opt_state
    seen, mixed = recipe.augmented(run, state.step, batch, state.mixed)
    (loss, aux), grads, *factors = gradients(state.params, state.batch_stats, seen)
    loss, aux, grads = lax.pmean((loss, aux, grads), AXIS)
    if factors:  # if every step takes statistics, they come with the gradients
        opt_state = kfac.observe(opt_state, factors[0])
    updates, opt_state = run.tx.update(grads, opt_state, state.params)
    params, batch_stats = optax.apply_updates(state.params, updates), aux["batch_stats"]
    params, ema = models.rescale(params) if config.rescale else params, state.ema
    if config.ema:  # the average forgets faster in the first steps, to avoid a lag
        share = jnp.minimum(config.ema, (1 + state.step) / (10 + state.step))
        ema = optax.incremental_update((params, batch_stats), ema, 1 - share)
    squares = {"gradient": report.squares(grads), "parameter": report.squares(params),
               "batch-norm average": report.squares(batch_stats)}  # fmt: skip
    metrics = {"loss": loss, "accuracy": aux["accuracy"]}
    metrics |= {f"{name}_norm": jnp.sqrt(jnp.sum(squares[name])) for name in ("gradient", "parameter")}
    if config.optimizer == "kfac":
        metrics |= {f"kfac/{name}": value for name, value in kfac.diagnostics(opt_state).items()}
        metrics |= {"kfac/due": kfac.statistics_due(opt_state)}
    return State(state.step + 1, params, batch_stats, ema, opt_state, mixed), metrics, squares


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
    """Train, validate, predict or measure. Return the exit code: 0, or 128 plus the number of a signal."""
    began = time.perf_counter()
    config = cfg.parse(args)
    if config.print_config:
        print(json.dumps({k: v for k, v in vars(config).items() if v is not None}, indent=2, default=str))
        return 0

    # The devices, over which each batch is split. A single device needs no special case.
    processes.meet(config)
    mesh = processes.row_of_devices(config.devices)
    same, split = NamedSharding(mesh, SAME), NamedSharding(mesh, SPLIT)
    on_devices = functools.partial(jax.shard_map, mesh=mesh)

    # The data, and the length of the training. An epoch counts all images, even if batches do not divide them.
    dataset = data.load(config)
    size = len(dataset.train)
    config = cfg.fit(config, size, mesh.size, mesh.devices[0].platform)
    batch, per_epoch, total = config.global_batch, size / config.global_batch, cfg.total_steps(config, size)
    local_batch = config.local_batch or batch // mesh.size
    micro_batches = batch // (mesh.size * local_batch)
    stop_at = min(total, config.stop_after or total)
    eval_every = config.eval_every or max(1, round(per_epoch))
    if config.input_speed:
        timed, steps = time.perf_counter(), math.ceil(config.input_speed / batch)
        bad = {name for got in batches.train_batches(dataset.train, batch, 0, 0, steps) for name in got.broken}
        print(f"{steps * batch} images by {config.workers} thread(s), {len(bad)} broken: "
              f"{steps * batch / (time.perf_counter() - timed):.0f} images/s")  # fmt: skip
        return 0
    # The run's folder, new or resumed. From here on the script writes files.
    output, lock = config.output, None
    if not (config.eval or config.plan):
        output, lock = processes.open_output(config, dataset.found())
    say(f"{dataset.name}: {size} training and {len(dataset.val)} validation images of "
        f"{'x'.join(map(str, dataset.shape))}, {dataset.num_classes} classes" + dataset.note)  # fmt: skip
    broken = batches.Broken(config.max_broken * (size + len(dataset.val)))
    rows = batches.own_rows(mesh, jax.process_index(), local_batch, micro_batches)
    # Make global arrays, split over the devices, from the rows that this process has loaded.
    place = functools.partial(jax.tree.map, functools.partial(jax.make_array_from_process_local_data, split))

    def train_batches(first: int, last: int) -> Iterator[batches.Batch]:
        return batches.prefetch(batches.train_batches(dataset.train, batch, config.seed, first, last, rows), place)

    # The network.
    plain = models.create(config.arch, dataset.num_classes, config.dtype, config.width, init_scheme=config.init,
                          norm_epsilon=config.norm_epsilon)  # fmt: skip
    model = plain.clone(axis_name=AXIS if config.sync_batch_norm else None)
    run = Run(config, dataset, model, plain, mesh.size, local_batch, micro_batches)
    variables = jax.eval_shape(functools.partial(fresh, run), jax.random.key(config.seed))
    num_params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(variables["params"]))
    say(f"{config.arch} in {config.dtype}, {num_params / 1e6:.2f} M parameters; {config.optimizer} on batches of "
        f"{batch}: {mesh.size} device(s) in {jax.process_count()} process(es), {micro_batches} micro-batch(es) of "
        f"{local_batch} images; {per_epoch:.4g} steps an epoch, {total} in all")  # fmt: skip

    # Validation: loss and accuracies over all readable images, each counted once.
    eval_local = min(local_batch, -(-len(dataset.val) // mesh.size))
    eval_rows = batches.own_rows(mesh, jax.process_index(), eval_local, 1)
    evaluate = jax.jit(on_devices(functools.partial(eval_step, run), in_specs=(SAME, SPLIT), out_specs=SAME))

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
        result = validate(jax.device_put(tuple(weights), same))
        say(
            f"{config.eval}, step {at}: validation loss {result['val_loss']:.4f}, accuracy "
            f"{result['val_accuracy']:.2%}, top-5 {result['val_top5_accuracy']:.2%}, of {len(dataset.val)} images"
        )
        return 0

    # The optimizer. K-FAC traces the loss once to find the layers.
    use_kfac, seen = config.optimizer == "kfac", jnp.dtype(config.dtype) if run.augmented else jnp.uint8
    example = Mixed(jax.ShapeDtypeStruct((local_batch, *dataset.shape), seen),
                    jax.ShapeDtypeStruct((local_batch, dataset.num_classes), run.wide))  # fmt: skip
    max_factor_dim = None if config.step_norm == "spectral" else 8192  # the recipe does not cut oblong kernels
    layers = kfac.find_layers(functools.partial(loss_fn, run, plain), variables["params"], variables["batch_stats"],
                              example, has_aux=True, max_factor_dim=max_factor_dim)  # fmt: skip
    if config.plan:
        every = {"statistics_period": config.statistics_period, "inverse_update_period": config.inverse_update_period}
        every = {name: value for name, value in every.items() if isinstance(value, int)}
        for n in config.plan:
            planned = kfac.planning.estimate(
                layers, devices=n, batch=batch, preconditioner=INVERSES[config.preconditioner](),
                statistics_fraction=config.statistics_fraction, **every,
            )  # fmt: skip
            say(f"{planned}\n")
        return 0
    rate = recipe.learning_rate(config, per_epoch, total)
    try:
        run = run._replace(tx=transform(config, rate, layers))
    except ValueError as error:
        raise UserError(f"the options of the optimizer conflict: {error}") from error

    # The state. All devices hold the same values, except for their own layers and mixed images.
    say("compiling ...")
    compile_began = time.perf_counter()
    specs = State(SAME, SAME, SAME, SAME, kfac.state.state_specs(run.tx, variables["params"], AXIS), SPLIT)
    variables = jax.jit(functools.partial(fresh, run), out_shardings=same)(jax.random.key(config.seed))
    state = jax.jit(on_devices(functools.partial(init, run), in_specs=SAME, out_specs=specs))(variables)

    # The programs. Compiling them here, not in the first call, measures the time and prevents later retracing. All
    # results are averaged over micro-batches, including the batch-norm averages in `aux`.
    loss_of = functools.partial(loss_fn, run, model)

    def compile(program: Callable[..., Any], measure: Callable[..., Any], out_specs: Any) -> Callable[..., Any]:
        if micro_batches > 1:
            measure = kfac.microbatch(measure, micro_batches, batch_argnums=2)
        program = on_devices(functools.partial(program, run, measure), in_specs=(specs, SPLIT), out_specs=out_specs)
        images = jax.ShapeDtypeStruct((batch, *dataset.shape), jnp.uint8, sharding=split)
        labels = jax.ShapeDtypeStruct((batch,), jnp.int32, sharding=split)
        return jax.jit(program, donate_argnums=0).lower(state, (images, labels)).compile()

    # Statistics have their own program. If every step takes them from all images, they come with the gradients.
    gradients: Callable[..., Any] = functools.partial(local_gradients, loss_of)
    take_statistics = None
    if use_kfac and config.statistics_period == config.statistics_fraction == 1:
        gradients = kfac.value_and_grad(loss_of, layers, has_aux=True)
    elif use_kfac:
        statistics = kfac.statistics(loss_of, layers, fraction=config.statistics_fraction, has_aux=True)
        take_statistics = compile(observe, statistics, specs)
    train = compile(train_step, gradients, (specs, SAME, SAME))
    compile_seconds = time.perf_counter() - compile_began
    say(f"compiled {'step, statistics' if take_statistics else 'step'} in {compile_seconds:.1f} s")

    # Start at the beginning, or at the last checkpoint, which fits any number of devices.
    saved = checkpoints.Checkpoints(output / "checkpoints", config.keep_checkpoints,
                                    *checkpoints.for_any_devices(mesh, specs, local_batch, use_kfac))  # fmt: skip
    start, due = 0, True
    if saved.latest():
        state, extra = saved.restore(state)
        start, due = int(state.step), extra["due"]
        broken.update(extra["broken"])
        say(f"resuming {output} at step {start} of {total}")
        if stop_at < start:
            raise UserError(f"the run in {output} is at step {start}, beyond its end at step {stop_at}; raise --steps, "
                            "--epochs or --stop-after")  # fmt: skip
    processes.on_first(lambda: cfg.save(config, dataset.found(), output))
    watched = {"gradient": state.params, "parameter": state.params, "batch-norm average": state.batch_stats}
    metrics = report.Metrics(output, start, per_epoch, jax.eval_shape(lambda: watched), processes.is_first())

    # The loop. SIGTERM and Ctrl-C end it after the current step, with a checkpoint. A second signal ends it at once.
    stop, step, target = processes.Stop(), start, config.target_accuracy or math.inf
    why = f"--stop-after {stop_at}"
    if max(metrics.accuracies, default=0) >= target:
        stop_at, why = start, "--target-accuracy, reached"
    last_save = last_line = loop_began = time.perf_counter()
    last_read = start
    for step, got in enumerate(train_batches(start, stop_at), start + 1):
        if config.statistics_period != "auto" and use_kfac:
            due = (step - 1) % config.statistics_period == 0
        if take_statistics and (due or step <= FACTOR_WARMUP):
            state = take_statistics(state, (got.images, got.labels))
        state, values, squares = train(state, (got.images, got.labels))
        broken.note(got.broken)
        if config.statistics_period == "auto":
            due = bool(values["kfac/due"])  # waits for the device
        metrics.add(step, values, squares)

        # Decide whether to log, validate, save or stop. Clocks differ between processes, so several processes compare
        # them only at fixed steps.
        now = time.perf_counter()
        last = step == stop_at or stop.asked(step)
        check = step % eval_every == 0 or step == total
        log = check or last or step % config.log_every == 0 or (now - last_line > 10 and jax.process_count() == 1)
        late = now - last_save > 60 * config.checkpoint_minutes
        if jax.process_count() > 1:
            late = log and processes.everyone(str(late))[0] == "True"
        save = late or last or bool(config.checkpoint_every and step % config.checkpoint_every == 0)
        if not (log or save):
            continue

        # Reading the numbers waits for the device, so most steps skip it.
        record = metrics.flush(rate)
        seconds = (time.perf_counter() - last_line) / (step - last_read)
        if record["bad"]:
            raise UserError(f"{record['bad']}; {saved.describe()}; a new run may work with "
                            f"{f'a --damping above {config.damping} or ' if use_kfac and config.damping else ''}"
                            f"a --learning-rate below {config.learning_rate}")  # fmt: skip
        result = validate(state.ema if config.ema else (state.params, state.batch_stats)) if check else {}
        if result.get("val_accuracy", -1) >= target:
            save, last, why = True, True, "--target-accuracy, reached"
        broken.update(*map(json.loads, processes.everyone(json.dumps(sorted(broken)))))
        if check:
            metrics.validated(step, result, len(broken))
        if save:
            saved.save(step, state, {"broken": sorted(broken), "due": due}, result.get("val_accuracy"))
            last_save = time.perf_counter()
        last_line, last_read = time.perf_counter(), step
        left = (total - step) * (last_line - loop_began) / (step - start)
        found = f"  val loss {result['val_loss']:.4f}  val accuracy {result['val_accuracy']:.1%}" if check else ""
        say(f"step {step:>{len(str(total))}}/{total}  epoch {step / per_epoch:5.1f}  loss {record['loss']:.4f}  "
            f"accuracy {record['accuracy']:6.1%}{found}  {batch / seconds:,.0f} images/s  {seconds:.3g} s/step  "
            f"{left / 60:.1f} min left")  # fmt: skip
        if last:
            break

    # The end.
    if lock is not None:
        os.close(lock)
    title = f"{dataset.name}, {config.arch}, {config.optimizer}, batch {batch}"
    metrics.close(title)
    why = signal.Signals(stop.signal).name if stop.signal else why
    scores = metrics.accuracies
    found = f"{scores[-1]:.2%} (best {max(scores):.2%})" if scores else "not measured"
    say(f"{f'stopped by {why} at step {step} of {total}' if step < total else f'done: {total} steps'}; {title}; "
        f"validation accuracy {found}; {len(broken)} broken images; {time.perf_counter() - began:.1f} s, of which "
        f"{compile_seconds:.1f} s compiling; {output}")  # fmt: skip
    return stop.restore()


if __name__ == "__main__":
    logging.getLogger("absl").setLevel(logging.CRITICAL)  # orbax also raises these errors
    processes.script(main)
