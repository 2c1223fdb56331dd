"""Test the data of `examples/imagenet`: files of all kinds and layouts, and how they are read."""

import io
import json
import os
import pickle
import sys
import tarfile
import types
from pathlib import Path

import jax
import numpy as np
import pytest
from jax.sharding import Mesh
from PIL import Image

pytestmark = pytest.mark.examples

EXAMPLE = Path(__file__).parents[2] / "examples" / "imagenet"
sys.path[:0] = [str(EXAMPLE), str(EXAMPLE.parent / "benchmarks")]
try:
    import batches as loader
    import cifar10
    import data
    import records
    from files import UserError
finally:
    del sys.path[:2]

ORANGE = (250, 120, 20)


@pytest.fixture(autouse=True)
def example(monkeypatch, tmp_path_factory):
    monkeypatch.setattr("files.RETRY_AFTER", (0.0,))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))


def encode(image, kind="JPEG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def plain(mode, colour, size=(60, 40)):
    return Image.new(mode, size, colour)


def palette():
    image = plain("P", 1)
    image.putpalette([0, 0, 0, *ORANGE])
    return image


def halves():
    """Return an image that is red on the left and blue on the right."""
    pixels = np.zeros((80, 160, 3), np.uint8)
    pixels[:, :80, 0] = pixels[:, 80:, 2] = 255
    return Image.fromarray(pixels)


# -- single images -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "image", "colour"),
    [
        ("colour", encode(plain("RGB", ORANGE), quality=95), ORANGE),
        ("progressive", encode(plain("RGB", ORANGE), quality=95, progressive=True), ORANGE),
        ("grey", encode(plain("L", 77)), (77, 77, 77)),
        ("CMYK", encode(plain("CMYK", (5, 135, 235, 0)), quality=95), ORANGE),
        ("16 bits", encode(Image.fromarray(np.full((40, 60), 0x8012, np.uint16)), "PNG"), (128, 128, 128)),
        ("1 bit", encode(plain("1", 1), "PNG"), (255, 255, 255)),
        ("alpha", encode(plain("RGBA", (*ORANGE, 3)), "PNG"), ORANGE),
        ("grey with alpha", encode(plain("LA", (50, 3)), "PNG"), (50, 50, 50)),
        ("palette", encode(palette(), "PNG"), ORANGE),
        ("palette with alpha", encode(palette(), "PNG", transparency=b"\x00\x80"), ORANGE),
        ("GIF", encode(palette(), "GIF"), ORANGE),
        ("WebP", encode(plain("RGB", ORANGE), "WEBP", lossless=True), ORANGE),
        ("one pixel", encode(plain("RGB", ORANGE, (1, 1)), "PNG"), ORANGE),
        ("one row", encode(plain("RGB", ORANGE, (3000, 1)), "PNG"), ORANGE),
        ("one column", encode(plain("RGB", ORANGE, (1, 3000)), "PNG"), ORANGE),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_every_kind_of_image_has_its_colour(kind, image, colour):
    for crop in ("random-resized", "squashed"):
        for key in (None, (0, 1)):
            pixels = data.Decoder(32, crop)(image, 5, key)
            assert pixels.shape == (32, 32, 3) and pixels.dtype == np.uint8
            assert np.abs(pixels.astype(int) - colour).max() <= 4, (kind, crop, key)


def test_a_rotation_in_exif_is_ignored():
    exif = Image.Exif()
    exif[0x0112] = 6
    pixels = data.Decoder(32)(encode(halves(), exif=exif, quality=95), 0, None)
    assert pixels[:, :12, 0].min() > 200 and pixels[:, 20:, 2].min() > 200


@pytest.mark.parametrize(
    ("kind", "image"),
    [
        ("empty", b""),
        ("text", b"no image at all"),
        ("cut short", encode(Image.effect_noise((60, 40), 50))[:700]),
        ("a header alone", encode(plain("RGB", ORANGE))[:30]),
        ("cut short PNG", encode(Image.effect_noise((60, 40), 50), "PNG")[:700]),
        ("100 million pixels", encode(plain("1", 0, (10_000, 10_000)), "PNG")),
        ("400 million pixels", encode(plain("1", 0, (20_000, 20_000)), "PNG")),
        ("a program", encode(plain("RGB", ORANGE), "EPS")),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_decoded_is_refused(kind, image):
    with pytest.raises((OSError, SyntaxError, Warning, Image.DecompressionBombError)):
        data.Decoder(32)(image, 0, None)


def smooth(width, height, length):
    """Return random waves, about 6 times `length` long, which are the same for each method of scaling."""
    rng = np.random.default_rng(0)
    y, x = np.mgrid[:height, :width] / length
    waves = [np.sin(a * x + b * y + c) for a, b, c in rng.normal(size=(3, 3))]
    return Image.fromarray((127 + 120 * np.stack(waves, -1)).astype(np.uint8))


def test_crops_are_those_of_their_definition():
    image = smooth(500, 375, 40)
    png = encode(image, "PNG")
    # Validation scales the short side to 256 and takes the centre.
    small = image.resize((341, 256), Image.Resampling.BILINEAR)
    expected = np.asarray(small)[16:240, 58:282]
    np.testing.assert_allclose(data.Decoder(224)(png, 0, None).astype(int), expected, atol=4)
    # "squashed" scales to 256 x 256. Then validation takes the centre, and training takes a crop at any of 33 x 33
    # places or its mirror image.
    squashed = np.asarray(image.resize((256, 256), Image.Resampling.BILINEAR)).astype(int)
    decoder = data.Decoder(224, "squashed")
    np.testing.assert_allclose(decoder(png, 0, None).astype(int), squashed[16:240, 16:240], atol=1)
    seen = set()
    for step in range(60):
        box, mirrored = decoder.choose(256, 256, 3, (0, step))
        left, top = int(box[0]), int(box[1])
        assert box == (left, top, left + 224, top + 224) and 0 <= min(left, top) <= max(left, top) <= 32
        expected = squashed[top : top + 224, left : left + 224]
        found = decoder(png, 3, (0, step)).astype(int)
        np.testing.assert_allclose(found, expected[:, ::-1] if mirrored else expected, atol=1)
        seen.add((left, top, mirrored))
    assert len(seen) > 50 and {mirrored for _, _, mirrored in seen} == {True, False}


def test_random_resized_crops():
    decoder = data.Decoder(224)
    boxes, mirrored = zip(*(decoder.choose(500, 375, index, (7, 3)) for index in range(400)), strict=True)
    left, top, right, bottom = np.array(boxes).T
    assert min(left) >= 0 and min(top) >= 0 and max(right) <= 500 and max(bottom) <= 375
    area, ratio = (right - left) * (bottom - top) / (500 * 375), (right - left) / (bottom - top)
    assert 0.08 <= area.min() < 0.12 and 0.85 < area.max() <= 1
    assert 0.749 < ratio.min() < 0.8 and 1.25 < ratio.max() < 1.334
    assert 160 < sum(mirrored) < 240
    # The choice depends on (seed, step, image) alone.
    assert decoder.choose(500, 375, 4, (7, 3)) == (boxes[4], mirrored[4])
    others = [decoder.choose(500, 375, 4, key) for key in ((7, 4), (8, 3))]
    assert len({boxes[4], boxes[5], *(box for box, _ in others)}) == 4


def test_large_jpegs_are_decoded_at_a_part_of_their_size():
    image = smooth(2001, 1501, 200)
    jpeg, png = encode(image, quality=95), encode(image, "PNG", compress_level=1)
    for crop, keys in (("random-resized", [None, (0, 0), (0, 1)]), ("squashed", [None, (0, 0)])):
        decoder = data.Decoder(64, crop)
        for key in keys:
            np.testing.assert_allclose(decoder(jpeg, 0, key).astype(int), decoder(png, 0, key), atol=3)


# -- layouts -----------------------------------------------------------------------------------------------------------


def write(path, colour=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    plain("L", colour, (20, 20)).save(path, "JPEG")


def class_folders(root):
    """Write classes 0 and 1, with two images each in train/ and one each in val/.

    An image's grey level is 100 times its class.
    """
    for label, name in enumerate(("n01440764", "n01443537")):
        for i in range(2):
            write(root / "train" / name / f"{name}_{i}.JPEG", 100 * label)
        write(root / "val" / name / f"ILSVRC2012_val_0000000{label + 1}.JPEG", 100 * label)


def add(tar, name, content):
    member = tarfile.TarInfo(name)
    member.size = len(content)
    tar.addfile(member, io.BytesIO(content))


def shard(path, labels, start=0):
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, "w") as tar:
        for i, label in enumerate(labels, start):
            # This key does not fit into a tar header, as webdataset's users may find.
            key = f"{'long/' * 30}n{i:08d}"
            add(tar, f"{key}.cls", f"{label}\n".encode())
            add(tar, f"{key}.jpg", encode(plain("L", 100 * abs(int(label)), (20, 20))))
            add(tar, f"{key}.json", b"{}")


def tar_shards(root):
    shard(root / "imagenet-train-000000.tar", (0, 1))
    shard(root / "imagenet-train-000001.tar", (1, 0), 2)
    shard(root / "imagenet-val-000000.tar", (0, 1))


def message(*fields):
    """Return a protocol buffer from numbers and bytes by field number."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += varint(number << 3) + varint(value)
        else:
            out += varint(number << 3 | 2) + varint(len(value)) + value
    return out


def varint(value):
    out = b""
    while value > 127:
        out, value = out + bytes([value & 127 | 128]), value >> 7
    return out + bytes([value])


def feature(name, value):
    kind = message((3, message((1, varint(value))))) if isinstance(value, int) else message((1, message((1, value))))
    return 1, message((1, name), (2, kind))


def masked_crc(data):
    """Compute a CRC with Castagnoli's polynomial, bit by bit (RFC 3720), masked as in TFRecord."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = crc >> 1 ^ (0x82F63B78 if crc & 1 else 0)
    crc ^= 0xFFFFFFFF
    return ((((crc >> 15) | (crc << 17)) + 0xA282EAD8) % 2**32).to_bytes(4, "little")


def tfrecord(path, labels, names=(b"image", b"label"), first=0):
    with open(path, "wb") as file:
        for i, label in enumerate(labels):
            grey = encode(plain("L", 100 * label, (20, 20)))
            values = [feature(b"file_name", b"%d.jpg" % i), feature(names[0], grey), feature(names[1], label + first)]
            example = message((1, message(*values)))
            length = len(example).to_bytes(8, "little")
            file.write(length + masked_crc(length) + example + masked_crc(example))


def test_a_damaged_length_in_a_tfrecord_is_named(tmp_path):
    tfrecords(tmp_path)
    path = tmp_path / "imagenet2012-train.tfrecord-00000-of-00002"
    data = bytearray(path.read_bytes())
    data[0] ^= 1
    path.write_bytes(data)
    with pytest.raises(UserError, match=r"00000-of-00002.*the length of record 0 does not agree with its checksum"):
        records.find(str(tmp_path))


@pytest.mark.parametrize("place", ["image", "label", "checksum"])
def test_a_flipped_bit_in_a_record_is_a_broken_image(tmp_path, place):
    """Check that reading notices a flipped bit, so that it is never trained on. The decoder alone may ignore it."""
    tfrecords(tmp_path)
    path = tmp_path / "imagenet2012-train.tfrecord-00001-of-00002"
    data_of = bytearray(path.read_bytes())
    found = records.find(tmp_path).train
    begin, end = int(found.offset[2]), int(found.offset[2] + found.size[2])
    at = {"image": data_of.index(b"\xff\xd9", begin) - 5, "checksum": end - 1,
          "label": data_of.index(b"label", begin) + 11}[place]  # fmt: skip
    assert begin < at < end
    data_of[at] ^= 2
    path.write_bytes(data_of)
    for index in indices():
        index.unlink()
    if place == "label":
        with pytest.raises(UserError, match="class 3 for training but none for validation"):
            records.find(tmp_path)
        tfrecord(tmp_path / "imagenet2012-validation.tfrecord-00000-of-00001", (0, 1, 3))
    dataset = data.load(options_for(tmp_path, 2))
    with pytest.raises(ValueError, match="checksum"):
        dataset.train.records.read(2)
    (batch,) = loader.train_batches(dataset.train, 4, 0, 0, 1)
    assert f"{path}:0" in batch.broken and batch.weights.sum() == 4
    (batch,) = loader.val_batches(dataset.train, 4)
    assert batch.weights.tolist() == [1, 1, 0, 1] and batch.broken == (f"{path}:0",)


def tfrecords(root):
    tfrecord(root / "imagenet2012-train.tfrecord-00000-of-00002", (0, 1))
    tfrecord(root / "imagenet2012-train.tfrecord-00001-of-00002", (1, 0))
    tfrecord(root / "imagenet2012-validation.tfrecord-00000-of-00001", (0, 1))


def test_shards_are_compared_with_what_tfds_has_noted(tmp_path):
    """Cut a shard at the end of a record, so that the shard itself looks complete."""
    tfrecords(tmp_path)
    path = tmp_path / "dataset_info.json"
    noted = [{"name": "train", "shardLengths": ["2", "2"]}, {"name": "validation", "shardLengths": ["2"]}]
    path.write_text(json.dumps({"splits": noted}))
    assert len(records.find(tmp_path).train.labels) == 4
    for index in indices():
        index.unlink()
    tfrecord(tmp_path / "imagenet2012-train.tfrecord-00001-of-00002", (1,))
    with pytest.raises(UserError, match=r"train\.tfrecord-00001-of-00002 holds 1 images, but .* says 2; fetch"):
        records.find(tmp_path)
    noted[0]["shardLengths"] = ["2", "1", "7"]
    path.write_text(json.dumps({"splits": noted}))
    with pytest.raises(UserError, match=r"lists 3 shards for train, found 2"):
        records.find(tmp_path)
    path.write_text(path.read_text()[:20])
    with pytest.raises(UserError, match=r"dataset_info.json does not say how many .*remove it if the shards are good"):
        records.find(tmp_path)


def test_a_missing_last_tar_shard_is_noticed(tmp_path):
    """Check the shard count that a note gives. Without a note, a last shard as full as the others raises a question."""
    shard(tmp_path / "imagenet-train-000002.tar", (1,), 4)
    tar_shards(tmp_path)
    assert records.find(tmp_path).note == ""
    note = {"splits": {"train": {"name": "train", "shard_lengths": [2, 2, 1], "num_samples": 5},
                       "validation": {"name": "validation", "shard_lengths": [2], "num_samples": 2}}}  # fmt: skip
    (tmp_path / "_info.json").write_text(json.dumps(note))
    assert len(records.find(tmp_path).train.labels) == 5
    (tmp_path / "imagenet-train-000002.tar").unlink()
    for index in indices():
        index.unlink()
    with pytest.raises(UserError, match=r"_info.json lists 3 shards for train, found 2; fetch the others"):
        records.find(tmp_path)
    (tmp_path / "_info.json").unlink()
    assert "is a later shard missing?" in records.find(tmp_path).note


def test_a_shard_that_is_cut_between_records_is_asked_about(tmp_path):
    """Cut a shard without a note or an earlier index, so that the file itself looks complete."""
    tfrecords(tmp_path)
    assert records.find(tmp_path).note == ""
    for index in indices():
        index.unlink()
    tfrecord(tmp_path / "imagenet2012-train.tfrecord-00001-of-00002", (1,))
    assert records.find(tmp_path).note.endswith("00001-of-00002 holds 1 images, others 2: is it complete?")


def classic_tfrecords(root):
    """Write TFRecords as older scripts did, with other names, and classes from 1."""
    names = (b"image/encoded", b"image/class/label")
    tfrecord(root / "train-00000-of-00001", (0, 1, 1, 0), names, 1)
    tfrecord(root / "validation-00000-of-00001", (0, 1), names, 1)


LAYOUTS = {
    class_folders: ([0, 0, 1, 1], [0, 1]),
    tar_shards: ([0, 1, 1, 0], [0, 1]),
    tfrecords: ([0, 1, 1, 0], [0, 1]),
    classic_tfrecords: ([0, 1, 1, 0], [0, 1]),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts(tmp_path, layout):
    layout(tmp_path)
    found = records.find(tmp_path)
    train, val = LAYOUTS[layout]
    notes = {tar_shards: "all 2 tar shards of train hold 2 images"}
    assert found.num_classes == 2 and (notes[layout] in found.note if layout in notes else found.note == "")
    assert found.train.labels.tolist() == train and found.val.labels.tolist() == val
    # The pixels agree with the labels.
    for part in (found.train, found.val):
        for i, label in enumerate(part.labels):
            assert abs(int(data.Decoder(8)(part.read(i), i, None).mean()) - 100 * label) < 4, part.name(i)
    names = [found.train.name(i) for i in range(4)]
    assert len(set(names)) == 4 and all(str(tmp_path) in name for name in names)


def options_for(folder, workers):
    return types.SimpleNamespace(data="folder", data_dir=folder, image_size=8, workers=workers,
                                 crop="squashed")  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
def test_layouts_as_batches(tmp_path, layout):
    layout(tmp_path)
    options = options_for(tmp_path, 2)
    dataset = data.load(options)
    _, val = LAYOUTS[layout]
    assert (len(dataset.train), len(dataset.val), dataset.num_classes) == (4, len(val), 2)
    (batch,) = loader.train_batches(dataset.train, 4, 0, 0, 1)
    assert sorted(batch.labels) == [0, 0, 1, 1] and batch.images.shape == (4, 8, 8, 3)
    assert np.abs(batch.images.mean((1, 2, 3)) - 100 * batch.labels).max() < 4
    (batch,) = loader.val_batches(dataset.val, 4)
    assert batch.labels[: len(val)].tolist() == val and batch.weights.sum() == len(val)
    assert data.load(options).fingerprint == dataset.fingerprint


def test_nested_folders_are_of_the_class_above_them(tmp_path):
    """Check the layout of Tiny ImageNet: train/<class>/images/."""
    class_folders(tmp_path)
    for name in ("n01440764", "n01443537"):
        for path in list((tmp_path / "train" / name).iterdir()):
            (tmp_path / "train" / name / "images").mkdir(exist_ok=True)
            path.rename(tmp_path / "train" / name / "images" / path.name)
    assert records.find(tmp_path).train.labels.tolist() == [0, 0, 1, 1]


# -- missing files -----------------------------------------------------------------------------------------------------


def indices():
    return list(Path(os.environ["XDG_CACHE_HOME"], "kfac-imagenet").glob("*.npz"))


def test_index_of_shards_is_kept_and_renewed(tmp_path, monkeypatch):
    tar_shards(tmp_path)
    first = records.find(tmp_path)
    read = records._tar
    monkeypatch.setattr(records, "_tar", lambda path: pytest.fail(f"{path} is read again"))
    again = records.find(tmp_path)
    assert again.train.identity() == first.train.identity() and len(indices()) == 2
    assert [again.train.read(i) for i in range(4)] == [first.train.read(i) for i in range(4)]
    monkeypatch.setattr(records, "_tar", read)
    shard(tmp_path / "imagenet-train-000001.tar", (1, 0, 1), 2)
    assert records.find(tmp_path).train.labels.tolist() == [0, 1, 1, 0, 1]
    for path in indices():
        path.write_bytes(b"damaged")
    assert len(records.find(tmp_path).train.labels) == 5
    # An index that cannot be stored is rebuilt each time.
    monkeypatch.setenv("XDG_CACHE_HOME", "/dev/null")
    assert len(records.find(tmp_path).train.labels) == 5


@pytest.mark.parametrize(
    ("layout", "gone", "words"),
    [
        (tar_shards, "imagenet-train-000000.tar", None),  # only the earlier index shows the loss
        (tar_shards, "imagenet-train-000001.tar", ["lost the shard imagenet-train-000001.tar", "-train.npz"]),
        (tfrecords, "imagenet2012-train.tfrecord-00000-of-00002", ["lacks", "00000-of-00002", "1 of 2"]),
        (tfrecords, "imagenet2012-train.tfrecord-00001-of-00002", ["lacks", "00001-of-00002", "1 of 2"]),
    ],
)
def test_a_missing_shard_is_refused(tmp_path, layout, gone, words):
    layout(tmp_path)
    records.find(tmp_path)
    (tmp_path / gone).unlink()
    with pytest.raises(UserError) as caught:
        records.find(tmp_path)
    assert all(word in str(caught.value) for word in words or ["lost the shard"]), caught.value


def test_a_gap_in_the_numbers_of_shards_is_refused(tmp_path):
    tar_shards(tmp_path)
    shard(tmp_path / "imagenet-train-000004.tar", (0, 1), 4)
    with pytest.raises(UserError, match=r"lacks the shard imagenet-train-000002.tar \(2 of 5 are missing\)"):
        records.find(tmp_path)


@pytest.mark.parametrize(("layout", "name"), [
    (tar_shards, "imagenet-train-000001.tar"), (tfrecords, "imagenet2012-train.tfrecord-00001-of-00002"),
])  # fmt: skip
@pytest.mark.parametrize("known", [False, True])
def test_a_shard_that_is_cut_short_is_refused(tmp_path, layout, name, known):
    layout(tmp_path)
    path = tmp_path / name
    if known:
        records.find(tmp_path)
    os.truncate(path, path.stat().st_size // 3)
    with pytest.raises(UserError, match=name.rpartition("/")[2] if known else r"cannot be read as"):
        records.find(tmp_path)


def test_a_tar_that_ends_with_a_member_is_cut_short(tmp_path):
    """Check the end of a tar file, which tarfile does not require."""
    tar_shards(tmp_path)
    path = tmp_path / "imagenet-train-000001.tar"
    with tarfile.open(path) as tar:
        last = tar.getmembers()[3]
        end = last.offset_data + (last.size + 511) // 512 * 512
    os.truncate(path, end)
    with pytest.raises(UserError, match="its end is missing"):
        records.find(tmp_path)


def test_a_shard_that_shrinks_while_it_is_read_is_no_broken_image(tmp_path, monkeypatch):
    tar_shards(tmp_path)
    train = records.find(tmp_path).train
    os.truncate(tmp_path / "imagenet-train-000001.tar", 600)
    with pytest.raises(UserError, match=r"imagenet-train-000001.tar.*the shard ends after"):
        train.read(3)


@pytest.mark.parametrize("split", ["train", "val"])
def test_a_missing_class_is_refused(tmp_path, split):
    class_folders(tmp_path)
    for other in ("train", "val"):
        write(tmp_path / other / "n9" / "a.jpg")
    for path in (tmp_path / split / "n9").iterdir():
        path.unlink()
    (tmp_path / split / "n9").rmdir()
    with pytest.raises(UserError, match="n9"):
        records.find(tmp_path)


# -- mistakes ----------------------------------------------------------------------------------------------------------


def replace(path, content):
    path.write_bytes(content) if isinstance(content, bytes) else path.write_text(content)


@pytest.mark.parametrize(
    ("layout", "change", "words"),
    [
        (class_folders, lambda r: (r / "val").rename(r / "v"), ["val", "train/<class>/", "shards"]),
        (
            class_folders,
            lambda r: write(r / "val" / "bird" / "a.jpg"),
            ["class bird for validation", "none for training"],
        ),
        (class_folders, lambda r: (r / "train" / "empty").mkdir(), ["empty", "no images"]),
        (
            class_folders,
            lambda r: (
                [p.rename(r / "val" / p.name) for p in list((r / "val").rglob("*.JPEG"))]
                and [p.rmdir() for p in (r / "val").iterdir() if p.is_dir()]
                and [p.rename(p.with_name(f"{k}.jpg")) for k, p in enumerate(sorted((r / "val").iterdir()))]
            ),
            ["val", "a folder of 2 files", "without classes"],
        ),
        (tar_shards, lambda r: (r / "imagenet-val-000000.tar").unlink(), ["no *val* tar shards"]),
        (
            tar_shards,
            lambda r: shard(r / "imagenet-val-000000.tar", (0, 1, 2)),
            ["class 2 for validation", "none for training"],
        ),
        (tar_shards, lambda r: [shard(path, (0, 0)) for path in r.glob("*.tar")], ["one class only, 0"]),
        (tar_shards, lambda r: replace(r / "imagenet-train-000001.tar", b"no tar" * 200), ["train-000001.tar", "tar"]),
        (tar_shards, lambda r: shard(r / "imagenet-train-000001.tar", ()), ["train-000001.tar"]),
        (tar_shards, lambda r: shard(r / "imagenet-train-000001.tar", ("-1",)), ["number of a class"]),
    ],
)
def test_mistakes_in_layouts_are_refused(tmp_path, layout, change, words):
    layout(tmp_path)
    change(tmp_path)
    with pytest.raises(UserError) as caught:
        records.find(tmp_path)
    message = str(caught.value)
    assert all(word in message for word in words), message
    assert "\n" not in message


def test_a_shard_of_halves_is_refused(tmp_path):
    tar_shards(tmp_path)
    path = tmp_path / "imagenet-train-000000.tar"
    for name, content, word in (("a.cls", b"0", "a.jpg"), ("a.jpg", b"", "a.cls")):
        shard(path, (0, 1))
        with tarfile.open(path, "a") as tar:
            add(tar, name, content)
        with pytest.raises(UserError, match=word):
            records.find(tmp_path)


def test_files_of_other_kinds_are_left_alone(tmp_path):
    class_folders(tmp_path)
    replace(tmp_path / "train" / "n01440764" / "notes.txt", "no image, by its ending")
    replace(tmp_path / "train" / "n01440764" / ".hidden.jpg", "no image")
    found = records.find(tmp_path)
    assert len(found.train.labels) == 4 and "notes.txt" in found.note


def test_names_need_not_be_text(tmp_path):
    name = b"\xff\xe9.jpg".decode("utf8", "surrogateescape")
    write(tmp_path / name, 100)
    files = records.Files(tmp_path, [name], [0])
    assert files.read(0) == (tmp_path / name).read_bytes()


# -- CIFAR-10 ----------------------------------------------------------------------------------------------------------


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


def write_sheets(folder):
    images, labels = cifar_arrays()
    folder.mkdir(parents=True)
    names = [f"data_batch_{i}.png" for i in range(1, 6)] + ["test_batch.png"]
    for name, rows in zip(names, images, strict=True):
        Image.fromarray(rows.reshape(8, 1024, 3)).save(folder / name)
    (folder / "train_lables.json").write_text(json.dumps(labels[:5].ravel().tolist()))
    (folder / "test_lables.json").write_text(json.dumps(labels[5].tolist()))


@pytest.mark.parametrize("write", [write_pickles, write_sheets])
def test_cifar10_layouts(tmp_path, write):
    write(tmp_path / "cifar")
    (found, train_labels), (test, test_labels) = cifar10.read(tmp_path / "cifar")
    images, labels = cifar_arrays()
    np.testing.assert_array_equal(found, images[:5].reshape(-1, 32, 32, 3))
    np.testing.assert_array_equal(train_labels, labels[:5].ravel())
    np.testing.assert_array_equal(test, images[5])
    np.testing.assert_array_equal(test_labels, labels[5])
    # As photographs, it writes all images of each class.
    cifar10.write(tmp_path / "cifar", tmp_path / "photographs", 100, 100)
    (image,) = (tmp_path / "photographs" / "val" / f"class-{labels[5][0]}").glob("00000.png")
    np.testing.assert_array_equal(np.asarray(Image.open(image)), images[5][0])
    assert len(list((tmp_path / "photographs" / "train").rglob("*.png"))) == 40


def test_damaged_cifar10_is_refused(tmp_path, monkeypatch):

    def sentence(folder):
        with pytest.raises(data.UserError) as caught:
            cifar10.read(folder)
        return str(caught.value)

    write_pickles(tmp_path / "a")
    path = tmp_path / "a/cifar-10-batches-py/data_batch_3"
    path.write_bytes(path.read_bytes()[:500])
    assert "data_batch_3 is not a CIFAR-10 pickle" in sentence(tmp_path / "a")
    path.write_bytes(pickle.dumps(os.getcwd))
    assert "data_batch_3 is not a CIFAR-10 pickle" in sentence(tmp_path / "a")

    write_sheets(tmp_path / "c")
    (tmp_path / "c/train_lables.json").write_text("[1, 2]")
    assert "48 images but 10 labels" in sentence(tmp_path / "c")
    (tmp_path / "c/train_lables.json").write_text(json.dumps([10] * 40))
    assert "labels from 0 to 9" in sentence(tmp_path / "c")
    (tmp_path / "c/data_batch_4.png").unlink()
    assert "data_batch_4.png" in sentence(tmp_path / "c")


# -- in memory ---------------------------------------------------------------------------------------------------------


def test_splits_of_the_digits_do_not_overlap():
    dataset = data.load(types.SimpleNamespace(data="digits", data_dir=None, image_size=8))
    assert (len(dataset.train), len(dataset.val)) == (1500, 297)
    histogram = np.bincount(dataset.val.labels)
    assert histogram.min() >= 28 and histogram.max() <= 31
    together = np.concatenate([dataset.train.images, dataset.val.images]).reshape(1797, 64)
    assert len(np.unique(together, axis=0)) == 1797


def test_every_image_once_an_epoch():
    n = 10
    images = np.arange(n, dtype=np.uint8).reshape(n, 1, 1, 1)
    split = loader.ArraySplit(images, np.arange(n))
    batches = list(loader.train_batches(split, 5, 0, 0, 4))
    first, second = (np.concatenate([b.labels for b in batches[i : i + 2]]) for i in (0, 2))
    assert sorted(first) == sorted(second) == list(range(n))
    assert first.tolist() != second.tolist()
    # Any step can be the first.
    again = list(loader.train_batches(split, 5, 0, 3, 4))
    np.testing.assert_array_equal(again[0].labels, batches[3].labels)
    # The last validation batch is padded with images that do not count.
    batches = list(loader.val_batches(split, 4))
    assert [b.weights.sum() for b in batches] == [4, 4, 2]


@pytest.mark.parametrize("count", [1, 2, 4])
def test_micro_batches_are_the_same_on_any_number_of_devices(count):
    mesh = Mesh(np.array(jax.devices()[:count]), ("devices",))
    local, parts = 12 // count, 3
    rows = loader.own_rows(mesh, 0, local, parts)
    assert sorted(rows) == list(range(36))
    by_part = rows.reshape(count, parts, local).swapaxes(0, 1).reshape(parts, -1)
    np.testing.assert_array_equal(by_part, np.arange(36).reshape(3, 12))


def test_a_share_of_a_batch_is_what_the_whole_would_have_been():
    rng = np.random.default_rng(0)
    split = loader.ArraySplit(rng.integers(0, 256, (9, 6, 6, 1), np.uint8), np.arange(9), shift=1, flip=True)
    indices, rows = np.arange(8), np.array([5, 2, 7])
    whole, share = split.load(indices, (0, 3)), split.load(indices, (0, 3), rows)
    np.testing.assert_array_equal(share.images, whole.images[rows])
    np.testing.assert_array_equal(share.labels, whole.labels[rows])
