"""Analyse a program compiled for a GPU from its text: launches, waits, FLOPs by dtype, bytes, messages and a bound.

The bound is a lower limit for the program's seconds on an H100 SXM. It sums `max(bytes / bandwidth, FLOPs / peak)` over
all kernels. It leaves out launches and waits, and real kernels do not reach both peaks.
"""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from collections.abc import Iterable

BANDWIDTH = 3.35e12  # bytes/s of an H100 SXM
# Dense FLOP/s by the dtype of a product's operands. The key tf32 stands for float32 on tensor cores.
PEAK = {"bf16": 989e12, "f16": 989e12, "tf32": 494e12, "f32": 67e12, "f64": 67e12}
WIDTH = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s16": 2, "u16": 2, "s64": 8, "u64": 8, "f64": 8}  # else 4

# Operations that launch no kernel: names, views, control flow.
NAMES = {
    "parameter", "constant", "get-tuple-element", "tuple", "bitcast", "after-all", "opt-barrier", "partition-id",
    "replica-id", "call", "while", "conditional",
}  # fmt: skip
COLLECTIVES = ("all-reduce", "reduce-scatter", "all-gather", "all-to-all", "collective-permute")
VIEWS = {"bitcast", "reshape", "copy", "convert", "transpose"}
# FLOPs / n^3 by LAPACK name (Golub & Van Loan 2013, sections 4.2, 5.2 and 8.3). `orgqr` forms Q.
FACTORISATIONS = {"geqrf": 4 / 3, "orgqr": 4 / 3, "potrf": 1 / 3, "syevd": 9.0}
NUMBER_BY_NUMBER = {"add", "subtract", "multiply", "divide", "negate", "maximum", "minimum", "select", "compare"}
PARTS = {"slice", "dynamic-slice", "gather"}

Shape = tuple[str, tuple[int, ...]]


@dataclasses.dataclass(frozen=True)
class Line:
    """An instruction in a program: its name, result shapes, operation, operands and text."""

    name: str
    shapes: list[Shape]
    op: str
    operands: list[str]
    text: str

    def attribute(self, name: str) -> str:
        found = re.search(rf"\b{name}=(\{{[^}}]*\}}|[^,\s]+)", self.text)
        return found[1].strip("{}%") if found else ""


def _numbers() -> collections.defaultdict[str, float]:
    return collections.defaultdict(float)


@dataclasses.dataclass
class Counts:
    """Counts for a single run of a program.

    Loops with a known length multiply the counts. A branch, or a loop with an unknown length, is called uncertain.

    Attributes:
      launches: kernels and library calls outside uncertain code.
      inside: launches in uncertain code, with one iteration per loop. No other figure includes them.
      waits: the outermost uncertain branches and loops. For each, the host reads a number from the device.
      waits_inside: uncertain branches and loops within uncertain code.
      kinds: launches by kind.
      flops: FLOPs in products, convolutions and factorisations, by the operands' dtype.
      bound: the lower bound in seconds.
      costs: the bound by kind.
      messages: bytes in the results of collectives, by kind.
    """

    launches: float = 0
    inside: float = 0
    waits: list[str] = dataclasses.field(default_factory=list)
    waits_inside: int = 0
    kinds: collections.defaultdict[str, float] = dataclasses.field(default_factory=_numbers)
    flops: collections.defaultdict[str, float] = dataclasses.field(default_factory=_numbers)
    bound: float = 0.0
    costs: collections.defaultdict[str, float] = dataclasses.field(default_factory=_numbers)
    messages: collections.defaultdict[str, float] = dataclasses.field(default_factory=_numbers)


def count(program: str, *, taken: bool = False) -> Counts:
    """Analyse a compiled program.

    Args:
      program: the text of its optimized HLO.
      taken: True to count uncertain code like the rest. A conditional then counts with the branch that has the largest
        bound, and a loop with an unknown length counts with one iteration. `inside` is then zero.
    """
    bodies, entry = computations(program)
    counts = Counts()
    _count(bodies, entry, 1.0, counts, outside=True, taken=taken)
    return counts


def computations(program: str) -> tuple[dict[str, dict[str, Line]], str]:
    """Return the instructions of each computation by name, and the entry computation's name."""
    bodies: dict[str, dict[str, Line]] = {}
    entry, current = "", None
    for text in program.splitlines():
        if found := re.match(r"(ENTRY )?%?([\w.-]+) \(.*\{$", text):
            current = bodies.setdefault(found[2], {})
            entry = found[2] if found[1] else entry
        elif text.startswith("}"):
            current = None
        elif current is not None and (line := _line(text)):
            current[line.name] = line
    return bodies, entry


