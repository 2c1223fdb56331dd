"""Test the package as a whole: its public interface, its imports, and its metadata."""

import ast
import functools
import importlib
import importlib.util
import inspect
import os
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import kfac
from public import FUNCTIONS, MODULES, OBJECTS, PUBLIC, public_modules, public_names

ROOT = Path(__file__).parents[2]
SOURCES = sorted((ROOT / "kfac").rglob("*.py"))
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())

# The names under which the package imports modules of other packages.
OTHERS = {"jax", "jex", "jnp", "lax", "np", "numpy", "optax"}

# Public names with their signatures, on which users' code may rely. They include the fields of the state, which
# checkpoints contain. A change to this file changes the interface, so it belongs in the changelog. To rewrite the file,
# run `python tests/package/test_package.py`.
INTERFACE = ROOT / "tests" / "public_api.txt"


def signature(name, value):
    """Return a signature as in the source. A long signature has a line for each parameter."""
    found = inspect.signature(value)
    parameters = [str(p).replace("ForwardRef", "") for p in found.parameters.values() if p.name != "self"]
    parameters = [re.sub(r"\('(.*?)'\)|'(.*?)'", lambda m: m[1] or m[2] or "''", text, count=1) for text in parameters]
    # The text of a function contains its address.
    parameters = [re.sub(r"<function (\w+) at 0x\w+>", r"\1", text) for text in parameters]
    keyword_only = [k for k, p in enumerate(found.parameters.values()) if p.kind is p.KEYWORD_ONLY]
    if keyword_only and not any(p.kind is p.VAR_POSITIONAL for p in found.parameters.values()):
        parameters.insert(keyword_only[0], "*")
    text = f"{name}({', '.join(parameters)})"
    return text if len(text) <= 120 else f"{name}(\n" + "".join(f"    {p},\n" for p in parameters) + ")"


def interface():
    """Return every public object, and the public members of its class, with signatures."""
    lines = []

    def add(name, value):
        if not inspect.isclass(value):
            lines.append(signature(name, value))
            return
        own = "__init__" in vars(value) or hasattr(value, "_fields")
        lines.append(signature(name, value) if own else name)
        for key, member in sorted(vars(value).items()):
            if key.startswith(("_", "tree_")):
                continue
            if inspect.isfunction(member):
                lines.append(signature(f"{name}.{key}", member))
            elif isinstance(member, property | functools.cached_property):
                lines.append(f"{name}.{key}")

    for prefix, module in public_modules().items():
        for name, value in sorted(public_names(module).items()):
            add(f"{prefix}.{name}", value)
    return "\n".join(lines) + "\n"


def test_public_names_and_signatures_are_those_on_file():
    assert interface() == INTERFACE.read_text(), (
        "if this is meant: python tests/package/test_package.py, and a changelog entry"
    )
    assert isinstance(kfac.__version__, str)


def test_the_top_level_is_a_page():
    assert len(PUBLIC) <= 23
    listed = set(re.findall(r"`(\w+)`", kfac.__doc__))
    assert set(PUBLIC) | set(MODULES) <= listed


FORMER = [
    ("kfac.curvature", "operator", "block_operator"),
    ("kfac.planning", "Plan", "kfac.planning.Estimate"),
    ("kfac.planning", "plan", "kfac.planning.estimate"),
]


@pytest.mark.parametrize(("module", "old", "new"), FORMER)
def test_former_names_give_the_present_name(module, old, new):
    place = importlib.import_module(module)
    with pytest.raises(AttributeError, match=rf"^{module}\.{old} is now {new}$"):
        getattr(place, old)
    with pytest.raises(AttributeError, match=f"module '{module}' has no attribute 'nothing'"):
        _ = place.nothing
    present = importlib.import_module(new.rpartition(".")[0] or module)
    assert hasattr(present, new.rpartition(".")[2])


def test_presets_gives_the_names_of_natural_gradient_and_gauss_newton():
    for access in (lambda: kfac.presets, lambda: kfac.presets.osawa2019, lambda: kfac.presets.full_batch):
        with pytest.raises(AttributeError, match=r"^kfac\.presets is now kfac\.natural_gradient .* kfac\.gauss_newton"):
            access()


