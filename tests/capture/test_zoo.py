"""Check that the layers of every model in the zoo are right, or that an error suggests a way out."""

import os
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
from oracle import Geometry, Hook, relative_error
from oracle import truth as by_hooks
from zoo import BROKEN, ZOO
from zoo.bruteforce import truth
from zoo.specimens import N, check, check_strict, compare, dressed, table

pytestmark = pytest.mark.usefixtures("x64")
PAGE = pathlib.Path(__file__).parents[1] / "zoo" / "README.md"
HEADING = "# Models that test the capture\n"


# Models that only slow tests run, because the models behind the colon have all their operations.
REPEATED = {
    "GPT in linen": ("GPT with a tied table",),
    "GPT of scanned blocks": ("GPT with a tied table", "Llama"),
    "ResNet in linen": ("DCGAN, generator", "U-Net in equinox"),
    "ConvNeXt in linen": ("MobileNet in haiku", "global response norm"),
    "MLP-Mixer in linen": ("ViT in nnx",),
    "encoder and decoder in haiku": ("GPT with a tied table", "Perceiver in equinox"),
    "LSTM in linen": ("GRU in linen",),
    "optimised LSTM in linen": ("GRU in linen", "GRU in haiku"),
    "LSTM in nnx": ("GRU in linen",),
    "LSTM in haiku": ("GRU in haiku", "time first"),
    "LSTM in equinox": ("LSTM in equinox, in a Python loop", "GRU in linen"),
    "PINN by jacfwd of jacfwd": ("PINN by nested jvp", "PINN by hessian"),
    "Sobolev training": ("PINN by jvp", "directional derivatives"),
    "WGAN with a gradient penalty": ("score matching",),
    "PINN by grad of grad": ("score matching", "PINN by hessian"),
    "Hamiltonian network": ("score matching", "PINN by hessian"),
    "convolutional autoencoder": ("DCGAN, generator",),
    "VAE in linen": ("mixture density network",),
    "duelling heads": ("mixture density network",),
    "BYOL": ("double DQN",),
    "Siamese network": ("reward model on pairs", "DCGAN, discriminator"),
    "SimCLR": ("reward model on pairs", "two towers"),
    "SimCLR on concatenated views": ("reward model on concatenated pairs", "two towers"),
    "bidirectional network": ("GRU in haiku", "ViT in nnx"),
    "graph network on flattened graphs": ("graphs of unequal size", "ViT in nnx"),
    "graph convolution": ("graph attention", "MADE"),
    "character network in a Python loop": ("ALBERT", "GPT with a tied table"),
    "experts with top-2 and a capacity": ("a Switch layer over all tokens", "graph attention"),
    "FixMatch": ("ALBERT", "ViT in nnx"),
    "DeepONet": ("DeepONet on a grid", "GPT with a tied table"),
    "deep set": ("PINN by nested jvp", "graphs of unequal size"),
    "maxout and highway": ("experts by ragged products", "Mamba"),
    "word2vec": ("DLRM", "a soft prompt"),
    "matrix factorisation": ("Llama", "Swin"),
    "DQN": ("double DQN", "actor-critic"),
    "DDPG, actor": ("ViT in nnx",),
    "SIREN with Fourier features": ("diffusion",),
}
# Models of each kind whose loss is dressed in a separate test. Another slow test dresses all other models.
DRESSED = "multilayer perceptron", "GRU in linen", "actor-critic", "a soft prompt", "DCGAN, discriminator"


def cases(chosen, broken=BROKEN, repeated=REPEATED):
    found = []
    for name, case in ZOO.items():
        if chosen(case):
            marks = [pytest.mark.xfail(strict=True, reason=broken[name])] if name in broken else []
            marks += [pytest.mark.slow] if name in repeated else []
            found.append(pytest.param(case, id=name.replace(" ", "-"), marks=marks))
    return found


# The dressed models have their own test, so this test is slow for them.
@pytest.mark.parametrize("case", cases(lambda case: True, repeated={*REPEATED, *DRESSED}))
def test_statistics_are_those_of_brute_force(case):
    check(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", DRESSED)
def test_what_does_not_count_changes_nothing(name):
    check(ZOO[name], dressed)


@pytest.mark.slow
@pytest.mark.parametrize("case", cases(lambda case: case.name not in DRESSED))
def test_what_does_not_count_changes_nothing_in_other_models(case):
    check(case, dressed)


@pytest.mark.parametrize("case", cases(lambda case: True))
def test_strict_names_all_that_has_no_exact_rows(case):
    check_strict(case)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["a soft prompt", "actor-critic", "MobileNet in haiku"])
