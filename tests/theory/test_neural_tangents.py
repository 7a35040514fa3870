"""Ordinary networks against neural-tangents: stored kernels, and new ones (``make test-peers``)."""

from __future__ import annotations

import pytest
import torch
from theory import peer_kernels
from theory.peer_networks import NETWORKS, inputs_of

from embens import theory

pytestmark = pytest.mark.usefixtures("double")
STORED = peer_kernels.load()


@pytest.mark.parametrize("name", NETWORKS)
def test_kernels_are_those_of_neural_tangents(name):
    torch.manual_seed(0)  # embeddings are checked for the law of torch
    ours = theory.kernels(NETWORKS[name](), inputs_of(name))
    for part, kernel in (("nngp", ours.nngp), ("ntk", ours.ntk_shared)):
        expected = torch.tensor(STORED[name][part])
        torch.testing.assert_close(kernel.same, expected, rtol=1e-8, atol=0)
        assert kernel.cross is kernel.same


def test_every_stored_kernel_has_a_network():
    assert set(STORED) == set(NETWORKS)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", NETWORKS)
def test_stored_kernels_are_those_of_neural_tangents_today(name):
    pytest.importorskip("jax", reason="neural-tangents is a peer: run `make test-peers`")
    peers = pytest.importorskip("benchmarks.peers")
    peer = peer_kernels.Peer(peers.neural_tangents())
    for part, kernel in peer.kernels(name, inputs_of(name).numpy()).items():
        expected = torch.tensor(STORED[name][part])
        torch.testing.assert_close(torch.tensor(kernel), expected, rtol=1e-10, atol=0)
