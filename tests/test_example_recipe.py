"""The recipe of `examples/imagenet`, each piece against its definition."""

import json
import random
import re
import signal
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import kfac
import runs
from runs import finish, records, start, state

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet"
sys.path.insert(0, str(EXAMPLE))
import augment  # noqa: E402
import config as cfg  # noqa: E402
import configs  # noqa: E402
import devices  # noqa: E402
import models  # noqa: E402
import optimizers  # noqa: E402
import precision  # noqa: E402
import report  # noqa: E402
import train  # noqa: E402

sys.path.remove(str(EXAMPLE))

IMAGENET = 1_281_167
# The table of the recipe: batch, rate, momentum, damping, power, first and last mark, alpha, epochs, steps.
TABLE = {
    "bs4k": (4096, 8.18e-3, 0.997, 2.5e-4, 11, 1, 53, 0.4, 35, 10948),
    "bs8k": (8192, 1.25e-2, 0.993, 2.5e-4, 8, 1, 53.5, 0.4, 35, 5478),
    "bs16k": (16384, 2.5e-2, 0.985, 2.5e-4, 8, 1, 53.5, 0.4, 35, 2737),
    "bs32k": (32768, 3e-2, 0.97, 2e-4, 3.5, 1.5, 49.5, 0.6, 45, 1760),
    "bs64k": (65536, 4e-2, 0.95, 1.5e-4, 2.9, 2, 64.5, 0.6, 60, 1173),
    "bs128k": (131072, 7e-2, 0.93, 1e-4, 3, 1, 95, 1.0, 80, 782),
}
QUICKLY = {"xla_backend_optimization_level": 0}


def resolved(*args):
    return cfg.parse([*map(str, args)])[0]


# Configurations.


@pytest.mark.parametrize("name", TABLE)
def test_the_configurations_are_those_of_the_table(name):
    config = resolved("--config", name, "--data", "synthetic")
    optim = config.optim
    found = (optim.global_batch, optim.learning_rate, optim.momentum, optim.damping, optim.decay_power,
             optim.decay_begin, optim.decay_end, config.augment.mixup_alpha, optim.epochs)  # fmt: skip
    assert found == TABLE[name][:-1]
    # 8,192 needs 5,474 steps for 35 epochs; the published run had four more.
    steps = cfg.total_steps(optim, IMAGENET / optim.global_batch)
    assert abs(steps - TABLE[name][-1]) <= (4 if name == "bs8k" else 0)
    assert optim.local_batch == 32 and config.model.arch == "resnet50d"
    assert optim.factor_decay == 0 and optim.factor_every == optim.inverse_every == 1
    assert optim.rescale and optim.weight_decay == 0 and config.augment.erasing == "in-place"


@pytest.mark.parametrize("name", configs.CONFIGS)
def test_every_configuration_is_whole_and_says_what_is_known_of_it(name):
    make = configs.CONFIGS[name]
    assert "Published" in make.__doc__ and "Measured with this code: nothing yet." in " ".join(make.__doc__.split())
    config = resolved("--config", name, "--data", "synthetic")
    fields = {k: v for group in cfg.GROUPS for k, v in vars(getattr(config, group)).items()}
    for key, value in make().items():
        assert fields[key] == value
    # What was asked for beside it comes first.
    for option, value in (("learning-rate", 0.123), ("schedule", "cosine"), ("arch", "resnet18"), ("epochs", 2.0)):
        other = resolved("--config", name, "--data", "synthetic", f"--{option}", value)
        changed = {k: v for group in cfg.GROUPS for k, v in vars(getattr(other, group)).items() if v != fields[k]}
        changed.pop("output", None)  # named by the clock
        assert changed == {option.replace("-", "_"): value}


def test_small_data_keep_their_network():
    config = resolved("--config", "bs128k", "--data", "digits", "--global-batch", "auto")
    assert config.model.arch == "digits" and config.optim.local_batch is None and config.model.sync_batch_norm
    assert config.model.init == "he" and config.augment.mixup_alpha == 1
    assert cfg.fit_batch(config, 50_000, 3).optim.global_batch == 4998
    with pytest.raises(cfg.UserError, match="auto"):
        cfg.fit_batch(resolved("--config", "bs128k"), 1500, 1)


