"""Test that the documentation agrees with the package: its examples run, and its tables are complete."""

import ast
import dataclasses
import functools
import inspect
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.flatten_util import ravel_pytree
from jax.scipy.sparse.linalg import cg
from jax.sharding import NamedSharding
from test_readme import model_and_data

import kfac
from public import OBJECTS, public_modules

DOCS = Path(__file__).parents[2] / "docs"
PACKAGE = DOCS.parent / "kfac"
OPTIONS = (DOCS / "options.md").read_text()


def run_blocks(page, count, chosen=slice(None), names=None):
    """Run the chosen examples of a page that has `count` examples, and return their names."""
    params, batch, loss_fn = model_and_data()
    names = {"loss_fn": loss_fn, "params": params, "batch": batch} if names is None else names
    blocks = re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL)
    assert len(blocks) == count
    for block in blocks[chosen]:
        exec(block, names)
    return names


@pytest.fixture(scope="module")
def precision():
    return run_blocks("precision.md", 1)


@pytest.fixture(scope="module")
def distributed():
    return run_blocks("distributed.md", 4)


def test_no_other_page_has_code_that_is_notrun_blocks():
    pages = {path.name for path in DOCS.glob("*.md") if "```python" in path.read_text()}
    several = {
        "options.md",
        "distributed.md",
        "precision.md",
        "getting_started.md",
        "own_loop.md",
        "curvature.md",
    }
    assert pages == several


def test_code_of_the_pages_is_at_most_88_columns_wide():
    """Wider code scrolls on a page of 1,400 pixels."""
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for block in re.findall(r"^```\w*\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL):
            wide = [line for line in block.splitlines() if len(line) > 88]
            assert not wide, (page.name, wide)


@pytest.fixture(scope="module")
def curvature():
    return run_blocks("curvature.md", 6)


def _named(node):
    """Return the object of `kfac` that an expression such as `kfac.curvature.eigenbasis` names, or None."""
    if isinstance(node, ast.Name):
        return kfac if node.id == "kfac" else None
    if isinstance(node, ast.Attribute):
        outer = _named(node.value)
        return None if outer is None or outer is kfac.train_step else getattr(outer, node.attr)
    return None


@pytest.mark.parametrize("page", sorted(path.name for path in DOCS.glob("*.md") if "```python" in path.read_text()))
def test_the_code_of_a_page_names_what_kfac_has(page):
    """Check names and keywords without running the code, which slow tests do."""
    for block in re.findall(r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.MULTILINE | re.DOTALL):
        for node in ast.walk(ast.parse(block)):
            _named(node)
            function = _named(node.func) if isinstance(node, ast.Call) else None
            if function is not None:
                known = inspect.signature(function).parameters
                # `train_step` passes its other options on.
                options = _options(kfac.kfac) | _options(kfac.natural_gradient) if function is kfac.train_step else {}
                assert {word.arg for word in node.keywords if word.arg} <= {*known, *options}, ast.unparse(node)


@pytest.mark.slow
def test_block_operator_and_gauss_newton_on_the_curvature_page_agree_with_dense_matrices(curvature):
    names = curvature
    loss_fn, layers, params, data = (names[name] for name in ("loss_fn", "layers", "params", "data"))
    whole = kfac.curvature.gauss_newton(loss_fn, params, data, batches=4)
    dense = np.asarray(whole.to_dense(), np.float64)
    # Corrected eigenvalues have the exact matrix's trace, whatever the basis.
    basis = kfac.curvature.eigenbasis(names["factors"], layers)
    corrected = kfac.curvature.estimate_factors(
        loss_fn, layers, params, [data], fisher="expected", key=names["key"], basis=basis
    )
    ekfac = kfac.curvature.block_operator(layers, corrected, basis=basis)
    np.testing.assert_allclose(ekfac.trace(), np.trace(dense), rtol=1e-4)
    gradient, _ = ravel_pytree(jax.grad(loss_fn)(params, names["query"]))
    solved, _ = jax.jit(lambda g: cg(lambda v: whole @ v + 1e-3 * v, g, tol=1e-5))(gradient)
    solution = np.linalg.solve(dense + 1e-3 * np.eye(len(dense)), gradient)
    np.testing.assert_allclose(solved, solution, rtol=1e-2, atol=1e-3 * np.abs(solution).max())
    assert np.isfinite(names["evidence"])
    assert jax.tree.structure(names["draw"]) == jax.tree.structure(params)


@pytest.mark.slow
def test_estimate_factors_on_the_curvature_page_serves_influence_and_continual_learning(curvature):
    names = curvature
    assert {layer.kind for layer in names["layers"]} == {"dense"}
    [pinn_layers] = names["step"].layers.values()
    assert {layer.kind for layer in pinn_layers} <= {"dense", "unitwise"}  # all have exact rows
    inner = names["points"][0]
    exact_error = abs(names["u"](names["pinn"], inner) - np.sin(np.pi * inner)).max()
    assert exact_error < 0.1 * names["error"] < 1e-4
    # The mean influence on the query is the product of the whole gradient and the query's direction.
    whole = jax.grad(names["loss_fn"])(names["params"], names["data"])
    expected = optax.tree.vdot(whole, names["direction"])
    np.testing.assert_allclose(names["scores"].mean(), expected, rtol=1e-3)
    # At the first task's weights the penalty has no gradient yet.
    images, labels = names["data"]
    second = images[:, ::-1], labels
    plain = jax.grad(names["loss_fn"])(names["params"], second)
    found = jax.grad(names["second_loss"])(names["params"], second)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5), found, plain)


