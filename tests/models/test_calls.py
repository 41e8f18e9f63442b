"""Models that are called several times before one backward: every call has rows of its own."""

import pytest
import torch
from torch import nn

from tests.models.truth import assert_rows_are_the_truth, run_twice
from trainermon.monitor.taps.micro_steps import MAX_FORWARDS

STEPS = 3


def net(width=4, out=1):
    return nn.Sequential(nn.Linear(width, 6), nn.Tanh(), nn.Linear(6, out))


def sgd(model):
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def siamese(watch, micro_steps):
    model = net(out=3)
    optimizer = sgd(model)
    watch.start(model, optimizer, micro_steps)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            one, other, third = (model(torch.randn(5, 4)) for _ in range(3))
            watch.backward((one - other).square().mean() - (one - third).abs().mean())
        with watch.step():
            nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
            optimizer.step()


def discriminator(watch, micro_steps):
    """The generator's backward reaches the discriminator too, whose gradients of it are thrown away."""
    model, generator = net(), net(2, 4)
    optimizer, other = sgd(model), sgd(generator)
    watch.start(model, optimizer, micro_steps)
    for _ in range(STEPS):
        optimizer.zero_grad()
        for _ in range(micro_steps):
            fake = generator(torch.randn(5, 2))
            real_loss = nn.functional.softplus(-model(torch.randn(5, 4))).mean()
            watch.backward(real_loss + nn.functional.softplus(model(fake.detach())).mean())
        with watch.step():
            optimizer.step()
        other.zero_grad()
        nn.functional.softplus(-model(generator(torch.randn(5, 2)))).mean().backward()
        other.step()
        watch.skipped()


def a_backward_that_fails(watch, micro_steps):
    model = net()
    optimizer = sgd(model)
    watch.start(model, optimizer, micro_steps)
    for _ in range(STEPS):
        optimizer.zero_grad()
        handle = model[2].weight.register_hook(lambda _: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(torch.randn(2, 4)).sum().backward()
        handle.remove()
        optimizer.zero_grad()
        watch.skipped()
        for _ in range(micro_steps):
            watch.backward(model(torch.randn(5, 4)).square().mean())
        with watch.step():
            optimizer.step()


@pytest.mark.parametrize("micro_steps", [1, 2])
@pytest.mark.parametrize("loop", [siamese, discriminator, a_backward_that_fails], ids=lambda loop: loop.__name__)
def test_calls_before_one_backward_are_numbered_and_keep_their_gradients(tmp_path, loop, micro_steps):
    truth, journal = run_twice(lambda watch: loop(watch, micro_steps), tmp_path, {})

    assert_rows_are_the_truth(truth, journal)


def test_of_a_model_that_is_called_for_every_time_step_the_first_calls_are_collected(tmp_path, caplog):
    def loop(watch):
        model = net(out=4)
        optimizer = sgd(model)
        watch.start(model, optimizer)
        for _ in range(2):
            optimizer.zero_grad()
            x = torch.randn(2, 4)
            for _ in range(MAX_FORWARDS + 3):
                x = model(x)
            watch.backward(x.square().mean())
            with watch.step():
                optimizer.step()

    truth, journal = run_twice(loop, tmp_path, {})

    beyond = {f"#{call}" for call in range(MAX_FORWARDS, MAX_FORWARDS + 3)}
    truth.tensors = {key: t for key, t in truth.tensors.items() if key[2][key[2].find("#") :] not in beyond}
    assert_rows_are_the_truth(truth, journal)
    assert caplog.text.count("the model was called more than 64 times before one backward") == 1
