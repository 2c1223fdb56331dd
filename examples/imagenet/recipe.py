"""Define named configurations, default options, augmentation on the device, and schedules."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

import kfac

AXIS = "devices"

# Osawa et al. 2019 (https://arxiv.org/abs/1811.12019). The columns are batch, learning rate, momentum, damping, decay
# power, the decay's first and last epoch, mixup's alpha, and epochs. The comments give published top-1 and steps. No
# configuration has been run on ImageNet with this code. If you run a configuration, add the result and the hardware.
OSAWA = {
    "bs4k": (4096, 8.18e-3, 0.997, 2.5e-4, 11.0, 1.0, 53.0, 0.4, 35.0),  # 75.9%, 10,948
    "bs8k": (8192, 1.25e-2, 0.993, 2.5e-4, 8.0, 1.0, 53.5, 0.4, 35.0),  # 76.4%, 5,478
    "bs16k": (16384, 2.5e-2, 0.985, 2.5e-4, 8.0, 1.0, 53.5, 0.4, 35.0),  # 76.6%, 2,737
    "bs32k": (32768, 3e-2, 0.97, 2e-4, 3.5, 1.5, 49.5, 0.6, 45.0),  # 76.9%, 1,760
    "bs64k": (65536, 4e-2, 0.95, 1.5e-4, 2.9, 2.0, 64.5, 0.6, 60.0),  # 76.3%, 1,173
    "bs128k": (131072, 7e-2, 0.93, 1e-4, 3.0, 1.0, 95.0, 1.0, 80.0),  # 75.0%, 782
}
CONFIGS: dict[str, dict[str, Any]] = {
    name: dict(
        optimizer="kfac", global_batch=batch, learning_rate=rate, momentum=momentum, damping=damping, decay_power=power,
        decay_begin=begin, decay_end=end, mixup_alpha=alpha, epochs=epochs, local_batch=32, schedule="polynomial",
        warmup_epochs=0.0, nesterov=False, momentum_coupling="ratio", lr_in_momentum=True,
        # The paper's code multiplies by 16. Its configuration files say 64.
        unitwise_damping_scale=16.0, factor_ema_decay=0.0, kl_clip=0.0, weight_decay=0.0, rescale=True,
        step_norm="none", trust_ratio=0.0,
        # The paper's text describes a plain ResNet-50 (--arch resnet50). Its code has this network.
        arch="resnet50d", init="he", norm_epsilon=2e-5, sync_batch_norm=False, crop="squashed", erasing="in-place",
        label_smoothing=0.0, divide_by_std=False,
    )
    for name, (batch, rate, momentum, damping, power, begin, end, alpha, epochs) in OSAWA.items()
}  # fmt: skip


# Default options for all runs, then by data set, then by optimizer. `config.resolve` combines them. K-FAC has the
# defaults of `kfac.kfac`. The options for the other optimizers were tuned on digits.
DEFAULTS: dict[str, Any] = dict(
    optimizer="kfac", schedule="cosine", decay_power=2.0, rescale=False, init="identity", norm_epsilon=1e-5,
    mixup_alpha=0.0, erasing="none", divide_by_std=True, crop="random-resized", nesterov=False,
)  # fmt: skip
_LARGE_IMAGES = dict(image_size=224, arch="resnet50", label_smoothing=0.1, sync_batch_norm=False)
DATA: dict[str, dict[str, Any]] = {
    "digits": dict(image_size=8, arch="digits", label_smoothing=0.0, global_batch=144, epochs=14.4,
                   sync_batch_norm=True),
    "folder": dict(global_batch=256, epochs=90.0, **_LARGE_IMAGES),
    "synthetic": dict(global_batch=64, epochs=1.0, **_LARGE_IMAGES),
}  # fmt: skip
OPTIMIZERS: dict[str, dict[str, Any]] = {
    "kfac": dict(learning_rate=0.1, momentum=0.9, weight_decay=0.0, nesterov=True, step_norm="spectral",
                 preconditioner="soap", momentum_coupling="none", statistics_period="auto"),
    "muon": dict(learning_rate=0.1, momentum=0.95, weight_decay=0.0, nesterov=True),
    "sgd": dict(learning_rate=1.0, momentum=0.9, nesterov=True, weight_decay=1e-4),
    "lars": dict(learning_rate=15.0, momentum=0.9, weight_decay=1e-4),
    "adamw": dict(learning_rate=0.01, momentum=0.9, weight_decay=1e-2),
}  # fmt: skip
# Defaults for K-FAC with --step-norm none and without --config. The curvature or a trust ratio sets the step length.
PUBLISHED: dict[str, Any] = dict(
    learning_rate=0.02, nesterov=False, damping=1e-2, factor_ema_decay=0.9, kl_clip=0.0, lr_in_momentum=False,
    unitwise_damping_scale=1.0, trust_ratio=0.0, preconditioner="cholesky", statistics_period=1,
    inverse_update_period=1,
)  # fmt: skip


class Run(NamedTuple):
    """Hold everything that no step changes."""

    config: Any
    dataset: Any
    model: Any  # with batch norm over the device axis, if --sync-batch-norm is set
    plain: Any  # the same model without the device axis
    num_devices: int
    local_batch: int
    micro_batches: int
    tx: Any = None

    @property
    def wide(self) -> Any:
        return jnp.promote_types(self.config.dtype, jnp.float32)

    @property
    def augmented(self) -> bool:
        return bool(self.config.mixup_alpha) or self.config.erasing != "none"


# Augmentation on the device, after the host's crop and flip. Random numbers depend on seed, step and the image's
# position in the global batch. So neither the number of devices nor a restart changes them.

# Random erasing (Zhong et al. 2017): probability, fraction of the image's area, and aspect ratio.
PROBABILITY, AREA, ASPECT = 0.5, (0.02, 0.25), (0.3, 1.0)
# Random number streams for each image.
MIXUP, ERASING = 0, 1


class Mixed(NamedTuple):
    """Hold images [n, h, w, c] and soft targets [n, classes]."""

    images: Any
    targets: Any


def keys(seed: int, step: jax.Array, indices: jax.Array) -> jax.Array:
    """Return a key for each image in the step, by its index in the global batch."""
    of_step = jax.random.fold_in(jax.random.key(seed), step)
    return jax.vmap(lambda index: jax.random.fold_in(of_step, index))(indices)


def own_indices(devices: int, local: int, micro_batches: int) -> jax.Array:
    """Return the positions of this device's images in the global batch. Call it inside `shard_map`."""
    part, place = jnp.arange(micro_batches)[:, None], jnp.arange(local)
    return ((part * devices + jax.lax.axis_index(AXIS)) * local + place).ravel()


