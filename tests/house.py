"""Measures the house: its lines of code, its longest functions, who reads equations, which way imports run, and how
many files of the tests name what is inside.

`python tests/house.py` prints it all, and ends with an error where a limit is broken; test_house.py asserts the same.
"""

import ast
import io
import itertools
import re
import sys
import tokenize
from pathlib import Path
from typing import NamedTuple

PACKAGE = Path(__file__).parents[1] / "kfac"

# The limits. Lines are those with code: no docstring, comment or blank line counts.
LINES = 8555  # to be lowered with every part that gets simpler
FUNCTION = 70
REFUSALS = 415  # lines with code that raise an error, or are in a function called `check`
# Files of the tests that name a module inside the package, which a change of that may break; to be lowered, too.
INSIDE = 21
# The modules that may read equations.
READERS = {f"_capture.{name}" for name in ("program", "equations", "parameters", "primitives", "replay")}

# The rooms in the order of their imports: each may import from the same row and from those above.
ROOMS = (
    ("_layers", "_factors", "_packing", "_varying", "_checks"),
    ("_statistics",),
    ("_capture",),
    ("_curvature",),
    ("_distributed",),
    ("_optimizer",),
    ("curvature", "planning", "presets", "schedules", "state", "types"),
    ("__init__",),
)

# What is read of an equation or of a jaxpr. Other things have `params` too: of them only those of something called so.
EQUATIONS = {"eqns", "invars", "outvars", "constvars", "primitive", "jaxpr"}
CALLED = {"eqn", "equation"}

NOT_CODE = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


class Module(NamedTuple):
    name: str  # without the package's: `_capture.trace`
    lines: set[int]  # those with code
    functions: dict[str, int]  # lines with code of each, with those of the functions inside it
    refusals: int  # lines with code of `raise`, and of functions whose names begin with `check`
    equations: list[str]  # where it reads them
    imports: set[str]  # modules of the package

    @property
    def room(self) -> str:
        return self.name.split(".")[0]


def code_lines(source: str, tree: ast.AST) -> set[int]:
    """The lines on which something stands that is no docstring and no comment."""
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    lines = {n for t in tokens if t.type not in NOT_CODE for n in range(t.start[0], t.end[0] + 1)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and type(first.value.value) is str:
                lines -= set(range(first.lineno, first.end_lineno + 1))
    return lines


def measure(name: str, source: str, names: set[str]) -> Module:
    """A module called `name` in a package of modules called `names`."""
    tree = ast.parse(source)
    lines = code_lines(source, tree)
    functions, refusing, equations, imports = {}, set(), [], set()
    for node in ast.walk(tree):
        checks = isinstance(node, ast.FunctionDef) and node.name.lstrip("_").startswith("check")
        if isinstance(node, ast.Raise) or checks:
            refusing |= lines & set(range(node.lineno, node.end_lineno + 1))
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[f"{node.name}:{node.lineno}"] = len(lines & set(range(node.lineno, node.end_lineno + 1)))
        elif isinstance(node, ast.Attribute):
            of_equation = node.attr == "params" and isinstance(node.value, ast.Name) and node.value.id in CALLED
            if node.attr in EQUATIONS or of_equation:
                equations.append(f"{ast.unparse(node)}:{node.lineno}")
        elif isinstance(node, ast.Import):
            imports |= {alias.name.removeprefix("kfac.") for alias in node.names if alias.name.startswith("kfac.")}
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] == "kfac":
            base = node.module.removeprefix("kfac").removeprefix(".")
            for alias in node.names:
                whole = f"{base}.{alias.name}" if base else alias.name
                imports.add(whole if whole in names else base or "__init__")
    # A package's own file is its room's name; what is no module is a name in one.
    return Module(name, lines, functions, len(refusing), equations, {i for i in imports if i in names and i != name})


def modules(package: Path = PACKAGE) -> list[Module]:
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)] = path
    return [measure(name, path.read_text(), set(paths)) for name, path in paths.items()]


def floor(room: str) -> int:
    """The row of a room; one without a place gets an error, so that somebody gives it one."""
    [found] = [k for k, row in enumerate(ROOMS) if room in row] or [None]
    if found is None:
        raise ValueError(f"tests/house.py: {room} has no place in ROOMS")
    return found


