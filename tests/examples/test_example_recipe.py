"""Test the recipe of `examples/imagenet`, each piece against its definition."""

import contextlib
import json
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import Mesh

import kfac

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[2] / "examples" / "imagenet"
sys.path[:0] = [str(EXAMPLE), str(EXAMPLE.parent / "benchmarks")]
import batches as loader  # noqa: E402
import checkpoints  # noqa: E402
import config as cfg  # noqa: E402
import models  # noqa: E402
import processes  # noqa: E402
import recipe  # noqa: E402
import report  # noqa: E402
import train  # noqa: E402
import vit  # noqa: E402

del sys.path[:2]
pytestmark = pytest.mark.examples

SAME, SPLIT = train.SAME, train.SPLIT
IMAGENET = 1_281_167
# The recipe's table: batch, rate, momentum, damping, power, first and last mark, alpha, epochs, steps.
TABLE = {
    "bs4k": (4096, 8.18e-3, 0.997, 2.5e-4, 11, 1, 53, 0.4, 35, 10948),
    "bs8k": (8192, 1.25e-2, 0.993, 2.5e-4, 8, 1, 53.5, 0.4, 35, 5478),
    "bs16k": (16384, 2.5e-2, 0.985, 2.5e-4, 8, 1, 53.5, 0.4, 35, 2737),
    "bs32k": (32768, 3e-2, 0.97, 2e-4, 3.5, 1.5, 49.5, 0.6, 45, 1760),
    "bs64k": (65536, 4e-2, 0.95, 1.5e-4, 2.9, 2, 64.5, 0.6, 60, 1173),
    "bs128k": (131072, 7e-2, 0.93, 1e-4, 3, 1, 95, 1.0, 80, 782),
}


def resolved(*args):
    return cfg.parse([*map(str, args)])


# -- configurations ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", TABLE)
def test_the_configurations_are_those_of_the_table(name):
    c = resolved("--config", name, "--data", "synthetic")
    found = (c.global_batch, c.learning_rate, c.momentum, c.damping, c.decay_power, c.decay_begin, c.decay_end,
             c.mixup_alpha, c.epochs)  # fmt: skip
    assert found == TABLE[name][:-1]
    # A batch of 8,192 needs 5,474 steps for 35 epochs. The published run had four more steps.
    assert abs(cfg.total_steps(c, IMAGENET) - TABLE[name][-1]) <= (4 if name == "bs8k" else 0)
    assert c.local_batch == 32 and c.arch == "resnet50d" and c.rescale and c.erasing == "in-place"
    assert (
        c.factor_ema_decay == c.weight_decay == c.warmup_epochs == 0
        and c.statistics_period == c.inverse_update_period == 1
    )


@pytest.mark.parametrize("name", recipe.CONFIGS)
def test_every_configuration_is_whole(name):
    config = resolved("--config", name, "--data", "synthetic")
    for key, value in recipe.CONFIGS[name].items():
        assert getattr(config, key) == value
    # Further options override the configuration.
    for option, value in (("learning-rate", 0.123), ("arch", "resnet18"), ("epochs", 2.0)):
        other = resolved("--config", name, "--data", "synthetic", f"--{option}", value)
        changed = {k: v for k, v in vars(other).items() if v != getattr(config, k)}
        changed.pop("output", None)  # contains the time
        assert changed == {option.replace("-", "_"): value}


def test_small_data_keep_their_network():
    config = resolved("--config", "bs128k", "--data", "digits", "--global-batch", "auto")
    assert config.arch == "digits" and config.local_batch is None and config.sync_batch_norm
    assert config.init == "he" and config.mixup_alpha == 1
    assert cfg.fit(config, 50_000, 3, "cpu").global_batch == 4998
    with pytest.raises(cfg.UserError, match="auto"):
        cfg.fit(resolved("--config", "bs128k"), 1500, 1, "cpu")