def test_the_length_is_given_in_one_way():
    for options, steps in ((["--steps", 7], 7), (["--examples", 1000], 7), (["--epochs", 0.7], 8), ([], 150)):
        assert cfg.total_steps(resolved(*options).optim, 1500 / 144) == steps
    with pytest.raises(cfg.UserError, match="--epochs and --examples"):
        resolved("--epochs", 1, "--examples", 1)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config", "bs1m"], ["bs1m", "bs128k"]),
        (["--schedule", "polynomial", "--decay-end", 0.5], ["--decay-end 0.5", "1"]),
        (["--schedule", "polynomial", "--decay-begin", 0.5], ["--decay-begin 0.5", "--warmup-epochs 1"]),
        (["--damping-initial", 1e-3], ["--damping-initial 0.001", "--damping 0.01"]),
        (["--rate-in-momentum", "--trust-ratio", 1], ["--trust-ratio"]),
        (["--config", "bs128k", "--trust-ratio", 1], ["--no-rate-in-momentum"]),
        (["--config", "lars-bs4k", "--optimizer", "kfac"], ["lars-bs4k", "10.25", "--optimizer kfac"]),
        (["--decay-power", 3], ["--decay-power", "cosine"]),
        (["--config", "bs4k", "--schedule", "linear", "--decay-end", 3], ["--decay-end", "linear"]),
        (["--profile", "5"], ["--profile", "5", "FIRST:LAST"]),
        (["--global-batch", "most"], ["most"]),
    ],
)
def test_bad_options_are_refused(args, words):
    with pytest.raises(cfg.UserError) as caught:
        resolved(*args)
    assert all(str(word) in str(caught.value) for word in words), caught.value


def test_the_configuration_can_be_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main(["--config", "lars-bs32k", "--data", "synthetic", "--momentum", "0.8", "--print-config"])
    about, _, text = capsys.readouterr().out.partition("{")
    assert "2,189 steps" in about
    optim = json.loads("{" + text)["optim"]
    assert (optim["optimizer"], optim["momentum"], optim["global_batch"]) == ("lars", 0.8, 32768)
    assert not any(tmp_path.iterdir())


# Schedules.


def test_the_learning_rate_of_the_recipe():
    optim = resolved("--config", "bs128k", "--data", "synthetic").optim
    per_epoch = IMAGENET / optim.global_batch
    rate = optimizers.learning_rate(optim, per_epoch, 782)
    for step in (0, 5, 9, 10, 100, 500, 781):
        epoch = step / per_epoch
        expected = 0.07 if epoch < 1 else 0.07 * (1 - (epoch - 1) / (95 - 1)) ** 3
        assert float(rate(step)) == pytest.approx(expected, rel=1e-4)
    assert rate(781) > 0
    # After a warm-up the marks count from the beginning too.
    warm = resolved("--schedule", "polynomial", "--decay-begin", 2, "--decay-end", 6, "--warmup-epochs", 1).optim
    rate = optimizers.learning_rate(warm, 10.0, 100)
    assert float(rate(9)) == float(rate(20)) == np.float32(warm.learning_rate)
    assert float(rate(40)) == pytest.approx(warm.learning_rate * 0.5**2, rel=1e-5) and float(rate(60)) == 0


def test_momentum_and_damping_of_the_options():
    options = ["--schedule", "polynomial", "--momentum-coupling"]
    rate = optax.linear_schedule(0.03, 0.0, 10)
    ratio = optimizers.momentum(resolved(*options, "ratio").optim, rate)
    assert float(ratio(5)) == pytest.approx(0.9 * 5 / 6, rel=1e-5)
    proportional = optimizers.momentum(resolved(*options, "proportional").optim, rate)
    assert float(proportional(5)) == pytest.approx(0.9 / 2, rel=1e-5)
    warm = resolved("--damping-initial", 1, "--damping-warmup-epochs", 2).optim
    damping = optimizers.damping(warm, 10.0)
    assert float(damping(0)) == 1 and float(damping(1)) == pytest.approx(0.8 * 1 + 0.2 * 1e-2, rel=1e-4)


