"""Saving and loading: nothing is lost, nothing is executed, damaged files raise."""

import copy
import dataclasses
import json
import pickle
import re
import signal
from functools import partial

import pytest
import torch
from cases import ARCHITECTURES, FAMILIES, Residual, sampled
from safetensors.torch import save_file
from torch import nn

import embens
from embens import laws
from embens.ensemble import saving
from embens.files import Refused, read_tensors, write_tensors

SAVED = {
    **FAMILIES,
    "fresh masks": partial(embens.mc_dropout, law=laws.Ternary()),
    "last layer": partial(embens.last_layer_dropout, law=laws.Rademacher()),
    "joint law": partial(embens.embed, pre=None, post=laws.Correlated(-0.2)),
}


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


def train(ensemble: embens.EmbeddedEnsemble, x: torch.Tensor, y: torch.Tensor) -> None:
    """Take a few steps of gradient descent."""
    optimizer = torch.optim.SGD(ensemble.parameter_groups(lr=0.05))
    for _ in range(2):
        optimizer.zero_grad()
        ensemble.objective(ensemble(x), y).backward()
        optimizer.step()


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ensemble.safetensors"


@sampled("case, family", ARCHITECTURES, list(SAVED))
def test_a_loaded_ensemble_is_the_saved_one(case, family, path):
    reference, x = case.build(), case.inputs(torch.Generator().manual_seed(0))
    ensemble = SAVED[family](reference, members=3).eval()
    with torch.no_grad():
        for p in ensemble.parameters():
            p.add_(0.1)
    ensemble.save(path)
    loaded = embens.load(path, case.build()).eval()
    assert loaded.spec == ensemble.spec
    for a, b in zip(loaded.state_dict().items(), ensemble.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    outputs = []
    for twin in (ensemble, loaded):
        torch.manual_seed(0)  # decides fresh masks
        outputs.append(twin(x))
    assert torch.equal(*outputs)
    trained = [p.requires_grad for p in ensemble.parameters()]
    assert [p.requires_grad for p in loaded.parameters()] == trained


def test_loading_does_not_change_the_reference(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    reference = mlp()
    before = [p.clone() for p in reference.parameters()]
    embens.load(path, reference)
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))


