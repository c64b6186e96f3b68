"""backhaul for the ``Trainer`` of transformers, and for those that build on it, such as TRL's.

Covers: managing the model while it is trained. Does not cover: anything else.

>>> import backhaul as bh
>>> callback = OffloadCallback(lambda model: bh.offload(model, activation_budget="12GiB"))
>>> # Trainer(model, ..., callbacks=[callback]).train(); print(callback.report)
"""

from collections.abc import Callable
from typing import Any

from torch import nn
from transformers import TrainerCallback
from transformers.utils import logging

from backhaul.api import Handle, offload
from backhaul.reporting import Report

logger = logging.get_logger(__name__)


class OffloadCallback(TrainerCallback):
    """Manages the model from the beginning of ``train`` to its end.

    Evaluation, and whatever else runs without gradients, is left alone. Afterwards the model is as it was, and ``report`` says what was
    done; it is logged, too. If ``train`` raises, the model stays managed until it is trained again, or ``handle.remove()`` is called.

    Args:
        manage: manages a model; ``bh.offload`` unless given. A function of your own can say more: a budget, a plan, some of the modules.
    """

    def __init__(self, manage: Callable[[nn.Module], Handle] = offload) -> None:
        self.manage = manage
        self.handle: Handle | None = None
        self.report: Report | None = None

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Manage the model."""
        if self.handle is not None:
            self.handle.remove()
        self.handle = self.manage(others["model"])

    def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Report, and leave the model as it was."""
        assert self.handle is not None
        self.report = self.handle.report()
        self.handle.remove()
        self.handle = None
        logger.info("%s", self.report)
