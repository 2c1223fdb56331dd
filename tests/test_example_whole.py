"""`examples/imagenet`: the whole recipe on a folder of odd JPEGs through worker processes, killed and resumed.

Slow, for each run compiles its steps anew.
"""

import io
import os
import random
import re
import signal

import jax
import numpy as np
import pytest
from PIL import Image

from runs import finish, records, start, state, train

CLASSES, TRAIN, VAL = ("bird", "cat", "dog"), 80, 10
STEPS = 14

pytestmark = [pytest.mark.examples, pytest.mark.slow]


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """240 images for training and 30 for validation, of all kinds and sizes; of each class four or one broken."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    # More pixels than are decoded, in a file of little.
    Image.new("L", (10_000, 9_000)).save(file, "JPEG", quality=1)
    enormous = file.getvalue()
    for split, count in (("train", TRAIN), ("val", VAL)):
        for k, name in enumerate(CLASSES):
            (folder / split / name).mkdir(parents=True)
            for i in range(count):
                content = odd_jpeg(rng, k, i)
                match i:
                    case 4:
                        content = b""
                    case 15:  # cut short
                        content = content[: len(content) // 2]
                    case 26:
                        content = b"no image"
                    case 37:
                        content = enormous
                (folder / split / name / f"{i:03d}.JPEG").write_bytes(content)
    return folder


def odd_jpeg(rng, label, i):
    """Noise in the colour of its class, in one of eight kinds."""
    height, width = rng.integers(20, 90, 2)
    pixels = rng.integers(0, 120, (height, width, 3), np.uint8)
    pixels[..., label] += 100
    image = Image.fromarray(pixels)
    options = {}
    match i % 8:
        case 1:
            image = image.convert("L")
        case 2:
            image = image.convert("CMYK")
        case 3:
            options["exif"] = Image.Exif()
            options["exif"][0x0112] = 6  # rotated
        case 4:
            options["progressive"] = True
        case 5:
            image = image.resize((1500, 1000))
        case 6:
            image = image.resize((300, 2))
        case 7:
            image = image.resize((1, 1))
    file = io.BytesIO()
    image.save(file, "PNG" if i % 16 == 8 else "JPEG", **options)
    return file.getvalue()


def recipe(images):
    return ["--config", "bs128k", "--data-dir", images, "--global-batch", "auto", "--arch", "digits", "--width", 8,
            "--image-size", 32, "--log-every", 1]  # fmt: skip


def test_odd_jpegs_by_the_recipe_killed_and_resumed_are_the_same_bit_for_bit(images, tmp_path):
    options = [*recipe(images), "--workers", 2, "--steps", STEPS, "--output"]
    whole = train(*options, tmp_path / "whole", cached=False).stdout
    assert "10 steps an epoch" in whole and f"done: {STEPS} steps" in whole
    assert "24: 1 device(s) in 1 process(es), 1 micro-batch(es) of 24 images" in whole

    after = random.randrange(1, STEPS - 2)
    print(f"SIGTERM after step {after}")
    run = start(*options, tmp_path / "parts")
    for line in run.stdout:
        if re.match(rf"step +{after}/", line):
            # As a batch system does, to the workers too.
            os.killpg(run.pid, signal.SIGTERM)
            break
    stopped = int(re.search(rf"stopped by SIGTERM at step (\d+) of {STEPS}", finish(run).stdout).group(1))
    assert after <= stopped < STEPS
    before = (tmp_path / "parts/metrics.jsonl").read_text()
    assert records(tmp_path / "parts")[-1]["step"] == stopped
    resumed = train("--resume", "--output", tmp_path / "parts", "--workers", 1).stdout
    assert f"at step {stopped} of {STEPS}" in resumed

    assert (tmp_path / "parts/metrics.jsonl").read_text().startswith(before)
    assert records(tmp_path / "parts") == records(tmp_path / "whole")
    one, two = (state(tmp_path / name, STEPS) for name in ("whole", "parts"))
    assert jax.tree.structure(one) == jax.tree.structure(two)
    jax.tree.map(np.testing.assert_array_equal, one, two)

    # It was the recipe, on all images that can be read.
    assert one["mixed"]["images"].shape == (24, 32, 32, 3)
    assert ((one["mixed"]["targets"] > 0).sum(1) > 1).mean() > 0.5
    assert (one["mixed"]["images"] == 0).mean() > 0.01
    last = next(r for r in reversed(records(tmp_path / "whole")) if "val_loss" in r)
    right = last["val_accuracy"] * len(CLASSES) * (VAL - 1)
    assert right == pytest.approx(round(right))
    assert 3 < last["broken_images"] <= 5 * len(CLASSES)


def test_two_processes_follow_the_recipe_as_one_does(images, tmp_path):
    """On as many devices in all; up to rounding, which a few steps do not amplify much."""
    options = [*recipe(images), "--workers", 1, "--stop-after", 4, "--output"]
    train(*options, tmp_path / "one", devices=2)
    train("--devices", 1, "--", *options, tmp_path / "two", name="launch/two_processes.py")
    one, two = (records(tmp_path / name) for name in ("one", "two"))
    assert [r["step"] for r in one] == [r["step"] for r in two] == [1, 2, 3, 4]
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-3)
    one, two = (state(tmp_path / name, 4) for name in ("one", "two"))
    for name in ("images", "targets"):
        # Random numbers and the order of the batch do not depend on processes at all.
        np.testing.assert_array_equal(one["mixed"][name], two["mixed"][name])
    for a, b in zip(jax.tree.leaves(one["params"]), jax.tree.leaves(two["params"]), strict=True):
        assert np.linalg.norm(a - b) <= 1e-3 * np.linalg.norm(b)
