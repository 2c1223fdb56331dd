"""Test the input of `examples/imagenet`: batches from threads, I/O errors, and the options that measure the input."""

import errno
import itertools
import os
import threading
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[2] / "examples" / "imagenet"
SIZE = 8
BROKEN = (3, 17, 18)


@pytest.fixture(autouse=True)
def example(monkeypatch):
    monkeypatch.syspath_prepend(str(EXAMPLE))


@pytest.fixture(scope="module")
def images(tmp_path_factory):
    """Write fifty files, three of them broken. An image's label is its number."""
    folder = tmp_path_factory.mktemp("images")
    rng = np.random.default_rng(0)
    for i in range(50):
        image = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8)).convert(("RGB", "L", "CMYK")[i % 3])
        image.save(folder / f"{i:02d}.jpg")
        if i in BROKEN:
            (folder / f"{i:02d}.jpg").write_bytes(b"broken")
    return folder


@pytest.fixture
def split(images):
    from data import Decoder, ImageSplit
    from records import Files

    def make(workers, files=None):
        names = sorted(path.name for path in images.iterdir())
        return ImageSplit(files or Files(images, names, range(50)), Decoder(SIZE), workers)

    yield make
    assert not [thread for thread in threading.enumerate() if "ThreadPool" in thread.name]


def training(split, size=20, start=0, stop=4, rows=None, seed=5):
    import batches as loader

    return loader.train_batches(split, size, seed, start, stop, rows)


def assert_equal(found, expected):
    found, expected = list(found), list(expected)
    assert len(found) == len(expected)
    for a, b in zip(found, expected, strict=True):
        for x, y in zip(a, b, strict=True):
            np.testing.assert_array_equal(x, y)


def test_workers_resuming_and_processes_change_nothing(split):
    whole = list(training(split(1)))
    assert [batch.images.shape for batch in whole] == [(20, SIZE, SIZE, 3)] * 4
    assert_equal(training(split(7)), whole)
    assert_equal(training(split(2), start=3), whole[3:])
    for rows in (np.arange(0, 20, 2), np.array([19, 4, 5])):
        for got, all_rows in zip(training(split(3), rows=rows), whole, strict=True):
            np.testing.assert_array_equal(got.images, all_rows.images[rows])
            np.testing.assert_array_equal(got.labels, all_rows.labels[rows])
    # Another step or seed crops the same image differently, and changes the order of images.
    other = list(training(split(3), seed=6))
    assert any(a.labels.tolist() != b.labels.tolist() for a, b in zip(whole, other, strict=True))