def test_every_module_but_the_public_ones_is_reached_through_the_package():
    source = (ROOT / "kfac" / "__init__.py").read_text()
    imports = [alias for node in ast.parse(source).body if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = [alias.name for alias in imports if not alias.asname]
    assert set(names) == set(PUBLIC) | set(MODULES)
    assert sorted(kfac.__all__) == sorted(names)


def test_the_names_of_functions_are_not_shadowed_by_modules():
    assert all(callable(value) for value in PUBLIC.values()) and inspect.isfunction(kfac.kfac)


@pytest.mark.parametrize("name", sorted(OBJECTS))
def test_public_objects_are_documented(name):
    value = OBJECTS[name]
    text = inspect.getdoc(value)
    assert text
    assert text != inspect.getdoc(object)
    # Dataclasses and NamedTuples without a docstring get their signature as a docstring.
    assert not text.startswith(f"{value.__name__}("), text


@pytest.mark.parametrize("name", FUNCTIONS)
def test_public_functions_document_arguments_and_result(name):
    function = OBJECTS[name]
    text = inspect.getdoc(function)
    assert "Args:" in text
    assert "Returns:" in text or inspect.signature(function).return_annotation == "None"
    arguments = text.split("Args:")[1].split("Returns:")[0].split("Raises:")[0]
    for parameter in inspect.signature(function).parameters:
        assert re.search(rf"^\s+\*{{0,2}}{parameter}\b.*:", arguments, re.MULTILINE), parameter


def test_schedules_are_documented_like_the_rest():
    names = [
        name for name, value in vars(kfac.schedules).items() if getattr(value, "__module__", "") == "kfac.schedules"
    ]
    assert sorted(names) == ["coupled_momentum", "damping_decay", "warmup_linear_decay"]
    page = (ROOT / "docs" / "options.md").read_text()
    for name in names:
        function = getattr(kfac.schedules, name)
        text = inspect.getdoc(function)
        assert all(section in text for section in ("Args:", "Returns:", "References:"))
        assert all(f"  {parameter}: " in text for parameter in inspect.signature(function).parameters)
        assert f"`{name}`" in page


def _imported_modules(tree: ast.AST) -> list[str]:
    """Return dotted paths of all imports. `from a import b` counts as `a.b`."""
    modules = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            modules += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            modules += [f"{node.module}.{alias.name}" for alias in node.names]
    return modules


def _private_attributes(tree: ast.AST, packages: set[str]) -> list[str]:
    """Return expressions such as `jax._src.core` that reach into a package by attribute."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_"):
            text = ast.unparse(node)
            if text.split(".")[0] in packages and not node.attr.startswith("__"):
                found.append(text)
    return found


# JAX's documented modules, as far as the package uses them. All others, such as jax.interpreters, change without
# notice, whether or not their names begin with an underscore. The only name from jax.core tells tracers from arrays.
PUBLIC_MODULES = {"jax.ad_checkpoint", "jax.dtypes", "jax.errors", "jax.extend.core", "jax.flatten_util", "jax.lax",
                  "jax.nn", "jax.numpy", "jax.ops", "jax.random", "jax.scipy.linalg", "jax.sharding",
                  "jax.tree", "jax.tree_util", "jax.typing"}  # fmt: skip


@functools.cache
def _is_module(path: str) -> bool:
    try:
        return importlib.util.find_spec(path) is not None
    except ModuleNotFoundError:
        return False


def _not_public(tree: ast.AST) -> set[str]:
    """Return the JAX modules that the code reaches, by imports or attributes, and that are not on the list."""
    attributes = [ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)]
    paths = [path for path in _imported_modules(tree) + attributes if re.fullmatch(r"jax(\.\w+)+", path)]
    parents = {".".join(path.split(".")[:k]) for path in paths for k in range(2, path.count(".") + 2)}
    modules = {path for path in parents if path in sys.modules or _is_module(path)}
    return {path for path in modules if not any(f"{public}.".startswith(f"{path}.") for public in PUBLIC_MODULES)}


def test_nothing_private_of_another_package_is_used():
    assert SOURCES
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        for module in _imported_modules(tree):
            root, *rest = module.split(".")
            if root not in ("kfac", "__future__"):
                private = [part for part in rest if part.startswith("_")]
                assert not private, f"{path.relative_to(ROOT)} imports {module}"
        assert not _private_attributes(tree, {"jax", "jnp", "lax", "jex", "optax", "numpy", "np"}), path
        assert "jax._src" not in path.read_text(), path
        assert not _not_public(ast.parse(path.read_text().replace("jax.core.Tracer", "Tracer"))), path


def test_the_search_for_private_names_finds_them():
    code = "import jax._src.core\nfrom jax import _src\nimport jax\njax._src.core.Trace\n"
    tree = ast.parse(code)
    assert _imported_modules(tree) == ["jax._src.core", "jax._src", "jax"]
    assert _private_attributes(tree, {"jax"}) == ["jax._src"]
    for code in (
        "import jax.interpreters.xla",
        "from jax.interpreters import ad",
        "from jax import interpreters",
        "import jax\njax.interpreters.ad.vjp",
        "from jax.extend import linear_util",
        "from jax.experimental import sparse",
        "from jax.core import Tracer",
    ):
        assert _not_public(ast.parse(code)), code
    assert not _not_public(ast.parse("from jax.extend import core\nfrom jax import lax\nimport jax\njax.random.key(0)"))


def test_only_declared_dependencies_are_imported():
    declared = {re.match(r"[\w-]+", entry)[0] for entry in PYPROJECT["project"]["dependencies"]}
    assert declared == {"jax", "numpy", "optax"}
    for path in SOURCES:
        for module in _imported_modules(ast.parse(path.read_text())):
            root = module.split(".")[0]
            standard = root in sys.stdlib_module_names
            assert standard or root in declared | {"kfac"}, f"{path.relative_to(ROOT)}: {module}"


def test_type_checkers_of_users_see_the_types():
    assert (ROOT / "kfac" / "py.typed").exists()


def test_there_is_one_version():
    # The distribution takes its version from the package, which contains it as a literal.
    assert "version" not in PYPROJECT["project"] and "version" in PYPROJECT["project"]["dynamic"]
    source = ROOT / PYPROJECT["tool"]["hatch"]["version"]["path"]
    assert f'\n__version__ = "{kfac.__version__}"\n' in source.read_text()
    assert f"\nversion: {kfac.__version__}\n" in (ROOT / "CITATION.cff").read_text()
    assert f"## [{kfac.__version__}]" in (ROOT / "CHANGELOG.md").read_text()


@pytest.mark.slow
def test_lapack_gets_one_thread_unless_the_user_says_otherwise():
    script = "import os, kfac; print(os.environ['OPENBLAS_NUM_THREADS'])"
    for given, expected in ((None, "1"), ("3", "3")):
        environment = {key: value for key, value in os.environ.items() if key != "OPENBLAS_NUM_THREADS"}
        environment |= {"OPENBLAS_NUM_THREADS": given} if given else {}
        found = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert found.stdout.strip() == expected


if __name__ == "__main__":
    INTERFACE.write_text(interface())


@pytest.mark.parametrize(
    ("function", "old", "new"),
    [
        ("find_layers", "skip", 'rules={pattern: "skip"}'),
        ("find_layers", "kfac_reduce", 'rules={pattern: "reduce"}'),
        ("find_layers", "gradient_factors", 'rules={pattern: "gradient"}'),
        ("train_step", "skip", 'rules={pattern: "skip"}'),
        ("kfac", "layer_multipliers", "rules={pattern: multiplier} of find_layers"),
    ],
)
def test_keywords_of_version_0_4_give_the_present_keyword(function, old, new):
    with pytest.raises(TypeError, match=rf"^{function}\(\) has no option {old}=: use {re.escape(new)}"):
        getattr(kfac, function)(**{old: 1})