def test_without_a_configuration_all_data_get_the_default_of_the_package():
    """Check that a small run does not get the recipe's values, which suit a batch of thousands.

    They include the damping, the averages and the learning rate.
    """
    for data in (["--data", "digits"], ["--data", "synthetic"], ["--data-dir", "."]):
        config = resolved(*data)
        assert (config.step_norm, config.learning_rate, config.statistics_period) == ("spectral", 0.1, "auto")
        assert config.damping is None and config.factor_ema_decay is None and config.trust_ratio is None
    recipe_of = resolved("--config", "bs128k", "--data", "synthetic")
    assert (recipe_of.step_norm, recipe_of.trust_ratio) == ("none", 0.0)
    assert (recipe_of.damping, recipe_of.statistics_period) == (1e-4, 1)


def test_without_a_step_norm_there_may_be_a_trust_ratio():
    plain, turned = resolved("--step-norm", "none"), resolved("--step-norm", "none", "--trust-ratio", 0.5)
    assert (plain.trust_ratio, turned.trust_ratio) == (0.0, 0.5)
    assert (plain.damping, plain.learning_rate, plain.preconditioner) == (1e-2, 0.02, "cholesky")
    spectral = resolved("--config", "bs128k", "--data", "synthetic", "--step-norm", "spectral")
    assert spectral.step_norm == "spectral" and spectral.damping == 1e-4


@pytest.mark.parametrize(("written", "step_norm", "ratio"), [("auto", "spectral", None), (0.0, "none", 0.0)])
def test_a_run_of_version_0_3_is_read(written, step_norm, ratio, tmp_path):
    """Read `--trust-ratio auto`, which is now `--step-norm spectral`."""
    cfg.save(cfg.fit(resolved(), 1500, 1, "cpu"), {}, tmp_path)
    values = json.loads((tmp_path / "config.json").read_text()) | {"trust_ratio": written}
    del values["step_norm"]
    (tmp_path / "config.json").write_text(json.dumps(values))
    config = cfg.parse(["--eval", str(tmp_path)])
    assert (config.step_norm, config.trust_ratio) == (step_norm, ratio)


def test_the_length_is_given_in_one_way():
    for options, steps in ((["--steps", 7], 7), (["--epochs", 0.7], 8), ([], 150)):
        assert cfg.total_steps(resolved(*options), 1500) == steps
    with pytest.raises(cfg.UserError, match="--epochs and --steps"):
        resolved("--epochs", 1, "--steps", 1)


@pytest.mark.parametrize("data", ["digits", "synthetic"])
@pytest.mark.parametrize("epochs", [3, 14, 90])
def test_all_optimizers_have_the_same_warm_up_and_none_is_all_warm_up(data, epochs):
    options = ["--data", data, "--epochs", epochs, "--synthetic-images", 1500, "--optimizer"]
    found = {cfg.fit(resolved(*options, name), 1500, 1, "cpu").warmup_epochs for name in cfg.OPTIMIZERS}
    assert len(found) == 1 and found.pop() == pytest.approx(epochs / 10, rel=0.03)
    with pytest.raises(cfg.UserError, match=r"--warmup-epochs 91.0 is all of the training"):
        cfg.fit(resolved(*options, "sgd", "--warmup-epochs", 91), 1500, 1, "cpu")


def test_a_run_that_grows_keeps_its_warm_up_and_one_without_a_checkpoint_does_not(tmp_path):
    found = {"training images": 1500}
    short, long = (resolved("--optimizer", "sgd", "--steps", n, "--output", tmp_path) for n in (20, 100))
    cfg.save(cfg.fit(short, 1500, 1, "cpu"), found, tmp_path)
    assert cfg.fit(long, 1500, 1, "cpu").warmup_epochs == pytest.approx(0.96)
    (tmp_path / "checkpoints" / "20").mkdir(parents=True)
    assert cfg.fit(long, 1500, 1, "cpu").warmup_epochs == pytest.approx(0.192)


