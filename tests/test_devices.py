"""C36: every tensor comes back to its own device, what is no activation of ours is left alone, and no accelerator is needed."""

import os
import subprocess
import sys

import pytest
import torch
from torch import Tensor, nn

from backhaul.testing import RecordingTier
from tests.conftest import Code, everything, same


class NeedsCpuMeta(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, lengths):
        ctx.save_for_backward(x, lengths)
        return x * lengths.sum()

    @staticmethod
    def backward(ctx, gradient):
        x, lengths = ctx.saved_tensors
        assert lengths.device.type == "cpu"
        assert x.device == gradient.device
        return gradient * lengths.sum(), None


def test_c36_metadata_on_the_host_comes_back_on_the_host():
    lengths = torch.tensor([2, 3])
    module, tier = Code(lambda x: NeedsCpuMeta.apply(x.sin(), lengths)), RecordingTier(deferred=True)
    x = torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module, tier) as handle:
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
        assert handle.stats.resident_bytes == tier.used_bytes == 0


def test_c36_host_tensors_beside_a_model_on_an_accelerator_are_left_alone():
    module, tier = Code(lambda x: x.sin().exp()), RecordingTier(deferred=True)
    x = torch.randn(64, requires_grad=True)
    with everything(module, tier) as handle:
        handle._engine._accelerated = True  # as if the parameters were on an accelerator
        module(x).sum().backward()
        stats = handle.stats
        assert stats.kept_by_reason == {"on the host": stats.saved_bytes}
        assert tier.peak_bytes == 0


def test_c36_meta_tensors_are_kept_and_counted():
    module, tier = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)).to("meta"), RecordingTier(deferred=True)
    with everything(module, tier) as handle:
        loss = module(torch.empty(8, 16, device="meta")).sum()
        loss.backward()
        assert all(parameter.grad is not None and parameter.grad.device.type == "meta" for parameter in module.parameters())
        assert handle.stats.kept_by_reason["meta"] > 0
        assert handle.stats.offloaded_bytes == tier.peak_bytes == 0


def test_c36_meta_tensors_in_between_do_not_stop_the_others_from_moving():
    def run(x: Tensor) -> Tensor:
        shape = torch.empty(4, device="meta", requires_grad=True).exp().sin().shape
        return x.exp().sin().cos() * shape[0]

    module, tier, x = Code(run), RecordingTier(deferred=True), torch.randn(64, requires_grad=True)
    expected = torch.autograd.grad(module(x).sum(), x)
    with everything(module, tier):
        for _ in range(3):
            assert same(torch.autograd.grad(module(x).sum(), x), expected)
        assert tier.bytes_of("load") > 0


def test_c36_fake_tensors_are_left_to_whoever_traces():
    from torch._subclasses.fake_tensor import FakeTensorMode

    model, tier = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), RecordingTier(deferred=True)
    with everything(model, tier) as handle, FakeTensorMode(allow_non_fake_inputs=True) as mode:
        x = mode.from_tensor(torch.randn(8, 16))
        loss = model(x).sum()
        loss.backward()
        del loss
        assert tier.peak_bytes == 0
        assert handle.stats.saved_bytes == 0


def test_c36_a_module_that_moves_to_another_dtype_while_managed_is_followed():
    model, tier = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16)), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for dtype in (torch.float32, torch.float64, torch.bfloat16):
            model.to(dtype)
            x = torch.randn(8, 16, dtype=dtype)
            got = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            with handle.paused():
                assert same(got, torch.autograd.grad(model(x).sum(), list(model.parameters())))
        assert tier.used_bytes == 0


SCRIPT = """
import torch
assert not torch.cuda.is_available()
import backhaul as bh
model = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU(), torch.nn.Linear(64, 64))
x = torch.randn(32, 64)
expected = torch.autograd.grad(model(x).sum(), list(model.parameters()))
for tier in (None, "host", "disk"):
    with bh.offload(model, tier=tier, min_bytes=0, activation_budget=0) as handle:
        for _ in range(3):
            got = torch.autograd.grad(model(x).sum(), list(model.parameters()))
            assert all(a.equal(b) for a, b in zip(got, expected))
        assert handle.stats.offloaded_bytes > 0
        assert (handle.stats.peak_disk_bytes > 0) == (tier != "host")
        str(handle.report())
bh.release_host_memory()
assert not torch.cuda.is_initialized()
"""


@pytest.mark.parametrize("devices", ["", "-1"])
def test_c36_everything_works_where_there_is_no_accelerator(devices):
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": devices}
    subprocess.run([sys.executable, "-W", "error", "-c", SCRIPT], check=True, env=environment, timeout=120)


def test_the_package_is_imported_without_torch_or_a_device():
    code = "import sys, backhaul; assert 'torch' not in sys.modules; backhaul.offload; assert 'torch' in sys.modules"
    subprocess.run([sys.executable, "-W", "error", "-c", code], check=True, timeout=120)
