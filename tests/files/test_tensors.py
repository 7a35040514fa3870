"""Tensors with a header and a checksum."""

import pytest
import torch

from embens.files import (
    Format,
    Refused,
    check_header,
    checksum,
    read_tensors,
    refusing,
    seal,
    unseal,
    write_tensors,
)

KIND = Format("numbers", 1)


class TestTensors:
    def test_of_every_shape_and_type_are_restored(self, path):
        matrix = torch.arange(12.0).view(3, 4)
        tensors = {
            "view": matrix[:, 1],
            "transposed": matrix.T,
            "one": torch.randn(33, 3)[:, 0][:1],
            "tied": matrix,
            "empty": torch.empty(0, 2),
            "scalar": torch.tensor(3),
        }
        for dtype in (torch.bool, torch.bfloat16, torch.complex64, torch.int8):
            tensors[str(dtype)] = torch.ones(3, dtype=dtype)
        write_tensors(path, KIND, {"note": [1, None, "é"]}, tensors)
        header, restored = read_tensors(path, KIND)

        assert header == {"format": "numbers", "version": 1, "note": [1, None, "é"]}
        assert restored.keys() == tensors.keys()
        for name, tensor in tensors.items():
            assert restored[name].dtype == tensor.dtype
            assert torch.equal(restored[name], tensor), name

    def test_on_the_meta_device_and_without_a_folder_raise(self, path):
        with pytest.raises(ValueError, match="'x' has no values to write: it is on the meta dev"):
            write_tensors(path, KIND, {}, {"x": torch.zeros(2, device="meta")})
        with pytest.raises(FileNotFoundError, match=r"the folder .* does not exist"):
            write_tensors(path / "none" / "file", KIND, {}, {})
        with pytest.raises(FileNotFoundError, match="there is no file"):
            read_tensors(path, KIND)

    @pytest.mark.parametrize(
        ("header", "message"),
        [
            ([], "x has no embens header; expected an 'numbers' file"),
            ({"format": "letters"}, "x is an 'letters' file; expected an 'numbers' file"),
            ({"format": "numbers", "version": 2}, "version 2, this embens reads 1; use a newer"),
            ({"format": "numbers", "version": 0}, "version 0, this embens reads 1; read it with"),
            ({"format": "numbers", "version": "?"}, "read it with the embens that wrote it"),
        ],
    )
    def test_of_another_kind_or_version_are_refused(self, header, message):
        with pytest.raises(Refused, match=message):
            check_header("x", header, KIND)

    def test_with_a_changed_value_are_refused(self):
        arrays = {"x": torch.arange(3)}
        sealed = seal({"a": 1}, arrays)

        assert unseal("x", sealed, arrays) == {"a": 1}
        for record, values in (({**sealed, "a": 2}, arrays), (sealed, {"x": torch.ones(3)})):
            with pytest.raises(Refused, match="x is damaged: its content has another checksum"):
                unseal("x", record, values)

    @pytest.mark.parametrize(
        ("value", "kind"), [(torch.eye(2).to_sparse(), "torch.sparse_coo"), ({"a": 1}, "dict")]
    )
    def test_of_other_kinds_are_refused_by_name(self, path, value, kind):
        with pytest.raises(TypeError, match=f"'x' cannot be written: .* got {kind}"):
            write_tensors(path, KIND, {}, {"x": value})
        assert not path.exists()

    def test_have_the_checksum_of_earlier_versions(self):
        arrays = {"b": torch.arange(3), "a": torch.ones(2, 2, dtype=torch.bfloat16)}
        assert checksum("text", arrays) == (
            "2f5f41d844da323c199e27031ef5cb28d5a90c493a772f5523d7db85daa83908"
        )

    def test_errors_of_the_system_are_not_refusals(self, path):
        with pytest.raises(FileNotFoundError), refusing(path):
            path.read_text()
        with (
            pytest.raises(Refused, match=r"file.txt can't be read: KeyError\('a'\)"),
            refusing(path),
        ):
            raise KeyError("a")
