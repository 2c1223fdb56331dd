"""Augmentation of a batch on the device: running mixup and random erasing, after the host's crop and flip.

Random numbers are a function of seed, step and the image's place in the global batch, so that neither the number of
devices nor a stop changes them.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

# Random erasing (Zhong et al. 2017): how often, and of which shapes, as shares of the image.
PROBABILITY = 0.5
AREA = (0.02, 0.25)
ASPECT = (0.3, 1.0)

# Streams of random numbers of an image.
MIXUP, ERASING = 0, 1


class Mixed(NamedTuple):
    """A batch as running mixup left it: images [n, h, w, c], targets [n, classes]."""

    images: Any
    targets: Any


def keys(seed: int, step: jax.Array, indices: jax.Array) -> jax.Array:
    """One key for each image of the step, by its index in the global batch."""
    of_step = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda index: jax.random.fold_in(of_step, index))(indices)


def running_mixup(keys: jax.Array, step: jax.Array, alpha: float, new: Mixed, previous: Mixed) -> Mixed:
    """`l x + (1 - l) x'` with the previous mixed batch x', `l = max(b, 1 - b)`, `b ~ Beta(alpha, alpha)`, per image.

    There is nothing before the first batch, which goes in as it is.
    """
    b = jax.vmap(lambda key: jax.random.beta(jax.random.fold_in(key, MIXUP), alpha, alpha, dtype=jnp.float32))(keys)
    share = jnp.where(step == 0, 1, jnp.maximum(b, 1 - b))

    def mix(x: jax.Array, before: jax.Array) -> jax.Array:
        own = share.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
        return own * x + (1 - own) * before

    return Mixed(mix(new.images, previous.images), mix(new.targets, previous.targets))


def erase(keys: jax.Array, images: jax.Array) -> jax.Array:
    """Sets a random rectangle of half of the images to zero, the mean of normalised pixels."""
    height, width = images.shape[1:3]

    def kept(key: jax.Array) -> jax.Array:
        u = jax.random.uniform(jax.random.fold_in(key, ERASING), (6,), jnp.float32)
        area = height * width * (AREA[0] + (AREA[1] - AREA[0]) * u[1])
        aspect = ASPECT[0] + (ASPECT[1] - ASPECT[0]) * u[2]
        aspect = jnp.where(u[3] < 0.5, aspect, 1 / aspect)  # height over width, either way up
        h = jnp.clip(jnp.round(jnp.sqrt(area * aspect)), 1, height)
        w = jnp.clip(jnp.round(jnp.sqrt(area / aspect)), 1, width)
        top, left = jnp.floor(u[4] * (height - h + 1)), jnp.floor(u[5] * (width - w + 1))
        y, x = jnp.arange(height)[:, None], jnp.arange(width)[None, :]
        inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
        return ~(inside & (u[0] < PROBABILITY))

    return jnp.where(jax.vmap(kept)(keys)[..., None], images, 0)


def augment(
    keys: jax.Array, step: jax.Array, alpha: float, erasing: str, batch: Mixed, previous: Any
) -> tuple[Mixed, Any]:
    """What the network sees, and what the next batch is mixed with.

    Args:
      keys: one for each image.
      step: of the run, from 0.
      alpha: of mixup; 0 for none, and then nothing is carried.
      erasing: `"none"`, `"own"`: of what the network sees, `"in-place"`: also of what is carried on, as in the code of
        Osawa et al. 2019.
      batch: normalised images and their targets.
      previous: what the last call carried.
    """
    if alpha:
        batch = running_mixup(keys, step, alpha, batch, previous)
    seen = batch if erasing == "none" else batch._replace(images=erase(keys, batch.images))
    carried = seen if erasing == "in-place" else batch
    return seen, carried if alpha else ()
