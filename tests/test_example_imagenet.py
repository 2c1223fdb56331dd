"""`examples/imagenet`: the script as a user runs it, on tiny settings."""

import json
import os
import pickle
import signal
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from PIL import Image

from runs import finish, records, refused, start, state, train

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[1] / "examples" / "imagenet"
OPTIMIZERS = ["kfac", "sgd", "lars", "lamb", "adamw"]
# Runs of different lengths share a program if they are parts of one long run.
SGD = ["--optimizer", "sgd", "--width", 8, "--steps", 2000]


def leaves(folder, step):
    return jax.tree.leaves(state(folder, step))


def contents(folder):
    return {path: path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.mark.parametrize(
    "optimizer",
    [o if o in ("kfac", "lars") else pytest.param(o, marks=pytest.mark.slow) for o in OPTIMIZERS],
)
def test_resumed_run_is_bit_identical(tmp_path, optimizer):
    """Of K-FAC with its statistics by their change and from parts of the batch."""
    steps, stop = (30, 16) if optimizer == "kfac" else (13, 6)
    options = ["--optimizer", optimizer, "--width", 8, "--steps", steps]
    if optimizer == "kfac":
        options += ["--subsample", 2, "--factor-every", "adaptive", "--statistics-threshold", 2.0]
    whole = train(*options, "--output", tmp_path / "whole")
    train(*options, "--output", tmp_path / "parts", "--stop-after", stop)
    assert {r["step"] for r in records(tmp_path / "parts")} == set(range(1, stop + 1))
    again = train("--resume", "--output", tmp_path / "parts")
    assert "resuming" in again.stdout
    assert f"at step {stop} of {steps}" in again.stdout
    assert records(tmp_path / "whole") == records(tmp_path / "parts")
    for a, b in zip(leaves(tmp_path / "whole", steps), leaves(tmp_path / "parts", steps), strict=True):
        np.testing.assert_array_equal(a, b)
    if optimizer == "kfac":
        found = [r["kfac/with_statistics"] for r in records(tmp_path / "whole") if "loss" in r]
        # Of each of the first ten, then less and less often.
        assert found[:10] == [1.0] * 10 and 10 < sum(found) < 20

    # What a run leaves, and what it says.
    assert all(np.isfinite(r["loss"]) for r in records(tmp_path / "whole") if "loss" in r)
    image = Image.open(tmp_path / "whole" / "curves.png")
    assert image.width > 500
    assert len(np.unique(np.asarray(image.convert("L")))) > 10
    lines = whole.stdout.splitlines()
    assert any("compiled step" in line for line in lines)
    assert any("steps/s" in line and "left" in line and "val accuracy" in line for line in lines)
    assert lines[-1].startswith(f"done: {steps} steps") and "validation accuracy" in lines[-1]
    saved = json.loads((tmp_path / "whole" / "config.json").read_text())
    assert saved["optim"]["optimizer"] == optimizer and saved["optim"]["learning_rate"] > 0


def test_sigterm_saves_and_resumes(tmp_path):
    run = start(*SGD, "--output", tmp_path / "a")
    for line in run.stdout:
        if line.startswith("step"):
            run.send_signal(signal.SIGTERM)
            break
    rest = finish(run).stdout
    assert "stopped by SIGTERM at step" in rest
    step = int(rest.split("at step ")[1].split()[0])
    assert records(tmp_path / "a")[-1]["step"] == step
    again = train("--resume", "--output", tmp_path / "a", "--stop-after", step + 1)
    assert f"at step {step} of 2000" in again.stdout


def test_metrics_after_the_last_checkpoint_are_made_again(tmp_path):
    options = [*SGD, "--checkpoint-every", 2, "--stop-after"]
    train(*options, 6, "--output", tmp_path / "a")
    train(*options, 4, "--output", tmp_path / "b")
    # As if the run had been killed: steps after the checkpoint, and a line cut short.
    with (tmp_path / "b" / "metrics.jsonl").open("a") as file:
        file.write('{"step": 5, "loss": 1.0}\n{"step": 6, "lo')
    train("--resume", "--output", tmp_path / "b", "--stop-after", 6)
    assert records(tmp_path / "a") == records(tmp_path / "b")
    sentence = refused("--resume", "--output", tmp_path / "b", "--stop-after", 3)
    assert "--stop-after 3" in sentence and "step 6" in sentence
    assert records(tmp_path / "a") == records(tmp_path / "b")


def test_factor_every_and_inverse_every(tmp_path):
    options = ["--steps", 16, "--width", 8, "--factor-every", 3, "--inverse-every", 3]
    assert "step, cheap step" in train(*options, "--output", tmp_path / "a").stdout
    found = [r for r in records(tmp_path / "a") if "loss" in r]
    assert all(np.isfinite(r["loss"]) for r in found)
    # The first ten steps collect statistics in any case, and refresh all inverses.
    with_statistics = [k < 10 or k % 3 == 0 for k in range(16)]
    assert [r["kfac/with_statistics"] for r in found] == with_statistics
    for before, now, fresh in zip(found, found[1:], with_statistics[1:], strict=False):
        assert (now["kfac/statistics_change"] != before["kfac/statistics_change"]) == fresh
    ages = [r["kfac/inverse_age"] for r in found]
    assert ages[:10] == [0] * 10 and max(ages) > 0


def test_micro_batches(tmp_path):
    options = ["--steps", 2, "--width", 8, "--batch-size", 30, "--optimizer", "sgd", "--output"]
    train(*options, tmp_path / "one")
    train(*options, tmp_path / "three", "--local-batch", 10)
    one, three = (records(tmp_path / x)[0] for x in ("one", "three"))
    # Batch norm sees parts of ten images, so the numbers are close but not the same.
    assert one["loss"] == pytest.approx(three["loss"], rel=0.2)
    assert one["loss"] != three["loss"]


def test_bfloat16_keeps_parameters_in_float32(tmp_path):
    train("--steps", 3, "--width", 8, "--dtype", "bfloat16", "--output", tmp_path / "a")
    dtypes = {leaf.dtype.name for leaf in leaves(tmp_path / "a", 3)}
    assert {name for name in dtypes if "float" in name} == {"float32"}


@pytest.mark.slow
@pytest.mark.parametrize("arch", ["resnet20", "resnet18"])
def test_architectures_on_noise(tmp_path, arch):
    train(
        "--data", "synthetic", "--synthetic-images", 16, "--synthetic-classes", 5, "--image-size",
        32, "--batch-size", 8, "--arch", arch, "--optimizer", "sgd", "--steps", 1, "--output",
        tmp_path / "a",
    )  # fmt: skip


# The numbers of parameters of the published networks; ResNet-20 with 1x1 convolutions in its two strided shortcuts.
SIZES = {("resnet50", 224, 1000): 25_557_032, ("resnet18", 224, 1000): 11_689_512, ("resnet20", 32, 10): 272_474}


@pytest.mark.parametrize(("arch", "size", "classes"), SIZES)
def test_the_networks_are_the_real_ones(monkeypatch, arch, size, classes):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import models

    model = models.create(arch, classes, "bfloat16")
    image = jax.ShapeDtypeStruct((1, size, size, 3), jnp.float32)
    key = jax.random.key(0)
    logits, variables = jax.eval_shape(lambda x: model.init_with_output(key, x, train=True), image)
    params = jax.tree.leaves(variables["params"])
    assert sum(leaf.size for leaf in params) == SIZES[arch, size, classes]
    assert {leaf.dtype.name for leaf in params} == {"float32"}
    assert logits.shape == (1, classes) and logits.dtype == jnp.float32


def test_help():
    done = train("--help")
    for option in ("--optimizer", "--data-dir", "--local-batch", "--damping", "--resume"):
        assert option in done.stdout
    assert "{kfac,sgd,lars,lamb,adamw}" in done.stdout


# Bad input


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--optimizer", "newton"], ["newton", "--optimizer", "lamb"]),
        (["--data", "mnist"], ["mnist", "cifar10"]),
        (["--learning-rate", "fast"], ["fast", "--learning-rate"]),
        (["--no-such-option", "1"], ["--no-such-option"]),
        (["--learning-rate", "-1"], ["--learning-rate", "-1", "greater than 0"]),
        (["--damping", "nan"], ["--damping", "nan"]),
        (["--momentum", "1"], ["--momentum", "1", "0.9999"]),
        (["--batch-size", "2000"], ["2000", "1500"]),
        (["--devices", "1", "--local-batch", "7"], ["144", "7"]),
        (["--devices", "3", "--global-batch", "100"], ["100", "3 devices"]),
        (["--devices", "99"], ["99", "JAX_NUM_CPU_DEVICES"]),
        (["--process-id", "1"], ["--process-id", "--coordinator"]),
        (
            ["--coordinator", "a:1", "--num-processes", "2", "--process-id", "2"],
            ["--process-id 2", "--num-processes 2"],
        ),
        (["--epochs", "1", "--steps", "1"], ["--epochs", "--steps"]),
        (["--profile", "151:160"], ["151:160", "150"]),
        (["--image-size", "16"], ["--image-size", "8x8"]),
        (["--data", "folder"], ["--data-dir"]),
        (["--data-dir", "nowhere"], ["nowhere", "does not exist"]),
        (["--data", "digits", "--data-dir", "."], ["digits", "--data-dir"]),
        (["--data", "cifar10", "--data-dir", "."], ["CIFAR-10", "get_cifar10.py"]),
        (["--resume"], ["--resume", "runs/"]),
        (["--resume", "--output", "nowhere"], ["nowhere", "config.json"]),
    ],
)
def test_bad_options_are_refused(tmp_path, monkeypatch, args, words):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    monkeypatch.chdir(tmp_path)
    import train

    with pytest.raises(train.UserError) as caught:
        train.main(args)
    assert all(word in str(caught.value) for word in words), caught.value
    assert not any(tmp_path.iterdir())


