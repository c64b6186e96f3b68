"""What may be done with a workload's saved tensors: nothing, or one of the libraries under comparison.

Covers: how each peer is put around a step, unchanged and as its authors use it.
Does not cover: the models (workloads/), or what is measured (measure.py).

A variant is made before its model, since the model asks it for its ``group``; then come ``attach``, any number of steps, and ``detach``.
"""

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import asdict
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from types import MethodType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from benchmarks.workloads import build
from benchmarks.workloads.base import Group, GroupFactory, Workload


class DoesNotApplyError(Exception):
    """The variant cannot run here; the message says why in a few words."""


class Variant:
    """Leave the saved tensors alone."""

    group: GroupFactory = Group
    package: str | None = None  # the distribution whose version the results should name
    settles = False  # after some steps: it plans by those before

    def attach(self, workload: Workload) -> None:
        """Get ready for the steps of this model."""

    def start_step(self) -> None:
        """Called once at the start of every step."""

    def microbatch(self, chunk: int) -> AbstractContextManager[object]:
        """Go around one forward of one chunk."""
        return nullcontext()

    def detach(self) -> None:
        """Leave nothing behind."""

    def pinned_bytes(self) -> int:
        """Say how many bytes the library has page-locked by itself, beside torch's own allocator."""
        return 0

    def waited_ms(self) -> float | None:
        """Say how long compute has waited for copies so far, by the library's own account; ``None`` where it keeps none."""
        return None

    def stats(self) -> Mapping[str, object]:
        """Return what the library says about itself."""
        return {}

    def explain(self) -> str:
        """Return what the library itself says about where compute waited."""
        return ""


class Checkpoint(Variant):
    """Recompute every layer from its input."""

    def attach(self, workload: Workload) -> None:
        if not workload.blocks:
            raise DoesNotApplyError("checkpointed already")
        self.blocks = workload.blocks
        for block in self.blocks:
            block.forward = self.around(block.forward)

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        """Return what a block should do instead of its own forward."""
        return partial(checkpoint, forward, use_reentrant=False)

    def detach(self) -> None:
        for block in self.blocks:
            del block.forward


aten = torch.ops.aten
MATRIX_PRODUCTS = [
    aten.mm.default,
    aten.addmm.default,
    aten.bmm.default,
    aten._grouped_mm.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
]


class SelectiveCheckpoint(Checkpoint):
    """Keep what matrix products and attention return, and recompute the rest of every layer from its input."""

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        contexts = partial(create_selective_checkpoint_contexts, MATRIX_PRODUCTS)
        return partial(checkpoint, forward, use_reentrant=False, context_fn=contexts)


class MemoryBudget(Checkpoint):
    """Compile every layer, and have the compiler keep this share of what it would keep for the shortest step.

    1 is the compiler's default, 0 keeps the layer's input alone. Kernels are fused, so gradients differ from the plain ones by rounding.
    """

    def __init__(self, budget: str = "0.5") -> None:
        self.budget = float(budget)

    def attach(self, workload: Workload) -> None:
        torch.compiler.reset()
        super().attach(workload)

    def around(self, forward: Callable[..., Tensor]) -> Callable[..., Tensor]:
        # On a CPU the compiler decides what to keep in the same way, and makes no kernels, which would take long.
        backend = "inductor" if torch.accelerator.is_available() else "aot_eager_decomp_partition"
        return torch.compile(forward, backend=backend, fullgraph=True)

    @contextmanager
    def microbatch(self, chunk: int) -> Iterator[None]:
        try:
            with torch._functorch.config.patch(activation_memory_budget=self.budget):
                yield
        except torch._dynamo.exc.Unsupported as error:
            raise DoesNotApplyError("a block does not compile whole") from error

    def detach(self) -> None:
        super().detach()
        torch.compiler.reset()


class SaveOnCPU(Variant):
    """torch's own: every saved tensor goes to pinned memory, one after the other."""

    def microbatch(self, chunk: int) -> AbstractContextManager[object]:
        return save_on_cpu(pin_memory=torch.accelerator.is_available())


