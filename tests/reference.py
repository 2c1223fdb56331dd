"""Implement K-FAC in NumPy float64 from the mathematics alone, without code from the package.

`network` is a small network with back-propagation written by hand. `Reference` is the optimizer.
"""

import dataclasses

import numpy as np

# Each block's kind and leaves in `network`.
BLOCKS = {
    "conv": ("kronecker", ("conv/kernel",)),
    "norm": ("unitwise", ("norm/scale", "norm/shift")),
    "table": ("unitwise", ("table",)),
    "first": ("kronecker", ("first/kernel", "first/bias")),
    "second": ("kronecker", ("second/kernel", "second/bias")),
}
SKIPPED = "temperature"
CLASSES = 3


def initial_parameters(seed=0):
    rng = np.random.default_rng(seed)
    return {
        "conv/kernel": rng.normal(size=(2, 2, 2, CLASSES)) / 2,
        "norm/scale": 1 + rng.normal(size=CLASSES) / 4,
        "norm/shift": rng.normal(size=CLASSES) / 4,
        "table": rng.normal(size=(3, 3, CLASSES)) / 4,
        "first/kernel": rng.normal(size=(CLASSES, CLASSES)),
        "first/bias": rng.normal(size=CLASSES) / 4,
        "second/kernel": rng.normal(size=(CLASSES, CLASSES)),
        "second/bias": rng.normal(size=CLASSES) / 4,
        "temperature": np.array(1.25),
    }


def batch(step, n=12):
    rng = np.random.default_rng(1000 + step)
    images = rng.normal(size=(n, 4, 4, 2))
    labels = (images[:, :2].sum((1, 2, 3)) > 0).astype(int) + (images[:, 2:].sum((1, 2, 3)) > 0)
    return images, labels


def network(params, images, labels):
    """Return the mean loss, the gradients by leaf, and the statistics by block.

    The network has a convolution without bias, batch norm, tanh, an added table, a mean over positions, two dense
    layers, logits times a temperature, and softmax cross-entropy.
    """
    n = len(images)
    patches = np.stack([images[:, y : y + 3, x : x + 3] for y in range(2) for x in range(2)], axis=3)
    patches = patches.reshape(n, 9, 8)
    kernel = params["conv/kernel"].reshape(8, CLASSES)
    conv = patches @ kernel
    mean, var = conv.mean((0, 1)), conv.var((0, 1))
    std = np.sqrt(var + 1e-5)
    normal = (conv - mean) / std
    table = params["table"].reshape(9, CLASSES)
    hidden = np.tanh(normal * params["norm/scale"] + params["norm/shift"])
    pooled = (hidden + table).mean(1)
    first = np.tanh(pooled @ params["first/kernel"] + params["first/bias"])
    second = first @ params["second/kernel"] + params["second/bias"]
    logits = params["temperature"] * second
    shifted = np.exp(logits - logits.max(1, keepdims=True))
    probabilities = shifted / shifted.sum(1, keepdims=True)
    loss = -np.mean(np.log(probabilities[np.arange(n), labels]))

    d_logits = (probabilities - np.eye(CLASSES)[labels]) / n
    d_second = params["temperature"] * d_logits
    d_first = d_second @ params["second/kernel"].T * (1 - first**2)
    d_pooled = d_first @ params["first/kernel"].T
    d_hidden = np.repeat(d_pooled[:, None] / 9, 9, axis=1)
    d_affine = d_hidden * (1 - hidden**2)
    d_normal = d_affine * params["norm/scale"]
    d_conv = d_normal - d_normal.mean((0, 1)) - normal * (d_normal * normal).mean((0, 1))
    d_conv /= std

    grads = {
        "conv/kernel": np.einsum("nsi,nso->io", patches, d_conv).reshape(2, 2, 2, CLASSES),
        "norm/scale": (d_affine * normal).sum((0, 1)),
        "norm/shift": d_affine.sum((0, 1)),
        "table": d_hidden.sum(0).reshape(3, 3, CLASSES),
        "first/kernel": pooled.T @ d_first,
        "first/bias": d_first.sum(0),
        "second/kernel": first.T @ d_second,
        "second/bias": d_second.sum(0),
        "temperature": np.sum(d_logits * second),
    }

    def kronecker(a, g):
        s = a.shape[1]
        return np.einsum("nsi,nsj->ij", a, a) / n, np.einsum("nso,nsp->op", g, g) * n / s

    def with_one(a):
        return np.concatenate([a, np.ones((n, 1))], 1)[:, None]

    per_example = n * np.stack([(d_affine * normal).sum(1), d_affine.sum(1)], -1)  # [n, channel, 2]
    per_element = n * d_hidden.reshape(n, -1, 1)
    statistics = {
        "conv": kronecker(patches, d_conv),
        "norm": np.einsum("ncp,ncq->cpq", per_example, per_example) / n,
        "table": np.einsum("ncp,ncq->cpq", per_element, per_element) / n,
        "first": kronecker(with_one(pooled), d_first[:, None]),
        "second": kronecker(with_one(first), d_second[:, None]),
    }
    return loss, grads, statistics


def to_matrix(block, leaves):
    """Return a block's matrix.

    It is `[out, in]` for a Kronecker block, with the bias last, and `[channels, parameters]` for a unit-wise block.
    """
    kind, paths = BLOCKS[block]
    if kind == "unitwise":
        return np.stack([leaves[path].ravel() for path in paths], -1)
    kernel = leaves[paths[0]]
    columns = [kernel.reshape(-1, kernel.shape[-1]).T]
    return np.concatenate(columns + [leaves[path][:, None] for path in paths[1:]], 1)