def test_the_places_for_changes_exist():
    """Check the modules and names in the table of docs/development/architecture.md."""
    text = (DOCS / "development" / "architecture.md").read_text()
    table = text.partition("## Where to make a change")[2].partition("\n## ")[0]
    for _, places in re.findall(r"^\| (.+?) \| (.+?) \|$", table, re.MULTILINE)[1:]:
        folder = ""
        sources = ""
        for path in re.findall(r"`(_?\w+/(?:\w+\.py)?|\w+\.py)`", places):
            folder = path.rpartition("/")[0] or folder
            found = PACKAGE / (path if "/" in path or (PACKAGE / path).exists() else f"{folder}/{path}")
            assert found.exists(), path
            sources += "".join(file.read_text() for file in ([found] if found.is_file() else found.glob("*.py")))
        for name in re.findall(r"`(MOVES|READS|[A-Z]\w+)`", places):
            assert name in sources, name


@pytest.mark.slow
def test_the_figure_prints_the_errors_in_its_docstring(capsys, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(DOCS / "figures"))
    import kronecker

    kronecker.main(tmp_path / "kronecker.png")
    shown = "".join(re.findall(r"^    (?:step| ).*\n", kronecker.__doc__, re.MULTILINE))
    number = r"\d+\.\d\d"
    printed = capsys.readouterr().out
    assert re.sub(number, "", printed).split() == re.sub(number, "", shown).split()
    found, expected = ([float(x) for x in re.findall(number, text)] for text in (printed, shown))
    # A rounding error may change a draw, and with it the last steps.
    np.testing.assert_allclose(found, expected, atol=0.05)


def test_every_public_name_is_in_the_reference():
    pages = {path.stem: path.read_text() for path in (DOCS / "api").glob("*.rst")}
    summary = pages.pop("index")
    found = [
        (name if name.startswith("kfac.") else f"kfac.{name}", page)
        for page, text in pages.items()
        for name in re.findall(r"^\.\. auto\w+:: (\S+)$", text, re.MULTILINE)
    ]
    documented = dict(found)
    assert len(documented) == len(found)
    whole = {"kfac.schedules"}  # documented with all members
    names = {name for name in OBJECTS if name.rpartition(".")[0] not in whole}
    assert documented.keys() == names | (public_modules().keys() - {"kfac"})
    for name, page in documented.items():
        module = name if name in public_modules() else name.rpartition(".")[0]
        assert page == ("kfac" if module == "kfac" else module.split(".")[1]), name
    tables = re.findall(r"^\.\. autosummary::\n   :nosignatures:\n\n((?:   \S+\n)+)", summary, re.MULTILINE)
    listed = " ".join(tables).split()
    assert sorted(listed) == sorted(OBJECTS)