class TRL(Variant):
    """TRL's ``OffloadActivations``: a fresh one for every microbatch, since entering one forgets the microbatch before."""

    package = "trl"

    def attach(self, workload: Workload) -> None:
        try:
            from trl.models.activation_offloading import OffloadActivations
        except ImportError as error:
            raise DoesNotApplyError(f"not installed ({error.name})") from error
        if not torch.accelerator.is_available():
            raise DoesNotApplyError("needs an accelerator")
        self.make, self.model = OffloadActivations, workload.chunks

    def microbatch(self, chunk: int) -> AbstractContextManager[object]:
        context = self.make()
        context.update_model_params(self.model)
        return context


class Megatron(Variant):
    """Megatron-Core's fine-grained offload of ``expert_fc1``, ``moe_act``, ``attn_norm`` and ``mlp_norm``."""

    package = "megatron-core"
    extension = "megatron.core.extensions.transformer_engine"

    def attach(self, workload: Workload) -> None:
        if not torch.accelerator.is_available():
            raise DoesNotApplyError("needs an accelerator")
        if not any(isinstance(getattr(module, "group", None), MethodType) for module in workload.chunks.modules()):
            raise DoesNotApplyError("the model has no groups")
        # It looks for a flag in Transformer Engine, which these models do without.
        self.replaced = sys.modules.get(self.extension)
        stand_in = ModuleType(self.extension)
        stand_in.cpu_offload = SimpleNamespace(CPUOffloadEnabled=False)
        sys.modules[self.extension] = stand_in
        self.owns_group = not dist.is_initialized()
        if self.owns_group:  # it gathers a table of bytes from all ranks after the first step
            dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.num_chunks = len(workload.chunks)
        self.interface.reset_instance()
        for parameter in workload.chunks.parameters():
            self.interface.mark_not_offload(parameter)

    def __init__(self) -> None:
        try:
            from megatron.core.pipeline_parallel import fine_grained_activation_offload as module
        except ImportError as error:
            raise DoesNotApplyError(f"not installed ({error.name})") from error
        self.interface = module.FineGrainedActivationOffloadingInterface

    def group(self, name: str, tensor: Tensor) -> Group:
        return MegatronGroup(name, tensor, self.interface)

    def start_step(self) -> None:
        self.interface.reset()

    def microbatch(self, chunk: int) -> AbstractContextManager[object]:
        self.interface.init_chunk_handler(
            pp_rank=0,
            vp_size=self.num_chunks,
            vp_stage=None if self.num_chunks == 1 else chunk,
            min_offloaded_tensor_size=1 << 20,
            delta_offload_bytes_across_pp_ranks=0,
            activation_offload_fraction=1.0,
        )
        return nullcontext()

    def detach(self) -> None:
        self.interface.reset_instance()
        del sys.modules[self.extension]
        if self.replaced is not None:
            sys.modules[self.extension] = self.replaced
        if self.owns_group:
            dist.destroy_process_group()


class MegatronGroup(Group):
    """A group as Megatron-Core marks it."""

    def __init__(self, name: str, tensor: Tensor, interface: Callable[[bool, Tensor, str], AbstractContextManager[Tensor]]) -> None:
        self.inner = interface(True, tensor, name)

    def __enter__(self) -> Tensor:
        return self.inner.__enter__()

    def __exit__(self, *error: object) -> None:
        self.inner.__exit__(*error)

    def commit(self, output: Tensor) -> Tensor:
        return self.inner.group_offload(output)


class Backhaul(Variant):
    """This library: one line, with or without a budget."""

    package = "backhaul"
    settles = True

    def __init__(self, budget: str | None = None) -> None:
        self.budget = budget

    def attach(self, workload: Workload) -> None:
        import backhaul as bh

        self.tier = bh.PinnedHost()
        # What the tiny sizes save is below the default; on an accelerator everything is as a user gets it.
        smallest = None if torch.accelerator.is_available() else 0
        self.handles = self.manage(workload, tier=self.tier, min_bytes=smallest)

    def manage(self, workload: Workload, **options: Any) -> list[Any]:
        """Return the handles of the workload's chunks."""
        import backhaul as bh

        return [bh.offload(workload.chunks, activation_budget=self.budget, **options)]

    def detach(self) -> None:
        for handle in self.handles:
            handle.remove()
        del self.handles
        self.tier.close()

    def pinned_bytes(self) -> int:
        return self.tier.locked_bytes

    def waited_ms(self) -> float:
        return sum(handle.stats.exposed_ms for handle in self.handles)

    def stats(self) -> Mapping[str, object]:
        each = [asdict(handle.stats) for handle in self.handles]
        kept = sum((Counter(stats.pop("kept_by_reason")) for stats in each), Counter())
        return {name: sum(stats[name] for stats in each) for name in each[0]} | {"kept_by_reason": dict(kept)}

    def explain(self) -> str:
        return "\n".join(str(handle.report()) for handle in self.handles)