def from_matrix(block, matrix, shapes):
    kind, paths = BLOCKS[block]
    if kind == "unitwise":
        return {path: matrix[:, k].reshape(shapes[path]) for k, path in enumerate(paths)}
    kernel = matrix[:, :-1] if len(paths) == 2 else matrix
    leaves = {paths[0]: kernel.T.reshape(shapes[paths[0]])}
    return leaves | {path: matrix[:, -1] for path in paths[1:]}


@dataclasses.dataclass
class Reference:
    """The reference optimizer. Every scalar option is a function of the step."""

    learning_rate: callable
    damping: callable
    factor_ema_decay: callable
    momentum: callable = None
    nesterov: bool = False
    weight_decay: callable = None
    kl_clip: callable = None
    trust_ratio: callable = None
    unitwise_damping_scale: callable = lambda _: 1.0
    inverse_update_period: int = 1
    interval_warmup_steps: int = 10

    def __post_init__(self):
        self.count = 0
        self.ages = dict.fromkeys(BLOCKS, 0)
        self.sums = {}  # not bias-corrected
        self.weight = dict.fromkeys(BLOCKS, 0.0)
        self.inverses = {}
        self.dampings = None  # in the last step
        self.measured = -1  # the last step with statistics
        self.refreshed = -1  # the last step with new inverses
        self.trace = None

    @property
    def factors(self):
        return {
            name: tuple(x / self.weight[name] for x in moment)
            if isinstance(moment, tuple)
            else moment / self.weight[name]
            for name, moment in self.sums.items()
        }

    def accumulate(self, statistics):
        decay = self.factor_ema_decay(self.count) ** (1 if self.measured < 0 else self.count - self.measured)
        self.measured = self.count

        def average(old, new):
            return decay * old + (1 - decay) * new

        for name, new in statistics.items():
            old = self.sums.get(name, (0, 0) if isinstance(new, tuple) else 0)
            if isinstance(new, tuple):
                self.sums[name] = average(old[0], new[0]), average(old[1], new[1])
            else:
                self.sums[name] = average(old, new)
            self.weight[name] = average(self.weight[name], 1)

    def refresh(self, name):
        damping, on_units = self.dampings
        factor = self.factors[name]
        if isinstance(factor, tuple):
            a, g = factor
            pi = np.sqrt(np.trace(a) / len(a)) / np.sqrt(np.trace(g) / len(g))
            self.inverses[name] = (
                np.linalg.inv(a + pi * np.sqrt(damping) * np.eye(len(a))),
                np.linalg.inv(g + np.sqrt(damping) / pi * np.eye(len(g))),
            )
        else:
            self.inverses[name] = np.linalg.inv(factor + on_units * np.eye(factor.shape[-1]))

    def step(self, params, grads, statistics=None):
        """Return the new parameters."""
        t = self.count
        dampings = (self.damping(t), self.damping(t) * self.unitwise_damping_scale(t))
        self.dampings = dampings
        every, warmup = self.inverse_update_period, self.interval_warmup_steps
        if warmup:
            every = min(every, 1 if t < warmup else 2 ** (1 + int(np.log2(t // warmup))))
        turn = t % every == 0 or t % self.inverse_update_period == 0
        turn |= self.refreshed < 0 or t - self.refreshed >= self.inverse_update_period
        refreshes = statistics is not None and turn
        if statistics is not None:
            self.accumulate(statistics)
        if refreshes:
            self.refreshed = t
        for name in self.factors:
            if refreshes:
                self.refresh(name)
                self.ages[name] = 0
            elif name in self.inverses:
                self.ages[name] += 1

        shapes = {path: grad.shape for path, grad in grads.items()}
        updates = dict(grads)
        for name, preconditioner in self.inverses.items():
            matrix = to_matrix(name, grads)
            if isinstance(preconditioner, tuple):
                matrix = preconditioner[1] @ matrix @ preconditioner[0]
            else:
                matrix = np.einsum("cpq,cq->cp", preconditioner, matrix)
            updates |= from_matrix(name, matrix, shapes)

        covered = [path for _, paths in BLOCKS.values() for path in paths]
        if self.kl_clip is not None:
            product = sum(np.sum(updates[path] * grads[path]) for path in covered)
            scale = min(1.0, np.sqrt(self.kl_clip(t) / (self.learning_rate(t) ** 2 * product)))
            updates = {path: update * scale if path in covered else update for path, update in updates.items()}
            self.scale = scale
        if self.momentum is not None:
            decay = self.momentum(t)
            old = self.trace or {path: np.zeros_like(update) for path, update in updates.items()}
            self.trace = {path: update + decay * old[path] for path, update in updates.items()}
            if self.nesterov:
                updates = {path: update + decay * self.trace[path] for path, update in updates.items()}
            else:
                updates = self.trace
        if self.trust_ratio is not None:
            updates = dict(updates)
            for path in (paths[0] for kind, paths in BLOCKS.values() if kind == "kronecker"):
                length = np.linalg.norm(params[path])
                cosine = np.sum(params[path] * grads[path]) / (length * np.linalg.norm(grads[path]))
                if abs(cosine) < 0.1 / np.sqrt(params[path].size):
                    along = params[path] / length
                    updates[path] = updates[path] - np.sum(updates[path] * along) * along
                ratio = np.linalg.norm(params[path]) / np.linalg.norm(updates[path])
                updates[path] = self.trust_ratio(t) * ratio * updates[path]
        if self.weight_decay is not None:
            updates = {path: update + self.weight_decay(t) * params[path] for path, update in updates.items()}
        self.count += 1
        return {path: params[path] - self.learning_rate(t) * updates[path] for path in params}