def test_refusal_is_one_sentence(tmp_path):
    assert "newton" in refused("--optimizer", "newton", cwd=tmp_path)
    assert not any(tmp_path.iterdir())


def test_earlier_results_are_not_touched(tmp_path):
    options = [*SGD, "--stop-after", 2, "--output", tmp_path / "a"]
    train(*options)
    before = contents(tmp_path)
    assert "in use" in refused(*options)
    sentence = refused("--resume", "--output", tmp_path / "a", "--optimizer", "lars")
    assert all(word in sentence for word in ("--optimizer", "lars", "sgd")), sentence
    sentence = refused("--resume", "--output", tmp_path / "a", "--batch-size", 100)
    assert all(word in sentence for word in ("--global-batch", "100", "144")), sentence
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused("--output", tmp_path / "file")
    (tmp_path / "file").unlink()
    assert contents(tmp_path) == before


# Folders of images


def make_images(folder, classes=("cat", "dog"), train=12, val=5):
    """JPEGs of odd shapes and modes, each class in a colour of its own."""
    rng = np.random.default_rng(0)
    for split, count in (("train", train), ("val", val)):
        for i, name in enumerate(classes):
            (folder / split / name).mkdir(parents=True)
            for j in range(count):
                size = (int(rng.integers(20, 90)), int(rng.integers(20, 90)), 3)
                pixels = rng.integers(0, 60, size, np.uint8)
                pixels[..., i % 3] += 150
                mode = ("RGB", "L", "CMYK")[j % 3]
                ending = ("JPEG", "jpg", "JPG")[j % 3]
                image = Image.fromarray(pixels).convert(mode)
                image.save(folder / split / name / f"{j:02d}.{ending}", "JPEG")


