"""Test user-defined preconditioners: a single class works on one device, on several devices, and in the plan.

One test uses an internal of `_layers`: its table of block kinds.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

import kfac
from problem import assert_close, batch, initial, layers, loss_fn, measured, plain_kfac, state_of


@dataclasses.dataclass(frozen=True)
class Diagonal(kfac.BlockPreconditioner):
    """Divide by a power of the diagonal of `A (x) G` plus damping."""

    power: float = 1.0

    def init(self, factors):
        shape = len(factors.A), factors.G.shape[-1], factors.A.shape[-1]
        return jnp.ones(shape, self.state_dtype(factors.A.dtype))

    def refresh(self, state, factors, damping):
        a, g = (jnp.diagonal(x, axis1=1, axis2=2) for x in (factors.A, factors.G))
        new = (g[:, :, None] * a[:, None, :] + damping[:, None, None]) ** -self.power
        return new.astype(state.dtype), jnp.max(new, axis=(1, 2)) / jnp.min(new, axis=(1, 2))

    def apply(self, state, matrices, damping):
        return state * matrices


def steps(tx, mesh=None, count=3):
    params = initial()
    state = jax.jit(tx.init)(params)

    @jax.jit
    def step(params, state, batch):
        _, grads, factors = kfac.value_and_grad(loss_fn, layers())(params, batch)
        state = kfac.observe(state, factors)
        updates, state = tx.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    for t in range(count):
        examples = jax.tree.map(lambda x: x[:15], batch(t))
        if mesh is not None:
            examples = jax.device_put(examples, NamedSharding(mesh, PartitionSpec("devices")))
        params, state = jax.block_until_ready(step(params, state, examples))
    return params, state


def test_it_does_what_it_says():
    grads, factors = measured(0)
    tx = kfac.scale_by_kfac(layers(), preconditioner=Diagonal(), damping=0.25)
    updates, state = jax.jit(lambda g, f: tx.update(g, kfac.observe(tx.init(initial()), f)))(grads, factors)
    for layer in layers():
        if layer.kind == "dense":
            block = jax.tree.map(lambda x: np.diagonal(np.asarray(x)), factors[layer.name])
            found, gradient = (
                np.asarray(layer.to_matrix([dict(zip(layers().paths, jax.tree.leaves(t), strict=True))[p] for p in
                                            layer.params])[0]) for t in (updates, grads)
            )  # fmt: skip
            np.testing.assert_allclose(found, gradient / (np.outer(block.G, block.A) + 0.25), rtol=1e-5)
    assert kfac.diagnostics(state)["failed_inversions"] == 0


@pytest.mark.slow
def test_on_three_devices_it_is_the_same():
    options = {"preconditioner": Diagonal(power=0.5), "damping": 0.1, "kl_clip": 1e-2}
    expected, one = steps(plain_kfac(0.1, layers(), **options))
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",), axis_types=(AxisType.Auto,))
    distribution = kfac.Distribution(mesh=mesh)
    found, state = steps(plain_kfac(0.1, layers(), distribution=distribution, **options), mesh)
    assert_close(found, expected, rtol=1e-4)
    assert_close(state_of(jax.jit(kfac.state.gather_state)(state)).blocks, state_of(one).blocks, rtol=1e-3)


def test_one_that_fails_keeps_the_last():
    """Check that a failed refresh is retried with more damping, and that non-finite results are never stored."""
    grads, factors = measured(0)
    negative = {n: b if layers()[n].kind != "dense" else dataclasses.replace(b, A=-b.A) for n, b in factors.items()}
    tx = kfac.scale_by_kfac(layers(), preconditioner=Diagonal(power=0.5), damping=1e-6)
    _, state = jax.jit(lambda g, f: tx.update(g, kfac.observe(tx.init(initial()), f)))(grads, kfac.Factors(negative))
    assert kfac.diagnostics(state)["failed_inversions"] == 2
    np.testing.assert_array_equal(state.blocks["kronecker_4x4"].preconditioner, 1)


@pytest.mark.parametrize("transform", [kfac.scale_by_kfac, kfac.kfac])
@pytest.mark.parametrize("options", [{"preconditioner": kfac.Cholesky}, {"distribution": kfac.Distribution}])
def test_a_class_without_parentheses_is_a_type_error(transform, options):
    (name,), (value,) = options, options.values()
    first = (0.1,) if transform is kfac.kfac else ()
    with pytest.raises(TypeError, match=rf"^{name} must be .* but is the class {value.__name__}: call it"):
        transform(*first, layers(), damping=1e-3, **options)


@pytest.mark.parametrize("name", ["relative_damping", "flops", "takes_moments", "takes_gradients"])
def test_init_subclass_refuses_a_former_class_attribute(name):
    with pytest.raises(TypeError, match=rf"^Own\.{name} is now \w+$"):
        type("Own", (kfac.BlockPreconditioner,), {name: 1})


@pytest.mark.parametrize("kind", [kfac.Cholesky, kfac.Eigh, kfac.EKFAC, kfac.SOAP])
def test_with_option_hints_names_the_present_option(kind):
    with pytest.raises(TypeError, match=rf"^{kind.__name__}\(\) has no option relative=: use scale_damping=$"):
        kind(relative=True)


def test_the_estimate_counts_what_it_keeps():
    full, half = (
        kfac.planning.estimate(layers(), devices=1, preconditioner=Diagonal(p)).memory["state"]
        for p in ("float32", "bfloat16")
    )
    unitwise = 4 * 2 * 2 + 4
    assert full - half == 2 * (2 * 16 + unitwise)


@dataclasses.dataclass(frozen=True)
class Constant(Diagonal):
    """Return constant condition numbers, which are the same on all devices."""

    def refresh(self, state, factors, damping):
        """Refresh as `Diagonal` does, with a condition number of 1."""
        return super().refresh(state, factors, damping)[0], jnp.ones(len(factors.A))


@pytest.mark.slow
def test_what_it_returns_need_not_differ_between_devices():
    mesh = Mesh(np.array(jax.devices()[:3]), ("devices",), axis_types=(AxisType.Auto,))
    tx, over = (
        plain_kfac(0.01, layers(), damping=0.1, preconditioner=Constant(), distribution=given)
        for given in (kfac.Distribution(), kfac.Distribution(mesh=mesh))
    )
    assert_close(steps(over, mesh)[0], steps(tx)[0], 1e-5)


@dataclasses.dataclass(frozen=True)
class Counting(Diagonal):
    """Store an additional integer, which messages between devices would round."""

    def init(self, factors):
        return super().init(factors), jnp.zeros(len(factors.A), jnp.int32)


def test_integers_are_refused():
    with pytest.raises(ValueError, match=r"Counting.*keeps an array of int32: keep floating arrays only"):
        kfac.scale_by_kfac(layers(), preconditioner=Counting()).init(initial())