def _table(heading):
    """Return the rows of the first table after `heading` as {first cell: second cell}, without backquotes."""
    text = OPTIONS[OPTIONS.index(heading) :]
    rows = re.search(r"(?:^\|.*\n)+", text, re.MULTILINE)[0].splitlines()[2:]
    cells = [[cell.strip().strip("`") for cell in row.split("|")[1:-1]] for row in rows]
    return {row[0]: row[1] for row in cells}


def _options(function):
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}


def test_every_option_of_kfac_is_documented_with_its_default():
    table = _table("Options of `kfac`")
    assert {name: eval(default) for name, default in table.items()} == _options(kfac.kfac)


@pytest.mark.slow
def test_every_diagnostic_is_documented():
    names = run_blocks("options.md", 1)
    params, batch = names["params"], names["batch"]
    layers = names["layers"]
    tx = kfac.kfac(0.1, layers)
    state = kfac.observe(tx.init(params), kfac.statistics(names["loss_fn"], layers)(params, batch))
    scalars = kfac.diagnostics(tx.update(params, state, params)[1])
    clipped = kfac.natural_gradient(0.1, layers, kl_clip=1.0)
    clipped = jax.eval_shape(lambda params: kfac.diagnostics(clipped.init(params)), params)
    adaptive = kfac.adaptive_damping(lambda damping: kfac.natural_gradient(0.1, layers, damping=damping), 0.01)
    adaptive = jax.eval_shape(lambda params: kfac.diagnostics(adaptive.init(params)), params)
    found = set(scalars) | set(adaptive) | set(clipped)
    table = _table("## Diagnostics")
    assert sorted(name for cell in table for name in re.findall(r"\w+", cell)) == sorted(found)
    assert all(table.values())  # each has a normal range
    assert all(np.isfinite(value) for value in scalars.values())


@pytest.mark.slow
def test_reduced_precision_keeps_what_the_page_says():
    params, batch, loss_fn = model_and_data()

    def bfloat16_loss(params, batch):
        half, inputs = jax.tree.map(lambda x: x.astype(jnp.bfloat16), (params, batch[0]))
        return loss_fn(half, (inputs, batch[1])).astype(jnp.float32)

    layers = kfac.find_layers(bfloat16_loss, params, batch)
    tx = kfac.kfac(0.1, layers, preconditioner=kfac.Cholesky(precision="bfloat16"))
    _, grads, factors = jax.jit(kfac.value_and_grad(bfloat16_loss, layers))(params, batch)
    state = jax.jit(kfac.observe)(tx.init(params), factors)
    updates, state = jax.jit(tx.update)(grads, state, params)
    assert {x.dtype for x in jax.tree.leaves((updates, factors))} == {jnp.dtype("float32")}
    stored = [blocks.preconditioner for blocks in state[0].blocks.values()]
    assert {x.dtype for x in jax.tree.leaves(stored)} == {jnp.dtype("bfloat16")}


def test_unscaled_statistics_are_those_of_the_loss_itself(precision):
    names = precision
    whole = jax.jit(kfac.value_and_grad(names["loss_fn"], names["layers"]))(names["params"], names["batch"])
    scaled = names["grads"], names["factors"]
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), whole[1:], scaled)


def _assert_close(found, expected, tolerance=1e-5):
    def compare(a, b):
        np.testing.assert_allclose(a, b, rtol=tolerance, atol=tolerance)

    jax.tree.map(compare, found, expected)


@pytest.fixture(scope="module")
def one_device(distributed):
    """Return the guides' parameters and state after each step, on one device with the whole batch."""
    names = distributed
    params, batch, layers = names["params"], names["batch"], names["layers"]
    tx = kfac.kfac(0.1, layers, inverse_update_period=3)
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state):
        _, grads, factors = kfac.value_and_grad(names["loss_fn"], layers)(params, batch)
        updates, state = tx.update(grads, kfac.observe(state, factors), params)
        return optax.apply_updates(params, updates), state

    found = [(params, state)]
    for _ in range(4):
        found.append(step(*found[-1]))
    return found


