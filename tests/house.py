"""Measure the package, and check the direction of its imports.

`python tests/house.py` prints a report of the package's size: tokens, density, longest functions. No figure in it is a
limit. It then checks the imports between rooms, the modules that read equations, and the test files that import
private modules, and exits with an error if a check fails. test_house.py asserts the same checks.
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

INSIDE = 18  # test files that import private modules
# The modules that may read equations.
READERS = {f"_capture.{name}" for name in ("program", "equations", "parameters", "primitives", "axis_rules", "replay")}

# The rooms in import order: each room may import from its own row and from the rows above.
ROOMS = (
    ("_layers", "_leaves", "_factors", "_packing", "_mesh", "_linalg", "_checks"),
    ("_statistics",),
    ("_capture",),
    ("_microbatch",),
    ("_curvature",),
    ("_distributed",),
    ("_optimizer",),
    ("curvature", "planning", "schedules", "state", "types"),
    ("__init__",),
)

# Attributes of an equation or a jaxpr. Other objects have `params` too, so `params` counts only for names in CALLED.
EQUATIONS = {"eqns", "invars", "outvars", "constvars", "primitive", "jaxpr"}
CALLED = {"eqn", "equation"}

NOT_CODE = {
    tokenize.COMMENT,
    tokenize.NL,
    tokenize.NEWLINE,
    tokenize.INDENT,
    tokenize.DEDENT,
    tokenize.ENDMARKER,
}


class Module(NamedTuple):
    name: str  # without the package's name, for example `_capture.trace`
    tokens: int
    lines: set[int]  # line numbers with code
    length: int  # number of lines, including those without code
    functions: dict[str, int]  # lines of each function, inner functions included
    arguments: int  # annotated arguments
    untyped: int  # annotated arguments with `Any`
    equations: list[str]  # places that read equations
    imports: set[str]  # modules of the package

    @property
    def room(self) -> str:
        return self.name.split(".")[0]


# From Python 3.12 on, the parts of an f-string are separate tokens. Count the whole string as a single token
# everywhere.
FSTRING_START = getattr(tokenize, "FSTRING_START", None)
FSTRING_END = getattr(tokenize, "FSTRING_END", None)


def count_code(source: str, tree: ast.AST) -> tuple[int, set[int]]:
    """Return the number of code tokens, and the line numbers with code."""
    docstrings: set[int] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if ast.get_docstring(node) is not None:
                first = node.body[0]
                docstrings |= set(range(first.lineno, first.end_lineno + 1))
    count = depth = 0  # depth: number of f-strings around a token
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        covered = set(range(token.start[0], token.end[0] + 1))
        depth -= token.type == FSTRING_END
        if token.type not in NOT_CODE and not covered & docstrings:
            count += depth == 0 and token.type != FSTRING_START
            lines |= covered
        depth += token.type == FSTRING_START
    return count, lines


def measure(name: str, source: str, names: set[str]) -> Module:
    """Measure a module called `name` in a package whose modules are called `names`."""
    tree = ast.parse(source)
    tokens, lines = count_code(source, tree)
    functions, annotations, equations, imports = {}, [], [], set()
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            functions[f"{node.name}:{node.lineno}"] = len(lines & set(range(node.lineno, node.end_lineno + 1)))
            arguments = [*node.args.args, *node.args.kwonlyargs]
            annotations += [ast.unparse(x.annotation) for x in arguments if x.annotation is not None]
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
    # A package's `__init__` has its room's name. Drop imported names that are not modules.
    untyped = sum("Any" in annotation for annotation in annotations)
    imports = {i for i in imports if i in names and i != name}
    length = source.count("\n")
    return Module(name, tokens, lines, length, functions, len(annotations), untyped, equations, imports)


def modules(package: Path = PACKAGE) -> list[Module]:
    paths = {}
    for path in sorted(package.rglob("*.py")):
        parts = path.relative_to(package).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[1:] and parts[-1] == "__init__" else parts)] = path
    return [measure(name, path.read_text(), set(paths)) for name, path in paths.items()]


def in_core(module: Module) -> bool:
    """Return whether a module is in a room whose name begins with an underscore."""
    return floor(module.room) < floor("curvature")


def floor(room: str) -> int:
    """Return a room's row in ROOMS. Raise a ValueError if it has no row."""
    [found] = [k for k, row in enumerate(ROOMS) if room in row] or [None]
    if found is None:
        raise ValueError(f"tests/house.py: {room} has no place in ROOMS")
    return found


def upward(found: list[Module]) -> list[str]:
    """Return all imports from a room in a lower row of ROOMS."""
    return [
        f"{module.name} imports {other}"
        for module in found
        for other in sorted(module.imports)
        if floor(other.split(".")[0]) > floor(module.room)
    ]


def circle(found: list[Module]) -> list[str]:
    """Return the modules in import cycles."""
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
    """Return whether a test imports a private module of the package, or sets an attribute of such a module."""
    return re.search(r"\bkfac(\.\w+)*(\.| import )_[a-z]", source) is not None


def inside(folder: Path = Path(__file__).parent) -> list[str]:
    """Return the test files that import private modules. Skip test_house.py, which contains such names as text."""
    paths = [path for path in sorted(folder.rglob("*.py")) if path.name != "test_house.py"]
    return [path.name for path in paths if names_the_inside(path.read_text())]


def broken(found: list[Module]) -> dict[str, list[str]]:
    """Return each check with a list of its violations."""
    files = inside()
    return {
        f"equations are read in {', '.join(sorted(READERS))} only": [
            f"{module.name} reads {', '.join(module.equations[:3])}, {len(module.equations)} places in all"
            for module in found
            if module.equations and module.name not in READERS
        ],
        f"at most {INSIDE} test files import private modules": [", ".join(files)] if len(files) > INSIDE else [],
        "no room imports from a lower row": upward(found),
        "no import cycle": circle(found),
    }


def table(found: list[Module]) -> str:
    rooms = {room: [m for m in found if m.room == room] for room in itertools.chain(*ROOMS)}
    by_size = sorted(found, key=lambda m: -m.tokens)
    functions = sorted(
        ((n, f"{m.name}.{name}") for m in found for name, n in m.functions.items()),
        reverse=True,
    )
    readers = [m for m in found if m.equations]
    core = [m for m in found if in_core(m)]
    tokens = sum(m.tokens for m in found)
    rows = ["tokens of each room, and its number of modules"]
    rows += [f"  {sum(m.tokens for m in ms):7,}  {room} ({len(ms)})" for room, ms in rooms.items() if ms]
    rows += [f"  {sum(m.tokens for m in core):7,}  in the core: all rooms that begin with an underscore"]
    rows += [f"  {tokens:7,}  in all, {tokens / sum(len(m.lines) for m in found):.1f} per line"]
    rows += [f"{sum(m.untyped for m in found)} of {sum(m.arguments for m in found)} annotated arguments have Any"]
    rows += ["the modules with most tokens, and their lines"]
    rows += [f"  {m.tokens:7,}  {m.name} ({m.length})" for m in by_size[:8]]
    rows += ["the longest functions in lines, with the line where each begins"]
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
    for rule, reasons in broken(house).items():
        print(f"{'BROKEN' if reasons else 'ok':>6}  {rule}")
        for reason in reasons:
            print(f"          {reason}")
        failed |= bool(reasons)
    sys.exit(failed)