TINY = ["--arch", "digits", "--image-size", 16, "--batch-size", 6, "--optimizer", "sgd",
        "--width", 8, "--learning-rate", 0.1]  # fmt: skip


def test_folder_with_broken_images_trains(tmp_path):
    make_images(tmp_path / "data")
    good = (tmp_path / "data/train/cat/00.JPEG").read_bytes()
    (tmp_path / "data/train/cat/truncated.JPEG").write_bytes(good[: len(good) // 2])
    (tmp_path / "data/val/dog/text.JPEG").write_text("not an image")
    (tmp_path / "data/train/dog/notes.txt").write_text("no image, by its ending")
    options = ["--data-dir", tmp_path / "data", *TINY, "--epochs", 3]
    done = train(*options, "--output", tmp_path / "whole")
    assert "25 training and 11 validation images" in done.stdout
    assert "notes.txt" in done.stdout
    for name in ("truncated.JPEG", "text.JPEG"):
        assert done.stderr.count(name) == 1, done.stderr
    assert "2 broken images" in done.stdout.splitlines()[-1]
    assert [r["broken_images"] for r in records(tmp_path / "whole") if "val_loss" in r][-1] == 2
    # The broken one does not count: ten images, not eleven.
    accuracy = [r["val_accuracy"] for r in records(tmp_path / "whole") if "val_loss" in r][-1]
    assert accuracy * 10 == pytest.approx(round(accuracy * 10))

    # The order of images and their crops do not depend on threads or on being stopped.
    train(*options, "--output", tmp_path / "parts", "--stop-after", 5, "--workers", 1)
    train("--resume", "--output", tmp_path / "parts", "--workers", 3)
    assert records(tmp_path / "whole") == records(tmp_path / "parts")


def test_changed_data_are_refused_on_resume(tmp_path):
    make_images(tmp_path / "data")
    train("--data-dir", tmp_path / "data", *TINY, "--steps", 2, "--output", tmp_path / "a")
    (tmp_path / "data/train/cat/00.JPEG").unlink()
    assert "23" in refused("--resume", "--output", tmp_path / "a")


def test_bad_folders_are_refused(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import train

    data = tmp_path / "data"
    data.mkdir()

    def sentence(*more):
        args = ["--data-dir", data, *TINY, "--devices", 1, *more, "--output", tmp_path / "out"]
        with pytest.raises(train.UserError) as caught:
            train.main(list(map(str, args)))
        assert not (tmp_path / "out").exists()
        return str(caught.value)

    assert "train" in sentence()
    (data / "train").mkdir()
    assert "is empty" in sentence()
    (data / "train" / "cat").mkdir()
    assert "one class only" in sentence()
    (data / "train" / "dog").mkdir()
    assert str(data / "train" / "cat") in sentence()
    for path in (data / "train" / "cat", data / "train" / "dog"):
        path.rmdir()
    (data / "train").rmdir()
    make_images(data)
    assert "24 training images" in sentence("--batch-size", 25)
    (data / "val" / "bird").mkdir()
    assert "bird" in sentence()
    (data / "val" / "bird").rmdir()
    for path in (data / "val" / "dog").iterdir():
        path.rename(path.with_suffix(".txt"))
    assert str(data / "val" / "dog") in sentence()


def test_folder_of_broken_images_is_refused(tmp_path):
    make_images(tmp_path / "data")
    for path in (tmp_path / "data" / "train").rglob("*.*"):
        path.write_bytes(b"broken")
    assert "none of the 24 files" in refused("--data-dir", tmp_path / "data", *TINY, "--output", tmp_path / "a")


# CIFAR-10


def cifar_arrays():
    rng = np.random.default_rng(0)
    images = rng.integers(0, 256, (6, 8, 32, 32, 3), np.uint8)
    return images, rng.integers(0, 10, (6, 8))


def write_pickles(folder):
    images, labels = cifar_arrays()
    folder = folder / "cifar-10-batches-py"
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}" for i in range(1, 6)] + ["test_batch"]
    for name, rows, these in zip(names, images, labels, strict=True):
        planes = rows.transpose(0, 3, 1, 2).reshape(8, 3072)
        text = {b"data": planes, b"labels": these.tolist(), b"batch_label": b"x"}
        (folder / name).write_bytes(pickle.dumps(text, protocol=2))


def write_binary(folder):
    images, labels = cifar_arrays()
    folder = folder / "cifar-10-batches-bin"
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}.bin" for i in range(1, 6)] + ["test_batch.bin"]
    for name, rows, these in zip(names, images, labels, strict=True):
        planes = rows.transpose(0, 3, 1, 2).reshape(8, 3072)
        text = np.concatenate([these[:, None].astype(np.uint8), planes], axis=1)
        (folder / name).write_bytes(text.tobytes())


def write_sheets(folder):
    images, labels = cifar_arrays()
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}.png" for i in range(1, 6)] + ["test_batch.png"]
    for name, rows in zip(names, images, strict=True):
        Image.fromarray(rows.reshape(8, 1024, 3)).save(folder / name)
    (folder / "train_lables.json").write_text(json.dumps(labels[:5].ravel().tolist()))
    (folder / "test_lables.json").write_text(json.dumps(labels[5].tolist()))