def test_weights_are_scaled_down_only():
    rng = np.random.default_rng(0)
    params = {"conv": rng.normal(size=(3, 3, 4, 8)), "small": rng.normal(size=(4, 8)) / 10, "bias": np.full(8, 100.0)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    found = optimizers.rescale(params)
    norm = np.linalg.norm(params["conv"].ravel())
    assert norm > np.sqrt(2 * 8)
    np.testing.assert_allclose(found["conv"], params["conv"] * np.sqrt(2 * 8) / (norm + 1e-9), rtol=1e-5)
    for name in ("small", "bias"):
        np.testing.assert_array_equal(found[name], params[name])


# The network.


def shapes_of(arch, **options):
    model = models.create(arch, 1000, "float32", **options)
    image = jax.ShapeDtypeStruct((1, 224, 224, 3), jnp.float32)
    return jax.eval_shape(lambda x: model.init_with_output(jax.random.key(0), x, train=True), image)


def test_resnet50d_by_its_parts():
    logits, variables = shapes_of("resnet50d")
    params = variables["params"]
    assert logits.shape == (1, 1000)
    stem = {k: {name: leaf.shape for name, leaf in params[k].items()} for k in ("stem1", "stem2", "stem3")}
    assert stem == {
        "stem1": {"kernel": (3, 3, 3, 32), "bias": (32,)},
        "stem2": {"kernel": (3, 3, 32, 32)},
        "stem3": {"kernel": (3, 3, 32, 64)},
    }
    # Beside the stem it has the parameters of ResNet-50.
    _, plain = shapes_of("resnet50")
    for name, leaves in plain["params"].items():
        if not name.startswith("stem_") and name != "stem":
            assert jax.tree.map(jnp.shape, leaves) == jax.tree.map(jnp.shape, params[name]), name


def test_a_strided_shortcut_averages_before_its_convolution():
    x = jax.random.normal(jax.random.key(0), (1, 8, 8, 4))
    model = models.ResNet((1, 1), 3, width=4, bottleneck=True, stem="small", pooled_shortcut=True)
    variables = model.init(jax.random.key(1), x, train=False)

    def inside(x, train):
        _, seen = model.apply(variables, x, train=train, capture_intermediates=True, mutable=["intermediates"])
        return seen["intermediates"]["stage2_block1"], seen["intermediates"]["stage1_block1"]["__call__"][0]

    block, before = inside(x, False)
    pooled = before.reshape(1, 4, 2, 4, 2, -1).mean((2, 4))
    kernel = variables["params"]["stage2_block1"]["shortcut"]["kernel"]
    np.testing.assert_allclose(block["shortcut"]["__call__"][0], pooled @ kernel[0, 0], rtol=1e-4, atol=1e-5)
    assert block["conv2"]["__call__"][0].shape == (1, 4, 4, 8)  # the stride is in the 3x3


def test_initial_weights_of_the_recipe():
    model = models.create("resnet18", 100, "float32", width=32, init_scheme="he", norm_epsilon=2e-5)
    variables = model.init(jax.random.key(0), jnp.zeros((1, 64, 64, 3)), train=False)
    scales = []
    for path, leaf in jax.tree_util.tree_flatten_with_path(variables["params"])[0]:
        name = path[-1].key
        if name == "kernel":
            # The norm at which the rescaling holds them.
            assert np.linalg.norm(leaf) == pytest.approx(np.sqrt(2 * leaf.shape[-1]), rel=0.1)
        elif name == "scale":
            scales.append(np.asarray(leaf))
        else:
            assert not leaf.any()
    scales = np.concatenate(scales)
    assert scales.mean() == pytest.approx(1, abs=0.01) and scales.std() == pytest.approx(0.05, rel=0.1)
    assert model.norm_epsilon == 2e-5


# Augmentation.


def batch_of(n, size=16, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    images = jnp.asarray(rng.normal(size=(n, size, size, 3)), jnp.float32)
    return augment.Mixed(images, jax.nn.one_hot(rng.integers(0, classes, n), classes))


def test_running_mixup_by_its_definition():
    first, second, third = (batch_of(6, seed=k) for k in range(3))
    zero = jax.tree.map(jnp.zeros_like, first)
    mixed, alpha, shares = zero, 0.6, []
    for step, new in enumerate((first, second, third)):
        keys = augment.keys(7, step, jnp.arange(6))
        before, mixed = mixed, augment.running_mixup(keys, jnp.int32(step), alpha, new, mixed)
        if step == 0:
            jax.tree.map(np.testing.assert_array_equal, mixed, first)
            continue
        # One share for each image, the same for its target, at least a half, of the previous *mixed* batch.
        x, y, z = (np.asarray(b.images, np.float64).reshape(6, -1) for b in (new, before, mixed))
        share = ((z - y) * (x - y)).sum(1) / ((x - y) ** 2).sum(1)
        assert len(set(share.round(6))) == 6 and (share >= 0.5).all() and (share <= 1).all()
        np.testing.assert_allclose(z, share[:, None] * x + (1 - share[:, None]) * y, atol=1e-5)
        expected = share[:, None] * np.asarray(new.targets) + (1 - share[:, None]) * np.asarray(before.targets)
        np.testing.assert_allclose(mixed.targets, expected, atol=1e-5)
        shares.append(share)


@pytest.mark.parametrize("alpha", [0.4, 1.0])
def test_shares_of_mixup_are_those_of_the_beta_distribution(alpha):
    n = 4000
    ones = augment.Mixed(jnp.ones((n, 1, 1, 1)), jnp.ones((n, 1)))
    zeros = jax.tree.map(jnp.zeros_like, ones)
    keys = augment.keys(0, 1, jnp.arange(n))
    share = np.sort(np.asarray(augment.running_mixup(keys, jnp.int32(1), alpha, ones, zeros).images).ravel())
    b = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    expected = np.sort(np.maximum(b, 1 - b))
    distance = np.abs(np.searchsorted(expected, share) / len(expected) - np.arange(n) / n).max()
    assert distance < 1.95 / np.sqrt(n)  # Kolmogorov-Smirnov: one in a thousand


def test_random_erasing_by_its_definition():
    n, size = 3000, 40
    images = jnp.full((n, size, size, 2), 3.0)
    erased = np.asarray(augment.erase(augment.keys(0, 4, jnp.arange(n)), images))
    holes = erased[..., 0] == 0
    np.testing.assert_array_equal(erased == 0, np.broadcast_to(holes[..., None], erased.shape))
    assert (erased[erased != 0] == 3).all()
    hit = holes.any((1, 2))
    assert hit.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(n))
    heights, widths = holes.any(2).sum(1)[hit], holes.any(1).sum(1)[hit]
    # A rectangle, within the image.
    np.testing.assert_array_equal(holes[hit].sum((1, 2)), heights * widths)
    area, aspect = heights * widths / size**2, heights / widths
    assert area.min() > 0.01 and area.max() < 0.27 and area.mean() == pytest.approx(0.135, abs=0.01)
    assert aspect.min() > 0.2 and aspect.max() < 5  # sides are whole pixels
    assert (heights > widths).mean() == pytest.approx(0.5, abs=0.1)
    # Anywhere in the image, up to its borders.
    places = holes.mean(0)
    assert min(places[0].max(), places[-1].max(), places[:, 0].max(), places[:, -1].max()) > 0
    np.testing.assert_allclose(places, places[::-1], atol=0.03)
    np.testing.assert_allclose(places, places[:, ::-1], atol=0.03)


@pytest.mark.parametrize("erasing", ["none", "own", "in-place"])
def test_what_is_carried_to_the_next_step(erasing):
    new, previous = batch_of(32, seed=0), batch_of(32, seed=1)
    keys = augment.keys(0, 3, jnp.arange(32))
    seen, carried = augment.augment(keys, jnp.int32(3), 1.0, erasing, new, previous)
    mixed = augment.running_mixup(keys, jnp.int32(3), 1.0, new, previous)
    erased = mixed._replace(images=augment.erase(keys, mixed.images))
    assert (erased.images != mixed.images).any()
    jax.tree.map(np.testing.assert_array_equal, seen, mixed if erasing == "none" else erased)
    jax.tree.map(np.testing.assert_array_equal, carried, erased if erasing == "in-place" else mixed)
    assert augment.augment(keys, jnp.int32(3), 0.0, erasing, new, ())[1] == ()


def test_random_numbers_depend_on_seed_step_and_image_alone():
    new, previous = batch_of(24), batch_of(24, seed=1)

    def on(count, parts, seed=0, step=2):
        mesh = Mesh(np.array(jax.devices()[:count]), (devices.AXIS,))
        local = 24 // count // parts

        def local_step(new, previous):
            keys = augment.keys(seed, jnp.int32(step), devices.own_indices(count, local, parts))
            return augment.augment(keys, jnp.int32(step), 1.0, "own", new, previous)[0].images

        mapped = jax.shard_map(local_step, mesh=mesh, in_specs=(devices.SPLIT, devices.SPLIT), out_specs=devices.SPLIT)
        # The images of each device in its order, as train.py loads them, and back.
        split = [jax.tree.map(lambda x: devices.in_device_order(x, count, local), b) for b in (new, previous)]
        rows = np.asarray(devices.in_device_order(jnp.arange(24), count, local))
        np.testing.assert_array_equal(rows, devices.own_rows(mesh, local, parts))
        return np.asarray(devices.in_batch_order(jax.jit(mapped, compiler_options=QUICKLY)(*split), count, local))

    one = on(1, 1)
    for count, parts in ((4, 1), (2, 3), (1, 4)):
        np.testing.assert_array_equal(on(count, parts), one)
    assert (on(1, 1, seed=1) != one).any() and (on(1, 1, step=3) != one).any()


# float16.


def test_the_loss_scale_falls_at_once_and_rises_with_patience():
    state = precision.LossScale(jnp.float32(8), jnp.int32(5))
    down = precision.adjust(state, jnp.array(False))
    assert (float(down.scale), int(down.finite_steps)) == (4, 0)
    same = precision.adjust(state, jnp.array(True))
    assert (float(same.scale), int(same.finite_steps)) == (8, 6)
    up = precision.adjust(state._replace(finite_steps=jnp.int32(precision.PATIENCE - 1)), jnp.array(True))
    assert (float(up.scale), int(up.finite_steps)) == (16, 0)
    floor = precision.adjust(precision.LossScale(jnp.float32(precision.SMALLEST), jnp.int32(0)), jnp.array(False))
    assert float(floor.scale) == precision.SMALLEST


def test_unscaled_statistics_are_those_in_float32():
    """Of the network in float16 with a scaled loss, against the same network in float32 without."""
    images = jax.random.normal(jax.random.key(0), (8, 8, 8, 1))
    targets = jax.nn.one_hot(jnp.arange(8), 10)

    def measure(dtype, scale):
        model = models.create("digits", 10, dtype, width=8, init_scheme="he")
        variables = model.init(jax.random.key(1), images, train=True)

        def loss_fn(params):
            logits, _ = model.apply({**variables, "params": params}, images, train=True, mutable=["batch_stats"])
            return scale * optax.softmax_cross_entropy(logits, targets).mean()

        layers = kfac.find_layers(loss_fn, variables["params"])
        measured = jax.jit(kfac.value_and_grad(loss_fn, layers, num_examples=8), compiler_options=QUICKLY)
        return measured(variables["params"])

    loss, grads, factors = precision.unscale(
        precision.LossScale(jnp.float32(1024), jnp.int32(0)), *measure("float16", 1024.0)
    )
    expected = measure("float32", 1.0)
    assert float(loss) == pytest.approx(float(expected[0]), rel=1e-2)
    for found, wanted in ((grads, expected[1]), (factors, expected[2])):
        for (path, a), b in zip(jax.tree_util.tree_flatten_with_path(found)[0], jax.tree.leaves(wanted), strict=True):
            error = np.linalg.norm(np.asarray(a) - b) / max(np.linalg.norm(b), 1e-6)
            assert error < 0.05, f"{jax.tree_util.keystr(path)}: {error}"


def test_what_is_not_finite_has_a_name():
    trees = {"gradient": {"a": {"kernel": 1, "bias": 2}, "b": 3}, "parameter": {"c": 1}}
    fine = {"gradient": [1, 2, 3], "parameter": [1]}
    assert precision.not_finite(1.0, fine, trees) == ""
    bad = {"gradient": [1, np.nan, np.inf], "parameter": [np.inf]}
    assert precision.not_finite(np.nan, bad, trees) == (
        "the loss and the gradient a/kernel (and 1 more) and the parameter c"
    )
    values = precision.squares({"a": jnp.array([3.0, 4.0]), "b": jnp.array(jnp.nan)})
    assert values[0] == 25 and np.isnan(values[1])


# The whole script.


RECIPE = ["--config", "bs128k", "--data", "digits", "--global-batch", "auto", "--width", 8, "--steps"]


def test_the_recipe_is_killed_and_resumed_bit_for_bit(tmp_path):
    """With everything on, in two micro-batches; SIGTERM at some step; metrics go on, parameters are the same."""
    options = [*RECIPE, 24, "--local-batch", 75, "--log-every", 1, "--output"]
    whole = runs.train(*options, tmp_path / "whole", cached=False).stdout
    assert "done: 24 steps" in whole and "10 steps an epoch" in whole and "2 micro-batch(es) of 75" in whole
    after = random.randrange(2, 15)
    print(f"SIGTERM after step {after}")
    # Compiled twice, independently of each other.
    run = start(*options, tmp_path / "parts")
    for line in run.stdout:
        if re.match(rf"step +{after}/", line):
            run.send_signal(signal.SIGTERM)
            break
    out = finish(run).stdout
    stopped = int(re.search(r"stopped by SIGTERM at step (\d+) of 24", out).group(1))
    assert after <= stopped < 24
    assert records(tmp_path / "parts")[-1]["step"] == stopped
    runs.train("--resume", "--output", tmp_path / "parts")
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "parts/metrics.jsonl").read_text().splitlines()]
    assert seconds == sorted(seconds)
    one, two = (state(tmp_path / name, 24) for name in ("whole", "parts"))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)

    # What the recipe does can be seen in what it left.
    mixed = one["mixed"]["targets"]
    assert mixed.shape == (150, 10) and ((mixed > 0).sum(1) > 1).mean() > 0.5
    assert (one["mixed"]["images"] == 0).mean() > 0.01
    for path, leaf in jax.tree_util.tree_flatten_with_path(one["params"])[0]:
        if path[-1].key == "kernel":
            assert np.linalg.norm(leaf) <= np.sqrt(2 * leaf.shape[-1]) * (1 + 1e-5)
    rates = [r["learning_rate"] for r in records(tmp_path / "whole") if "loss" in r]
    assert rates[0] == rates[9] > rates[11] > rates[-1]


