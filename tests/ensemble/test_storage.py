"""Saving and loading: nothing lost, nothing executed, nothing foreign accepted."""

from __future__ import annotations

import copy
import dataclasses
import json
import pickle
import signal
from functools import partial

import cases
import pytest
import torch
from cases import ARCHITECTURES, Residual
from safetensors.torch import save_file
from torch import nn

import embens
from embens import laws
from embens.ensemble import storage
from embens.files import Refused, read_tensors, write_tensors

FAMILIES = {
    "batch ensemble": lambda r: embens.batch_ensemble(r, 3, p=0.3),
    "frozen masks": lambda r: embens.mc_dropout(r, 3),
    "fresh masks": lambda r: embens.mc_dropout(r, 3, law=laws.Ternary(), fresh=True),
    "last layer": lambda r: embens.last_layer_dropout(r, 3, law=laws.Rademacher()),
    "independent": lambda r: embens.independent(r, 3),
    **{
        name: partial(family, members=3)
        for name, family in (cases.FAMILIES | cases.STOCHASTIC).items()
    },
    "by site": lambda r: embens.embed(r, 3, pre=None, sites="all", trainable=False),
}


def mlp(width: int = 6) -> nn.Sequential:
    return nn.Sequential(nn.Linear(3, width), nn.Tanh(), nn.Linear(width, 2))


@pytest.fixture
def path(tmp_path):
    return tmp_path / "ensemble.safetensors"