@pytest.fixture
def data_module(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))
    import data

    return data


@pytest.mark.parametrize("write", [write_pickles, write_binary, write_sheets])
def test_cifar10_layouts(tmp_path, data_module, write):
    write(tmp_path / "cifar")
    dataset = data_module.read_cifar10(tmp_path / "cifar")
    images, labels = cifar_arrays()
    train, val = (split.load(np.arange(len(split)), None) for split in (dataset.train, dataset.val))
    np.testing.assert_array_equal(train.images, images[:5].reshape(-1, 32, 32, 3))
    np.testing.assert_array_equal(train.labels, labels[:5].ravel())
    np.testing.assert_array_equal(val.images, images[5])
    np.testing.assert_array_equal(val.labels, labels[5])


def test_cifar10_from_the_command_line(tmp_path):
    write_sheets(tmp_path / "cifar")
    options = ["--data", "cifar10", "--data-dir", tmp_path / "cifar", "--arch", "digits",
               "--batch-size", 10, "--optimizer", "sgd", "--steps", 2]  # fmt: skip
    done = train(*options, "--output", tmp_path / "a")
    assert "40 training and 8 validation images of 32x32x3" in done.stdout
    (tmp_path / "cifar" / "test_batch.png").write_bytes(b"broken")
    sentence = refused(*options, "--output", tmp_path / "b")
    assert "test_batch.png" in sentence
    assert not (tmp_path / "b").exists()


