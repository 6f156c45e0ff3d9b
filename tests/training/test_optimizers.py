from __future__ import annotations

import torch

from fleetune.training.optimizers import OPTIMIZERS, AdamWSettings, adam, adamw


def test_matrices_decay_and_biases_and_norms_never_do():
    matrix, bias = torch.nn.Parameter(torch.ones(2, 2)), torch.nn.Parameter(torch.ones(2))
    optimizer = adamw(AdamWSettings(0.9, 0.999, 1e-8, 0.5))([("matrix", matrix), ("bias", bias)])
    for group in optimizer.param_groups:
        group["lr"] = 0.1
    matrix.grad, bias.grad = torch.zeros(2, 2), torch.zeros(2)
    optimizer.step()
    assert torch.allclose(matrix, torch.full((2, 2), 0.95)) and torch.equal(bias, torch.ones(2))


def test_an_update_is_the_one_of_the_formula():
    parameter = torch.nn.Parameter(torch.tensor([[1.0]]))
    optimizer = adamw(AdamWSettings(0.9, 0.99, 1e-8, 0.0))([("matrix", parameter)])
    optimizer.param_groups[0]["lr"] = 0.1
    mean = square = 0.0
    value = 1.0
    for step, gradient in enumerate([0.5, -0.25, 1.0], start=1):
        parameter.grad = torch.tensor([[gradient]])
        optimizer.step()
        mean = 0.9 * mean + 0.1 * gradient
        square = 0.99 * square + 0.01 * gradient**2
        value -= 0.1 * (mean / (1 - 0.9**step)) / ((square / (1 - 0.99**step)) ** 0.5 + 1e-8)
    assert abs(float(parameter.detach()) - value) < 1e-6


def test_adam_takes_the_decay_into_the_gradient():
    parameter = torch.nn.Parameter(torch.tensor([[2.0]]))
    optimizer = adam(AdamWSettings(0.9, 0.999, 1e-8, 0.5))([("matrix", parameter)])
    optimizer.param_groups[0]["lr"] = 0.1
    parameter.grad = torch.tensor([[0.0]])
    optimizer.step()
    assert abs(float(parameter.detach()) - 1.9) < 1e-6  # the first step of Adam is the rate, whatever the gradient's size
    assert OPTIMIZERS["cpu_adam"] is OPTIMIZERS["adamw"]
