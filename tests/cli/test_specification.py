"""Networks, laws and data that are written on a command line."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from embens import laws, networks
from embens.cli.specification import parse_law, parse_reference, parse_widths, read_data


@pytest.mark.parametrize(
    ("text", "law"),
    [
        ("Normal", laws.Normal()),
        (" Shifted(0.5) ", laws.Shifted(0.5)),
        ("Bernoulli(keep=0.9, scale=-2)", laws.Bernoulli(0.9, -2.0)),
        ("none", None),
        ("None", None),
    ],
)
def test_a_law_is_written_as_a_call(text, law):
    assert parse_law(text) == law


def test_a_law_of_the_users_own_is_known_once_it_is_defined():
    class Fours(laws.Discrete):
        atoms = ((4.0, 1.0),)

    assert isinstance(parse_law("Fours"), Fours)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("Shiftd(0.5)", "unknown law 'Shiftd'; did you mean 'Shifted'"),
        ("Shifted(2)", r"law 'Shifted\(2\)': .*p must be a number in \[-1, 1\]"),
        ("Shifted(q=0)", "unexpected keyword argument 'q'"),
        ("Shifted(open('x'))", "a call with literal values"),
        ("__import__('os').system('x')", "a call with literal values"),
        ("Shifted(0.5", "a call with literal values"),
    ],
)
def test_what_is_no_law_is_refused_and_never_run(text, message):
    with pytest.raises(ValueError, match=message):
        parse_law(text)


def test_a_reference_is_a_network_of_embens_or_a_function_in_a_file(tmp_path):
    network = parse_reference("mlp(inputs=4, width=8, depth=2, outputs=3)")
    assert network(torch.zeros(1, 4)).shape == (1, 3)
    path = tmp_path / "mine.py"
    path.write_text(
        "from torch import nn\n"
        "def make(): return nn.Linear(2, 3)\n"
        "network, number = make(), lambda: 3\n"
    )
    assert parse_reference(f"{path}:make").out_features == 3
    assert isinstance(parse_reference(f"{path}:network"), nn.Linear)
    with pytest.raises(ValueError, match=r"should return a torch.nn.Module; got int"):
        parse_reference(f"{path}:number")
    with pytest.raises(ValueError, match="has no 'maek'; expected a function"):
        parse_reference(f"{path}:maek")
    with pytest.raises(ValueError, match="there is no file"):
        parse_reference(f"{path}.py:make")
    with pytest.raises(ValueError, match=r"there is no file no_such; .* is file.py:function"):
        parse_reference("no_such:make")
    with pytest.raises(ValueError, match="unknown network 'mpl'; did you mean 'mlp'"):
        parse_reference("mpl()")


def test_data_are_digits_or_arrays_in_a_file(tmp_path):
    flat, targets = read_data("digits", networks.mlp())
    images, _ = read_data("digits", networks.cnn((4,), inputs=1))
    assert flat.shape[1:] == (64,)
    assert images.shape[1:] == (1, 8, 8)
    assert len(flat) == len(targets)

    x, y = np.ones((3, 2), dtype=np.float32), np.arange(3)
    np.save(tmp_path / "x.npy", x)
    np.savez(tmp_path / "both.npz", x=x, y=y)
    np.savez(tmp_path / "other.npz", z=x)
    (tmp_path / "broken.npz").write_bytes(b"no")
    whole = (tmp_path / "both.npz").read_bytes()
    (tmp_path / "half.npz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "flipped.npz").write_bytes(whole[:140] + bytes([whole[140] ^ 1]) + whole[141:])
    np.savez(tmp_path / "words.npz", x=np.array(["a", "b"]))
    reference = networks.mlp()
    assert read_data(str(tmp_path / "x.npy"), reference)[1] is None
    assert read_data(str(tmp_path / "both.npz"), reference)[1].tolist() == [0, 1, 2]
    for name, message in {
        "x.csv": "data is 'digits', a .npz file with x",
        "none.npy": "there is no file",
        "broken.npz": "can't be read",
        "half.npz": "can't be read",
        "flipped.npz": "can't be read",
        "words.npz": "can't be read",
        "other.npz": r"expected arrays x and y in other.npz; got z",
    }.items():
        with pytest.raises(ValueError, match=message):
            read_data(str(tmp_path / name), reference)


def test_a_network_of_embens_has_a_width_and_a_users_own_has_none(tmp_path):
    mlp, cnn = (parse_widths(text) for text in ("mlp(4, 6, 2, 3)", "cnn((8,), inputs=1, image=4)"))
    assert [mlp(factor)[0].out_features for factor in (0.01, 0.5, 1.0, 2.0)] == [1, 3, 6, 12]
    assert [cnn(factor)[0].out_channels for factor in (0.5, 2.0)] == [4, 16]
    (tmp_path / "net.py").write_text("import torch\ndef build():\n    return torch.nn.Linear(2, 3)")
    assert isinstance(parse_widths(f"{tmp_path}/net.py:build"), nn.Linear)