def _line(text: str) -> Line | None:
    found = re.match(r"\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(([^)]*)\)", text)
    if not found:
        return None
    shapes = [(d, tuple(int(n) for n in s.split(",") if n)) for d, s in re.findall(r"(\w+)\[([\d,]*)\]", found[2])]
    return Line(found[1], shapes, found[3], re.findall(r"%([\w.-]+)", found[4]), text)


def _count(
    bodies: dict[str, dict[str, Line]], name: str, times: float, counts: Counts, *, outside: bool, taken: bool
) -> None:
    for line in bodies[name].values():
        inner = [part for key in _CALLED for part in re.findall(r"[\w.-]+", line.attribute(key)) if part in bodies]
        if line.op == "call" or line.op == "async-start":
            for part in inner:
                _count(bodies, part, times, counts, outside=outside, taken=taken)
        elif line.op == "while":
            turns = re.search(r'"known_trip_count":\{"n":"(\d+)"', line.text)
            if turns is None:
                _wait(line, times, counts, outside)
            body, known = line.attribute("body"), outside and (taken or bool(turns))
            _count(bodies, body, times * float(turns[1]) if turns else times, counts, outside=known, taken=taken)
        elif line.op == "conditional":
            _wait(line, times, counts, outside)
            inner = [max(inner, key=lambda part: _alone(bodies, part))] if taken else inner
            for part in inner:
                _count(bodies, part, times, counts, outside=outside and taken, taken=taken)
        elif line.op not in NAMES and not line.op.endswith("-done"):
            if outside:
                _launch(bodies, bodies[name], line, times, counts)
            else:
                counts.inside += times


_CALLED = ("calls", "to_apply", "branch_computations", "true_computation", "false_computation", "called_computations")


def _alone(bodies: dict[str, dict[str, Line]], name: str) -> tuple[float, float]:
    counts = Counts()
    _count(bodies, name, 1.0, counts, outside=True, taken=True)
    return counts.bound, counts.launches


def _wait(line: Line, times: float, counts: Counts, outside: bool) -> None:
    if outside:
        source = re.search(r'op_name="([^"]*)"', line.text)
        counts.waits += [f"{line.op} {source[1] if source else line.name}"] * round(times)
    else:
        counts.waits_inside += 1


