"""Count the bytes per kind of collective in compiled training steps: SGD, K-FAC, and K-FAC with statistics.

    python tests/messages.py resnet50 --devices 8
    python tests/messages.py gpt --devices 8 --style mesh
    python tests/messages.py gpt --devices 8 --style mesh --parameters split

Programs are compiled for simulated devices. ResNet-50 has small images, because messages should contain only
parameters, statistics and results, whose size does not depend on the images.

A device's bytes are its input to all-reduces, reduce-scatters and all-to-alls, and its output from all-gathers. `sent`
counts all-reduces in full and other kinds by half, because a ring implements an all-reduce as a reduce-scatter and an
all-gather.
"""

import argparse
import functools
import math
import os
import re

if __name__ == "__main__":
    PARSER = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    PARSER.add_argument("model", choices=["resnet50", "gpt"])
    PARSER.add_argument("--devices", type=int, default=8)
    PARSER.add_argument("--style", choices=["shard_map", "mesh"], default="shard_map")
    PARSER.add_argument("--axes", choices=["auto", "explicit"], default="auto")
    PARSER.add_argument("--gradients", choices=["averaged", "local"], default="averaged", help="of shard_map")
    PARSER.add_argument("--max-factor-dim", type=int, default=8192, help="as of find_layers")
    PARSER.add_argument("--refresh", choices=["inside", "apart"], default="inside", help="apart: without its messages")
    PARSER.add_argument("--parameters", choices=["whole", "split"], default="whole", help="as FSDP splits them")
    PARSER.add_argument("--largest", type=int, default=0, help="print so many of the largest messages of each program")
    OPTIONS = PARSER.parse_args()
    os.environ["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={OPTIONS.devices}"
    os.environ.setdefault("JAX_DISABLE_MOST_OPTIMIZATIONS", "true")  # speeds up compilation; messages are the same

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.flatten_util import ravel_pytree
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

import kfac

SIZES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
KINDS = "all-reduce|reduce-scatter|all-gather|all-to-all|collective-permute|ragged-all-to-all|collective-broadcast"


def messages(text, devices):
    """Return `(kind, bytes, times, operation)` for every collective in a compiled program's text.

    Args:
      text: the compiled program, as `compiled.as_text()` returns it.
      devices: the number of devices.

    Returns:
      A list of tuples. `times` counts how often the loops around a collective repeat it.
    """
    bodies, current, entry = {}, None, None
    for line in text.splitlines():
        opened = re.match(r"(ENTRY )?%?([\w.\-]+) .*\{$", line)
        if opened and not line.startswith(" "):
            current = opened[2]
            bodies[current] = []
            entry = current if opened[1] else entry
        elif current:
            bodies[current].append(line)
    found = []

    def walk(name, times):
        for line in bodies[name]:
            for attribute, names in re.findall(
                r"(body|condition|calls|to_apply|true_computation|false_computation|branch_computations)="
                r"(\{[^}]*\}|%?[\w.\-]+)", line
            ):  # fmt: skip
                trips = re.search(r'known_trip_count":\{"n":"(\d+)"', line)
                if attribute == "to_apply" and " call(" not in line:
                    continue  # computes the elements of a reduction
                for inner in re.findall(r"[\w.\-]+", names):
                    walk(inner, times * (int(trips[1]) if trips and attribute == "body" else 1))
            message = re.search(rf"= (.*?) ({KINDS})(?:-start)?\(", line)
            if message:
                result, kind = message.groups()
                size = sum(
                    SIZES[dtype] * math.prod(int(n) for n in shape.split(",") if n)
                    for dtype, shape in re.findall(r"\b([a-z]+\d*)\[([\d,]*)\]", result)
                )
                # A reduce-scatter's operand is `devices` times as large as its result.
                operation = re.search(r'op_name="([^"]*)"', line)
                size *= devices if kind == "reduce-scatter" else 1
                found.append((kind, size, times, (operation[1] if operation else line.strip())[-100:]))

    walk(entry, 1)
    return found


def device_groups(text):
    """Return the device groups in which a compiled program's collectives send.

    XLA writes groups as a list, `{{0,1},{2,3}}`, as an array of devices, `[2,2]<=[2,2]T(1,0)`, or, since JAX 0.11, as
    axes of a mesh, `mesh['node'=2,'gpu'=2] {'gpu'}`.

    Args:
      text: the compiled program, as `compiled.as_text()` returns it.

    Returns:
      A dictionary from each kind of collective to a set. Each element is a frozenset of groups, which are tuples of
        devices.

    Raises:
      ValueError: the groups are written in another form.
    """
    found = {}
    for kind, written in re.findall(rf"({KINDS})(?:-start)?\(.*?(?:replica_groups|source_target_pairs)=(.*)", text):
        found.setdefault(kind, set()).add(_groups(written))
    return found


def _groups(written):
    """Parse the groups at the beginning of a text and return them as a frozenset."""
    if listed := re.match(r"\{(\{[\d,]+\}(?:,\{[\d,]+\})*)\}", written):
        groups = [[int(n) for n in group.split(",")] for group in re.findall(r"[\d,]*\d", listed[1])]
    elif array := re.match(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", written):
        shape, source = ([int(n) for n in sizes.split(",")] for sizes in array.groups()[:2])
        order = [int(n) for n in array[3].split(",")] if array[3] else range(len(source))
        groups = np.arange(math.prod(source)).reshape(source).transpose(order).reshape(shape).tolist()
    elif named := re.match(r"mesh\[([^\]]*)\] \{([^}]*)\}", written):
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
        within = re.findall(r"'(\w+)'", named[2])
        last = [list(sizes).index(name) for name in within]
        first = [k for k in range(len(sizes)) if k not in last]
        devices = np.arange(math.prod(sizes.values())).reshape(list(sizes.values())).transpose(first + last)
        groups = devices.reshape(-1, math.prod(sizes[name] for name in within)).tolist()
    else:
        raise ValueError(f"a collective has groups in an unknown form: {written[:100]}")
    return frozenset(tuple(sorted(group)) for group in groups)


def by_kind(found):
    """Return the bytes of each kind and `sent`, which counts all-reduces in full and other kinds by half."""
    total = {}
    for kind, size, times, _ in found:
        total[kind] = total.get(kind, 0) + size * times
    return total | {"sent": in_all_reduces(total)}


def in_all_reduces(sizes):
    """Return the size of an all-reduce that takes as long as messages with the given bytes per kind."""
    return sum(size if kind == "all-reduce" else size / 2 for kind, size in sizes.items())


def independent_of_first(jaxpr, primitive):
    """Return the share of backward FLOPs that need not wait for the first message with a primitive.

    Only matrix products and convolutions count.

    Args:
      jaxpr: one device's program.
      primitive: the name of the message's primitive.
    """
    made_by = {var: k for k, eqn in enumerate(jaxpr.eqns) for var in eqn.outvars}
    needs = []
    for eqn in jaxpr.eqns:  # find the earlier equations that each equation waits for
        inputs = {made_by[v] for v in eqn.invars if not hasattr(v, "val") and v in made_by}
        needs.append(inputs.union(*(needs[k] for k in inputs)))
    backward = {k: flops(eqn) for k, eqn in enumerate(jaxpr.eqns) if "transpose" in str(eqn.source_info.name_stack)}
    firsts = [needs[k] for k, eqn in enumerate(jaxpr.eqns) if eqn.primitive.name == primitive]
    waited = min(sum(backward.get(k, 0) for k in first) for first in firsts)
    return 1 - waited / sum(backward.values())


def flops(eqn):
    """Count the FLOPs of an equation's matrix products and convolutions, including all iterations of its scans."""
    times = eqn.params["length"] if eqn.primitive.name == "scan" else 1
    total = 0
    for inner in jax.tree.leaves(list(eqn.params.values()), is_leaf=lambda x: hasattr(x, "eqns")):
        if hasattr(inner, "eqns"):  # a jaxpr, closed or not
            total += times * sum(map(flops, inner.eqns))
    if eqn.primitive.name == "dot_general":
        (contracted, _), _ = eqn.params["dimension_numbers"]
        shape = eqn.invars[0].aval.shape
        total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(shape[k] for k in contracted)
    if eqn.primitive.name == "conv_general_dilated":
        kernel, spec = eqn.invars[1].aval.shape, eqn.params["dimension_numbers"].rhs_spec
        total += 2 * math.prod(eqn.outvars[0].aval.shape) * math.prod(kernel) // kernel[spec[0]]
    return total


# -- models: losses, parameter shapes, and shapes of a batch of `n` examples ------------------------------------------


def resnet50(n, size=32):
    """Return ResNet-50 with its strides, a scale and a shift after each convolution, and per-example normalisation."""

    def kernels(c, h, w, i, o):
        return {"kernel": (h, w, i, o), "scale": (o,), "shift": (o,)} if c else {"kernel": (i, o), "bias": (o,)}

    shapes, wide = {"stem": kernels(1, 7, 7, 3, 64)}, 64
    stages = [(64, 3), (128, 4), (256, 6), (512, 3)]
    for stage, (width, blocks) in enumerate(stages):
        for block in range(blocks):
            sizes = {"a": (1, wide, width), "b": (3, width, width), "c": (1, width, 4 * width)}
            sizes |= {"d": (1, wide, 4 * width)} if block == 0 else {}
            shapes |= {f"{stage}_{block}{k}": kernels(1, w, w, i, o) for k, (w, i, o) in sizes.items()}
            wide = 4 * width
    shapes["head"] = kernels(0, 1, 1, wide, 1000)

    def conv(x, q, stride=1):
        x = lax.conv_general_dilated(x, q["kernel"], (stride,) * 2, "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))
        mean, spread = x.mean((1, 2, 3), keepdims=True), x.std((1, 2, 3), keepdims=True)
        return (x - mean) / (spread + 1e-3) * q["scale"] + q["shift"]

    def loss(p, b):
        x = jax.nn.relu(conv(b["x"], p["stem"], 2))
        x = lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), "SAME")
        for stage, (_, blocks) in enumerate(stages):
            for block in range(blocks):
                name, stride = f"{stage}_{block}", 2 if stage and block == 0 else 1
                y = jax.nn.relu(conv(x, p[f"{name}a"]))
                y = conv(jax.nn.relu(conv(y, p[f"{name}b"], stride)), p[f"{name}c"])
                x = jax.nn.relu(y + (conv(x, p[f"{name}d"], stride) if block == 0 else x))
        z = kfac.mark_output(x.mean((1, 2)) @ p["head"]["kernel"] + p["head"]["bias"], "categorical")
        return -jnp.mean(jnp.sum(b["y"] * jax.nn.log_softmax(z), axis=-1))

    return loss, floats(shapes), floats({"x": (n, size, size, 3), "y": (n, 1000)}), {}


def by_examples(x):
    """Shard activations like the examples. With automatic axes, a loss with sharded parameters has to request this."""
    kinds = jax.sharding.get_abstract_mesh().axis_types
    return lax.with_sharding_constraint(x, P("data")) if kinds == (AxisType.Auto,) else x


def gpt(n, size=64, layers=12, d=768, words=50257, heads=12):
    """Return the smallest GPT-2, with 124 M parameters. Its token table is also its last layer."""
    dense = {"qkv": (d, 3 * d), "out": (d, d), "up": (d, 4 * d), "down": (4 * d, d)}
    blocks = {k: {"kernel": (layers, *s), "bias": (layers, s[1])} for k, s in dense.items()}
    blocks |= {k: {"scale": (layers, d), "shift": (layers, d)} for k in ("first", "second")}
    shapes = {"words": (words, d), "places": (1024, d), "blocks": blocks, "norm": {"scale": (d,), "shift": (d,)}}

    def norm(x, q):
        return (x - x.mean(-1, keepdims=True)) * lax.rsqrt(x.var(-1, keepdims=True) + 1e-5) * q["scale"] + q["shift"]

    def affine(x, q):
        return by_examples(x @ q["kernel"] + q["bias"])

    @jax.checkpoint
    def block(h, q):
        h = by_examples(h)
        x = affine(norm(h, q["first"]), q["qkv"])
        query, key, value = (y.reshape(*y.shape[:2], heads, -1) for y in jnp.split(x, 3, -1))
        score = jnp.einsum("nqhd,nkhd->nhqk", query, key) / (d // heads) ** 0.5
        weight = jax.nn.softmax(jnp.where(jnp.tril(jnp.ones((size, size), bool)), score, -1e30))
        h = h + affine(jnp.einsum("nhqk,nkhd->nqhd", weight, value).reshape(h.shape), q["out"])
        return h + affine(jax.nn.gelu(affine(norm(h, q["second"]), q["up"])), q["down"]), None

    def loss(p, b):
        explicit = AxisType.Explicit in jax.sharding.get_abstract_mesh().axis_types
        where = {"out_sharding": jax.typeof(b["x"]).sharding.spec} if explicit else {}
        h, _ = lax.scan(block, p["words"].at[b["x"]].get(**where) + p["places"][:size], p["blocks"])
        z = kfac.mark_output(norm(h, p["norm"]) @ p["words"].T, "categorical")
        return -jnp.mean(jnp.sum(jax.nn.one_hot(b["x"], words) * jax.nn.log_softmax(z), axis=-1))

    tokens = jax.ShapeDtypeStruct((n, size), jnp.int32)
    return loss, floats(shapes), {"x": tokens}, {"rules": {"places": "skip"}}


def floats(shapes):
    return jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes, is_leaf=lambda s: isinstance(s, tuple))


MODELS = {"resnet50": resnet50, "gpt": gpt}


# -- steps ------------------------------------------------------------------------------------------------------------


def split_spec(devices, leaf):
    """Return FSDP's spec for a leaf, which splits the first axis that is divisible by the number of devices."""
    axis = next((k for k, size in enumerate(leaf.shape) if size % devices == 0), None)
    return P(*("data" if k == axis else None for k in range(leaf.ndim)))


def programs(
    model,
    devices,
    style,
    kind=AxisType.Auto,
    parameters="whole",
    gradients="averaged",
    inverse_update_period=10,
    max_factor_dim=8192,
):
    """Return the layers and the compiled programs by name: steps of SGD, K-FAC, and K-FAC with statistics.

    With a mesh, there is also a program that contains only the optimizer's `update`.
    """
    loss, params, batch, find = model(4 * devices)
    mesh = jax.make_mesh((devices,), ("data",), axis_types=(kind,), devices=jax.devices()[:devices])
    whole = P() if parameters == "whole" else jax.tree.map(functools.partial(split_spec, devices), params)

    def sharded(tree, specs):
        return abstract(tree, shardings(mesh, specs))

    with jax.set_mesh(mesh):
        params, batch = sharded(params, whole), sharded(batch, P("data"))
        layers = kfac.find_layers(loss, params, batch, max_factor_dim=max_factor_dim, **find)
    axis = {"axis_name": "data"} if style == "shard_map" else {"mesh": mesh}
    distribution = kfac.Distribution(**axis)
    tx = kfac.scale_by_kfac(layers, inverse_update_period=inverse_update_period, distribution=distribution)
    measured = kfac.value_and_grad(loss, layers)

    def average(tree):
        flat, unravel = ravel_pytree(tree)
        return unravel(lax.pmean(flat, "data")) if style == "shard_map" else tree

    def moved(params, updates):
        return jax.tree.map(lambda p, u: p - 0.1 * u, params, updates)

    def gradient(params, batch):
        # Without `pcast`, JAX would sum the gradients of replicated parameters over devices.
        own = lax.pcast(params, "data", to="varying") if style == "shard_map" else params
        return jax.grad(loss)(own, batch)

    def given(grads):
        return grads if gradients == "local" else average(grads)

    def sgd(params, state, batch):
        return moved(params, average(gradient(params, batch))), state

    def without(params, state, batch):
        updates, state = tx.update(given(gradient(params, batch)), state, params)
        return moved(params, updates), state

    def full(params, state, batch):
        _, grads, factors = measured(params, batch)
        state = kfac.observe(state, factors)
        updates, state = tx.update(given(grads), state, params)
        return moved(params, updates), state

    def alone(params, state, batch):
        return tx.update(given(params), state)

    specs = kfac.state.state_specs(tx, params, "data")
    init = tx.init
    if style == "shard_map":
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=P(), out_specs=specs)
    compiled = {}
    with jax.set_mesh(mesh):
        state = sharded(jax.eval_shape(init, params), specs)
        results = shardings(mesh, (whole, specs))
        steps = {"SGD": sgd, "K-FAC": without, "K-FAC with statistics": full}
        steps |= {"update": alone} if style == "mesh" else {}
        for name, step in steps.items():
            fn = step
            if style == "shard_map":
                fn = jax.shard_map(step, mesh=mesh, in_specs=(P(), specs, P("data")), out_specs=(P(), specs))
            compiled[name] = jax.jit(fn, out_shardings=results).lower(params, state, batch).compile()
    return layers, compiled


