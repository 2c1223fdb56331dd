"""Test `examples/imagenet/simple.py`, copied into an empty folder: trained, stopped, damaged and restarted."""

import importlib.util
import re
import shutil
import signal

import numpy as np
import pytest
from PIL import Image

from runs import IMAGENET, end, finish, start

pytestmark = pytest.mark.examples

SMALL = ["--width", 4]


@pytest.fixture
def folder(tmp_path):
    shutil.copy(IMAGENET / "simple.py", tmp_path)
    return tmp_path


@pytest.fixture
def shorter(folder):
    """Change the script as a reader may: the last stage, which makes compilation take 1.5 times as long, is removed."""
    text = (folder / "simple.py").read_text()
    assert text.count("= (1, 1, 1)") == 1
    (folder / "simple.py").write_text(text.replace("= (1, 1, 1)", "= (1, 1)"))
    return folder


def module(folder):
    """Return the script as a module in this process."""
    spec = importlib.util.spec_from_file_location("simple", folder / "simple.py")
    found = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(found)
    return found


@pytest.fixture
def photographs(tmp_path):
    """Write images of red, green and blue noise, and a broken image."""
    rng = np.random.default_rng(0)
    for k, name in enumerate(("red", "green", "blue")):
        (tmp_path / "photographs" / name / "deeper").mkdir(parents=True)
        for i in range(30):
            pixels = rng.integers(0, 120, (20 + i, 30, 3), np.uint8)
            pixels[..., k] += 100
            image = Image.fromarray(pixels).convert(("RGB", "CMYK")[i % 7 == 6])
            image.save(tmp_path / "photographs" / name / ("deeper" if i % 2 else ".") / f"{i}.jpg")
    (tmp_path / "photographs" / "red" / "broken.jpg").write_bytes(b"broken")
    return tmp_path / "photographs"


def simple(folder, *args, devices=1):
    return start(*args, "--output", folder / "run", name=str(folder / "simple.py"), cwd=folder, devices=devices)


def lines(done):
    """Return the printed lines without the seconds, and without the five lines that `init` prints."""
    text = re.sub(r"^\d+ layers, .*\n(?:.*\n){4}", "", done.stdout, flags=re.MULTILINE)
    return re.sub(r"  [\d.]+ s\n", "\n", text).splitlines()


def test_it_is_one_file_of_200_lines_that_needs_no_neighbour():
    text = (IMAGENET / "simple.py").read_text()
    assert len(text.splitlines()) <= 200 and "kfac.train_step(" in text
    imported = set(re.findall(r"^\s*(?:import|from) (\w+)", text, re.MULTILINE))
    assert not imported & {path.stem for path in IMAGENET.glob("*.py")}