def upward(found: list[Module]) -> list[str]:
    """Imports that run back: to a room that stands further down in ROOMS."""
    return [
        f"{module.name} imports {other}"
        for module in found
        for other in sorted(module.imports)
        if floor(other.split(".")[0]) > floor(module.room)
    ]


def circle(found: list[Module]) -> list[str]:
    """Modules in circles of imports: what is left without those that import none, and those that none imports."""
    left = {module.name: module.imports for module in found}
    while left:
        imported = set().union(*left.values())
        kept = {name: imports & left.keys() for name, imports in left.items() if name in imported}
        kept = {name: imports for name, imports in kept.items() if imports}
        if kept == left:
            break
        left = kept
    return sorted(left)


def names_the_inside(source: str) -> bool:
    """Whether a module of the package that begins with an underscore is imported, or something in it is set."""
    return re.search(r"\bkfac(\.\w+)*(\.| import )_[a-z]", source) is not None


def inside(folder: Path = Path(__file__).parent) -> list[str]:
    """The files of the tests that do so; test_house.py has such names as text."""
    paths = [path for path in sorted(folder.rglob("*.py")) if path.name != "test_house.py"]
    return [path.name for path in paths if names_the_inside(path.read_text())]


def broken(found: list[Module]) -> dict[str, list[str]]:
    """Under each limit what breaks it."""
    total, files = sum(len(module.lines) for module in found), inside()
    refusals = sum(module.refusals for module in found)
    return {
        f"at most {LINES:,} lines of code": [f"{total:,} lines of code"] if total > LINES else [],
        f"at most {REFUSALS} lines of refusals": [f"{refusals} lines of refusals"] if refusals > REFUSALS else [],
        f"no function of more than {FUNCTION} lines": [
            f"{module.name}.{name} has {count} lines"
            for module in found
            for name, count in module.functions.items()
            if count > FUNCTION
        ],
        f"equations are read in {', '.join(sorted(READERS))} only": [
            f"{module.name} reads {', '.join(module.equations[:3])}, {len(module.equations)} places in all"
            for module in found
            if module.equations and module.name not in READERS
        ],
        f"at most {INSIDE} files of the tests name the inside": [", ".join(files)] if len(files) > INSIDE else [],
        "no import runs back": upward(found),
        "no import circle": circle(found),
    }


def table(found: list[Module]) -> str:
    rooms = {room: [m for m in found if m.room == room] for room in itertools.chain(*ROOMS)}
    by_size = sorted(found, key=lambda m: -len(m.lines))
    functions = sorted(((n, f"{m.name}.{name}") for m in found for name, n in m.functions.items()), reverse=True)
    readers = [m for m in found if m.equations]
    rows = ["lines of code, modules in the room"]
    rows += [f"  {sum(len(m.lines) for m in ms):5,}  {room} ({len(ms)})" for room, ms in rooms.items() if ms]
    core = [m for m in found if floor(m.room) < floor("curvature")]
    rows += [f"  {sum(len(m.lines) for m in core):5,}  in the core: all rooms that begin with an underscore"]
    rows += [f"  {sum(len(m.lines) for m in found):5,}  in all"]
    rows += [f"  {sum(m.refusals for m in found):5,}  of refusals", "the largest modules"]
    rows += [f"  {len(m.lines):5,}  {m.name}" for m in by_size[:8]]
    rows += ["the longest functions, with the line where each begins"]
    rows += [f"  {n:5,}  {name}" for n, name in functions[:10]]
    rows += ["modules that read equations, and in how many places"]
    rows += [f"  {len(m.equations):5,}  {m.name}" for m in sorted(readers, key=lambda m: -len(m.equations))]
    rows += ["imports between rooms"]
    for room, ms in rooms.items():
        others = sorted({i.split(".")[0] for m in ms for i in m.imports} - {room})
        rows += [f"         {room} <- {', '.join(others)}"] if others else []
    return "\n".join(rows)


if __name__ == "__main__":
    house = modules()
    print(table(house))
    failed = False
    for limit, reasons in broken(house).items():
        print(f"{'BROKEN' if reasons else 'ok':>6}  {limit}")
        for reason in reasons:
            print(f"          {reason}")
        failed |= bool(reasons)
    sys.exit(failed)
