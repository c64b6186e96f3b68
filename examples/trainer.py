"""Train a small Llama with the ``Trainer`` of transformers, its activations offloaded: one callback is new.

Run it with ``python examples/trainer.py``; it needs ``pip install transformers accelerate`` and takes some seconds on a CPU. TRL's
trainers take the callback in the same way.
"""

import tempfile

import torch
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import backhaul as bh
from backhaul.integrations.transformers import OffloadCallback


def main() -> None:
    torch.manual_seed(0)
    config = LlamaConfig(hidden_size=128, intermediate_size=384, num_hidden_layers=4, num_attention_heads=4, vocab_size=512)
    model = LlamaForCausalLM(config)
    rows = torch.randint(0, config.vocab_size, (64, 256))

    callback = OffloadCallback(lambda model: bh.offload(model, min_bytes="64KiB"))  # or OffloadCallback() for what suits a real model

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder,
            max_steps=6,
            per_device_train_batch_size=8,
            logging_steps=2,
            dataloader_pin_memory=torch.cuda.is_available(),
            save_strategy="no",
            report_to="none",
        )
        trainer = Trainer(model, arguments, train_dataset=[{"input_ids": row, "labels": row} for row in rows], callbacks=[callback])
        trainer.train()

    print(callback.report)


if __name__ == "__main__":
    main()