def test_digits_stopped_killed_and_damaged_go_on_bit_for_bit(shorter):
    options = [*SMALL, "--steps", 40]
    whole = lines(finish(simple(shorter, *options)))
    assert whole[0].endswith("0 steps are done") and whole[-2].startswith("step 40/40")
    assert float(whole[-1].split()[-1].rstrip("%")) > 60
    shutil.rmtree(shorter / "run")
    for number, code in ((signal.SIGINT, 130), (signal.SIGKILL, -9)):
        run = simple(shorter, *options)
        for text in run.stdout:
            if text.startswith("    validation") or text.startswith("step 40"):
                run.send_signal(number)
                break
        done = end(run)
        assert done.returncode == code and not done.stderr, done.stderr
    # Change a bit in the last checkpoint. A killed save leaves a folder with a longer name.
    saved = (path for path in (shorter / "run" / "checkpoints").iterdir() if path.name.isdigit())
    last = max(saved, key=lambda path: int(path.name))
    data = max((p for p in last.glob("state/**/d/*") if p.is_file()), key=lambda path: path.stat().st_size)
    changed = bytearray(data.read_bytes())
    changed[len(changed) // 2] ^= 4
    data.write_bytes(changed)
    # Orbax reads arrays at the same time. If several are damaged, Python reports all errors but the first as ignored.
    run = end(simple(shorter, *options))
    assert run.returncode == 0, run.stderr
    assert run.stderr.count("Traceback") == run.stderr.count("Exception ignored in: <coroutine"), run.stderr
    again = lines(run)
    assert "is damaged, or from another model; it was renamed to" in again[0]
    assert whole[-len(again[2:]) :][1:] == again[3:] and again[-1] == whole[-1]
    # A finished run does not train again, and other options make another run. Both run in a single process.
    twice = "import sys, simple\nfor more in [], ['--rate', '0.2']:\n    simple.main(sys.argv[1:] + more)\n"
    (shorter / "twice.py").write_text(twice)
    run = end(start(*options, "--output", shorter / "run", name=str(shorter / "twice.py"), cwd=shorter))
    (once_more,) = lines(run)
    assert once_more.endswith("; 40 steps are done")
    assert run.returncode == 1 and len(run.stderr.splitlines()) == 1 and "name a new --output" in run.stderr


def into_splits(photographs):
    for path in [p for p in photographs.rglob("*.jpg") if p.name.startswith("1")]:
        place = photographs / "val" / path.relative_to(photographs)
        place.parent.mkdir(parents=True, exist_ok=True)
        path.rename(place)
    (photographs / "train").mkdir()
    for name in ("red", "green", "blue"):
        (photographs / name).rename(photographs / "train" / name)


@pytest.mark.parametrize("layout", ["classes", "splits"])
def test_photographs_are_found_in_both_layouts(folder, photographs, layout, capsys):
    if layout == "splits":
        into_splits(photographs)
    *parts, classes = module(folder).photographs(photographs, 16)
    assert classes == ["blue", "green", "red"]
    # Validation has a tenth of all files, including the broken file, or the files whose names begin with 1.
    assert [len(labels) for _, labels in parts] == ([57, 33] if layout == "splits" else [81, 9])
    for images, labels in parts:
        assert images.shape == (len(labels), 18, 18, 3) and images.dtype == np.uint8
        np.testing.assert_array_equal(images.mean((1, 2)).argmax(1), 2 - labels)  # as the name says
    assert capsys.readouterr().err.count("broken.jpg: UnidentifiedImageError") == 1


@pytest.mark.parametrize("layout", [pytest.param("classes", marks=pytest.mark.slow), "splits"])
def test_photographs_on_several_devices(folder, photographs, layout):
    if layout == "splits":
        into_splits(photographs)
    done = finish(simple(folder, photographs, *SMALL, "--size", 16, "--steps", 12, devices=2))
    assert re.search(r"^\d+ images of 3 classes", done.stdout, re.MULTILINE)
    assert "broken.jpg: UnidentifiedImageError" in done.stderr and len(done.stderr.splitlines()) == 1
    assert float(lines(done)[-1].split()[-1].rstrip("%")) > 60


@pytest.mark.parametrize(
    ("args", "words"),
    [(["nowhere"], ["nowhere", "a folder for each class"]), (["--batch", 5000], ["--batch 5000", "1498"])],
)
def test_what_cannot_be_is_one_sentence(folder, args, words):
    handler = signal.getsignal(signal.SIGINT)
    with pytest.raises(SystemExit) as raised:  # Python prints only this text, and exits with 1
        module(folder).main([*map(str, args), "--output", str(folder / "run")])
    signal.signal(signal.SIGINT, handler)
    sentence = raised.value.code
    assert len(sentence.splitlines()) == 1 and all(word in sentence for word in ["error: ", *words])
    assert not (folder / "run").exists()


def test_a_rate_that_is_too_large_is_one_sentence(shorter):
    done = end(simple(shorter, *SMALL, "--rate", 3e38))
    assert len(done.stderr.splitlines()) == 1
    assert done.returncode == 1 and "try half of --rate 3e+38" in done.stderr


def test_ctrl_c_as_it_starts_is_no_traceback(folder, photographs):
    run = simple(folder, photographs, *SMALL)
    assert run.stderr.readline().startswith("left out")  # before anything is compiled
    run.send_signal(signal.SIGINT)
    done = end(run)
    assert done.returncode == -2 and not done.stderr and not (folder / "run").exists()
