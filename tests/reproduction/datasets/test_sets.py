import hashlib
import http.server
import os
import shutil
import sys
import tarfile
import threading
from functools import partial
from multiprocessing.pool import ThreadPool
from pathlib import Path

import pytest
import torch

from reproduction.datasets import DataSet, Part
from reproduction.datasets import sets as data


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def noise(train=30, test=10, shape=(3, 8, 8)):
    parts = [
        Part(torch.rand(count, *shape, generator=seeded(count)), torch.arange(count) % 5)
        for count in (train, test)
    ]
    return DataSet(parts[0], None, parts[1], classes=5, name="noise")


def numbered(train=30, test=10):
    """A data set in which each input is its own number, twice, and so is its target."""
    train, test = (
        Part(torch.arange(count)[:, None].expand(-1, 2).float(), torch.arange(count))
        for count in (train, test)
    )
    return DataSet(train, None, test, classes=30, name="numbered")


def assert_rows_match(part):
    assert torch.equal(part.inputs[:, 0].long(), part.targets)


# --- preparation -------------------------------------------------------------------------------


def test_a_split_has_exact_sizes_and_shares_no_sample():
    split = numbered().split(7, generator=seeded())
    assert (len(split.train.targets), len(split.validation.targets)) == (23, 7)
    both = torch.cat([split.train.targets, split.validation.targets])
    assert torch.equal(both.sort().values, torch.arange(30))
    assert_rows_match(split.train)
    assert_rows_match(split.validation)


def test_a_split_is_decided_by_its_generator():
    first, again, other = (numbered().split(7, generator=seeded(s)).validation for s in (0, 0, 1))
    assert torch.equal(first.targets, again.targets)
    assert not torch.equal(first.targets, other.targets)


def test_a_split_with_a_generator_leaves_the_global_one_alone():
    before = torch.get_rng_state()
    numbered().split(7, generator=seeded())
    data.digits()
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("size", [0, -1, 30])
def test_a_split_must_leave_samples_on_both_sides(size):
    with pytest.raises(ValueError, match=f"at least 1 and fewer than all 30, got {size}"):
        numbered().split(size)


def test_a_data_set_is_split_once():
    with pytest.raises(ValueError, match="numbered already has a validation part of 7 samples"):
        numbered().split(7).split(7)


def test_a_subset_is_the_first_samples():
    subset = numbered().subset(train=5, test=3)
    assert torch.equal(subset.train.targets, torch.arange(5))
    assert torch.equal(subset.test.targets, torch.arange(3))
    assert len(numbered().subset(train=5).test.targets) == 10


@pytest.mark.parametrize(("name", "size"), [("train", 31), ("test", 0)])
def test_a_subset_is_no_larger_than_its_part(name, size):
    with pytest.raises(ValueError, match=rf"{name} must be between 1 and \d+, .* got {size}"):
        numbered().subset(**{name: size})


def test_images_are_standardised_by_channel_of_the_train_part():
    split = noise().split(10, generator=seeded())
    standard = split.standardise()
    for channel in range(3):
        values = split.train.inputs[:, channel]
        mean, deviation = values.mean(), values.std(correction=0)
        for part in ("train", "validation", "test"):
            expected = (getattr(split, part).inputs[:, channel] - mean) / deviation
            got = getattr(standard, part).inputs[:, channel]
            torch.testing.assert_close(got, expected)


def test_flat_inputs_are_standardised_by_feature_and_constant_ones_only_shifted():
    inputs = torch.rand(20, 3, generator=seeded())
    inputs[:, 1] = 0.3
    part = Part(inputs, torch.zeros(20, dtype=torch.int64))
    standard = DataSet(part, None, part, classes=1, name="table").standardise().train.inputs

    torch.testing.assert_close(standard.mean(0), torch.zeros(3), atol=1e-6, rtol=0)
    torch.testing.assert_close(standard.std(0, correction=0), torch.tensor([1.0, 0.0, 1.0]))


def test_downsampling_averages_over_areas():
    images = noise()
    small = images.downsample(4)
    expected = images.test.inputs.unfold(2, 2, 2).unfold(3, 2, 2).mean((4, 5))

    torch.testing.assert_close(small.test.inputs, expected)
    assert small.train.inputs.shape == (30, 3, 4, 4)
    torch.testing.assert_close(small.train.inputs.mean(), images.train.inputs.mean())


def test_downsampling_to_a_size_that_does_not_divide_keeps_constants():
    images = noise()
    images.train.inputs.fill_(0.25)
    assert (images.downsample(3).train.inputs == 0.25).all()


@pytest.mark.parametrize(
    "prepare",
    [lambda d: d.downsample(9), lambda d: d.downsample(0), lambda d: d.flatten().downsample(4)],
)
def test_invalid_sizes_raise(prepare):
    with pytest.raises(ValueError, match=r"needs images .* Downsample before flattening"):
        prepare(noise())


def test_preparing_changes_nothing_in_place():
    images = noise()
    before = images.train.inputs.clone()
    images.split(5).standardise().downsample(2).flatten()
    assert torch.equal(images.train.inputs, before)