def running_mixup(keys: jax.Array, step: jax.Array, alpha: float, new: Mixed, previous: Mixed) -> Mixed:
    """Mix each image x, and its target, with the image x' at the same position in the last mixed batch.

    The result is `l x + (1 - l) x'`. For each image, `l = max(b, 1 - b)` with `b ~ Beta(alpha, alpha)`.
    """
    b = jax.vmap(lambda key: jax.random.beta(jax.random.fold_in(key, MIXUP), alpha, alpha, dtype=jnp.float32))(keys)
    share = jnp.where(step == 0, 1, jnp.maximum(b, 1 - b))

    def mix(x: jax.Array, before: jax.Array) -> jax.Array:
        own = share.astype(x.dtype).reshape(-1, *(1,) * (x.ndim - 1))
        return own * x + (1 - own) * before

    return Mixed(mix(new.images, previous.images), mix(new.targets, previous.targets))


def erase(keys: jax.Array, images: jax.Array) -> jax.Array:
    """Set a random rectangle to zero, the mean of normalised pixels, in half of the images."""
    shape = (images.shape[1], images.shape[2])

    def kept(key: jax.Array) -> jax.Array:
        u = jax.random.uniform(jax.random.fold_in(key, ERASING), (6,), jnp.float32)
        area = shape[0] * shape[1] * (AREA[0] + (AREA[1] - AREA[0]) * u[1])
        aspect = ASPECT[0] + (ASPECT[1] - ASPECT[0]) * u[2]
        aspect = jnp.where(u[3] < 0.5, aspect, 1 / aspect)  # height over width, or the inverse
        h = jnp.clip(jnp.round(jnp.sqrt(area * aspect)), 1, shape[0])
        w = jnp.clip(jnp.round(jnp.sqrt(area / aspect)), 1, shape[1])
        top, left = jnp.floor(u[4] * (shape[0] - h + 1)), jnp.floor(u[5] * (shape[1] - w + 1))
        y, x = jnp.arange(shape[0])[:, None], jnp.arange(shape[1])[None, :]
        inside = (y >= top) & (y < top + h) & (x >= left) & (x < left + w)
        return ~(inside & (u[0] < PROBABILITY))

    return jnp.where(jax.vmap(kept)(keys)[..., None], images, 0)


