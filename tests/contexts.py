"""Ways to train inside an offloading context, for the tests of compat."""

import contextlib

import torch
from torch import Tensor, nn

from backhaul.compat import contexts, prime_rl, trl
from backhaul.testing import RecordingTier
from tests.models import X, build

WEIGHT_BYTES = 16 * 16 * 4
ROW_BYTES = X.nbytes  # of every activation of Net
ALL = {"min_offload_size": 0, "max_fwd_stash_size": 1}


def recording_tiers(monkeypatch) -> list[RecordingTier]:
    """Have each context use a tier that copies as late as it may and poisons what it has freed."""
    made: list[RecordingTier] = []

    def make():
        made.append(RecordingTier(deferred=True))
        return made[-1]

    monkeypatch.setattr(contexts, "PinnedHost", make)
    return made


def moved(tiers: list[RecordingTier]) -> int:
    """Return the bytes that have left."""
    return sum(tier.bytes_of("store") for tier in tiers)


def train(model: nn.Module, context, num_steps: int = 4, *, backward_inside: bool = False, x: Tensor = X) -> list[Tensor]:
    """Train by plain SGD, with forward (and backward) in the context that ``context()`` gives. Return all losses and gradients."""
    seen = []
    for _ in range(num_steps):
        with context():
            loss = model(x).square().sum()
            if backward_inside:
                loss.backward()
        if not backward_inside:
            loss.backward()
        seen += [loss.detach(), *(parameter.grad for parameter in model.parameters())]
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 1e-2 * parameter.grad
                parameter.grad = None
    return seen


EXPECTED = train(build(), contextlib.nullcontext)


def unknown_model(model):
    context = trl.OffloadActivations(**ALL)
    return lambda: context


def known_model(model):
    context = trl.OffloadActivations(**ALL)
    context.update_model_params(model)
    return lambda: context


def whole_manager(model):
    context = trl.get_act_offloading_ctx_manager(model, **ALL)
    return lambda: context


def anew_each_time(model):
    return lambda: prime_rl.OffloadActivations(model, max_fwd_stash_size=1, min_offload_size=0)


def anew_and_unknown(model):
    return lambda: prime_rl.OffloadActivations(min_offload_size=0)


WAYS = [unknown_model, known_model, whole_manager, anew_each_time, anew_and_unknown]
