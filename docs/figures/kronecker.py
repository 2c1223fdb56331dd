"""Draws docs/figures/kronecker.png: the exact Fisher block of a layer, and its Kronecker product, real numbers.

The network of docs/operators.md, after 30 steps; `python docs/figures/kronecker.py` runs the code of that page.
"""

import pathlib
import re

import jax
import jax.numpy as jnp
import matplotlib.pyplot as plt

import kfac

HERE = pathlib.Path(__file__).resolve().parent
names: dict = {}
blocks = re.findall(r"^```python\n(.*?)^```$", (HERE.parent / "operators.md").read_text(), re.MULTILINE | re.DOTALL)
for code in blocks[4:]:
    exec(code, names)
params, layers, loss_fn, batch = names["after"][30], names["layers"], names["loss_fn"], names["batch"]

block = names["exact_blocks"](params)["second"]
factors = kfac.value_and_grad(loss_fn, layers, fisher="expected")(params, batch, fisher_key=jax.random.key(0))[2][
    "second"
]
product = jnp.kron(factors.A, factors.G)
cosine = jnp.sum(block * product) / (jnp.linalg.norm(block) * jnp.linalg.norm(product))

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
    inset.imshow(factor, vmin=-float(jnp.abs(factor).max()), vmax=float(jnp.abs(factor).max()), **style)
    inset.set_title(f"{title}\n{factor.shape[0]} x {factor.shape[0]}")
    inset.set_xticks([]), inset.set_yticks([])
axes[0, 1].axis("off")
axes[1, 0].imshow(product, vmin=-limit, vmax=limit, **style)
axes[1, 0].set_title(f"Kronecker product,\ncosine {float(cosine):.2f}")
axes[1, 1].imshow(block - product, vmin=-limit, vmax=limit, **style)
axes[1, 1].set_title("difference\n(same colours)")
for axis in (axes[0, 0], *axes[1]):
    axis.set_xticks([]), axis.set_yticks([])
figure.savefig(HERE / "kronecker.png", dpi=120)