@pytest.mark.slow
def test_the_recipe_on_other_devices(tmp_path):
    """Stopped on four devices, resumed on two with other micro-batches: as if always on two, up to rounding."""
    options = ["--config", "bs128k", "--data", "digits", "--global-batch", 144, "--width", 8, "--steps", 8]
    runs.train(*options, "--local-batch", 18, "--stop-after", 4, "--output", tmp_path / "a", devices=4)
    runs.train("--resume", "--local-batch", 36, "--output", tmp_path / "a", devices=2)
    runs.train(*options, "--local-batch", 36, "--output", tmp_path / "b", devices=2)
    one, two = state(tmp_path / "a", 8), state(tmp_path / "b", 8)
    for name in ("images", "targets"):
        # Random numbers and the order of the batch do not depend on devices at all.
        np.testing.assert_allclose(one["mixed"][name], two["mixed"][name], atol=1e-6)
    for a, b in zip(jax.tree.leaves(one["params"]), jax.tree.leaves(two["params"]), strict=True):
        assert np.linalg.norm(a - b) < 1e-3 * np.linalg.norm(b)


@pytest.mark.parametrize("optimizer", ["kfac", "sgd"])
def test_a_step_that_overflows_float16_changes_nothing_but_the_scale(tmp_path, monkeypatch, optimizer):
    monkeypatch.setattr(precision, "INITIAL", 2.0**24)
    options = ["--optimizer", optimizer, "--dtype", "float16", "--width", "4", "--devices", "1", "--steps", "9",
               "--checkpoint-every", "1", "--keep-checkpoints", "9", "--output", str(tmp_path / "a")]  # fmt: skip
    train.main(options)
    found = [r for r in records(tmp_path / "a") if "loss" in r]
    skipped = [r["step"] for r in found if r["gradient_norm"] is None]
    assert skipped == list(range(1, len(skipped) + 1)) and 2 <= len(skipped) <= 7
    assert [r["loss_scale"] for r in found] == [2.0 ** (24 - min(k, len(skipped))) for k in range(9)]
    rates = [r["learning_rate"] for r in found]
    assert rates[0] == rates[len(skipped)] and (len(skipped) == 8 or rates[len(skipped)] < rates[-1])
    # Momentum, factors, inverses, counts of steps; but for what is counted of such steps and the norms of the gradient.
    first, last, after = (state(tmp_path / "a", k) for k in (1, len(skipped), 9))
    counts = re.compile(r"metrics|notfinite|last_finite")
    kept = [name for name in ("params", "batch_stats", "opt_state") if name in first]
    for name in kept:
        before, now = (jax.tree_util.tree_flatten_with_path(x[name])[0] for x in (first, last))
        for (path, x), (_, y) in zip(before, now, strict=True):
            if not counts.search(jax.tree_util.keystr(path)):
                np.testing.assert_array_equal(x, y, jax.tree_util.keystr(path))
    assert (first["params"]["head"]["kernel"] != after["params"]["head"]["kernel"]).any()
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(after["params"]))