def test_damaged_cifar10_is_refused(tmp_path, data_module):
    def sentence(folder):
        with pytest.raises(data_module.UserError) as caught:
            data_module.read_cifar10(folder)
        return str(caught.value)

    write_pickles(tmp_path / "a")
    path = tmp_path / "a/cifar-10-batches-py/data_batch_3"
    path.write_bytes(path.read_bytes()[:500])
    assert "data_batch_3 is not a CIFAR-10 pickle" in sentence(tmp_path / "a")
    path.write_bytes(pickle.dumps(os.getcwd))
    assert "data_batch_3 is not a CIFAR-10 pickle" in sentence(tmp_path / "a")

    write_binary(tmp_path / "b")
    path = tmp_path / "b/cifar-10-batches-bin/data_batch_2.bin"
    path.write_bytes(path.read_bytes()[:500])
    assert "500 bytes" in sentence(tmp_path / "b")

    write_sheets(tmp_path / "c")
    (tmp_path / "c/train_lables.json").write_text("[1, 2]")
    assert "40 images but 2 labels" in sentence(tmp_path / "c")
    (tmp_path / "c/train_lables.json").write_text(json.dumps([10] * 40))
    assert "labels from 0 to 9" in sentence(tmp_path / "c")
    (tmp_path / "c/data_batch_4.png").unlink()
    assert "data_batch_4.png" in sentence(tmp_path / "c")


def test_get_cifar10_refuses_what_is_not_the_archive(tmp_path):
    (tmp_path / "archive.tgz").write_bytes(b"something else")
    options = ["--data-dir", tmp_path / "cifar", "--archive", tmp_path / "archive.tgz"]
    assert "sha256" in refused(*options, name="get_cifar10.py")
    assert not (tmp_path / "cifar").exists()
    write_sheets(tmp_path / "cifar")
    # Complete by its names, but not by its counts.
    assert "40 images" in refused(*options, name="get_cifar10.py")


# What is promised


def test_splits_of_the_digits_do_not_overlap(data_module):
    from config import Data

    dataset = data_module.load(Data("digits", image_size=8, workers=1))
    assert (len(dataset.train), len(dataset.val)) == (1500, 297)
    histogram = np.bincount(dataset.val.labels)
    assert histogram.min() >= 28 and histogram.max() <= 31
    together = np.concatenate([dataset.train.images, dataset.val.images]).reshape(1797, 64)
    assert len(np.unique(together, axis=0)) == 1797


def test_every_image_once_an_epoch(data_module):
    n = 10
    images = np.arange(n, dtype=np.uint8).reshape(n, 1, 1, 1)
    split = data_module.ArraySplit(images, np.arange(n))
    batches = list(data_module.train_batches(split, 5, 0, 0, 4))
    first, second = (np.concatenate([b.labels for b in batches[i : i + 2]]) for i in (0, 2))
    assert sorted(first) == sorted(second) == list(range(n))
    assert first.tolist() != second.tolist()
    # Any step can be the first.
    again = list(data_module.train_batches(split, 5, 0, 3, 4))
    np.testing.assert_array_equal(again[0].labels, batches[3].labels)
    # The last batch of a validation is filled up with images that do not count.
    batches = list(data_module.val_batches(split, 4))
    assert [b.weights.sum() for b in batches] == [4, 4, 2]


@pytest.mark.slow
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_the_main_job(tmp_path, optimizer):
    train("--optimizer", optimizer, "--output", tmp_path / "a")
    last = [r for r in records(tmp_path / "a") if "val_accuracy" in r][-1]
    assert last["val_accuracy"] >= 0.97