def _launch(
    bodies: dict[str, dict[str, Line]], around: dict[str, Line], line: Line, times: float, counts: Counts
) -> None:
    target = re.search(r'custom_call_target="([^"]+)"', line.text)
    label = target[1] if target else line.op.removesuffix("-start")
    for kind in COLLECTIVES:
        if line.op.removesuffix("-start") == kind:
            result = line.shapes[len(line.shapes) // 2 :] if line.op.endswith("-start") else line.shapes
            counts.messages[kind] += times * sum(map(_bytes, result))
    dtype, work = _work(bodies, around, line, label)
    if line.op == "fusion" and "__triton" in line.text:
        label = "fusion (Triton)"
    label += f" {dtype}" * bool(work)
    counts.launches += times
    counts.kinds[label] += times
    cost = times * max(_moved(bodies, around, line) / BANDWIDTH, work / PEAK.get(dtype, PEAK["f32"]))
    counts.bound += cost
    counts.costs[label] += cost
    if work:
        counts.flops[dtype] += times * work


def _bytes(shape: Shape) -> int:
    return WIDTH.get(shape[0], 4) * math.prod(shape[1])


def _moved(bodies: dict[str, dict[str, Line]], around: dict[str, Line], line: Line) -> int:
    """Return the bytes that a kernel must read and write. Each array counts once.

    If a kernel uses only parts of an array, only these parts count.
    """
    body = bodies.get(line.attribute("calls")) if line.op == "fusion" else None
    inner = list(body.values()) if body else []
    root = next((one for one in inner if one.text.lstrip().startswith("ROOT")), None)
    written = sum(map(_bytes, line.shapes))
    updated: set[str] = set()
    roots = [body[o] for o in root.operands] if body and root is not None and root.op == "tuple" else [root]
    for one in roots:
        one = _through_views(body, one) if body and one is not None else one
        if body and one is not None and one.op == "dynamic-update-slice":
            written += _bytes(body[one.operands[1]].shapes[0]) - _bytes(one.shapes[0])
            updated.add(_through_views(body, body[one.operands[0]]).name)
    read = 0
    parameters = {int(re.search(r"parameter\((\d+)\)", one.text)[1]): one for one in inner if one.op == "parameter"}  # type: ignore[index]
    seen: set[str] = set()
    for position, operand in enumerate(line.operands):
        if operand in seen or operand not in around:
            continue
        seen.add(operand)
        whole = sum(map(_bytes, around[operand].shapes))
        if position in parameters:
            name = parameters[position].name
            users = [one for one in inner if name in one.operands]
            if name in updated and all(one.op == "dynamic-update-slice" for one in users):
                whole = 0
            elif parts := _parts(inner, parameters[position]):
                whole = min(whole, WIDTH.get(around[operand].shapes[0][0], 4) * sum(parts.values()))
        read += whole
    return written + read


def _parts(inner: list[Line], line: Line) -> dict[str, int] | None:
    """Return the number of elements in each part that a kernel takes from an array, or None if it may take all.

    The function looks through views and elementwise operations, because a part of their result needs only the same
    part of the array.
    """
    parts: dict[str, int] = {}
    for one in inner:
        if line.name not in one.operands:
            continue
        if one.op in PARTS and one.operands[0] == line.name:
            parts[one.attribute("slice") or one.name] = math.prod(one.shapes[0][1])
        elif one.op in VIEWS | NUMBER_BY_NUMBER and (found := _parts(inner, one)):
            parts |= found
        else:
            return None
    return parts


def _through_views(body: dict[str, Line], line: Line) -> Line:
    while line.op in VIEWS and line.operands and line.operands[0] in body:
        line = body[line.operands[0]]
    return line


def _work(bodies: dict[str, dict[str, Line]], around: dict[str, Line], line: Line, label: str) -> tuple[str, float]:
    """Return the dtype and the FLOPs of a kernel's products."""
    if label.startswith("__cudnn$conv"):
        return _convolution(around, line, label)
    if said := re.search(r"flops_(\d+)_(\w+?)\b", line.text) if label.startswith("__gpu$") else None:
        return said[2], float(said[1])  # the package's own kernels have the FLOPs in their names
    if found := re.match(r"cusolver_(\w+?)_ffi", label):
        dtype, shape = around[line.operands[0]].shapes[0]
        return dtype, FACTORISATIONS.get(found[1], 0.0) * math.prod(shape[:-1]) * shape[-1] ** 2
    if label.startswith("__cublas$"):
        numbers = re.search(r'"lhs_contracting_dimensions":\[([^\]]*)\]', line.text)
        dims = [int(n) for n in re.findall(r"\d+", numbers[1])] if numbers else []
        left = around[line.operands[0]].shapes[0]
        tensor = '"operand_precision":["HIGHEST"' not in line.text
        return _arithmetic(left[0], tensor), _products(line.shapes[0], left, dims)
    body = bodies.get(line.attribute("calls"), {}) if line.op == "fusion" else {line.name: line}
    total, dtype = 0.0, "f32"
    for one in body.values():
        if one.op == "dot":
            left = (body.get(one.operands[0]) or around[one.operands[0]]).shapes[0]
            dims = [int(n) for n in one.attribute("lhs_contracting_dims").split(",") if n]
            split = re.search(r"algorithm=dot_(bf16|tf32)_\w+?_x(\d)", one.text)  # float32 split into parts
            total += _products(one.shapes[0], left, dims) * (int(split[2]) if split else 1)
            dtype = split[1] if split else _arithmetic(left[0], "highest" not in one.text)
    return dtype, total


def _arithmetic(dtype: str, tensor_cores: bool) -> str:
    return "tf32" if dtype == "f32" and tensor_cores else dtype


def _products(out: Shape, left: Shape, contracted: Iterable[int]) -> float:
    return 2.0 * math.prod(out[1]) * math.prod(left[1][k] for k in contracted)


def _convolution(around: dict[str, Line], line: Line, label: str) -> tuple[str, float]:
    """Return the dtype and the FLOPs of a convolution or one of its two derivatives. Padding counts."""
    left, right = (around[name].shapes[0] for name in line.operands[:2])
    out = line.shapes[0]
    kernel, image = (out, right) if "BackwardFilter" in label else (right, left if "BackwardInput" in label else out)
    labels = re.search(r"dim_labels=\w+_(\w+)->", line.text)
    features = kernel[1][labels[1].index("o")] if labels else 1
    return _arithmetic(left[0], "highest" not in line.text), 2.0 * math.prod(image[1]) * math.prod(kernel[1]) / features