@pytest.mark.parametrize("optimizer", ["kfac", "sgd"])
def test_nan_stops_with_a_name_and_is_never_saved(tmp_path, optimizer):
    options = ["--optimizer", optimizer, "--learning-rate", 1e30, "--steps", 20, "--checkpoint-every", 1,
               "--warmup-epochs", 0, "--width", 8, "--output", tmp_path / "a"]  # fmt: skip
    sentence = runs.refused(*options)
    assert re.search(
        r"the (loss|gradient \S+|parameter \S+|batch-norm average \S+).* became NaN or infinite at step", sentence
    )
    assert "--learning-rate" in sentence
    for folder in (tmp_path / "a" / "checkpoints").glob("[0-9]*"):
        assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state(tmp_path / "a", int(folder.name))))


def test_the_best_checkpoint_is_kept_besides_the_last(tmp_path):
    import checkpoints

    def counted(k):
        return {"w": jnp.full(3, float(k))}

    kept = checkpoints.Checkpoints(tmp_path / "c", keep=2)
    assert kept.latest() is None and kept.best() < 0
    for step, accuracy in enumerate([0.2, 0.9, None, 0.5, None, 0.6], 1):
        kept.save(step, counted(step), {"broken": []}, accuracy)
    kept.close()
    assert sorted(int(p.name) for p in (tmp_path / "c").iterdir()) == [2, 5, 6]
    again = checkpoints.Checkpoints(tmp_path / "c", keep=2)
    assert again.latest() == 6 and again.best() == 0.9
    found, extra = again.restore(counted(0))
    assert float(found["w"][0]) == 6 and extra == {"broken": []}
    again.close()


