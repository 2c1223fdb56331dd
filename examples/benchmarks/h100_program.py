"""Compile training steps for an NVIDIA H100 without a GPU, count their operations, and bound their time.

    python examples/benchmarks/h100_program.py                                     # all of it: an hour or more
    python examples/benchmarks/h100_program.py --models resnet50 --rows sgd statistics
    python examples/benchmarks/h100_program.py --models gpt-124m --devices 8       # with bytes sent between devices
    python examples/benchmarks/h100_program.py --models gpt-124m --rows refresh    # branches count, too
    python examples/benchmarks/h100_program.py --models resnet50 --small           # small networks: a minute

XLA compiles for the GPU that `h100.textproto` describes. Nothing runs, so the script measures no time. Instead, `bound`
is the least time that memory and arithmetic units need, without launches and waits (`gpu_counts.py`). Without a device,
XLA does not tune its algorithms. The script needs JAX's CUDA build, `pip install "jax[cuda12]"`, but no GPU.
"""

import argparse
import collections
import functools
import json
import math
import os
import pathlib
import sys
import time
from typing import Any

# The steps are compiled for the GPU and never run. Everything else runs on the CPU.
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_gpu_autotune_level=0".strip()

import environment  # noqa: F401, isort: skip; before JAX is imported

import jax
from jax.experimental import topologies
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
from gpu_counts import count
from steps import AXIS, FIRST_ORDER, INVERSES, ROWS, Task, make_step, table, task


def h100s(number: int) -> Mesh:
    """Return a mesh of simulated H100 GPUs."""
    description = (pathlib.Path(__file__).parent / "h100.textproto").read_text()
    try:
        found = topologies.get_topology_desc(platform="cuda", target_config=description, topology=f"1x1x{number}")
    except Exception as error:
        raise SystemExit(f'no compiler for CUDA: pip install "jax[cuda12]"; no GPU is needed ({error})') from None
    return Mesh(topologies.make_mesh(found, (number,), (AXIS,)).devices, (AXIS,), axis_types=(AxisType.Auto,))


def compile_step(row: str, task: Task, options: argparse.Namespace) -> tuple[str, Any, float]:
    """Compile a row's step; return the program's text, its memory analysis, and the seconds for compiling."""
    mesh = h100s(options.devices)
    step, tx = make_step(row, task, options)
    same, split, own = PartitionSpec(), PartitionSpec(AXIS), PartitionSpec()
    init = tx.init
    if options.devices > 1:
        own = same if row in FIRST_ORDER else kfac.state.state_specs(tx, task.params, AXIS)
        init = jax.shard_map(tx.init, mesh=mesh, in_specs=same, out_specs=own)
        step = jax.shard_map(step, mesh=mesh, in_specs=(same, own, split), out_specs=(same, own, same))

    def placed(tree: Any, specs: Any) -> Any:
        def one(spec: PartitionSpec, part: Any) -> Any:
            place = NamedSharding(mesh, spec)
            return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place), part)

        return jax.tree.map(one, specs, tree, is_leaf=lambda x: isinstance(x, PartitionSpec))

    def global_shape(x: Any) -> Any:
        return jax.ShapeDtypeStruct((options.devices * x.shape[0], *x.shape[1:]), x.dtype)

    batch = placed(jax.tree.map(global_shape, task.batch), split)
    state = placed(jax.eval_shape(init, task.params), own)
    lowered = jax.jit(step, donate_argnums=(0, 1)).lower(placed(task.params, same), state, batch)
    began = time.perf_counter()
    compiled = lowered.compile()
    return compiled.as_text() or "", compiled.memory_analysis(), time.perf_counter() - began


# -- the table --------------------------------------------------------------------------------------------------------


def describe(row: str, text: str, memory: Any, seconds: float, first: dict[str, Any] | None) -> dict[str, Any]:
    """Return a row of the table. It includes ratios to SGD's row, `first`.

    If the program has branches, the row also includes the figures for the case that all are taken.
    """
    counts, taken = count(text), count(text, taken=True)
    figures: dict[str, Any] = {
        "step": row,
        "launches": round(counts.launches),
        "in branches": round(counts.inside),
        "waits": len(counts.waits),
        "float32 GFLOP": counts.flops.get("f32", 0) / 1e9,
        "tf32 GFLOP": counts.flops.get("tf32", 0) / 1e9,
        "bfloat16 GFLOP": counts.flops.get("bf16", 0) / 1e9,
        "bound ms": counts.bound * 1e3,
        "temporary GB": memory.temp_size_in_bytes / 1e9,
        "compile s": seconds,
    }
    first = first or figures
    for name in ("bound ms", "launches", "temporary GB", "compile s"):
        figures[f"{name.split()[0]} of sgd"] = figures[name] / first[name] if first[name] else math.nan
    if counts.inside:
        figures |= {"launches if taken": round(taken.launches), "waits if taken": len(taken.waits)}
        figures["bound ms if taken"] = taken.bound * 1e3
    return figures | {f"{kind} MB": size / 1e6 for kind, size in sorted(counts.messages.items())}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    add = functools.partial(parser.add_argument)
    add("--models", nargs="+", choices=("resnet50", "vit-b16", "gpt-124m"), default=["resnet50", "vit-b16", "gpt-124m"])
    add(
        "--rows",
        nargs="+",
        choices=ROWS,
        default=("sgd", "muon", "without", "statistics", "observe"),
        help="`observe` only takes statistics on a quarter of the examples, and `refresh` only inverts factors",
    )
    add("--batch", type=int, help="per device; by default 256 images for ResNet-50, 128 for ViT, 8 sequences for GPT")
    add("--image-size", type=int, default=224)
    add("--devices", type=int, default=1, help="number of H100s, each with its own batch")
    add("--preconditioner", choices=INVERSES, default="soap")
    add("--inverse-update-period", type=int, default=100)
    add("--refresh", choices=("inside", "apart"), default="inside", help="apart: only the row `refresh` inverts")
    add("--small", action="store_true", help="small networks, for a trial run")
    add("--kinds", action="store_true", help="print the kinds of launches of each program")
    add("--output", type=pathlib.Path, help="folder for the programs' texts and table.json")
    options = parser.parse_args(arguments)
    if options.devices < 1 or (options.batch is not None and options.batch < 1):
        parser.error("--devices and --batch must be at least 1")
    return options


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    options = parse(arguments)
    every = []
    for name in options.models:
        rows: list[dict[str, Any]] = []
        for row in options.rows:
            text, memory, seconds = compile_step(row, task(name, options), options)
            rows.append(describe(row, text, memory, seconds, next((r for r in rows if r["step"] == "sgd"), None)))
            if options.output:
                options.output.mkdir(parents=True, exist_ok=True)
                (options.output / f"{name}-{row}.hlo").write_text(text)
            counts = count(text, taken=row == "refresh")
            for wait, times in collections.Counter(counts.waits).items():
                print(f"the host waits in {name}, {row}, {times} times: {wait}")
            if options.kinds:
                for kind, number in sorted(counts.kinds.items(), key=lambda item: -counts.costs[item[0]]):
                    print(f"  {number:8.0f} {counts.costs[kind] * 1e3:8.2f} ms  {kind}")
            sys.stdout.flush()
        print(f"\n{name}\n\n{table(rows)}\n", flush=True)
        every += [{"model": name} | row for row in rows]
    if options.output:
        (options.output / "table.json").write_text(json.dumps(every, indent=2) + "\n")
    return every


if __name__ == "__main__":
    main()
