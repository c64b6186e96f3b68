"""W1 and W1v as ``torch.distributed.pipelining`` drives them: real stages, in the order of the first rank of a real schedule.

    python -m benchmarks.run W1 --pipelined --variants plain,backhaul:28GB
    python -m benchmarks.run W1v --pipelined InterleavedZeroBubble --variants plain,backhaul:28GB

Covers: the order of a schedule's first rank, and stages that find noise where messages would be.
Does not cover: communication, or what the stages compute (workloads/dsv3.py).

The schedule is made for as many ranks as the workload has stages, by a process group of one; it only says the order. Forward, backward and
its two halves are ``PipelineStage``'s own, and so is what it holds on to meanwhile.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import _Action, get_schedule_class

from benchmarks.workloads.base import Kind, Slot, Workload
from benchmarks.workloads.dsv3 import DeepSeekStage

KINDS: dict[str, Kind] = {"FORWARD": "forward", "FULL_BACKWARD": "backward", "BACKWARD_INPUT": "input", "BACKWARD_WEIGHT": "weight"}
SINGLE = ("GPipe", "1F1B")
V_SHAPED = ("ZBVZeroBubble", "DualPipeV")  # the first rank has the first stage and the last


class ReplayedStage(PipelineStage):
    """A stage of a pipeline whose neighbours are noise."""

    def __init__(self, workload: DeepSeekStage, chunk: int, *, index: int, ranks: int) -> None:
        sizes = workload.sizes
        example = torch.empty(sizes.tokens, sizes.hidden, dtype=workload.dtype, device="meta")
        super().__init__(workload.chunks[chunk], index, ranks * sizes.chunks, workload.device, example, example)
        self.workload, self.chunk = workload, chunk
        self.group_size = ranks
        self.chunks, self.has_backward = sizes.microbatches, True
        if hasattr(self, "_stage_meta"):  # newer versions count the inputs by it
            self._stage_meta.inputs = self._user_meta.inputs
        self.losses: dict[int, Tensor] = {}

    def slot(self, kind: Kind, microbatch: int) -> Slot:
        return Slot(kind=kind, microbatch=microbatch, chunk=self.chunk)

    def run(self, slot: Slot) -> Any:
        """Do what the schedule's runtime does for one action, between receiving and sending."""
        microbatch = slot.microbatch
        match slot.kind:
            case "forward":
                output = self.forward_one_chunk(microbatch, self._retrieve_recv_activations(microbatch) if self.is_first else ())
                if self.is_last:  # a loss with the gradient that a neighbour would have sent
                    self.losses[microbatch] = (output * self.workload.output_grad(slot)).sum()
                return output
            case "weight":
                self.backward_weight_one_chunk(microbatch)
            case _:
                self.backward_one_chunk(microbatch, loss=self.losses.pop(microbatch, None), full_backward=slot.kind == "backward")
                self.bwd_cache.pop(microbatch)  # sent
        return None

    def _retrieve_recv_activations(self, fwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self.workload.noise(self.slot("forward", fwd_chunk_id), 0).requires_grad_(),)

    def _retrieve_recv_grads(self, bwd_chunk_id: int) -> tuple[Tensor, ...]:
        return (self.workload.output_grad(self.slot("backward", bwd_chunk_id)),)

    def _validate_fwd_input(self, *_: object) -> None:
        """Older versions compare with what was to be received."""

    def _validate_fwd_outputs(self, *_: object) -> None:
        """The same for what is to be sent."""


class Pipelined(Workload):
    """A DeepSeek-V3 workload under a schedule of ``torch.distributed.pipelining``, as its first rank sees it.

    ``schedule`` is a name that ``get_schedule_class`` knows; the default is the 1F1B that fits the number of chunks.
    """

    def __init__(self, workload: Workload, schedule: str = "") -> None:
        if not isinstance(workload, DeepSeekStage):
            raise ValueError("only W1, W1s and W1v are a stage of a pipeline")
        sizes = workload.sizes
        name = schedule or ("Interleaved1F1B" if sizes.chunks > 1 else "1F1B")
        if (name in SINGLE) != (sizes.chunks == 1):
            raise ValueError(
                f"{name} is for {'one chunk' if name in SINGLE else 'several chunks'} a rank, and this workload has {sizes.chunks}"
            )
        self.owns_group = not dist.is_initialized()
        if self.owns_group:
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.inner, self.chunks, self.blocks, self.plan = workload, workload.chunks, workload.blocks, workload.plan
        self.lean, self.tight = workload.lean, workload.tight
        ranks, last = sizes.stages, sizes.stages * sizes.chunks - 1
        indices = [0, last] if name in V_SHAPED else range(0, last + 1, ranks)
        self.stages = [ReplayedStage(workload, chunk, index=index, ranks=ranks) for chunk, index in enumerate(indices)]
        self.slots = first_rank(name, self.stages)
        self.facts = workload.facts | {"driven by": f"torch.distributed.pipelining, {name}"}

    def forward(self, slot: Slot) -> Tensor:
        return self.stages[slot.chunk].run(slot)

    def output_grad(self, slot: Slot) -> Tensor:
        return self.inner.output_grad(slot)

    def backward(self, slot: Slot, output: Tensor | None) -> None:
        self.stages[slot.chunk].run(slot)

    def close(self) -> None:
        self.inner.close()
        if self.owns_group:
            dist.destroy_process_group()


def first_rank(name: str, stages: list[ReplayedStage]) -> tuple[Slot, ...]:
    """Return what the first rank does in a step of a schedule, in its order."""
    kind = get_schedule_class(name)
    schedule = kind(stages[0] if name in SINGLE else stages, stages[0].chunks, loss_fn=lambda output, target: output.sum())
    chunk_of = {stage.stage_index: stage.chunk for stage in stages}

    def slots(action: _Action | None) -> list[Slot]:
        if action is None or action.computation_type.name == "REDUCE_GRAD":
            return []
        if action.sub_actions:  # a forward and a backward side by side
            return [slot for each in action.sub_actions for slot in slots(each)]
        kind = KINDS[action.computation_type.name]
        return [Slot(kind=kind, microbatch=action.microbatch_index, chunk=chunk_of[action.stage_index])]

    return tuple(slot for action in schedule.pipeline_order[0] for slot in slots(action))