def shardings(mesh, specs):
    """Return a `NamedSharding` for each spec in a tree."""
    return jax.tree.map(functools.partial(NamedSharding, mesh), specs, is_leaf=lambda s: isinstance(s, P))


def abstract(tree, where):
    """Return a tree's shapes with the shardings in `where`, a prefix of the tree."""
    spread = jax.tree.map(
        lambda sharding, part: jax.tree.map(lambda _: sharding, part), where, tree,
        is_leaf=lambda s: isinstance(s, NamedSharding),
    )  # fmt: skip
    return jax.tree.map(lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, spread)


def packed_bytes(layers):
    """Return the size of all factors' upper triangles in bytes."""
    return 4 * sum(
        math.prod(s[:-2]) * (s[-1] * (s[-1] + 1) // 2 if f not in layer.diagonal and len(s) > 1 else math.prod(s))
        for layer in layers
        for f, s in layer.factor_shapes.items()
    )


def main():
    kind = AxisType.Explicit if OPTIONS.axes == "explicit" else AxisType.Auto
    layers, compiled = programs(
        MODELS[OPTIONS.model],
        OPTIONS.devices,
        OPTIONS.style,
        kind,
        OPTIONS.parameters,
        OPTIONS.gradients,
        max_factor_dim=OPTIONS.max_factor_dim,
        inverse_update_period=10 if OPTIONS.refresh == "inside" else math.inf,
    )
    print(f"{OPTIONS.model}, {OPTIONS.devices} devices, {OPTIONS.style}; packed factors {packed_bytes(layers):,} bytes")
    for name, program in compiled.items():
        found = messages(program.as_text(), OPTIONS.devices)
        sizes = ", ".join(f"{kind} {int(size):,}" for kind, size in by_kind(found).items())
        print(f"{name}: {sizes or 'nothing'}; temporary {program.memory_analysis().temp_size_in_bytes:,}")
        for kind, size, times, operation in sorted(found, key=lambda m: -m[1] * m[2])[: OPTIONS.largest]:
            print(f"    {kind} {size:,} x {times}: {operation}")


if __name__ == "__main__":
    main()
