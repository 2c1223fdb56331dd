"""Draw docs/figures/kronecker.png, a layer's exact block and its Kronecker product, and print relative errors.

`python docs/figures/kronecker.py` trains a small network for 100 steps. The picture has the block after 30. The errors
are relative to a layer's exact block. "Nearest" is the best possible product (Van Loan and Pitsianis 1993):

                    nearest    EKFAC    K-FAC one draw empirical
    step   0  first      0.25     0.30     0.35     0.38     0.62
    step   0  output     0.15     0.15     0.15     0.17     0.42
    step   0  second     0.15     0.16     0.17     0.19     0.49
    step 100  first      0.66     0.79     0.84     1.12     0.99
    step 100  output     0.45     0.54     0.57     0.69     0.74
    step 100  second     0.51     0.63     0.65     1.21     0.97
"""

import pathlib

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt
from jax.flatten_util import ravel_pytree

import kfac


def network(params, x):
    for layer in (params["first"], params["second"]):
        x = jnp.tanh(x @ layer["kernel"] + layer["bias"])
    return x @ params["output"]["kernel"] + params["output"]["bias"]


def loss_fn(params, batch):
    x, labels = batch
    logits = kfac.mark_output(network(params, x), "categorical")
    return -jnp.mean(jax.nn.log_softmax(logits)[jnp.arange(len(labels)), labels])


def initial(key, *widths):
    keys = jax.random.split(key, len(widths) - 1)
    names = "first", "second", "output"
    shapes = zip(names, keys, widths[:-1], widths[1:], strict=True)
    return {
        name: {
            "kernel": jax.random.normal(key, (d_in, d_out)) / d_in**0.5,
            "bias": jnp.zeros(d_out),
        }
        for name, key, d_in, d_out in shapes
    }


start = initial(jax.random.key(0), 8, 10, 10, 4)
x = jax.random.normal(jax.random.key(1), (256, 8))
teacher = initial(jax.random.key(2), 8, 10, 10, 4)
labels = jax.random.categorical(jax.random.key(3), 3 * network(teacher, x))
batch = (x, labels)

layers = kfac.find_layers(loss_fn, start, batch)
tx = kfac.natural_gradient(
    0.1,
    layers,
    momentum=0.9,
    lr_in_momentum=False,
    damping=1e-2,
    factor_ema_decay=0.95,
    unitwise_damping_scale=1.0,
)


@jax.jit
def step(params, opt_state, batch, key):
    measure = kfac.value_and_grad(loss_fn, layers, fisher="sampled")
    loss, grads, factors = measure(params, batch, fisher_key=key)
    opt_state = kfac.observe(opt_state, factors)
    updates, opt_state = tx.update(grads, opt_state, params)
    return jax.tree.map(jnp.add, params, updates), opt_state, loss


def exact_blocks(params):
    """Return each layer's block, with the kernel's entries in row-major order before the bias."""
    whole = kfac.curvature.gauss_newton(loss_fn, params, batch).to_dense()
    _, unravel = ravel_pytree(params)
    places = unravel(jnp.arange(len(whole), dtype=whole.dtype))
    rows = {
        name: jnp.append(own["kernel"], own["bias"]).astype(int)
        for name, own in places.items()
    }
    return {name: whole[jnp.ix_(row, row)] for name, row in rows.items()}


def nearest_product(block, layer):
    a, g = layer.d_in, layer.d_out
    rearranged = block.reshape(a, g, a, g).swapaxes(1, 2).reshape(a * a, g * g)
    left, values, right = jnp.linalg.svd(rearranged, full_matrices=False)
    return values[0] * jnp.kron(left[:, 0].reshape(a, a), right[0].reshape(g, g))


def sampled(params, keys, **basis):
    measure = kfac.value_and_grad(loss_fn, layers, fisher="sampled")
    factors = jax.lax.map(
        lambda key: measure(params, batch, fisher_key=key, **basis)[2], keys
    )
    return jax.tree.map(lambda leaf: leaf.mean(axis=0), factors)


@jax.jit
def compare(params):
    _, _, empirical = kfac.value_and_grad(loss_fn, layers)(params, batch)
    many = sampled(params, jax.random.split(jax.random.key(0), 500))
    one = sampled(params, jax.random.split(jax.random.key(1), 1))
    basis = kfac.curvature.eigenbasis(many, layers)
    corrected = sampled(params, jax.random.split(jax.random.key(0), 500), basis=basis)
    ekfac = kfac.curvature.block_operator(layers, corrected, basis=basis)
    rows = {}
    for name, block in exact_blocks(params).items():
        products = [
            jnp.kron(factors[name].A, factors[name].G)
            for factors in (many, one, empirical)
        ]
        matrices = [
            nearest_product(block, layers[name]),
            ekfac.block(name).to_dense()[0],
            *products,
        ]
        errors = [
            jnp.linalg.norm(block - matrix) / jnp.linalg.norm(block)
            for matrix in matrices
        ]
        rows[name] = errors
    return rows


def draw(params, path):
    block = exact_blocks(params)["second"]
    measure = kfac.value_and_grad(loss_fn, layers, fisher="expected")
    factors = measure(params, batch, fisher_key=jax.random.key(0))[2]["second"]
    product = jnp.kron(factors.A, factors.G)
    norms = jnp.linalg.norm(block) * jnp.linalg.norm(product)
    cosine = jnp.sum(block * product) / norms

    # Two rows and large titles, so that they can be read on a phone.
    plt.rcParams["axes.titlesize"] = 12
    figure, axes = plt.subplots(2, 2, figsize=(5, 5.6), layout="constrained")
    limit = float(jnp.quantile(jnp.abs(block), 0.995))
    style = {"cmap": "RdBu_r", "interpolation": "nearest"}
    size = f"{block.shape[0]} x {block.shape[0]}"
    axes[0, 0].imshow(block, vmin=-limit, vmax=limit, **style)
    axes[0, 0].set_title(f"exact block of a\nlayer, {size}")
    for factor, title in ((factors.A, "A"), (factors.G, "G")):
        inset = axes[0, 1].inset_axes([0.0 if title == "A" else 0.56, 0.28, 0.44, 0.44])
        inset.imshow(
            factor,
            vmin=-float(jnp.abs(factor).max()),
            vmax=float(jnp.abs(factor).max()),
            **style,
        )
        inset.set_title(f"{title}\n{factor.shape[0]} x {factor.shape[0]}")
        inset.set_xticks([]), inset.set_yticks([])
    axes[0, 1].axis("off")
    axes[1, 0].imshow(product, vmin=-limit, vmax=limit, **style)
    axes[1, 0].set_title(f"Kronecker product,\ncosine {float(cosine):.2f}")
    axes[1, 1].imshow(block - product, vmin=-limit, vmax=limit, **style)
    axes[1, 1].set_title("difference\n(same colours)")
    for axis in (axes[0, 0], *axes[1]):
        axis.set_xticks([]), axis.set_yticks([])
    figure.savefig(path, dpi=120)


def main(path):
    params, opt_state = start, tx.init(start)
    after = [params]
    for t in range(100):
        params, opt_state, _ = step(params, opt_state, batch, jax.random.key(t))
        after.append(params)

    print("                nearest    EKFAC    K-FAC one draw empirical")
    for t in (0, 100):
        for name, row in compare(after[t]).items():
            values = (f"{float(value):8.2f}" for value in row)
            print(f"step {t:3d}  {name:6}", *values)
    draw(after[30], path)


if __name__ == "__main__":
    main(pathlib.Path(__file__).resolve().parent / "kronecker.png")