def test_a_law_of_the_user_is_loaded_if_its_class_is_defined(path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Halves(laws.Discrete):
        value: float = 0.5

        @property
        def atoms(self):
            return ((-self.value, 0.5), (self.value, 0.5))

    embens.embed(mlp(), 2, pre=Halves(0.25)).save(path)
    assert Halves(0.25) in {s.law for s in embens.load(path, mlp()).spec.sites}
    monkeypatch.setattr(laws.law, "registered", dict)  # as in a process without the class
    with pytest.raises(ValueError, match=r"unknown law 'Halves'.*import its module first"):
        embens.load(path, mlp())


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_raises(path, keep):
    embens.batch_ensemble(mlp(), 3).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        embens.load(path, mlp())


class Trap:
    """Sets an attribute if it is unpickled."""

    fired = False

    def __reduce__(self):
        return (setattr, (Trap, "fired", True))


def test_other_files_raise_and_are_never_executed(path):
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        embens.load(path, mlp())
    assert not Trap.fired
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no embens header"):
        embens.load(path, mlp())
    for header in ("{", "[]", "7", "[" * 100_000, '{"format": "embens ensemble", "version": 4}'):
        save_file({"a": torch.zeros(2)}, path, {"embens": header})
        with pytest.raises(ValueError, match=r"ensemble.safetensors (can't|has no|is damaged)"):
            embens.load(path, mlp())


@pytest.mark.parametrize(
    ("version", "advice"), [(3, "the embens that wrote"), (99, "newer embens")]
)
def test_a_file_of_another_version_raises_with_advice(path, version, advice):
    header = {"format": "embens ensemble", "version": version}
    save_file({}, path, {"embens": json.dumps(header)})
    with pytest.raises(ValueError, match=rf"version {version}, this embens reads 4; .*{advice}"):
        embens.load(path, mlp())


def edit(path, change=lambda spec: None, change_tensors=lambda tensors: None) -> None:
    """Change header and tensors of a file, with a valid checksum."""
    header, tensors = read_tensors(path, saving.FORMAT)
    change(header["spec"])
    change_tensors(tensors)
    write_tensors(path, saving.FORMAT, header, tensors)


@pytest.mark.parametrize(
    "change",
    [
        lambda spec: spec.update(members=-1),
        lambda spec: spec.update(members="many"),
        lambda spec: spec["sites"][0].update(size=10**12),
        lambda spec: spec["sites"][0].update(kind="sideways"),
        lambda spec: spec["sites"][0]["law"].update(p="os.system"),
        lambda spec: spec["sites"][0]["law"].update(law="__import__"),
        lambda spec: spec["sites"][0].update(layer="nowhere"),
        lambda spec: spec.update(per_member=[["0", ["__class__"]]]),
        lambda spec: spec.update(surprise=1),
        lambda spec: spec.update(chosen=[0, 1, 7], sampled=4),
        lambda spec: spec.update(chosen=[0, 1], sampled=4),
        lambda spec: spec.update(chosen=3, sampled=4),
        lambda spec: spec.update(members=10**9),
        lambda spec: spec.update(sites=7),
        lambda spec: spec.pop("low_rank"),
    ],
)
def test_an_invalid_header_raises_before_anything_is_built(path, change):
    embens.batch_ensemble(mlp(), 3).save(path)
    edit(path, change)
    with pytest.raises(Refused, match=r"^ensemble.safetensors(:| can't be read:) "):
        embens.load(path, mlp())


def test_more_members_than_the_file_holds_raise_before_memory_is_allocated(path):
    embens.independent(mlp(), 3).save(path)
    edit(path, lambda spec: spec.update(members=10**6))
    with pytest.raises(Refused, match="header and tensors disagree"):
        embens.load(path, mlp())


def test_a_flipped_bit_raises(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 37):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(Refused):
            embens.load(path, mlp())


def test_a_file_without_a_checksum_raises(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    header, tensors = read_tensors(path, saving.FORMAT)
    save_file(tensors, path, {"embens": json.dumps(header)})
    with pytest.raises(Refused, match="another checksum"):
        embens.load(path, mlp())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bfloat16])
def test_tensors_of_another_type_raise(path, dtype):
    embens.batch_ensemble(mlp(), 3).save(path)

    def change(tensors):
        name = next(name for name in tensors if name.endswith("bias"))
        tensors[name] = tensors[name].to(dtype)

    edit(path, change_tensors=change)
    with pytest.raises(
        Refused, match=rf"bias' has shape .*{dtype}, the reference has .*torch.float32"
    ):
        embens.load(path, mlp())


def test_a_reference_of_another_type_raises(path):
    ensemble = embens.batch_ensemble(mlp().double(), 3)
    ensemble.save(path)
    with pytest.raises(Refused, match=r"reference.to\(torch.float64\)"):
        embens.load(path, mlp())
    x = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(embens.load(path, mlp().double())(x), ensemble(x))


def test_nan_in_a_file_is_reported(path):
    ensemble = embens.batch_ensemble(mlp(), 3)
    with torch.no_grad():
        next(iter(ensemble.shared_parameters()))[0, 0] = torch.nan
    ensemble.save(path)
    with pytest.warns(UserWarning, match=r"was saved with NaN in reference\."):
        embens.load(path, mlp())