def test_moving_moves_inputs_and_targets():
    moved = noise().split(5).to("meta")
    for part in (moved.train, moved.validation, moved.test):
        assert part.inputs.device.type == part.targets.device.type == "meta"


def test_a_repr_has_shapes_and_no_values():
    assert "Part(30 samples of shape (3, 8, 8))" in repr(noise())


def test_a_part_unpacks_into_inputs_and_targets():
    inputs, targets = noise().train
    assert len(inputs) == len(targets) == 30


# --- digits ------------------------------------------------------------------------------------


def test_digits_come_with_a_test_part_that_is_always_the_same():
    first, again = data.digits(), data.digits()
    assert (len(first.train.targets), len(first.test.targets), first.classes) == (1347, 450, 10)
    assert first.train.inputs.shape == (1347, 1, 8, 8)
    assert (first.train.inputs.min(), first.train.inputs.max()) == (0, 1)
    assert torch.equal(first.test.inputs, again.test.inputs)
    other = data.digits(test=100, generator=seeded(5))
    assert not torch.equal(first.test.inputs[:100], other.test.inputs)


def test_digits_are_scikit_learns():
    from sklearn.datasets import load_digits

    pixels, targets = load_digits(return_X_y=True)
    got = data.digits()
    assert sum(part.inputs.sum() for part in (got.train, got.test)) * 16 == pixels.sum()
    counts = sum(part.targets.bincount() for part in (got.train, got.test))
    assert torch.equal(counts, torch.from_numpy(targets).bincount())


def test_digits_without_scikit_learn_name_the_missing_package(monkeypatch):
    monkeypatch.setitem(sys.modules, "sklearn.datasets", None)
    with pytest.raises(ImportError, match=r"pip install 'embens\[reproduction\]'"):
        data.digits()


# --- CIFAR-100 ---------------------------------------------------------------------------------


def cifar_records(count, seed=0):
    records = torch.randint(256, (count, 3074), generator=seeded(seed), dtype=torch.uint8)
    records[:, 0] %= 20
    records[:, 1] %= 100
    return records


def content(records):
    return bytes(records.flatten().tolist())


@pytest.fixture
def cifar(tmp_path):
    folder = tmp_path / "cifar-100-binary"
    folder.mkdir()
    for name, count in (("train", 7), ("test", 3)):
        (folder / f"{name}.bin").write_bytes(content(cifar_records(count)))
        label = "fine" if name == "train" else "coarse"
        (folder / f"{label}_label_names.txt").write_text("names\n")
    return folder


@pytest.mark.parametrize(("labels", "byte", "classes"), [("coarse", 0, 20), ("fine", 1, 100)])
def test_cifar_records_are_two_labels_and_pixels_by_channel(cifar, labels, byte, classes):
    got, records = data.cifar100(cifar, labels=labels), cifar_records(7)
    assert (got.name, got.classes, got.validation) == ("cifar100", classes, None)
    assert torch.equal(got.train.targets, records[:, byte].long())
    assert got.train.inputs.shape == (7, 3, 32, 32)
    assert got.test.inputs.shape == (3, 3, 32, 32)
    pixel = records[4, 2 + 1024 * 2 + 32 * 5 + 6]  # channel 2, row 5, column 6
    assert got.train.inputs[4, 2, 5, 6] == pixel / 255


def test_cifar_is_found_in_a_folder_of_its_name(cifar):
    data_set = data.cifar100(cifar.parent)
    assert torch.equal(data_set.train.inputs, data.cifar100(str(cifar)).train.inputs)


def test_cifar_that_is_missing_says_where_it_was_looked_for(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"train.bin and test.bin in .* allow the download"):
        data.cifar100(tmp_path)


def test_a_compressed_cifar_file_is_not_taken_for_the_file(cifar):
    (cifar / "train.bin").rename(cifar / "train.bin.gz")
    with pytest.raises(FileNotFoundError, match="Pass the folder that has them"):
        data.cifar100(cifar)


@pytest.mark.parametrize("size", [0, 3073, 3074 * 2 + 1])
def test_a_cut_cifar_file_is_refused(cifar, size):
    (cifar / "train.bin").write_bytes(bytes(size))
    with pytest.raises(ValueError, match=f"records of 3074 bytes, got {size} bytes. Replace it"):
        data.cifar100(cifar)


def test_cifar_labels_out_of_range_are_refused(cifar):
    (cifar / "test.bin").write_bytes(b"\x13\xff" + bytes(3072))
    with pytest.raises(ValueError, match=r"test.bin must have labels from 0 to 99, got 255"):
        data.cifar100(cifar)


def test_cifar_has_fine_and_coarse_labels_only(cifar):
    with pytest.raises(ValueError, match="labels must be 'fine' or 'coarse', got 'corse'"):
        data.cifar100(cifar, labels="corse")


