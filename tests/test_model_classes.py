"""A sample of the real model classes under backhaul; ``python -m benchmarks.model_classes`` runs them all."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

pytest.importorskip("transformers")

import backhaul as bh
from benchmarks.model_class_cases import available_cases
from benchmarks.model_classes import acceptable, judge

CASES = {case.name: case for case in available_cases()}
SAMPLE = [
    "LlamaForCausalLM [bf16 autocast]",
    "LlamaForCausalLM [checkpointed]",
    "Qwen2ForCausalLM",  # tied embeddings
    "Qwen3MoeForCausalLM",
    "MambaForCausalLM",
    "BertForMaskedLM [frozen base]",
    "AlbertForMaskedLM",  # one layer, run twice
    "T5ForConditionalGeneration",
    "ResNetForImageClassification [channels_last]",  # in-place activations
    "Wav2Vec2ForCTC",
]


@pytest.fixture(autouse=True)
def _one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)  # the models are tiny: on a busy machine two threads take many times as long as one
    yield
    torch.set_num_threads(before)


def verdict_on(name):
    return judge(CASES[name], torch.device("cpu"), tier="host")


@pytest.mark.parametrize("name", SAMPLE)
def test_a_real_model_class_trains_the_same_to_the_last_bit(name):
    result = verdict_on(name)
    assert result.verdict == "bit-equal", result
    assert result.offloaded_bytes > 0.9 * result.saved_bytes
    assert acceptable([result])


def offload_that_unpacks(change):
    """Stand in for ``bh.offload``, handing back what ``change`` makes of each saved tensor."""
    stats = SimpleNamespace(saved_bytes=1, offloaded_bytes=1, reloaded_bytes=0, futile_bytes=0, kept_by_reason={"small": 1})

    @contextlib.contextmanager
    def offload(model, **options):
        with torch.autograd.graph.saved_tensors_hooks(torch.Tensor.detach, change):
            yield SimpleNamespace(stats=stats)

    return offload


def a_little_off(tensor):
    return tensor * (1 + 2**-20) if tensor.dtype == torch.float32 else tensor


def as_it_was(tensor):
    return tensor


def refuse(model, **options):
    raise ValueError("this model cannot be managed")


def fail(tensor):
    raise OSError("the disk is gone")


@pytest.mark.parametrize(
    ("offload", "verdict", "why"),
    [
        (offload_that_unpacks(a_little_off), "WRONG", "step 1 gradient"),
        (offload_that_unpacks(fail), "FAILED", "OSError: the disk is gone"),
        (offload_that_unpacks(as_it_was), "kept", "small"),
        (refuse, "refused", "this model cannot be managed"),
    ],
)
def test_the_judge_is_not_fooled(monkeypatch, offload, verdict, why):
    monkeypatch.setattr(bh, "offload", offload, raising=False)
    result = verdict_on("LlamaForCausalLM")
    assert result.verdict == verdict, result
    assert why in result.why
    assert not acceptable([result])