@pytest.mark.slow
def test_all_programs_train_like_one_device(distributed, one_device):
    names = distributed
    expected, state = one_device[4]
    devices = jax.device_count()
    alone_params, _ = names["train"](names["params"], names["batch"])
    for found in (alone_params, *(names[f"{program}_params"] for program in ("mesh", "fsdp", "hosts", "global"))):
        _assert_close(jax.device_get(found), expected)
    portable = jax.eval_shape(kfac.state.gather_state, names["opt_state"])
    assert jax.tree.structure(portable) == jax.tree.structure(state)
    for style in ("opt_state", "mesh_state"):
        gathered = jax.jit(kfac.state.gather_state)(names[style])
        _assert_close(jax.device_get(gathered), jax.device_get(state), 1e-3)

    # The functions of the page under `jax.pmap`.
    mapped = functools.partial(jax.pmap, axis_name="devices")
    stacked_params = jax.tree.map(lambda x: jnp.stack([x] * devices), names["params"])
    stacked_batch = jax.tree.map(lambda x: x.reshape(devices, -1, *x.shape[1:]), names["batch"])
    stacked_state = mapped(names["tx"].init)(stacked_params)
    observe, step = mapped(names["local_observe"]), mapped(names["local_step"])
    for _ in range(4):
        stacked_state = observe(stacked_state, stacked_params, stacked_batch)
        stacked_params, stacked_state, losses = step(stacked_params, stacked_state, stacked_batch)
        losses.block_until_ready()
    for device in (0, -1):
        _assert_close(jax.tree.map(lambda x, k=device: x[k], stacked_params), expected)
    # Gathered as the page says for several processes.
    split, same = (NamedSharding(names["mesh"], names[name]) for name in ("split", "same"))
    whole = jax.make_array_from_process_local_data(split, jax.device_get(stacked_state))
    gather = jax.jit(kfac.state.gather_state, out_shardings=same)
    _assert_close(jax.device_get(gather(whole)), jax.device_get(state), 1e-3)


@pytest.mark.slow
def test_a_loss_that_averages_over_devices_trains_like_one_device(distributed):
    names = distributed

    def global_loss(params, batch):
        x, labels = batch
        h = x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
        h = jnp.tanh(h - h.mean(axis=0))
        logits = h @ params["output"]["kernel"] + params["output"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    def local_loss(params, batch):
        x, labels = batch
        h = x @ params["hidden"]["kernel"] + params["hidden"]["bias"]
        h = jnp.tanh(h - jax.lax.pmean(h.mean(axis=0), "devices"))
        logits = h @ params["output"]["kernel"] + params["output"]["bias"]
        return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])

    found, params = [], names["params"]

    def find(params, batch):
        found.append(kfac.find_layers(local_loss, params, batch))

    in_specs = names["same"], names["split"]
    mapped = jax.shard_map(find, mesh=names["mesh"], in_specs=in_specs, out_specs=names["same"])
    jax.eval_shape(mapped, params, names["batch"])
    layers = found[0]
    assert layers.num_examples == 32 // jax.device_count()  # a device's share
    whole_batch = dataclasses.replace(layers, num_examples=32)
    assert whole_batch == kfac.find_layers(global_loss, params, names["batch"])

    def step(params, batch, loss_fn, axis_name, average):
        tx = kfac.kfac(0.1, layers, distribution=kfac.Distribution(axis_name))
        loss, grads, factors = kfac.value_and_grad(loss_fn, layers)(params, batch)
        loss, grads = average((loss, grads))
        return loss, tx.update(grads, kfac.observe(tx.init(params), factors), params)[0]

    average = functools.partial(jax.lax.pmean, axis_name="devices")
    local_step = functools.partial(step, loss_fn=local_loss, axis_name="devices", average=average)
    mapped = jax.shard_map(local_step, mesh=names["mesh"], in_specs=in_specs, out_specs=names["same"])
    found = jax.jit(mapped)(params, names["spread_batch"])
    whole = functools.partial(step, loss_fn=global_loss, axis_name=None, average=lambda tree: tree)
    expected = jax.jit(whole)(params, names["batch"])
    _assert_close(jax.device_get(found), expected)
