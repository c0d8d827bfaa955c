"""What process 0 sends to the processes that help it to train."""

import pickle

import pytest
import torch
from tiny_distillation import ORDER, PLAIN, pair_of

from depthgauge.recovery.divergence import SELECT, Pair
from depthgauge.recovery.helpers import packed, unpack
from depthgauge.recovery.recover_model import trained_weights


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3", "mixtral"])
def test_a_training_arrives_as_it_was_sent(name: str) -> None:
    pair = pair_of(name)
    with torch.no_grad():  # the smaller model shares what was not changed with its source
        shared = [next(iter(model.parameters())) for model in (pair.student, pair.teacher)]
        shared[0].data = shared[1].data
    weights = trained_weights(pair.checkpoints[0])
    sent, tensors = packed(pair, weights, ORDER, PLAIN)
    written = pickle.dumps(sent)
    assert len(written) < 10**6
    received = pickle.loads(written)
    unpack(received)
    with torch.no_grad():
        for one, other in zip(received.tensors, tensors, strict=True):
            one.copy_(other)
    made = Pair(*received.models, received.windows)
    assert next(made.student.parameters()).data_ptr() == next(made.teacher.parameters()).data_ptr()
    assert torch.equal(made.losses(SELECT), pair.losses(SELECT))
    index = torch.arange(4)
    assert torch.equal(made(index), pair(index))
    trained = trained_weights(received.models[0])
    assert [id(received.tensors[number]) for number in received.weights] == [id(weight) for weight in trained]
    assert (received.order, received.training) == (ORDER, PLAIN)
    assert all(one.requires_grad == other.requires_grad for one, other in zip(trained, weights, strict=True))
