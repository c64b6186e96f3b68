"""The demo trains, moves bytes, keeps every bit, and says so when a bit is lost."""

import dataclasses
import json
import time
from types import SimpleNamespace

import pytest
import torch
from typer.testing import CliRunner

from backhaul import demo
from backhaul.cli import app

TINY = ["demo", "--device", "cpu", "--steps", "2", "--layers", "1", "--hidden", "128", "--seq", "512"]


@pytest.fixture(scope="module")
def reported():
    """Return what one tiny run prints as JSON, after checking that it ended well."""
    result = CliRunner().invoke(app, [*TINY, "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def measured(**changes):
    unchanged = demo.Measurement(
        step_s=[1.0],
        losses=[2.0],
        digests=[{"loss": "0x1p1", "head.weight": "a", "norm.weight": "b"}],
        peak_saved_bytes=8_000_000,
        offloaded_bytes=0,
        reloaded_bytes=0,
        baseline_bytes=1_000_000,
        peak_bytes=9_000_000,
    )
    return dataclasses.replace(unchanged, **changes)


def test_offloading_moves_bytes_out_and_back_and_keeps_less(reported):
    plain, offloaded = reported["plain"], reported["offloaded"]
    assert offloaded["offloaded_bytes"] > 0
    assert offloaded["reloaded_bytes"] > 0
    assert offloaded["peak_saved_bytes"] < plain["peak_saved_bytes"]
    assert plain["offloaded_bytes"] == plain["reloaded_bytes"] == 0


def test_every_loss_and_gradient_is_identical(reported):
    assert reported["differences"] == []
    num_parameters = 3 + 2 + 2 + 1 + 4 * 3 + 1  # embeddings and head, norms, attention, router, experts, last norm
    assert reported["num_compared"] == 2 * (1 + num_parameters)
    assert reported["plain"]["losses"] == reported["offloaded"]["losses"]


def test_the_text_is_learned(reported):
    first, last = reported["plain"]["losses"]
    assert last < first


def test_a_gradient_that_differs_by_a_bit_fails_the_run(monkeypatch):
    def one_bit_off(config, variant, on_step):
        return measured() if variant == "plain" else measured(digests=[{"loss": "0x1p1", "head.weight": "a", "norm.weight": "c"}])

    monkeypatch.setattr(demo, "measure", one_bit_off)
    result = CliRunner().invoke(app, [*TINY, "--json"])
    assert result.exit_code == 1
    assert json.loads(result.stdout)["differences"] == ["step 0: norm.weight"]
    result = CliRunner().invoke(app, TINY)
    assert result.exit_code == 1
    assert "1 of 3 losses and gradients differ" in result.stdout


def test_the_table_names_what_was_measured(monkeypatch):
    def by_hand(config, variant, on_step):
        return measured() if variant == "plain" else measured(offloaded_bytes=14_000_000, reloaded_bytes=10_000_000)

    monkeypatch.setattr(demo, "measure", by_hand)
    result = CliRunner().invoke(app, TINY)
    assert result.exit_code == 0
    assert "offloaded to disk" in result.stdout
    assert "7 MB" in result.stdout  # 14 MB out in two steps
    assert "all 3 losses and gradients are identical" in result.stdout


def test_a_variant_that_fails_ends_the_demo_with_its_name(monkeypatch):
    monkeypatch.setattr(demo, "check_device", lambda device: "cpu:no-such-device")
    monkeypatch.setattr(demo.torch, "device", lambda name: SimpleNamespace(type="cpu"))
    result = CliRunner().invoke(app, ["demo"])
    assert result.exit_code == 2
    assert "the plain variant ended with exit status 1" in result.output


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("--device", "no-such-device", "cannot be used here"),
        ("--hidden", "100", "multiple of 64"),  # heads do not divide it
        ("--budget", "12 gigs", "12 gigs"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_on_the_command_line(option, value, message):
    result = CliRunner().invoke(app, ["demo", option, value])
    assert result.exit_code == 2
    assert message in result.output


def test_a_digest_tells_bits_apart_that_compare_equal():
    assert demo._digest(torch.zeros(3)) != demo._digest(-torch.zeros(3))
    nan = torch.full((3,), float("nan"))
    assert demo._digest(nan) == demo._digest(nan.clone())
    assert demo._digest(torch.arange(6).view(2, 3).t()) == demo._digest(torch.arange(6).view(2, 3).t().contiguous())


def test_saved_bytes_count_a_storage_once_and_no_parameter():
    class Squares(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(torch.ones(1024))

        def forward(self, x):
            y = x * self.weight  # saves x and the parameter
            return (y * y).sum() + y.view(32, 32).square().sum()  # saves y four times

    assert demo._peak_saved_bytes(Squares(), torch.ones(1024)) == 2 * 4096


def test_process_memory_sees_a_block_come_and_go():
    memory = demo.ProcessMemory()
    with memory:
        block = torch.ones(64 * 2**20, dtype=torch.uint8)
        time.sleep(0.05)  # many samples
        del block
    assert 0.9 * 64 * 2**20 < memory.peak_bytes - memory.baseline_bytes < 1.5 * 64 * 2**20


def test_a_device_that_is_not_there_is_refused_before_anything_runs():
    with pytest.raises(ValueError, match="cannot be used here"):
        demo.Config.for_device("nonsense")
