"""Reinforcement and semi-supervised learning: second passes without a gradient."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax

from zoo.generative import layers, mlp
from zoo.specimens import cross_entropy, data, specimen, tokens, tree

D, ACTIONS = 5, 3
TARGET = ("target/b1", "target/b2", "target/w1", "target/w2")


def transitions():
    return {
        "s": data(0, D), "a": tokens(0, below=ACTIONS), "r": data(1), "next": data(2, D), "action": data(3, 2),
    }  # fmt: skip


def chosen(q, a):
    return jnp.take_along_axis(q, a[:, None], -1)[:, 0]


@specimen("DQN", "the target from the same network under `lax.stop_gradient`")
def dqn():
    def loss(p, b):
        target = b["r"] + 0.9 * jnp.max(lax.stop_gradient(mlp(p, b["next"])), -1)
        return jnp.mean((chosen(mlp(p, b["s"]), b["a"]) - target) ** 2)

    return loss, tree(**layers(D, 8, ACTIONS)), transitions()


@specimen("double DQN", "target parameters beside the online ones, best action by the online network", unreached=TARGET)
def double_dqn():
    def loss(p, b):
        best = jnp.argmax(mlp(p["online"], b["next"]), -1)
        value = chosen(mlp(lax.stop_gradient(p["target"]), b["next"]), best)
        return jnp.mean((chosen(mlp(p["online"], b["s"]), b["a"]) - (b["r"] + 0.9 * value)) ** 2)

    return loss, tree(online=layers(D, 8, ACTIONS), target=layers(D, 8, ACTIONS)), transitions()


@specimen("duelling heads", "a value and advantages less their mean, of one trunk")
def duelling():
    def loss(p, b):
        h = jax.nn.relu(b["s"] @ p["trunk"] + p["b"])
        advantage = h @ p["advantage"]
        q = h @ p["value"] + advantage - jnp.mean(advantage, -1, keepdims=True)
        return jnp.mean((chosen(q, b["a"]) - b["r"]) ** 2)

    return loss, tree(trunk=(D, 8), b=(8,), advantage=(8, ACTIONS), value=(8, 1)), transitions()


@specimen("actor-critic", "one trunk, an advantage without a gradient, a bootstrap from a second pass, an entropy")
def actor_critic():
    def loss(p, b):
        def network(s):
            h = jnp.tanh(s @ p["trunk"] + p["b"])
            return jax.nn.log_softmax(h @ p["actor"]), (h @ p["critic"])[:, 0]

        log_policy, value = network(b["s"])
        target = lax.stop_gradient(b["r"] + 0.9 * network(b["next"])[1])
        advantage = lax.stop_gradient(target - value)
        entropy = -jnp.sum(jnp.exp(log_policy) * log_policy, -1)
        actor = -chosen(log_policy, b["a"]) * advantage
        return jnp.mean(actor + 0.5 * (value - target) ** 2 - 0.01 * entropy)

    return loss, tree(trunk=(D, 8), b=(8,), actor=(8, ACTIONS), critic=(8, 1)), transitions()


@specimen(
    "PPO over rollouts",
    "rollouts `[n, time]`, a Gaussian policy with a learned deviation, clipped ratios",
    functions=("log_std",),
)
def ppo():
    def loss(p, b):
        mean = mlp(p["policy"], b["s"])
        log_p = jnp.sum(-0.5 * ((b["a"] - mean) / jnp.exp(p["log_std"])) ** 2 - p["log_std"], -1)
        ratio = jnp.exp(log_p - b["old"])
        policy = -jnp.minimum(ratio * b["adv"], jnp.clip(ratio, 0.8, 1.2) * b["adv"])
        value = mlp(p["value"], b["s"])[..., 0]
        return jnp.mean(policy + 0.5 * (value - b["adv"]) ** 2)

    params = tree(policy=layers(D, 8, 2), value=layers(D, 7, 1), log_std=(2,))
    return loss, params, {"s": data(0, 3, D), "a": data(1, 3, 2), "old": data(2, 3) - 3, "adv": data(3, 3)}


@specimen("SAC critics", "two critics by `jax.vmap` over stacked parameters, the smaller one counts")
def critics():
    def loss(p, b):
        q = jax.vmap(mlp, (0, None))(p["critics"], jnp.concatenate([b["s"], b["action"]], -1))[..., 0]
        target = b["r"] + 0.9 * lax.stop_gradient(jnp.min(q, 0))
        return jnp.mean(jnp.sum((q - target) ** 2, 0))

    stacked = {name: (2, *shape) for name, shape in layers(D + 2, 8, 1).items()}
    return loss, tree(critics=stacked), transitions()


@specimen("DDPG, actor", "an actor through a critic that the loss closes over")
def ddpg():
    critic = tree(9, **layers(D + 2, 8, 1))

    def loss(p, b):
        action = jnp.tanh(mlp(p, b["s"]))
        return -jnp.mean(mlp(critic, jnp.concatenate([b["s"], action], -1)))

    return loss, tree(**layers(D, 8, 2)), transitions()


@specimen("reward model on pairs", "one network of both texts of a pair, one call each")
def reward():
    def loss(p, b):
        better, worse = mlp(p, b["s"]), mlp(p, b["next"])
        return jnp.mean(jax.nn.softplus(worse - better))

    return loss, tree(**layers(D, 8, 1)), transitions()


@specimen("reward model on concatenated pairs", "both texts in one batch of twice the size")
def reward_concatenated():
    def loss(p, b):
        better, worse = jnp.split(mlp(p, jnp.concatenate([b["s"], b["next"]])), 2)
        return jnp.mean(jax.nn.softplus(worse - better))

    return loss, tree(**layers(D, 8, 1)), transitions()


@specimen("VAT", "a direction against the network from gradients with respect to the input, then a divergence")
def vat():
    def divergence(a, b):
        a, b = jax.nn.log_softmax(a), jax.nn.log_softmax(b)
        return jnp.mean(jnp.sum(jnp.exp(a) * (a - b), -1))

    def loss(p, b):
        z = lax.stop_gradient(mlp(p, b["x"]))
        slope = jax.grad(lambda r: divergence(z, mlp(p, b["x"] + 0.1 * r)))(b["r"])
        r = lax.stop_gradient(slope / (jnp.linalg.norm(slope, axis=-1, keepdims=True) + 1e-16))
        return cross_entropy(mlp(p, b["x"]), b["y"]) + divergence(z, mlp(p, b["x"] + 0.5 * r))

    return loss, tree(**layers(D, 8, 3)), {"x": data(0, D), "r": data(1, D), "y": tokens(0, below=3)}


@specimen(
    "FixMatch",
    "unlabelled images three for each labelled one, labels from a pass without a gradient",
)
def fixmatch():
    def loss(p, b):
        weak, strong = b["weak"].reshape(-1, D), b["strong"].reshape(-1, D)
        target = jax.nn.softmax(lax.stop_gradient(mlp(p, weak)))
        sure = jnp.max(target, -1) > 0.4
        per_image = -jnp.take_along_axis(jax.nn.log_softmax(mlp(p, strong)), jnp.argmax(target, -1)[:, None], -1)[:, 0]
        return cross_entropy(mlp(p, b["x"]), b["y"]) + jnp.mean(per_image * sure)

    batch = {"x": data(0, D), "y": tokens(0, below=3), "weak": data(1, 3, D), "strong": data(2, 3, D)}
    return loss, tree(**layers(D, 8, 3)), batch


@specimen("BYOL", "a predictor on the online network, the target network under `lax.stop_gradient`", unreached=TARGET)
def byol():
    def loss(p, b):
        online = mlp(p["predictor"], mlp(p["online"], b["x"]))
        target = lax.stop_gradient(mlp(p["target"], b["view"]))
        online, target = (z / jnp.linalg.norm(z, axis=-1, keepdims=True) for z in (online, target))
        return jnp.mean(2 - 2 * jnp.sum(online * target, -1))

    params = tree(online=layers(D, 8, 4), predictor=layers(4, 7, 4), target=layers(D, 8, 4))
    return loss, params, {"x": data(0, D), "view": data(1, D)}


@specimen("MAML", "a gradient step inside the loss", gradient=("w1", "w2"))
def maml():
    def loss(p, b):
        def inner(p, x, y):
            return jnp.mean((mlp(p, x) - y) ** 2)

        def task(x, y, x2, y2):
            adapted = jax.tree.map(lambda w, g: w - 0.1 * g, p, jax.grad(inner)(p, x, y))
            return inner(adapted, x2, y2)

        return jnp.mean(jax.vmap(task)(b["x"], b["y"], b["x2"], b["y2"]))

    batch = {"x": data(0, 3, 2), "y": data(1, 3, 1), "x2": data(2, 3, 2), "y2": data(3, 3, 1)}
    return loss, tree(**layers(2, 8, 1)), batch