@pytest.mark.parametrize("case", ARCHITECTURES, ids=str)
@pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
def test_a_loaded_ensemble_is_the_saved_one(case, family, path):
    reference, x = case.build(), case.inputs(torch.Generator().manual_seed(0))
    ensemble = family(reference).eval()
    with torch.no_grad():
        for p in ensemble.parameters():
            p.add_(0.1)
    ensemble.save(path)
    loaded = embens.load(path, case.build()).eval()
    assert loaded.plan == ensemble.plan
    for a, b in zip(loaded.state_dict().items(), ensemble.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    states = []
    for e in (ensemble, loaded):
        torch.manual_seed(0)
        states.append(e(x))
    assert torch.equal(*states)
    assert [p.requires_grad for p in loaded.parameters()] == [
        p.requires_grad for p in ensemble.parameters()
    ]


def test_the_reference_that_is_given_is_not_changed(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    reference = mlp()
    before = [p.clone() for p in reference.parameters()]
    embens.load(path, reference)
    assert all(torch.equal(a, b) for a, b in zip(before, reference.parameters(), strict=True))


def test_a_law_of_the_users_own_is_loaded_once_its_class_is_defined(path, monkeypatch):
    @dataclasses.dataclass(frozen=True)
    class Halves(laws.Discrete):
        value: float = 0.5

        @property
        def atoms(self):
            return ((-self.value, 0.5), (self.value, 0.5))

    embens.embed(mlp(), 2, pre=Halves(0.25)).save(path)
    assert Halves(0.25) in {s.law for s in embens.load(path, mlp()).plan.sites}
    monkeypatch.setattr(laws, "known", dict)  # as in a process that does not define it
    with pytest.raises(ValueError, match=r"'Halves' that is not known here.*import the module"):
        embens.load(path, mlp())


@pytest.mark.parametrize("keep", [0.0, 0.001, 0.3, 0.999])
def test_a_truncated_file_is_refused(path, keep):
    embens.batch_ensemble(mlp(), 3).save(path)
    content = path.read_bytes()
    path.write_bytes(content[: int(len(content) * keep)])
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        embens.load(path, mlp())


class Trap:
    """Would leave a mark if it were unpickled."""

    fired = False

    def __reduce__(self):
        return (setattr, (Trap, "fired", True))


def test_foreign_files_are_refused_and_never_executed(path):
    path.write_bytes(pickle.dumps(Trap()))
    with pytest.raises(ValueError, match="not a whole safetensors file"):
        embens.load(path, mlp())
    assert not Trap.fired
    save_file({"a": torch.zeros(2)}, path)
    with pytest.raises(ValueError, match="no embens header"):
        embens.load(path, mlp())
    for header in ("{", "[]", "7", "[" * 100_000, '{"format": "embens ensemble", "version": 3}'):
        save_file({"a": torch.zeros(2)}, path, {"embens": header})
        with pytest.raises(ValueError, match=r"ensemble.safetensors (can't|has no|is damaged)"):
            embens.load(path, mlp())


@pytest.mark.parametrize(
    ("version", "advice"), [(2, "the embens that wrote"), (99, "newer embens")]
)
def test_another_version_says_what_reads_it(path, version, advice):
    header = {"format": "embens ensemble", "version": version}
    save_file({}, path, {"embens": json.dumps(header)})
    with pytest.raises(ValueError, match=rf"version {version}, this embens reads 3; .*{advice}"):
        embens.load(path, mlp())


def edit(path, change=lambda plan: None, tensors=lambda tensors: None) -> None:
    """Change header and tensors as someone who knows the checksum."""
    header, found = read_tensors(path, storage.FORMAT)
    change(header["plan"])
    tensors(found)
    write_tensors(path, storage.FORMAT, header, found)


@pytest.mark.parametrize(
    "change",
    [
        lambda plan: plan.update(members=-1),
        lambda plan: plan.update(members="many"),
        lambda plan: plan["sites"][0].update(size=10**12),
        lambda plan: plan["sites"][0].update(kind="sideways"),
        lambda plan: plan["sites"][0]["law"].update(p="os.system"),
        lambda plan: plan["sites"][0]["law"].update(law="__import__"),
        lambda plan: plan["sites"][0].update(layer="nowhere"),
        lambda plan: plan.update(own=[["0", ["__class__"]]]),
        lambda plan: plan.update(surprise=1),
        lambda plan: plan.update(subset={"members": [0, 1, 7], "of": 4}),
        lambda plan: plan.update(subset={"members": [0, 1], "of": 4}),
        lambda plan: plan.update(subset={"members": 3, "of": 4}),
        lambda plan: plan.update(members=10**9),
        lambda plan: plan.update(sites=7),
        lambda plan: plan.pop("folding"),
    ],
)
def test_a_header_that_was_tampered_with_is_refused_before_anything_is_built(path, change):
    embens.batch_ensemble(mlp(), 3).save(path)
    edit(path, change)
    with pytest.raises(Refused, match=r"^ensemble.safetensors can't be read: "):
        embens.load(path, mlp())


def test_more_separate_networks_than_the_file_holds_are_refused_before_any_memory_is_taken(path):
    embens.independent(mlp(), 3).save(path)
    edit(path, lambda plan: plan.update(members=10**9))
    with pytest.raises(Refused, match="disagree on the number of members"):
        embens.load(path, mlp())


def test_a_flipped_bit_anywhere_is_refused(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    content = path.read_bytes()
    for place in range(0, len(content), 37):
        changed = bytearray(content)
        changed[place] ^= 1 << place % 8
        path.write_bytes(changed)
        with pytest.raises(Refused):
            embens.load(path, mlp())


def test_a_file_without_a_checksum_is_refused(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    header, tensors = read_tensors(path, storage.FORMAT)
    save_file(tensors, path, {"embens": json.dumps(header)})
    with pytest.raises(Refused, match="another checksum"):
        embens.load(path, mlp())


@pytest.mark.parametrize("dtype", [torch.int32, torch.float64, torch.bfloat16])
def test_tensors_of_another_type_are_refused(path, dtype):
    embens.batch_ensemble(mlp(), 3).save(path)

    def change(tensors):
        name = next(name for name in tensors if name.endswith("bias"))
        tensors[name] = tensors[name].to(dtype)

    edit(path, tensors=change)
    with pytest.raises(Refused, match=rf"bias' is .*{dtype}.* in the reference .*torch.float32"):
        embens.load(path, mlp())


def test_a_reference_of_another_type_is_refused_and_one_of_the_same_is_loaded(path):
    ensemble = embens.batch_ensemble(mlp().double(), 3)
    ensemble.save(path)
    with pytest.raises(Refused, match=r"reference.to\(torch.float64\)"):
        embens.load(path, mlp())
    x = torch.randn(4, 3, dtype=torch.float64)
    assert torch.equal(embens.load(path, mlp().double())(x), ensemble(x))


def test_weights_that_are_nan_are_warned_of(path):
    ensemble = embens.batch_ensemble(mlp(), 3)
    with torch.no_grad():
        next(iter(ensemble.shared_parameters()))[0, 0] = torch.nan
    ensemble.save(path)
    with pytest.warns(UserWarning, match=r"was saved with NaN in network\."):
        embens.load(path, mlp())


def test_saving_through_a_link_keeps_the_link(path, tmp_path):
    target = tmp_path / "far.safetensors"
    path.symlink_to(target)
    embens.batch_ensemble(mlp(), 3).save(path)
    assert path.is_symlink()
    assert embens.load(target, mlp()).members == 3


@pytest.mark.skipif(not hasattr(signal, "SIGXFSZ"), reason="there are no limits on files here")
def test_a_full_disk_is_an_error_that_says_where_and_leaves_the_old_file(path):
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


def test_another_architecture_is_refused_with_the_difference(path):
    embens.batch_ensemble(mlp(), 3).save(path)
    with pytest.raises(ValueError, match=r"reference.s layer needs 7, which is another shape"):
        embens.load(path, mlp(width=7))
    with pytest.raises(ValueError, match="the reference has no module '2'"):
        embens.load(path, nn.Sequential(nn.Linear(3, 6)))
    with pytest.raises(ValueError, match="no module '0'"):
        embens.load(path, Residual())


def test_a_missing_file_or_folder_is_said_to_be_missing(tmp_path):
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


def small_file(case, family, path):
    """Return a reference, an ensemble with other members' numbers, and its outputs."""
    torch.manual_seed(0)
    reference, x = case.build(), case.inputs(torch.Generator().manual_seed(0))
    ensemble = family(reference)
    with torch.no_grad():
        for parameter in ensemble.individual_parameters():
            parameter.add_(0.1)
    ensemble.train()(x)  # running statistics, also of what members share
    ensemble.eval().save(path, shared=False)
    return reference, ensemble, x


SMALL = {**FAMILIES, "mimo": lambda r: embens.mimo(r, 3)}
SMALL.pop("fresh masks")


@pytest.mark.parametrize(
    "case", [c for c in ARCHITECTURES if c.name in ("mlp", "residual", "transformer")], ids=str
)
@pytest.mark.parametrize("family", SMALL.values(), ids=SMALL)
def test_members_numbers_alone_are_joined_to_the_same_reference_again(case, family, path):
    reference, ensemble, x = small_file(case, family, path)
    loaded = embens.load(path, reference).eval()
    assert loaded.plan == ensemble.plan
    for a, b in zip(loaded.state_dict().items(), ensemble.state_dict().items(), strict=True):
        assert a[0] == b[0]
        assert torch.equal(a[1], b[1])
    outputs = []
    for each in (loaded, ensemble):
        torch.manual_seed(0)  # some families draw numbers at every pass
        outputs.append(each(x))
    assert torch.equal(*outputs)
    shared = {id(p) for p in ensemble.shared_parameters()}
    state = ensemble.state_dict(keep_vars=True).items()
    kept = read_tensors(path, storage.FORMAT)[1].keys()
    assert kept == {name for name, tensor in state if id(tensor) not in shared}
    if not shared:
        return
    other = copy.deepcopy(reference)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.flatten()[-1:].add_(1e-3)
    with pytest.raises(ValueError, match=r"other weights.*checkpoint"):
        embens.load(path, other)


def test_a_file_of_members_numbers_is_small_and_trained_members_of_a_frozen_network_fit(path):
    reference = embens.networks.mlp(8, 128, 3, 2).requires_grad_(False)
    ensemble = embens.batch_ensemble(reference, 4)
    x, y = torch.randn(40, 8), torch.arange(40) % 2
    embens.fit(ensemble, (x, y), epochs=2, lr=0.05)
    ensemble.save(path, shared=False)
    assert path.stat().st_size < 0.25 * sum(p.nbytes for p in reference.parameters())
    assert torch.equal(embens.load(path, reference)(x), ensemble(x))


def test_shared_weights_that_were_trained_do_not_fit_the_reference_of_before(path):
    reference = mlp()
    ensemble = embens.batch_ensemble(reference, 3)
    x, y = torch.randn(40, 3), torch.arange(40) % 2
    embens.fit(ensemble, (x, y), epochs=1)
    ensemble.save(path, shared=False)
    with pytest.raises(ValueError, match=r"other weights \('network.*save the whole ensemble"):
        embens.load(path, reference)
    with pytest.raises(ValueError, match="other weights"):
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
def test_tampered_fingerprints_are_refused(path, change):
    reference = mlp()
    embens.batch_ensemble(reference, 3).save(path, shared=False)
    header, tensors = read_tensors(path, storage.FORMAT)
    change(header)
    write_tensors(path, storage.FORMAT, header, tensors)
    with pytest.raises(ValueError, match=r"weights|read|no tensor"):
        embens.load(path, reference)


@pytest.mark.parametrize("shared", [True, False])
def test_a_file_in_which_attention_is_one_layer_is_refused(tmp_path, shared):
    reference = nn.TransformerEncoderLayer(8, 2, 12, batch_first=True)
    embens.batch_ensemble(reference, 2).save(tmp_path / "new", shared=shared)
    header, tensors = read_tensors(tmp_path / "new", storage.FORMAT)
    old = "network.self_attn.attention.in_proj_weight"
    if shared:
        tensors[old] = reference.self_attn.in_proj_weight.detach()
    else:
        header["shared"][old] = "0"
    header = {k: v for k, v in header.items() if k not in ("format", "version")}
    write_tensors(tmp_path / "old", storage.FORMAT, header, tensors)
    with pytest.raises(Refused, match=r"attention of version 0\.2|the reference has other weights"):
        embens.load(tmp_path / "old", reference)
    embens.load(tmp_path / "new", reference)
