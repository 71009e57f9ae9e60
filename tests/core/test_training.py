"""How a client goes over its points."""

import math

import pytest

from fedmix.core.settings import ClientSettings
from fedmix.core.training import Passes
from fedmix.errors import SettingError
from fedmix.rng import stream


def sizes(n, batch_size, even, epochs=1):
    return [len(index) for index in Passes(batch_size, epochs, even).batches(n, stream(0, "order"))]


def test_full_batches_and_what_is_left():
    assert sizes(450, 64, even=False) == [64] * 7 + [2]
    assert sizes(128, 64, even=False) == [64, 64]


def test_even_batches_are_as_many_and_of_nearly_one_size():
    assert sizes(450, 64, even=True) == [57, 57, 56, 56, 56, 56, 56, 56]
    for n in range(1, 200):
        for batch_size in (1, 2, 7, 64):
            even = sizes(n, batch_size, even=True)
            assert len(even) == math.ceil(n / batch_size) == len(sizes(n, batch_size, even=False))
            assert max(even) <= batch_size
            assert max(even) - min(even) <= 1


@pytest.mark.parametrize("even", [True, False])
def test_every_pass_takes_every_point_once_in_an_order_of_its_own(even):
    index = [i for batch in Passes(10, 3, even).batches(23, stream(0, "order")) for i in batch.tolist()]
    passes = [index[:23], index[23:46], index[46:]]
    assert all(sorted(one) == list(range(23)) for one in passes)
    assert passes[0] != passes[1] != passes[2]


def test_the_last_batch_is_one_of_two_kinds():
    with pytest.raises(SettingError, match=r"training.last_batch must be one of"):
        ClientSettings(last_batch="dropped")
