"""Trainers from PyPI train the same with us: losses, weights, evaluation, and nothing left behind."""

import runpy
from pathlib import Path

import pytest
import torch

pytest.importorskip("transformers")
pytest.importorskip("accelerate")

from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

import backhaul as bh
from backhaul.integrations.transformers import OffloadCallback
from backhaul.testing import RecordingTier
from tests.conftest import everything, same
from tests.test_handle import traces

SIZES = {"hidden_size": 32, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "vocab_size": 96}
TOKENS = [{"input_ids": row, "labels": row} for row in torch.randint(0, 96, (24, 16), generator=torch.Generator().manual_seed(0))]

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # gradient_checkpointing_enable


def llama() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=2, **SIZES))


def arguments(folder, **options) -> TrainingArguments:
    chosen = {
        "per_device_train_batch_size": 4,
        "max_steps": 4,
        "learning_rate": 1e-2,
        "logging_steps": 1,
        "report_to": "none",
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
        "dataloader_pin_memory": False,
        "seed": 0,
    }
    return TrainingArguments(str(folder), **{**chosen, **options})


def trained(folder, *callbacks, **options):
    """Train. Return the model, all losses in order, and whatever else the log says of evaluation."""
    model = llama()
    trainer = Trainer(model, arguments(folder, **options), train_dataset=TOKENS[:16], eval_dataset=TOKENS[16:], callbacks=[*callbacks])
    trainer.train()
    return model, [entry[name] for entry in trainer.state.log_history for name in ("loss", "grad_norm", "eval_loss") if name in entry]


class Watch(TrainerCallback):
    """Notes how much had been saved when an evaluation began and when it ended."""

    def __init__(self, callback):
        self.callback = callback
        self.seen = []

    def on_step_end(self, *args, **others):
        self.seen.append(("step", self.callback.handle.stats.saved_bytes))

    def on_evaluate(self, *args, **others):
        self.seen.append(("evaluated", self.callback.handle.stats.saved_bytes))


OPTIONS = {
    "plain": {},
    "accumulation": {"gradient_accumulation_steps": 2, "per_device_train_batch_size": 2},
    "checkpointing": {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}},
    "bf16": {"bf16": True},
}


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_the_trainer_trains_the_same(tmp_path, options):
    expected_model, expected = trained(tmp_path, **options)
    tier = RecordingTier(deferred=True)
    callback = OffloadCallback(lambda model: everything(model, tier))
    model, losses = trained(tmp_path, callback, **options)
    assert losses == expected
    assert len(losses) >= 8
    assert same(list(model.state_dict().values()), list(expected_model.state_dict().values()))
    assert callback.report.stats.offloaded_bytes == tier.bytes_of("store") > 0
    assert tier.used_bytes == 0


def test_nothing_is_left_behind(tmp_path):
    untouched, _ = trained(tmp_path, max_steps=1)
    callback = OffloadCallback(everything)
    model, _ = trained(tmp_path, callback, max_steps=1)
    assert callback.handle is None
    assert [sorted(module.__dict__) for module in model.modules()] == [sorted(module.__dict__) for module in untouched.modules()]
    before = traces(model)
    bh.offload(model).remove()
    assert traces(model) == before


def test_evaluation_between_steps_is_untouched(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 1}
    _, expected = trained(tmp_path, **options)
    callback = OffloadCallback(everything)
    watch = Watch(callback)
    _, losses = trained(tmp_path, callback, watch, **options)
    assert losses == expected
    saved = dict.fromkeys(range(4))
    assert [kind for kind, _ in watch.seen] == ["step", "evaluated"] * 4
    for index in saved:
        assert watch.seen[2 * index][1] == watch.seen[2 * index + 1][1]  # evaluation has saved nothing


def test_a_run_that_failed_is_followed_by_one_that_works(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **others):
            raise RuntimeError("the user's own")

    model, callback = llama(), OffloadCallback(everything)
    with pytest.raises(RuntimeError, match="the user's own"):
        Trainer(model, arguments(tmp_path), train_dataset=TOKENS, callbacks=[callback, Fails()]).train()
    assert callback.handle is not None
    Trainer(model, arguments(tmp_path, max_steps=1), train_dataset=TOKENS, callbacks=[callback]).train()
    assert callback.handle is None
    assert callback.report.stats.offloaded_bytes > 0


def test_by_default_the_callback_is_bh_offload(tmp_path):
    callback = OffloadCallback()
    with pytest.warns(UserWarning, match="below min_bytes"):
        trained(tmp_path, callback)
    assert callback.report.stats.offloaded_bytes == 0 < callback.report.stats.saved_bytes
    assert "below min_bytes" in str(callback.report)


def test_the_example_runs_and_moves_activations(capsys):
    runpy.run_path(str(Path(__file__).parent.parent / "examples" / "trainer.py"), run_name="__main__")
    assert "0 B  in 0 copies" not in capsys.readouterr().out


# TRL, where it is installed


def sft(folder, callbacks=(), **options):
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    transformers = pytest.importorskip("transformers")
    tokenizers = pytest.importorskip("tokenizers")

    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({"<pad>": 0, "<eos>": 1, "a": 2, "b": 3}, unk_token="<pad>"))
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=words, pad_token="<pad>", eos_token="<eos>")
    rows = [{"input_ids": entry["input_ids"].tolist()} for entry in TOKENS]
    chosen = arguments(folder).to_dict()
    names = (
        "per_device_train_batch_size",
        "max_steps",
        "learning_rate",
        "logging_steps",
        "save_strategy",
        "disable_tqdm",
        "use_cpu",
        "seed",
    )
    config = trl.SFTConfig(
        str(folder), **{name: chosen[name] for name in names}, report_to="none", dataloader_pin_memory=False, bf16=False, **options
    )
    model = llama()
    trainer = trl.SFTTrainer(
        model, config, train_dataset=datasets.Dataset.from_list(rows), processing_class=tokenizer, callbacks=[*callbacks]
    )
    trainer.train()
    return trainer, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def test_trls_trainer_trains_the_same_with_the_callback(tmp_path):
    _, expected = sft(tmp_path)
    callback = OffloadCallback(everything)
    _, losses = sft(tmp_path, [callback])
    assert losses == expected
    assert callback.report.stats.offloaded_bytes > 0


def test_trls_trainer_trains_the_same_with_our_context_in_the_place_of_its_own(tmp_path, monkeypatch):
    _, expected = sft(tmp_path)
    trainer_module = pytest.importorskip("trl.trainer.sft_trainer")
    from backhaul.compat import trl

    monkeypatch.setattr(trainer_module, "get_act_offloading_ctx_manager", trl.get_act_offloading_ctx_manager)
    trainer, losses = sft(tmp_path, activation_offloading=True)
    assert losses == expected
    report = trainer.maybe_activation_offload_context.handle.report()
    assert report.stats.offloaded_bytes > 0
    assert report.stats.host_bytes == report.stats.resident_bytes == 0