def augment(
    keys: jax.Array, step: jax.Array, alpha: float, erasing: str, batch: Mixed, previous: Any
) -> tuple[Mixed, Any]:
    """Return the batch for the network, and the batch for the next step's mixup (empty without mixup).

    `batch` holds normalised images, and `keys` a key for each image. With `erasing` "in-place", the next mixup also
    uses the erased images, as in the code of Osawa et al.
    """
    if alpha:
        batch = running_mixup(keys, step, alpha, batch, previous)
    seen = batch if erasing == "none" else batch._replace(images=erase(keys, batch.images))
    carried = seen if erasing == "in-place" else batch
    return seen, carried if alpha else ()


def normalise(run: Run, images: jax.Array) -> jax.Array:
    """Normalise uint8 images for the network. Return other images unchanged."""
    if images.dtype != jnp.uint8:  # augmentation has normalised them
        return images
    mean = jnp.array(run.dataset.mean, run.wide)
    std = jnp.array(run.dataset.std if run.config.divide_by_std else 1, run.wide)
    return (images.astype(run.wide) / 255 - mean) / std


def augmented(run: Run, step: jax.Array, batch: Any, mixed: Any) -> tuple[Mixed, Any]:
    """Return the augmented batch for the network, and the batch for the next step's mixup."""
    images, labels = batch
    seen, config = Mixed(images, jax.nn.one_hot(labels, run.dataset.num_classes, dtype=run.wide)), run.config
    if not run.augmented:  # images stay uint8 until a micro-batch is normalised
        return seen, mixed
    seen = seen._replace(images=normalise(run, images).astype(config.dtype))
    own = keys(config.seed, step, own_indices(run.num_devices, run.local_batch, run.micro_batches))
    return augment(own, step, config.mixup_alpha, config.erasing, seen, mixed)


# Schedules, in optimizer steps.


def learning_rate(config: Any, steps_per_epoch: float, total_steps: int) -> optax.Schedule:
    """Return the schedule: a linear warm-up, then the chosen decay."""
    peak = config.learning_rate
    warmup = min(round(config.warmup_epochs * steps_per_epoch), total_steps - 1)
    rest = max(total_steps - warmup, 1)
    # The polynomial begins and ends at fractional epochs, which need not be whole steps.
    begin = warmup if config.decay_begin is None else config.decay_begin * steps_per_epoch
    end = total_steps if config.decay_end is None else config.decay_end * steps_per_epoch
    decay = {
        "cosine": optax.cosine_decay_schedule(peak, rest),
        "linear": optax.linear_schedule(peak, 0.0, rest),
        "polynomial": optax.polynomial_schedule(
            peak, 0.0, config.decay_power, max(end - begin, 1), max(begin - warmup, 0)
        ),
        "constant": optax.constant_schedule(peak),
    }[config.schedule]
    # Start at peak / warmup, because a step with rate zero would be wasted.
    rise = optax.linear_schedule(peak / max(warmup, 1), peak, max(warmup - 1, 1))
    return optax.join_schedules([rise, decay], [warmup]) if warmup else decay


def momentum(config: Any, rate: optax.Schedule) -> Any:
    """Return the momentum, or its schedule if it falls with the learning rate."""
    if config.momentum_coupling == "none":
        return config.momentum
    peak = config.learning_rate if config.momentum_coupling == "proportional" else None
    return kfac.schedules.coupled_momentum(config.momentum, rate, reference_rate=peak)
