"""Compare a long run of the example's default job with and without a fault every few steps.

    python tests/soak.py --output soak                       # 2,000 steps, a fault every 20th
    python tests/soak.py --output soak8 --devices 8 --steps 200    # each fault on the last of eight CPU devices
    python tests/soak.py --output soak16 --dtype float16 --steps 200

Network, data, optimizer, validation and checkpoints come from `examples/imagenet`. Only the loop differs: the example
stops at a non-finite number, but this loop continues. Faults are arguments of the compiled step, so that both runs use
the same program.

The training runs in a separate process, which two of the faults kill. The script restarts the process until the
training is complete. An interrupted run resumes from its last checkpoint. The script ends with a table. It exits with
code 1 unless the accuracies are within one percentage point and nothing was lost.
"""

import argparse
import collections
import functools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
EVERY, CHECKPOINT_EVERY, FAILURES = 20, 50, 5
FAULTS = [
    "NaN in a pixel",
    "infinity in an activation",
    "NaN in one gradient",
    "infinity in all gradients",
    "NaN in A of a convolution",
    "infinity in G of the output layer",
    "NaN in F of a batch norm",
    "all statistics zero",
    "all statistics of rank one",
    "indefinite A and G of a convolution",
    f"indefinite statistics of all layers, {FAILURES} steps in a row",
    "overflow of a scaled loss",
    "killed while writing a checkpoint",
    "killed, and the last checkpoint cut short",
]
PIXEL, ACTIVATION, GRADIENT, GRADIENTS, A, G, F, ZERO, RANK_ONE, INDEFINITE, IN_A_ROW, OVERFLOW, KILL, TRUNCATE = range(
    14
)
NOTHING = -1
COUNTS = ("skipped_steps", "skipped_statistics", "failed_inversions")