def test_three_devices_are_one(name):
    """Check that three devices' mean factors, each from a third of the batch, equal the whole batch's factors.

    The loss has a second pass, which must not count.
    """
    case = ZOO[name]
    loss, params, batch = case.build()
    layers = kfac.find_layers(dressed(loss), params, batch, has_aux=True)

    def local(params, batch):
        results = kfac.value_and_grad(dressed(loss), layers, has_aux=True)(params, batch)
        return jax.lax.pmean((results[0][0], *results[1:]), "devices")

    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",))
    over, whole = PartitionSpec("devices"), PartitionSpec()
    fn = jax.shard_map(local, mesh=mesh, in_specs=(whole, over), out_specs=whole)
    found = jax.jit(fn)(params, batch)
    compare(layers, *jax.tree.map(np.asarray, found), truth(loss, params, batch, N), case)


KNOWN = [case for case in ZOO.values() if not (case.name in BROKEN or case.hidden or case.alone)]


@pytest.mark.slow
@pytest.mark.parametrize("case", [pytest.param(x, id=x.name) for x in KNOWN])
def test_a_batch_over_a_mesh_of_three_devices(case):
    """Check statistics that are packed and scattered over devices as they are formed, if the example axis is known."""
    loss, params, batch = case.build()
    layers = kfac.find_layers(loss, params, batch)
    mesh = jax.make_mesh((3,), ("devices",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    everywhere, spread = (NamedSharding(mesh, spec) for spec in (PartitionSpec(), PartitionSpec("devices")))

    def place(x):  # arrays that all examples share are replicated
        return jax.device_put(x, spread if np.ndim(x) > 0 and len(x) == N else everywhere)

    measure = jax.jit(kfac.value_and_grad(loss, layers))
    value, grads, factors = measure(jax.device_put(params, everywhere), jax.tree.map(place, batch))
    print(case.name, {name: type(block).__name__ for name, block in factors.items()})
    found = jax.tree.map(np.asarray, (value, grads, factors.whole()))
    compare(layers, *found, truth(loss, params, batch, N), case)


def test_brute_force_agrees_with_hooks_by_hand():
    """Compare brute force with hooks for a convolution, and for a kernel that is used with and without its bias."""
    rng = np.random.default_rng(0)
    shapes = {"c": (2, 2, 2, 3), "cb": (3,), "w": (12, 12), "b": (12,)}
    params = {name: jnp.asarray(rng.normal(size=shape)) for name, shape in shapes.items()}
    x = jnp.asarray(rng.normal(size=(N, 3, 3, 2)))
    geometry = Geometry((2, 2), (1, 1), ((0, 0), (0, 0)), (1, 1), (1, 1))

    def hooked(hook, p, x):
        y = lax.conv_general_dilated(x, p["c"], (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")) + p["cb"]
        h = jnp.tanh(hook.layer("c", x, y, bias=True, conv=geometry)).reshape(len(x), -1)
        h = jnp.tanh(hook.layer("w", h, h @ p["w"] + p["b"], bias=True))
        return jnp.mean(jnp.sum(hook.layer("w", h, h @ p["w"]) ** 2, -1))

    def loss(p, x):
        return hooked(Hook(), p, x)

    layers = kfac.find_layers(loss, params, x)
    by_hand, found = by_hooks(hooked, params, (x,)), truth(loss, params, x, N)
    for layer in layers:
        a, g, matrix, positions = found.kronecker(layers, layer)
        key = layer.params[0]
        for mine, other in zip((a[0], g[0]), by_hand.kronecker(key), strict=True):
            assert relative_error(mine, other) < 1e-12
        assert relative_error(matrix[0], by_hand.gradient(key)) < 1e-12
        assert positions == sum(use.a.shape[1] for use in by_hand.uses[key])


def test_small_faults_are_seen():
    case = ZOO["multilayer perceptron"]
    loss, params, batch = case.build()
    expected = truth(loss, params, batch, N)
    layers = kfac.find_layers(loss, params, batch)
    value, grads, factors = jax.jit(kfac.value_and_grad(loss, layers))(params, batch)
    compare(layers, value, grads, factors, expected, case)
    leaves, structure = jax.tree.flatten(factors)
    for k in range(len(leaves)):
        wrong = [leaf * (1 + 1e-5 * (j == k)) for j, leaf in enumerate(leaves)]
        with pytest.raises(AssertionError, match=r"(in|out): A"):
            compare(layers, value, grads, jax.tree.unflatten(structure, wrong), expected, case)


def test_there_is_a_zoo():
    assert len(ZOO) >= 40
    assert {*BROKEN, *REPEATED, *sum(REPEATED.values(), ()), *DRESSED} <= set(ZOO)


@pytest.mark.slow
def test_the_table_in_the_documentation():
    """Check the table on the zoo's page.

    To update it: `UPDATE_ZOO_TABLE=1 pytest -m slow tests/capture/test_zoo.py -k doc`.
    """
    text, found = table(ZOO, BROKEN), PAGE.read_text()
    start = found.index("| model |", found.index(HEADING))
    if os.environ.get("UPDATE_ZOO_TABLE"):
        found = found[:start] + text
        PAGE.write_text(found)
    assert found[start:] == text
