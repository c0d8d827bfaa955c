"""Small matrices are computed by one thread; the number of threads is restored afterwards."""

import pytest
import torch

from depthgauge.theory.depth import certificate as certificates
from depthgauge.theory.depth.methods import collapse
from depthgauge.theory.linalg.small_matrices import SMALL, threads_for
from depthgauge.theory.network.random_networks import random_network


@pytest.fixture(autouse=True)
def three_threads():
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(("width", "inside"), [(SMALL, 1), (SMALL + 1, 3)])
def test_the_number_follows_the_width_and_is_restored(width, inside):
    with threads_for(width):
        assert torch.get_num_threads() == inside
    assert torch.get_num_threads() == 3


def test_it_is_restored_after_an_error():
    with pytest.raises(KeyError), threads_for(1):
        raise KeyError
    assert torch.get_num_threads() == 3


def test_certificates_of_small_networks_run_with_one_thread(monkeypatch):
    seen = []
    prove = certificates.method_of

    def watched(*args):
        seen.append(torch.get_num_threads())
        return prove(*args)

    monkeypatch.setattr(certificates, "method_of", watched)
    network = random_network(layers=2, heads=1, dim=3, eta=0.01)
    certificates.certify(network, collapse(network), radius=1.0, starts=1, steps=1)
    assert seen == [1]
    assert torch.get_num_threads() == 3