def fault_of(step: int, steps: int) -> int:
    """Return the fault that strikes in `step`, counted from 1."""
    first = step - step % EVERY
    if step < EVERY or first >= steps:
        return NOTHING
    kind = (first // EVERY - 1) % len(FAULTS)
    return kind if step == first or (kind == IN_A_ROW and step - first < FAILURES) else NOTHING


def read(path: Path) -> list[dict]:
    """Return the complete lines of a journal. A kill may have cut the last line short."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def write(path: Path, record: dict) -> None:
    text = path.read_text() if path.exists() else ""
    with path.open("a") as file:
        file.write(("" if not text or text.endswith("\n") else "\n") + json.dumps(record) + "\n")
        file.flush()
        os.fsync(file.fileno())


def train(output: Path, steps: int, faulty: bool, dtype: str, num_devices: int) -> None:
    """Train to the end, or until a fault kills this process."""
    sys.path[:0] = [str(ROOT), str(ROOT / "examples" / "imagenet")]
    import flax.linen as nn
    import jax
    import jax.numpy as jnp
    import numpy as np
    import optax
    from jax import lax

    import batches as loader
    import checkpoints
    import config as cfg
    import data
    import kfac
    import models
    import processes
    import recipe
    import train as example
    from kfac import Factors
    from recipe import AXIS
    from train import SAME, SPLIT

    kind = ["--step-norm", "none", "--learning-rate", 0.03, "--weight-decay", 1e-4]
    options = ["--steps", steps, *kind, "--output", output]
    config = cfg.parse([*map(str, options)])
    mesh = processes.row_of_devices(num_devices)
    dataset = data.load(config)
    config = cfg.fit(config, len(dataset.train), num_devices, "cpu")
    batch, per_epoch = config.global_batch, len(dataset.train) / config.global_batch
    local = batch // num_devices
    output.mkdir(parents=True, exist_ok=True)
    journal = output / "journal.jsonl"

    plain = models.create(config.arch, dataset.num_classes, dtype, config.width)
    model = plain.clone(axis_name=AXIS if num_devices > 1 else None)
    mean, std = jnp.float32(dataset.mean), jnp.float32(dataset.std)
    scale_of = 1.0 if dtype == "float32" else 2.0**15

    def struck(kind, fault, x, bad):
        here = (lax.axis_index(AXIS) == num_devices - 1) & (fault == kind)
        return jnp.where(here, bad(x).astype(x.dtype), x)

    def loss_fn(model, faulty, params, batch_stats, images, labels, scale, fault):
        images = (images.astype(jnp.float32) / 255 - mean) / std
        if faulty:
            images = struck(PIXEL, fault, images, lambda x: x.at[0, 4, 4].set(jnp.nan))

        def intercept(call, args, kwargs, context):
            y = call(*args, **kwargs)
            if faulty and context.module.path == ("stage2_block1", "conv1"):
                y = struck(ACTIVATION, fault, y, lambda y: y.at[0, 0, 0, 0].set(jnp.inf))
            return y

        variables = {"params": params, "batch_stats": batch_stats}
        with nn.intercept_methods(intercept):
            logits, new = model.apply(variables, images, train=True, mutable=["batch_stats"])
        loss = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), labels).mean()
        return scale * loss, new["batch_stats"]

    def spoil_gradients(grads, fault):
        leaves, tree = jax.tree.flatten(grads)
        leaves[-1] = struck(GRADIENT, fault, leaves[-1], lambda x: x.at[(0,) * x.ndim].set(jnp.nan))
        return jax.tree.unflatten(tree, [struck(GRADIENTS, fault, x, lambda x: x - jnp.inf) for x in leaves])

    def spoil_factors(factors, fault):
        def first(x, value):
            return x.at[(0,) * x.ndim].set(value)

        def rank_one(x):
            column = jnp.ones_like(x[..., :1]) * jnp.sqrt(jnp.abs(x).max())
            return column * column.mT

        blocks = {name: {key: x for key, x in vars(block).items() if x is not None} for name, block in factors.items()}
        conv, norm = "stage1_block1/conv1", "stage1_block1/norm1"
        blocks[conv]["A"] = struck(A, fault, blocks[conv]["A"], lambda x: first(x, jnp.nan))
        blocks["head"]["G"] = struck(G, fault, blocks["head"]["G"], lambda x: first(x, jnp.inf))
        blocks[norm]["F"] = struck(F, fault, blocks[norm]["F"], lambda x: first(x, jnp.nan))
        for name, block in blocks.items():
            for key, x in block.items():
                x = struck(ZERO, fault, x, jnp.zeros_like)
                x = struck(RANK_ONE, fault, x, rank_one)
                x = struck(IN_A_ROW, fault, x, lambda x: -30 * num_devices * x)
                block[key] = struck(INDEFINITE, fault, x, lambda x: -30 * num_devices * x) if name == conv else x
        return Factors({name: type(factors[name])(**block) for name, block in blocks.items()}, factors.gradients)

    key = jax.random.key(config.seed)

    def fresh(key):
        variables = plain.init(key, jnp.zeros((1, *dataset.shape)), train=True)
        return jax.tree.map(lambda x: x.astype(jnp.float32), variables)

    variables = jax.eval_shape(fresh, key)
    like = (jax.ShapeDtypeStruct((local, *dataset.shape), jnp.uint8), jax.ShapeDtypeStruct((local,), jnp.int32))
    layers = kfac.find_layers(
        functools.partial(loss_fn, plain, False), variables["params"], variables["batch_stats"], *like,
        jnp.float32(1), jnp.int32(0), has_aux=True,
    )  # fmt: skip
    tx = example.transform(config, recipe.learning_rate(config, per_epoch, steps), layers)
    specs = example.State(SAME, SAME, SAME, SAME, kfac.state.state_specs(tx, variables["params"], AXIS), SPLIT)
    measure = kfac.value_and_grad(functools.partial(loss_fn, model, True), layers, has_aux=True)

    def train_step(state, got, scale, fault):
        (loss, stats), grads, factors = measure(state.params, state.batch_stats, *got, scale, fault)
        grads = lax.pmean(spoil_gradients(grads, fault), AXIS)
        loss, stats = lax.pmean((loss, stats), AXIS)
        loss, grads = loss / scale, jax.tree.map(lambda g: g / scale, grads)
        factors = spoil_factors(factors.unscale(scale), fault)
        updates, opt_state = tx.update(grads, kfac.observe(state.opt_state, factors), state.params)
        # The optimizer skips a bad step, but batch-norm averages are not part of its state.
        whole = functools.reduce(jnp.logical_and, [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((grads, stats))])
        stats = jax.tree.map(functools.partial(jnp.where, whole), stats, state.batch_stats)
        params = optax.apply_updates(state.params, updates)
        found = kfac.diagnostics(opt_state)
        sound = [jnp.all(jnp.isfinite(x)) for x in jax.tree.leaves((params, stats))]
        record = {"loss": loss, "sound": jnp.all(jnp.stack(sound)), **{name: found[name] for name in COUNTS}}
        return state._replace(step=state.step + 1, params=params, batch_stats=stats, opt_state=opt_state), record

    def init(key):
        new = fresh(key)
        return example.State(jnp.int32(0), new["params"], new["batch_stats"], (), tx.init(new["params"]), ())

    def eval_step(params, batch_stats, got):
        images = (got.images.astype(jnp.float32) / 255 - mean) / std
        logits = plain.apply({"params": params, "batch_stats": batch_stats}, images, train=False)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits.astype(jnp.float32), got.labels)
        right = jnp.argmax(logits, -1) == got.labels
        return lax.psum(tuple(jnp.sum(x * got.weights) for x in (losses, right, jnp.ones(right.shape))), AXIS)

    on_devices = functools.partial(jax.shard_map, mesh=mesh)
    take = jax.jit(
        on_devices(train_step, in_specs=(specs, SPLIT, SAME, SAME), out_specs=(specs, SAME)), donate_argnums=0
    )
    evaluate = jax.jit(on_devices(eval_step, in_specs=(SAME, SAME, SPLIT), out_specs=SAME))
    gather, scatter = checkpoints.for_any_devices(mesh, specs, local, True)
    state = jax.jit(on_devices(init, in_specs=SAME, out_specs=specs))(key)

    # Find the first step. If a checkpoint cannot be read, use the previous checkpoint.
    saved = checkpoints.Checkpoints(output / "checkpoints", 3, gather, scatter)
    last = begin = saved.latest() or 0
    if begin:
        state = saved.restore(state)[0]
        begin = int(state.step)
    if begin < last:
        write(journal, {"refused": last})
    known = {record["step"]: record for record in read(journal) if "step" in record}
    killed = {record["killed"] for record in read(journal) if "killed" in record}

    def save(step):
        saved.save(step, state, {"broken": []}, None)

    def place(arrays):
        split = jax.sharding.NamedSharding(mesh, SPLIT)
        return jax.tree.map(lambda x: jax.make_array_from_process_local_data(split, x), arrays)

    rows = loader.own_rows(mesh, 0, local, 1)
    batches = loader.train_batches(dataset.train, batch, config.seed, begin, steps, rows)
    for step, got in enumerate(loader.prefetch(batches, place), begin + 1):
        fault = fault_of(step, steps) if faulty else NOTHING
        scale = scale_of * (2.0**40 if dtype == "float16" else 2.0**127) if fault == OVERFLOW else scale_of
        state, record = take(state, (got.images, got.labels), jnp.float32(scale), jnp.int32(fault))
        record = {"step": step, **{name: float(value) for name, value in jax.device_get(record).items()}}
        if step in known:
            # A step that is repeated after a kill must give the same result as before, bit for bit.
            old = known[step]
            same = all(old[name] == record[name] or math.isnan(old[name]) for name in record)
            write(journal, {"again": step, "same": same})
        else:
            write(journal, record)
        if fault in (KILL, TRUNCATE) and step not in killed:
            save(step)
            if fault == TRUNCATE:
                for path in (output / "checkpoints" / str(step) / "state" / "d").iterdir():
                    os.truncate(path, path.stat().st_size // 2)
            write(journal, {"killed": step})
            os.kill(os.getpid(), signal.SIGKILL)
        if step % CHECKPOINT_EVERY == 0 and step < steps:
            save(step)
    size = num_devices * -(-len(dataset.val) // num_devices)
    got = next(
        loader.prefetch(loader.val_batches(dataset.val, size, loader.own_rows(mesh, 0, size // num_devices, 1)), place)
    )
    loss, right, count = map(float, evaluate(state.params, state.batch_stats, got._replace(broken=())))
    assert all(np.all(np.isfinite(x)) for x in jax.tree.leaves(jax.device_get(state)))
    write(journal, {"val_accuracy": right / count, "val_loss": loss / count})


def supervise(output: Path, steps: int, faulty: bool, options: argparse.Namespace) -> None:
    """Restart the training until it is complete."""
    journal = output / "journal.jsonl"
    command = [sys.executable, __file__, "--output", str(output), "--steps", str(steps), "--dtype", options.dtype,
               "--devices", str(options.devices), "--child", "faulty" if faulty else "clean"]  # fmt: skip
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "JAX_NUM_CPU_DEVICES": str(options.devices)}
    flags = {"enable_concurrency_optimized_scheduler": "false", "collective_call_terminate_timeout_seconds": "600"}
    env |= {"OPENBLAS_NUM_THREADS": "1", "XLA_FLAGS": " ".join(f"--xla_cpu_{k}={v}" for k, v in flags.items())}
    # All processes compile the same program.
    env |= {"JAX_ENABLE_COMPILATION_CACHE": "true", "JAX_COMPILATION_CACHE_DIR": str(output.parent / "cache")}
    while not any("val_accuracy" in record for record in read(journal)):
        code = subprocess.run(command, env=env, check=False).returncode
        if code not in (0, -signal.SIGKILL):
            sys.exit(f"error: the training in {output} ended with exit code {code}")


def report(clean: list[dict], faulty: list[dict], steps: int) -> bool:
    """Print the table. Return whether the runs passed."""
    by_step = {record["step"]: record for record in faulty if "step" in record}
    counts: dict[int, collections.Counter] = collections.defaultdict(collections.Counter)
    indefinite = NOTHING
    for step in range(EVERY, steps + 1):
        # Blame the last fault for each count. Averages can stay indefinite for longer, so once a fault has made them
        # indefinite, blame that fault for all failed inversions until the next such fault.
        kind = fault_of(step - step % EVERY, steps)
        if kind == NOTHING or step not in by_step:
            continue
        indefinite = kind if kind in (INDEFINITE, IN_A_ROW) else indefinite
        counts[kind]["times"] += step % EVERY == 0
        for name in COUNTS:
            blamed = indefinite if name == "failed_inversions" and indefinite != NOTHING else kind
            counts[blamed][name] += int(by_step[step][name] - by_step[step - 1][name])
    print("| injected | times | steps left out | statistics left out | inversions failed |")
    print("|---|---|---|---|---|")
    for kind, found in sorted(counts.items()):
        print(f"| {FAULTS[kind]} | {found['times']} |", " | ".join(str(found[name]) for name in COUNTS), "|")
    again = [record["same"] for record in faulty if "again" in record]
    kills, refused = (sum(name in record for record in faulty) for name in ("killed", "refused"))
    sound = all(record["sound"] for record in by_step.values())
    first, second = (next(r["val_accuracy"] for r in records if "val_accuracy" in r) for records in (clean, faulty))
    times = sum(found["times"] for found in counts.values())
    print(f"{times} faults in {steps} steps; killed {kills} times, {refused} checkpoints refused; "
          f"{len(again)} steps done again, {sum(again)} of them bit for bit")  # fmt: skip
    print(f"parameters finite after each step: {sound}")
    print(f"validation accuracy: {first:.2%} without faults, {second:.2%} with")
    return sound and all(again) and abs(first - second) <= 0.01 and len(by_step) == steps


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs; goes on with those in it")
    parser.add_argument("--steps", type=int, default=2000, help="steps of each run (default: 2000)")
    parser.add_argument("--dtype", choices=["float32", "float16"], default="float32", help="of the network")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices; faults strike on the last one")
    parser.add_argument("--child", choices=["clean", "faulty"], help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        train(options.output, options.steps, options.child == "faulty", options.dtype, options.devices)
        return
    output = options.output.absolute()
    for name in ("faulty", "clean"):
        supervise(output / name, options.steps, name == "faulty", options)
    journals = (read(output / name / "journal.jsonl") for name in ("clean", "faulty"))
    sys.exit(0 if report(*journals, options.steps) else 1)


if __name__ == "__main__":
    main()