class Planned(Backhaul):
    """This library with the workload's own plan: cheap modules recomputed, the rest offloaded, as far as a budget needs it.

    Each chunk has a handle of its own, and an equal share of the budget.
    """

    def rules(self, workload: Workload) -> Mapping[str, str] | None:
        return workload.plan

    def manage(self, workload: Workload, **options: Any) -> list[Any]:
        import backhaul as bh
        from backhaul.sizes import parse_bytes

        rules = self.rules(workload)
        if rules is None:
            raise DoesNotApplyError("it has no plan")
        share = None if self.budget is None else parse_bytes(self.budget, what="budget") // len(workload.chunks)
        return [bh.apply(chunk, rules, activation_budget=share, **options) for chunk in workload.chunks]


class Lean(Planned):
    """The same with less to recompute: only what frees more than the link does."""

    def rules(self, workload: Workload) -> Mapping[str, str]:
        return workload.lean


class Tight(Planned):
    """The same with more to recompute: some products, too."""

    def rules(self, workload: Workload) -> Mapping[str, str] | None:
        return workload.tight


class FromFile(Planned):
    """The same with a plan from a file, as ``bh.Plan.save`` writes it."""

    def __init__(self, path: str, budget: str | None = None) -> None:
        super().__init__(budget)
        self.path = path

    def rules(self, workload: Workload) -> Any:
        import backhaul as bh

        return bh.Plan.load(self.path)


KINDS: dict[str, Callable[..., Variant]] = {
    "plain": Variant,
    "checkpoint": Checkpoint,
    "selective": SelectiveCheckpoint,
    "memory_budget": MemoryBudget,
    "backhaul": Backhaul,
    "plan": Planned,
    "lean": Lean,
    "tight": Tight,
    "megatron": Megatron,
    "trl": TRL,
    "save_on_cpu": SaveOnCPU,
}


WITH_BUDGET = ("backhaul", "plan", "lean", "tight", "memory_budget")


def make(text: str) -> Variant:
    """Make a variant from its name.

    ``backhaul:12GiB``, ``plan``, ``lean`` and ``tight`` likewise, and ``memory_budget:0.5`` say how much may stay;
    ``plan@mine.json:12GiB`` names a plan of one's own.
    """
    name, _, argument = text.partition(":")
    kind, at, path = name.partition("@")
    if kind not in KINDS or (at and kind != "plan"):
        raise ValueError(f"no variant is called {name!r}; there are {', '.join(KINDS)}")
    if argument and kind not in WITH_BUDGET:
        raise ValueError(f"{name} takes no argument, but {text!r} has one")
    arguments = [argument] if argument else []
    return FromFile(path, *arguments) if at else KINDS[kind](*arguments)


@contextmanager
def attached(
    text: str, workload: str, *, device: torch.device, driven: Callable[[Workload], Workload] | None = None, **sizes: Any
) -> Iterator[tuple[Workload, Variant]]:
    """Make a variant from its name and a workload for it, put one around the other, and clear both away in the end.

    ``driven`` may put something between them that drives the workload; ``sizes`` are those of ``workloads.build``.
    """
    variant = make(text)
    made = build(workload, device=device, group=variant.group, **sizes)
    if driven is not None:
        made = driven(made)
    with ExitStack() as cleared:
        cleared.callback(made.close)
        variant.attach(made)
        cleared.callback(variant.detach)
        yield made, variant


def package_version(variant: Variant) -> str | None:
    """Return ``name version`` of the package behind a variant."""
    if variant.package is None:
        return None
    try:
        return f"{variant.package} {version(variant.package)}"
    except PackageNotFoundError:
        return None