def test_every_image_once_an_epoch(split, images):
    from records import Files

    # Leave out the broken files, and use two processes.
    names = [path.name for path in sorted(images.iterdir()) if int(path.stem) not in BROKEN]
    files = Files(images, names, [int(name[:2]) for name in names])
    shares = [(2, np.arange(12)), (1, np.arange(12, 23))]
    labels = np.array([
        np.concatenate(together)
        for together in zip(*(
            [batch.labels for batch in training(split(workers, files), 23, 0, 6, rows)] for workers, rows in shares
        ), strict=True)
    ])  # fmt: skip
    epochs = labels.reshape(3, 46)
    # An epoch of 47 images has two batches of 23. It leaves out an image, which differs between epochs.
    assert all(len(set(epoch)) == 46 for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    assert not any(set(epoch) & set(BROKEN) for epoch in epochs)


@pytest.mark.parametrize("workers", [1, 5])
def test_broken_files_are_replaced_by_any_other_and_named(split, images, workers):
    from batches import epoch_order
    from data import Decoder

    decode, seen, instead = Decoder(SIZE), set(), []
    for step, batch in enumerate(training(split(workers), stop=20)):
        order = epoch_order(5, step // 2, 50)[step % 2 * 20 :][:20]
        assert batch.weights.tolist() == [1] * 20
        for at, i in enumerate(order):
            label = int(batch.labels[at])
            assert label == i if i not in BROKEN else label not in BROKEN
            instead += [label] * (i in BROKEN)
            if i in BROKEN or at == 0:
                pixels = decode((images / f"{label:02d}.jpg").read_bytes(), label, (5, step))
                np.testing.assert_array_equal(batch.images[at], pixels)
        assert {str(images / f"{i:02d}.jpg") for i in order if i in BROKEN} <= set(batch.broken)
        seen |= set(batch.broken)
    assert len(seen) == 3
    # Replacements come from all classes, and are not always the next image.
    assert len(instead) > 15 and len(set(instead)) > 10


def test_the_system_is_asked_again_and_its_errors_are_no_broken_images(split, images, monkeypatch):
    """Check that errors of the file system are not treated as broken images.

    A stale file system once turned three of five classes into images of a fourth.
    """
    import builtins

    import records

    failures, opened, tries = {}, builtins.open, []

    def fake(path, *args, **kwargs):
        name = os.path.basename(path)
        if failures.get(name, 0):
            failures[name] -= 1
            tries.append(name)
            raise OSError(code, os.strerror(code), path)
        return opened(path, *args, **kwargs)

    monkeypatch.setattr("files.RETRY_AFTER", (0.0, 0.0))
    monkeypatch.setattr("files.open", fake, raising=False)
    expected = list(training(split(3)))
    for code in (errno.EIO, errno.ESTALE):
        # Errors that pass leave no trace.
        failures.update({f"{i:02d}.jpg": 2 for i in range(50)})
        assert_equal(training(split(3)), expected)
        assert len(tries) > 50
        # An error that persists ends the run with the path and the reason.
        failures.update({"07.jpg": 10**6})
        with pytest.raises(records.UserError, match=rf"07\.jpg cannot be read: {os.strerror(code)} \(3 tries\)"):
            list(training(split(3), stop=10))
        failures.clear()
        tries.clear()


def test_a_file_that_is_gone_is_no_broken_image(split, images, tmp_path, monkeypatch):
    from files import UserError
    from records import Files

    monkeypatch.setattr("files.RETRY_AFTER", (0.0,))

    (tmp_path / "00.jpg").write_bytes((images / "00.jpg").read_bytes())
    files = Files(tmp_path, ["00.jpg", "gone.jpg"], [0, 1])
    with pytest.raises(UserError, match=r"gone\.jpg cannot be read: No such file or directory \(2 tries\)"):
        list(training(split(3, files), 2, stop=4))


def test_too_many_broken_images_end_the_run(capsys):
    import batches as loader
    import data

    broken = loader.Broken(most=0.001 * 20_000)
    broken.note(f"{i}.jpg" for i in range(20))
    broken.note(["3.jpg"])
    assert capsys.readouterr().err.count("skipped") == 20
    with pytest.raises(data.UserError, match=r"21 images are broken.*--max-broken"):
        broken.note(["20.jpg"])


@pytest.mark.parametrize("workers", [1, 5])
def test_validation_counts_each_readable_image_once(split, workers):
    import batches as loader

    one = split(workers)
    passes = []
    for _ in range(3):
        batches = list(loader.val_batches(one, 20))
        labels = np.concatenate([batch.labels for batch in batches])
        weights = np.concatenate([batch.weights for batch in batches])
        assert labels[:50].tolist() == list(range(50)) and len(labels) == 60
        assert np.flatnonzero(weights == 0).tolist() == [*BROKEN, *range(50, 60)]
        assert sum(len(batch.broken) for batch in batches) == 3
        passes.append(batches)
    assert_equal(passes[1], passes[0])
    # The shares of two processes give the same. The second process has no image of the last batch.
    shares = [list(loader.val_batches(split(3), 20, np.arange(k, k + 10))) for k in (0, 10)]
    assert [batch.weights.sum() for batch in shares[1]] == [8, 10, 0]
    assert sum(batch.weights.sum() for share in shares for batch in share) == 47


def test_train_batches_leave_no_thread_when_they_are_broken_off(split):
    before = set(threading.enumerate())
    batches = training(split(5))
    next(batches)
    started = set(threading.enumerate()) - before
    assert started
    batches.close()
    assert not started & set(threading.enumerate())


@pytest.mark.parametrize("workers", [1, 5])
def test_nothing_readable_is_refused(split, tmp_path, workers):
    from files import UserError
    from records import Files

    for name in ("a.jpg", "b.jpg"):
        (tmp_path / name).write_bytes(b"")
    with pytest.raises(UserError, match=r"50 images in a row cannot be decoded, .*\.jpg the first"):
        list(training(split(workers, Files(tmp_path, ["a.jpg", "b.jpg"], [0, 1])), 2))


def test_prefetch_places_the_next_batch_while_this_one_is_used():
    import batches as loader
    import data

    events, second = [], threading.Event()

    def batches():
        for i in range(3):
            yield loader.Batch(np.full(1, i), np.zeros(1), np.ones(1), (str(i),))

    def place(arrays):
        events.append(f"place {arrays[0][0]}")
        if len(events) == 2:
            second.set()
        return arrays

    ahead = loader.prefetch(batches(), place)
    first = next(ahead)
    assert second.wait(60)
    assert events == ["place 0", "place 1"] and first.broken == ("0",)
    assert [batch.images[0] for batch in ahead] == [1, 2]
    # Errors arrive where the batch would have.

    def fails():
        yield loader.Batch(np.zeros(1), np.zeros(1), np.ones(1))
        raise data.UserError("no more")

    ahead = loader.prefetch(fails(), place)
    next(ahead)
    with pytest.raises(data.UserError, match="no more"):
        next(ahead)


# -- options that only measure or predict ------------------------------------------------------------------------------


@pytest.fixture
def script():
    import train

    return train


def test_speed_is_measured(script, capsys, tmp_path, images, monkeypatch):
    for division, name in itertools.product(("train", "val"), ("cat", "dog")):
        (tmp_path / "data" / division / name).mkdir(parents=True)
        for i in range(20):
            (tmp_path / "data" / division / name / f"{i}.jpg").write_bytes((images / f"{i:02d}.jpg").read_bytes())
    monkeypatch.chdir(tmp_path)
    options = ["--data-dir", "data", "--input-speed", "64", "--batch-size", "32", "--image-size", "32", "--workers"]
    for workers in ("1", "3"):
        script.main([*options, workers])
        text = capsys.readouterr().out
        assert f"64 images by {workers} thread(s), 6 broken" in text and "images/s" in text
    assert [path.name for path in tmp_path.iterdir()] == ["data"]


def test_plan(script, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    script.main(["--plan", "1", "12", "--statistics-period", "10", "--inverse-update-period", "100"])
    text = capsys.readouterr().out
    assert "1 device(s), batch 144" in text and "12 device(s), batch 144" in text
    assert text.count("statistics every 10 and refreshes every 100 step(s)") == 2 and "ASSUMED" in text
    assert not any(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["--plan", "0"], ["--plan: it is 0", "at least 1"]),
        (["--plan", "8", "--optimizer", "sgd"], ["--plan", "sgd"]),
        (["--plan", "x"], ["--plan", "x"]),
        (["--input-speed", "0"], ["--input-speed: it is 0", "at least 1"]),
        (["--input-speed", "8", "--data-dir", "nowhere"], ["nowhere", "does not exist"]),
    ],
)
def test_what_cannot_be_measured_is_refused(script, monkeypatch, tmp_path, args, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(script.UserError) as caught:
        script.main(args)
    assert all(word in str(caught.value) for word in words), caught.value