@pytest.mark.skipif("EMBENS_CIFAR100" not in os.environ, reason="EMBENS_CIFAR100 is not set")
def test_real_cifar_has_plausible_statistics():
    folder = Path(os.environ.get("EMBENS_CIFAR100", ""))
    fine, coarse = data.cifar100(folder), data.cifar100(folder, labels="coarse")
    assert len(fine.train.targets) == (folder / "train.bin").stat().st_size // 3074
    assert torch.equal(fine.train.targets.unique(), torch.arange(100))
    assert torch.equal(coarse.train.targets.unique(), torch.arange(20))
    assert len(torch.unique(coarse.train.targets * 100 + fine.train.targets)) == 100
    mean, deviation = torch.tensor([0.507, 0.487, 0.441]), torch.tensor([0.267, 0.256, 0.276])
    got = fine.train.inputs
    torch.testing.assert_close(got.mean((0, 2, 3)), mean, atol=0.01, rtol=0)
    torch.testing.assert_close(got.std((0, 2, 3)), deviation, atol=0.01, rtol=0)
    horizontal = (got[..., 1:] - got[..., :-1]).abs().mean()
    assert horizontal < 0.1  # neighbouring pixels are alike: rows and channels are in order


# --- downloads ---------------------------------------------------------------------------------


class Quiet(http.server.SimpleHTTPRequestHandler):
    timeout = 10

    def do_GET(self):
        self.server.requests.append(self.path)
        super().do_GET()

    def log_message(self, *_):
        pass


@pytest.fixture
def site(tmp_path, monkeypatch):
    """A folder that is served on this machine; its server has an address and its requests."""
    monkeypatch.setenv("no_proxy", "*")
    folder = tmp_path / "site"
    folder.mkdir()
    handler = partial(Quiet, directory=folder)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        server.folder, server.requests = folder, []
        server.address = f"http://127.0.0.1:{server.server_port}/"
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        yield server
        server.shutdown()
        thread.join(10)


@pytest.fixture
def cifar_site(site, cifar, monkeypatch):
    archive = site.folder / "cifar-100-binary.tar.gz"
    with tarfile.open(archive, "w:gz") as tar:
        tar.add(cifar, cifar.name)
    shutil.rmtree(cifar)
    sha256 = hashlib.sha256(archive.read_bytes()).hexdigest()
    monkeypatch.setattr(data, "CIFAR100_URL", site.address + archive.name)
    monkeypatch.setattr(data, "CIFAR100_SHA256", sha256)
    monkeypatch.setattr(data, "CIFAR100_SIZE", archive.stat().st_size)
    return site


def test_cifar_is_downloaded_once_and_found_afterwards(cifar_site, tmp_path):
    root = tmp_path / "new" / "cache"
    got = data.cifar100(root, download=True)
    assert torch.equal(got.train.targets, cifar_records(7)[:, 1].long())
    data.cifar100(root, download=True)
    data.cifar100(root)
    assert cifar_site.requests == ["/cifar-100-binary.tar.gz"]
    assert sorted(path.name for path in (root / "cifar-100-binary").iterdir()) == [
        "coarse_label_names.txt",
        "fine_label_names.txt",
        "test.bin",
        "train.bin",
    ]


def test_several_downloads_at_once_are_one(cifar_site, tmp_path):
    with ThreadPool(4) as pool:
        loaded = pool.map(lambda _: data.cifar100(tmp_path, download=True), range(4))
    assert all(torch.equal(got.train.inputs, loaded[0].train.inputs) for got in loaded)
    assert cifar_site.requests == ["/cifar-100-binary.tar.gz"]


def test_a_cifar_archive_with_wrong_bytes_is_never_unpacked(cifar_site, tmp_path):
    (cifar_site.folder / "cifar-100-binary.tar.gz").write_bytes(b"wrong")
    with pytest.raises(ValueError, match="bytes with SHA-256"):
        data.cifar100(tmp_path / "root", download=True)
    assert not (tmp_path / "root" / "cifar-100-binary").exists()


# --- the cache folder --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {}, "home/.cache/embens"),
        ("linux", {"XDG_CACHE_HOME": "xdg"}, "xdg/embens"),
        ("linux", {"XDG_CACHE_HOME": ""}, "home/.cache/embens"),
        ("darwin", {"XDG_CACHE_HOME": "xdg"}, "home/Library/Caches/embens"),
        ("win32", {"LOCALAPPDATA": "local"}, "local/embens"),
        ("win32", {}, "home/AppData/Local/embens"),
        ("linux", {"EMBENS_DATA": "mine"}, "mine"),
        ("darwin", {"EMBENS_DATA": "mine"}, "mine"),
        ("linux", {"EMBENS_DATA": ""}, "home/.cache/embens"),
    ],
)
def test_the_cache_folder_is_the_platforms_unless_chosen(
    monkeypatch, platform, variables, expected
):
    for name in ("EMBENS_DATA", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("home"))

    assert data.cache_folder() == Path(expected)


def test_without_a_root_files_are_looked_for_in_the_cache_folder(cifar, monkeypatch):
    monkeypatch.setenv("EMBENS_DATA", str(cifar.parent))
    assert len(data.cifar100().train.targets) == 7
    monkeypatch.setenv("EMBENS_DATA", str(cifar.parent / "elsewhere"))
    with pytest.raises(FileNotFoundError, match="elsewhere"):
        data.cifar100()