def test_named_configurations_are_in_half_precision_on_accelerators():
    named = resolved("--config", "bs4k", "--data", "synthetic", "--synthetic-images", 10**6)
    found = [cfg.fit(named, 10**6, 8, platform).dtype for platform in ("gpu", "tpu", "cpu")]
    assert found == ["bfloat16", "bfloat16", "float32"]
    assert cfg.fit(resolved(), 1500, 1, "gpu").dtype == "float32"


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--config", "bs1m"], ["bs1m", "bs128k"]),
        (["--schedule", "polynomial", "--decay-end", 0.5], ["--decay-end 0.5", "1"]),
        (["--schedule", "polynomial", "--decay-begin", 0.5], ["--decay-begin 0.5", "--warmup-epochs 1"]),
        (["--lr-in-momentum", "--step-norm", "none", "--trust-ratio", 1], ["--no-lr-in-momentum"]),
        (["--trust-ratio", "auto"], ["--trust-ratio", "auto is now --step-norm spectral"]),
        (["--trust-ratio", 0], ["--trust-ratio has no effect with --step-norm spectral; give --step-norm none"]),
        (["--step-norm", "frobenius"], ["--step-norm", "spectral", "none"]),
        (["--config", "bs128k", "--trust-ratio", 1], ["--no-lr-in-momentum"]),
        (["--config", "bs4k", "--optimizer", "lars"], ["bs4k", "0.00818", "--optimizer lars"]),
        (["--decay-power", 3], ["--decay-power", "cosine"]),
        (["--optimizer", "sgd", "--damping", 1], ["--damping has no effect with --optimizer sgd"]),
        (["--optimizer", "adamw", "--inverse-update-period", 2], ["--inverse-update-period", "adamw"]),
        (["--global-batch", "12.5"], ["--global-batch", "12.5 is not a whole number"]),
        (["--epochs", "inf"], ["--epochs: it is inf", "finite"]),
        (["--learnin-rate", 1], ["--learnin-rate", "did you mean --learning-rate?"]),
        (["--batchsize", 1], ["--batchsize", "did you mean --batch-size?"]),
        (["--factor-ema-decay", 0.9], ["--factor-ema-decay has no effect with --step-norm spectral", "--config"]),
        (["--processes", "localhost", 2, 0], ["localhost", "HOST:PORT"]),
        (["--processes", "a:1", 2, 2], ["a:1 2 2", "from 0"]),
        (["--processes", "a:1", 2], ["--processes", "expected 3 arguments"]),
        (["--optimizer", "newton"], ["newton", "--optimizer", "lars"]),
        (["--learning-rate", "fast"], ["fast", "--learning-rate"]),
        (["--no-such-option", "1"], ["--no-such-option"]),
        (["--lr", "-1"], ["--learning-rate", "-1", "greater than 0"]),
        (["--damping", "nan"], ["--damping", "nan"]),
        (["--momentum", "1"], ["--momentum", "1", "0.99999"]),
        (["--epochs", "1", "--steps", "1"], ["--epochs", "--steps"]),
        (["--image-size", "16"], ["--image-size", "8x8"]),
        (["--data", "folder"], ["--data-dir"]),
        (["--data", "digits", "--data-dir", "."], ["digits", "--data-dir"]),
        (["--eval", "nowhere"], ["nowhere", "config.json"]),
        (["--config", "bs4k", "--schedule", "linear", "--decay-end", 3], ["--decay-end", "linear"]),
        (["--global-batch", "most"], ["most"]),
        (["--plan"], ["--plan", "at least one"]),
        (["--plan", "4", "0"], ["--plan", "is 0", "at least 1"]),
        (["--steps", "0"], ["--steps: it is 0 but must be at least 1"]),
        (["--step", "1"], ["--step", "did you mean --steps?"]),
    ],
)
def test_bad_options_are_refused(args, words, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(cfg.UserError) as caught:
        cfg.fit(resolved(*args), 1500, 1, "cpu")
    assert all(str(word) in str(caught.value) for word in words), caught.value


def test_the_configuration_can_be_printed(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train.main(["--config", "bs32k", "--data", "synthetic", "--momentum", "0.8", "--print-config"])
    optim = json.loads(capsys.readouterr().out)
    assert (optim["optimizer"], optim["momentum"], optim["global_batch"]) == ("kfac", 0.8, 32768)
    assert None not in optim.values()
    assert not any(tmp_path.iterdir())


# -- schedules ---------------------------------------------------------------------------------------------------------


def test_the_learning_rate_of_the_recipe():
    optim = resolved("--config", "bs128k", "--data", "synthetic")
    per_epoch = IMAGENET / optim.global_batch
    rate = recipe.learning_rate(optim, per_epoch, 782)
    for step in (0, 5, 9, 10, 100, 500, 781):
        epoch = step / per_epoch
        expected = 0.07 if epoch < 1 else 0.07 * (1 - (epoch - 1) / (95 - 1)) ** 3
        assert float(rate(step)) == pytest.approx(expected, rel=1e-4)
    assert rate(781) > 0
    # After a warm-up, the marks still count from the beginning.
    warm = resolved("--schedule", "polynomial", "--decay-begin", 2, "--decay-end", 6, "--warmup-epochs", 1)
    rate = recipe.learning_rate(warm, 10.0, 100)
    assert float(rate(9)) == float(rate(20)) == np.float32(warm.learning_rate)
    assert float(rate(40)) == pytest.approx(warm.learning_rate * 0.5**2, rel=1e-5) and float(rate(60)) == 0


def test_momentum_of_the_options():
    options = ["--learning-rate", 0.03, "--schedule", "polynomial", "--momentum-coupling"]
    rate = optax.linear_schedule(0.03, 0.0, 10)
    ratio = recipe.momentum(resolved(*options, "ratio"), rate)
    assert float(ratio(5)) == pytest.approx(0.9 * 5 / 6, rel=1e-5)
    proportional = recipe.momentum(resolved(*options, "proportional"), rate)
    assert float(proportional(5)) == pytest.approx(0.9 / 2, rel=1e-5)


def test_weights_are_scaled_down_only():
    rng = np.random.default_rng(0)
    params = {"conv": rng.normal(size=(3, 3, 4, 8)), "small": rng.normal(size=(4, 8)) / 10, "bias": np.full(8, 100.0)}
    params = jax.tree.map(lambda x: jnp.asarray(x, jnp.float32), params)
    found = models.rescale(params)
    norm = np.linalg.norm(params["conv"].ravel())
    assert norm > np.sqrt(2 * 8)
    np.testing.assert_allclose(found["conv"], params["conv"] * np.sqrt(2 * 8) / (norm + 1e-9), rtol=1e-5)
    for name in ("small", "bias"):
        np.testing.assert_array_equal(found[name], params[name])


# -- the network -------------------------------------------------------------------------------------------------------

# Parameter counts of the published networks. ResNet-20 has 1x1 convolutions in its two strided shortcuts. The
# transformers have fixed positions and no class token.
SIZES = {
    "resnet8": 78_042, "resnet20": 272_474, "resnet18": 11_689_512, "resnet34": 21_797_672, "resnet50": 25_557_032,
    "resnet101": 44_549_160, "vit-b16": 86_567_656 - 197 * 768 - 768,
}  # fmt: skip


ALIKE = "resnet34", "resnet101"  # like other networks, except for depth and width


@pytest.mark.parametrize("arch", [pytest.param(a, marks=pytest.mark.slow if a in ALIKE else ()) for a in SIZES])
def test_the_networks_are_the_real_ones(arch):
    size, classes = (32, 10) if arch in ("resnet8", "resnet20") else (224, 1000)
    model = vit.vit_b16(classes, jnp.bfloat16) if arch == "vit-b16" else models.create(arch, classes, "bfloat16")
    image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    logits, variables = jax.eval_shape(lambda x: model.init_with_output(jax.random.key(0), x, train=True), image)
    params = jax.tree.leaves(variables["params"])
    assert sum(leaf.size for leaf in params) == SIZES[arch]
    assert {leaf.dtype.name for leaf in params} == {"float32"}
    assert logits.shape == (1, classes) and logits.dtype == jnp.float32


def test_kfac_finds_all_of_a_transformer():
    model = vit.ViT(10, width=16, depth=1, heads=2, patch=4)
    images = jax.ShapeDtypeStruct((2, 8, 8, 3), jnp.float32)
    variables = jax.eval_shape(lambda x: model.init(jax.random.key(0), x, train=True), images)
    layers = kfac.find_layers(
        lambda p, x: model.apply({"params": p}, x, train=True).sum() ** 2, variables["params"], images
    )
    assert sorted(layer.kind for layer in layers) == ["conv", *["dense"] * 7, *["unitwise"] * 3]


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
    # Apart from the stem, it has ResNet-50's parameters.
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
            # The rescaling keeps kernels at this norm.
            assert np.linalg.norm(leaf) == pytest.approx(np.sqrt(2 * leaf.shape[-1]), rel=0.1)
        elif name == "scale":
            scales.append(np.asarray(leaf))
        else:
            assert not leaf.any()
    scales = np.concatenate(scales)
    assert scales.mean() == pytest.approx(1, abs=0.01) and scales.std() == pytest.approx(0.05, rel=0.1)
    assert model.norm_epsilon == 2e-5


# -- augmentation ------------------------------------------------------------------------------------------------------


def batch_of(n, size=16, classes=5, seed=0):
    rng = np.random.default_rng(seed)
    images = jnp.asarray(rng.normal(size=(n, size, size, 3)), jnp.float32)
    return recipe.Mixed(images, jax.nn.one_hot(rng.integers(0, classes, n), classes))


def test_running_mixup_by_its_definition():
    first, second, third = (batch_of(6, seed=k) for k in range(3))
    zero = jax.tree.map(jnp.zeros_like, first)
    mixed, alpha, shares = zero, 0.6, []
    for step, new in enumerate((first, second, third)):
        keys = recipe.keys(7, step, jnp.arange(6))
        before, mixed = mixed, recipe.running_mixup(keys, jnp.int32(step), alpha, new, mixed)
        if step == 0:
            jax.tree.map(np.testing.assert_array_equal, mixed, first)
            continue
        # Each image has its own share of the new batch, at least a half, and its target has the same share. The rest
        # comes from the previous *mixed* batch.
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
    ones = recipe.Mixed(jnp.ones((n, 1, 1, 1)), jnp.ones((n, 1)))
    zeros = jax.tree.map(jnp.zeros_like, ones)
    keys = recipe.keys(0, 1, jnp.arange(n))
    share = np.sort(np.asarray(recipe.running_mixup(keys, jnp.int32(1), alpha, ones, zeros).images).ravel())
    b = np.random.default_rng(0).beta(alpha, alpha, 200_000)
    expected = np.sort(np.maximum(b, 1 - b))
    distance = np.abs(np.searchsorted(expected, share) / len(expected) - np.arange(n) / n).max()
    assert distance < 1.95 / np.sqrt(n)  # Kolmogorov-Smirnov: fails at most once in a thousand


def test_random_erasing_by_its_definition():
    n, size = 3000, 40
    images = jnp.full((n, size, size, 2), 3.0)
    erased = np.asarray(recipe.erase(recipe.keys(0, 4, jnp.arange(n)), images))
    holes = erased[..., 0] == 0
    np.testing.assert_array_equal(erased == 0, np.broadcast_to(holes[..., None], erased.shape))
    assert (erased[erased != 0] == 3).all()
    hit = holes.any((1, 2))
    assert hit.mean() == pytest.approx(0.5, abs=4 * 0.5 / np.sqrt(n))
    heights, widths = holes.any(2).sum(1)[hit], holes.any(1).sum(1)[hit]
    # Each hole is a rectangle within the image.
    np.testing.assert_array_equal(holes[hit].sum((1, 2)), heights * widths)
    area, aspect = heights * widths / size**2, heights / widths
    assert area.min() > 0.01 and area.max() < 0.27 and area.mean() == pytest.approx(0.135, abs=0.01)
    assert aspect.min() > 0.2 and aspect.max() < 5  # sides are whole pixels
    assert (heights > widths).mean() == pytest.approx(0.5, abs=0.1)
    # Holes occur anywhere in the image, up to its borders.
    places = holes.mean(0)
    assert min(places[0].max(), places[-1].max(), places[:, 0].max(), places[:, -1].max()) > 0
    np.testing.assert_allclose(places, places[::-1], atol=0.03)
    np.testing.assert_allclose(places, places[:, ::-1], atol=0.03)


@pytest.mark.parametrize("erasing", ["none", "own", "in-place"])
def test_what_is_carried_to_the_next_step(erasing):
    new, previous = batch_of(32, seed=0), batch_of(32, seed=1)
    keys = recipe.keys(0, 3, jnp.arange(32))
    seen, carried = recipe.augment(keys, jnp.int32(3), 1.0, erasing, new, previous)
    mixed = recipe.running_mixup(keys, jnp.int32(3), 1.0, new, previous)
    erased = mixed._replace(images=recipe.erase(keys, mixed.images))
    assert (erased.images != mixed.images).any()
    jax.tree.map(np.testing.assert_array_equal, seen, mixed if erasing == "none" else erased)
    jax.tree.map(np.testing.assert_array_equal, carried, erased if erasing == "in-place" else mixed)
    assert recipe.augment(keys, jnp.int32(3), 0.0, erasing, new, ())[1] == ()


def test_random_numbers_depend_on_seed_step_and_image_alone():
    new, previous = batch_of(24), batch_of(24, seed=1)

    def on(count, parts, seed=0, step=2):
        mesh = Mesh(np.array(jax.devices()[:count]), (recipe.AXIS,))
        local = 24 // count // parts

        def local_step(new, previous):
            keys = recipe.keys(seed, jnp.int32(step), recipe.own_indices(count, local, parts))
            return recipe.augment(keys, jnp.int32(step), 1.0, "own", new, previous)[0].images

        mapped = jax.shard_map(local_step, mesh=mesh, in_specs=(SPLIT, SPLIT), out_specs=SPLIT)
        # Put the images into the devices' order, as train.py loads them, and back.
        split = [jax.tree.map(lambda x: checkpoints.in_device_order(x, count, local), b) for b in (new, previous)]
        rows = np.asarray(checkpoints.in_device_order(jnp.arange(24), count, local))
        np.testing.assert_array_equal(rows, loader.own_rows(mesh, 0, local, parts))
        return np.asarray(checkpoints.in_batch_order(jax.jit(mapped)(*split), count, local))

    one = on(1, 1)
    for count, parts in ((4, 1), (2, 3), (1, 4)):
        # Programs for other shapes may round differently.
        np.testing.assert_allclose(on(count, parts), one, atol=1e-6)
    assert (on(1, 1, seed=1) != one).any() and (on(1, 1, step=3) != one).any()


def test_what_is_not_finite_has_a_name():
    trees = {"gradient": {"a": {"kernel": 1, "bias": 2}, "b": 3}, "parameter": {"c": 1}}
    fine = {"gradient": [1, 2, 3], "parameter": [1]}
    assert report.not_finite(1.0, fine, trees) == ""
    bad = {"gradient": [1, np.nan, np.inf], "parameter": [np.inf]}
    assert report.not_finite(np.nan, bad, trees) == (
        "the loss and the gradient a/kernel (and 1 more) and the parameter c"
    )
    values = report.squares({"a": jnp.array([3.0, 4.0]), "b": jnp.array(jnp.nan)})
    assert values[0] == 25 and np.isnan(values[1])


# -- output and figures ------------------------------------------------------------------------------------------------


def test_losses_far_apart_are_on_a_log_scale_and_none_is_hidden(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr("matplotlib.figure.Figure.savefig", lambda figure, *args, **rest: seen.append(figure.axes))
    losses = [101.0, 40.0, *np.linspace(7, 2, 98)]
    records = [{"step": k, "loss": x, "val_loss": 2 * x, "accuracy": k / 99} for k, x in enumerate(losses)]
    for some in (records, records[2:]):
        report.plot({"a": some}, tmp_path / "a.png", "")
        axes = seen.pop()
        assert axes[0].get_yscale() == ("log" if some is records else "linear")
        for line in axes[0].lines:
            assert axes[0].get_ylim()[0] < min(line.get_ydata()) and max(line.get_ydata()) < axes[0].get_ylim()[1]
        assert axes[3].get_ylim() == (0, 100)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="this system has no full disk to write to")
def test_metrics_on_a_full_disk_are_one_sentence(tmp_path, monkeypatch):
    metrics = report.Metrics(tmp_path, 0)
    metrics._file.close()
    metrics._file = open("/dev/full", "a", buffering=1)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setattr(processes.signal, "signal", lambda *args: None)
    with pytest.raises(SystemExit, match="error: a file cannot be read or written: No space left on device; correct"):
        processes.script(lambda args: metrics.write({"step": 1}))
    # Closing would write the unwritten line again.
    with contextlib.suppress(OSError):
        metrics._file.close()


def test_what_is_saved_can_be_read_from_anywhere(tmp_path, monkeypatch):
    (tmp_path / "images").mkdir()
    monkeypatch.chdir(tmp_path)
    config = resolved("--data-dir", "images", "--stop-after", 3, "--devices", 2)
    cfg.save(config, {"classes": 2}, tmp_path)
    again, found = cfg.load(tmp_path)
    assert again.data_dir == str(tmp_path / "images") and found == {"classes": 2}
    assert again.stop_after is None and again.devices is None and again.learning_rate == config.learning_rate
    cfg.same_run(config, again)
    for text in ("[]", "{", "", '{"found": {}}', (tmp_path / "config.json").read_text()[:200]):
        (tmp_path / "config.json").write_text(text)
        with pytest.raises(cfg.UserError, match=r"config.json is not a configuration .*; remove "):
            cfg.load(tmp_path)


@pytest.mark.parametrize("damage", [b'{"step": 3, "lo', b"\xff\xfe\x00", b"[1]", b'{"loss": 1}', b'{"step": "3"}'])
def test_a_damaged_line_of_the_metrics_is_kept_aside_and_loses_no_other(tmp_path, capsys, damage):
    path = tmp_path / "metrics.jsonl"
    lines = [b'{"step": %d, "loss": 1.0}' % step for step in range(1, 21)]
    path.write_bytes(b"\n".join([*lines[:4], damage, *lines[4:], damage]) + b"\n")
    metrics = report.Metrics(tmp_path, 20)
    metrics.close()
    assert path.read_bytes() == b"\n".join(lines) + b"\n"
    assert (tmp_path / "metrics.damaged").read_bytes() == damage + b"\n" + damage + b"\n"
    assert f"2 damaged line(s) of {path} are set aside" in capsys.readouterr().out
    # The second time there is no damage, and no message.
    report.Metrics(tmp_path, 20).close()
    assert (tmp_path / "metrics.damaged").read_bytes().count(damage) == 2 and not capsys.readouterr().out


def test_a_clock_that_goes_back_changes_no_time_of_training(tmp_path, monkeypatch):
    monkeypatch.setattr(report.time, "time", lambda: 0.0)
    metrics = report.Metrics(tmp_path, 0)
    for step in (1, 2):
        metrics.validated(step, {"val_accuracy": 0.5}, 0)
    metrics.close()
    again = report.Metrics(tmp_path, 2)
    again.validated(3, {"val_accuracy": 0.5}, 0)
    again.close()
    seconds = [json.loads(line)["seconds"] for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert len(seconds) == 3 and seconds == sorted(seconds) and seconds[0] >= 0


def test_the_page_on_several_runs(tmp_path):
    from PIL import Image

    for k, name in enumerate(("first", "second")):
        folder = tmp_path / name
        folder.mkdir()
        metrics = report.Metrics(folder, 0, 10.0)
        for step in range(1, 31):
            metrics.write(
                {"step": step, "seconds": (k + 1) * step, "loss": 2 / step + k, "accuracy": step / (40 + 20 * k)}
            )
            if step % 10 == 0:
                metrics.write({"step": step, "seconds": (k + 1) * step, "val_loss": 2 / step + k,
                               "val_accuracy": step / (35 + 20 * k)})  # fmt: skip
        metrics.close()
    report.main([str(tmp_path / "first"), str(tmp_path / "second"), "--output", str(tmp_path / "page.png")])
    image = np.asarray(Image.open(tmp_path / "page.png").convert("RGB")).astype(int)
    assert image.shape[1] > 1000
    # Each of the six parts shows both runs, in their own colours.
    rows, columns = (
        np.array_split(np.arange(image.shape[0] * 85 // 100), 2),
        np.array_split(np.arange(image.shape[1]), 3),
    )
    for color in ((31, 119, 180), (255, 127, 14)):
        near = np.abs(image - color).sum(-1) < 40
        assert all(near[np.ix_(r, c)].sum() > 20 for r in rows for c in columns)
    with pytest.raises(cfg.UserError, match="no run"):
        report.main([str(tmp_path)])