def test_saving_through_a_link_keeps_the_link(path, tmp_path):
    target = tmp_path / "far.safetensors"
    path.symlink_to(target)
    embens.batch_ensemble(mlp(), 3).save(path)
    assert path.is_symlink()
    assert embens.load(target, mlp()).members == 3


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="the system has no limit of file sizes")
def test_a_full_disk_raises_with_the_path_and_leaves_the_old_file(path):
    import resource

    embens.batch_ensemble(mlp(), 3).save(path)
    before, limits = path.read_bytes(), resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(OSError, match=r"File too large: '.*/ensemble.safetensors'"):
            embens.batch_ensemble(mlp(), 3).save(path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_another_architecture_raises_with_the_difference(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    with pytest.raises(ValueError, match=r"reference.s layer has 7 channels: another shape"):
        embens.load(path, mlp(width=7))
    with pytest.raises(ValueError, match="the reference has no module '2'"):
        embens.load(path, nn.Sequential(nn.Linear(3, 6)))
    with pytest.raises(ValueError, match="no module '0'"):
        embens.load(path, Residual())


def test_a_missing_file_or_folder_raises(tmp_path):
    with pytest.raises(FileNotFoundError, match="there is no file"):
        embens.load(tmp_path / "nothing", mlp())
    with pytest.raises(FileNotFoundError, match="does not exist"):
        embens.batch_ensemble(mlp(), 2).save(tmp_path / "no" / "where")


def test_saving_over_a_file_is_atomic(path, monkeypatch):
    ensemble = embens.batch_ensemble(mlp(), 3)
    ensemble.save(path)
    before = path.read_bytes()

    def fail(*args):
        raise OSError("disk full")

    monkeypatch.setattr("os.fsync", fail)
    with pytest.raises(OSError, match="disk full"):
        ensemble.save(path)
    assert path.read_bytes() == before
    assert list(path.parent.iterdir()) == [path]


def test_a_saved_file_has_the_permissions_of_any_new_file(path, tmp_path):
    plain = tmp_path / "plain"
    plain.write_text("")
    embens.batch_ensemble(mlp(), 2).save(path)
    assert path.stat().st_mode == plain.stat().st_mode
    path.chmod(0o640)
    embens.batch_ensemble(mlp(), 2).save(path)
    assert path.stat().st_mode & 0o777 == 0o640


BATCHED = [case for case in ARCHITECTURES if case.name in ("mlp", "residual", "transformer")]


@pytest.mark.parametrize("case", BATCHED, ids=str)
@pytest.mark.parametrize("family", FAMILIES)
def test_values_of_the_members_are_combined_with_the_same_reference_again(case, family, path):
    torch.manual_seed(0)
    reference, x = case.build(), case.inputs(torch.Generator().manual_seed(0))
    ensemble = FAMILIES[family](reference, members=3)
    with torch.no_grad():
        for parameter in ensemble.individual_parameters():
            parameter.add_(0.1)
    ensemble.train()(x)  # changes running statistics
    ensemble.eval().save(path, shared=False)
    loaded = embens.load(path, reference).eval()
    assert loaded.spec == ensemble.spec
    assert torch.equal(loaded(x), ensemble(x))
    shared = {id(p) for p in ensemble.shared_parameters()}
    state = ensemble.state_dict(keep_vars=True).items()
    kept = read_tensors(path, saving.FORMAT)[1].keys()
    assert kept == {name for name, tensor in state if id(tensor) not in shared}
    if not shared:
        return
    other = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.flatten()[-1:].add_(1e-3)
    with pytest.raises(ValueError, match=r"other weights.*checkpoint"):
        embens.load(path, other)


def test_a_file_without_shared_parameters_is_small(path):
    reference = embens.networks.mlp(8, 128, 3, 2).requires_grad_(False)
    ensemble = embens.batch_ensemble(reference, 4)
    x, y = torch.randn(40, 8), torch.arange(40) % 2
    train(ensemble, x, y)
    ensemble.save(path, shared=False)

    assert path.stat().st_size < 0.25 * sum(p.nbytes for p in reference.parameters())
    assert torch.equal(embens.load(path, reference)(x), ensemble(x))


def test_trained_shared_weights_do_not_fit_the_untrained_reference(path):
    reference = mlp()
    ensemble = embens.batch_ensemble(reference, 3)
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    train(ensemble, x, y)
    ensemble.save(path, shared=False)
    with pytest.raises(ValueError, match=r"other weights \('reference.*save the whole ensemble"):
        embens.load(path, reference)
    with pytest.raises(ValueError, match=r"reference.to\(torch.float32\)"):
        embens.load(path, mlp().double())
    with pytest.raises(ValueError, match="the reference has no module"):
        embens.load(path, nn.Sequential(nn.Linear(3, 6)))


@pytest.mark.parametrize(
    "change",
    [
        lambda header: header.update(shared=7),
        lambda header: header["shared"].popitem(),
        lambda header: header["shared"].update(surprise="0"),
        lambda header: header.pop("shared"),
    ],
)
def test_invalid_fingerprints_raise(path, change):
    reference = mlp()
    embens.batch_ensemble(reference, 3).save(path, shared=False)
    header, tensors = read_tensors(path, saving.FORMAT)
    change(header)
    write_tensors(path, saving.FORMAT, header, tensors)
    with pytest.raises(ValueError, match=r"weights|header.shared must be|no tensor"):
        embens.load(path, reference)


# Folders


def reference(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(4, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 3)
    )


@pytest.mark.parametrize("by", ["modulations", "low_rank", "head"])
def test_a_folder_holds_the_values_of_the_members_and_a_card(by, tmp_path):
    net, x = reference(), torch.randn(30, 4)
    ensemble = embens.adapt(net, 3, by=by, trunk="frozen")
    train(ensemble, x, torch.arange(30) % 3)
    ensemble.save_pretrained(tmp_path / "new" / "folder", base="somebody/network: v2")
    card = (tmp_path / "new" / "folder" / saving.CARD).read_text()
    assert 'base_model: "somebody/network: v2"\n' in card  # a quoted string of YAML
    folder = tmp_path / "new" / "folder"
    assert {path.name for path in folder.iterdir()} == {saving.FILE, saving.CARD}
    other_head = reference()
    nn.init.zeros_(other_head[4].weight)  # members have separate heads
    again = embens.load(folder, other_head)
    torch.testing.assert_close(again(x), ensemble(x))
    ensemble.save(tmp_path / "whole")
    if by == "head":
        assert (folder / saving.FILE).stat().st_size < 0.5 * (tmp_path / "whole").stat().st_size
    with pytest.raises(Exception, match="the reference has other weights"):
        embens.load(folder, reference(1))


def test_the_card_describes_the_ensemble_and_its_code_runs(tmp_path, monkeypatch):
    net = reference()
    ensemble = embens.adapt(net, 3, by="modulations", trunk="trained")
    ensemble.save_pretrained(tmp_path / "folder", results={"log loss": 0.12345})
    text = (tmp_path / "folder" / saving.CARD).read_text()
    assert text.startswith("---\nlibrary_name: embens\ntags: [ensemble, uncertainty, adapt]\n---\n")
    for part in ("# 3 members in one Sequential\n", "| log loss | 0.12345 |", "separate '4'"):
        assert part in text
    individual = sum(p.numel() for p in ensemble.individual_parameters())
    shared = sum(p.numel() for p in ensemble.shared_parameters())
    assert f"| {individual:,} |" in text
    assert f"| {shared:,}, in the file |" in text
    assert "Normal(mean=1.0, std=" in text
    code = re.search(r"```python\n(.*?)```", text, re.DOTALL).group(1)
    monkeypatch.chdir(tmp_path)
    names = {"inputs": torch.ones(2, 4), "net": net, "folder": "folder"}
    exec(code.replace("reference = ...", "reference = net"), names)
    expected = embens.predict(ensemble, torch.ones(2, 4)).probabilities
    torch.testing.assert_close(names["prediction"].probabilities, expected)


def test_a_readme_that_is_no_model_card_is_never_replaced(tmp_path):
    ensemble = embens.batch_ensemble(nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 2)), 2)
    ensemble.save(tmp_path / saving.FILE)
    readme = tmp_path / saving.CARD
    readme.write_text("# Notes of the user")
    with pytest.raises(FileExistsError, match="holds other files"):
        ensemble.save_pretrained(tmp_path)
    assert readme.read_text() == "# Notes of the user"
    readme.unlink()
    readme.mkdir()
    (readme / "notes").touch()
    with pytest.raises(FileExistsError, match="holds other files"):
        ensemble.save_pretrained(tmp_path)
    assert (readme / "notes").exists()