def test_events_and_traces_are_written(tmp_path):
    out = tmp_path / "a"
    options = ["--optimizer", "sgd", "--width", 8, "--steps", 2000, "--stop-after", 5, "--eval-every", 5]
    runs.train(*options, "--tensorboard", "--profile", "2:3", "--output", out)
    [events] = (out / "tensorboard").iterdir()
    assert b"learning_rate" in events.read_bytes() and b"val_accuracy" in events.read_bytes()
    assert list((out / "profile").rglob("*.xplane.pb"))


def test_the_page_on_several_runs(tmp_path):
    from PIL import Image

    for k, name in enumerate(("first", "second")):
        folder = tmp_path / name
        folder.mkdir()
        metrics = report.Metrics(folder / "metrics.jsonl", 0)
        for step in range(1, 31):
            at = {"step": step, "epoch": step / 10, "seconds": (k + 1) * step}
            metrics.write({**at, "loss": 2 / step + k, "accuracy": step / (40 + 20 * k)})
            if step % 10 == 0:
                metrics.write({**at, "val_loss": 2 / step + k, "val_accuracy": step / (35 + 20 * k)})
        assert metrics.seconds == 30 * (k + 1)
        metrics.close()
    report.main([str(tmp_path / "first"), str(tmp_path / "second"), "--output", str(tmp_path / "page.png")])
    image = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    assert image.shape[1] > 1000
    # Both runs are drawn in each of the six parts, in their own colours.
    rows, columns = (
        np.array_split(np.arange(image.shape[0] * 85 // 100), 2),
        np.array_split(np.arange(image.shape[1]), 3),
    )
    for color in ((31, 119, 180), (255, 127, 14)):
        near = np.abs(image - color).sum(-1) < 40
        assert all(near[np.ix_(r, c)].sum() > 20 for r in rows for c in columns)
    with pytest.raises(cfg.UserError, match="no run"):
        report.load(tmp_path)


# Static facts.


def test_one_program_of_nhwc_convolutions_that_updates_its_state_in_place(tmp_path, monkeypatch, caplog):
    programs = []
    compile_ = jax.stages.Lowered.compile

    def spy(lowered, *args, **kwargs):
        compiled = compile_(lowered, *args, **kwargs)
        programs.append((lowered, compiled))
        return compiled

    monkeypatch.setattr(jax.stages.Lowered, "compile", spy)
    compilations = {}
    write = report.Metrics.write

    def count(metrics, record):
        found = (r for r in caplog.records if "Finished XLA compilation" in r.getMessage())
        compilations[record["step"]] = sum(1 for _ in found)
        write(metrics, record)

    monkeypatch.setattr(report.Metrics, "write", count)
    with jax.log_compiles(), caplog.at_level("WARNING"):
        options = ["--config", "bs128k", "--data", "digits", "--global-batch", "auto", "--factor-every", "2", "--width"]
        train.main(
            [*options, "4", "--devices", "1", "--steps", "20", "--log-every", "1", "--output", str(tmp_path / "a")]
        )
    # Once steps of both kinds and a validation are over, nothing more is compiled.
    assert 3 <= compilations[13] == compilations[20]
    full, cheap, _ = (p for p in programs)
    for lowered, compiled in (full, cheap):
        text = lowered.as_text()
        layouts = set(re.findall(r"dim_numbers = (\[.*?\]x\[.*?\]->\[.*?\])", text))
        assert "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]" in layouts
        # And its gradients with respect to the kernel and to the image, and correlations of images for statistics.
        assert layouts <= {
            "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, f, b]",
            "[b, 0, 1, f]x[0, 1, i, o]->[b, 0, 1, f]",
            "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]",
            "[b, 0, 1, f]x[0, 1, o, i]->[b, 0, 1, f]",
        }, layouts
        memory = compiled.memory_analysis()
        # All arguments but the images and the labels.
        assert memory.alias_size_in_bytes >= memory.argument_size_in_bytes - 150 * (64 + 4) - 1024
