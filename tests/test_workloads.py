"""The benchmark workloads: the order of a step, what a layer saves, and variants that do not change a gradient."""

import json
from collections import Counter
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.utils.flop_counter import FlopCounterMode

import backhaul as bh
from benchmarks import measure, run, timeline, variants
from benchmarks.workloads import build, dsv3, glm
from benchmarks.workloads.base import Group, one_f_one_b, run_step

CPU = torch.device("cpu")
MIB = 2**20
compiles = pytest.mark.filterwarnings("ignore::UserWarning", "ignore::DeprecationWarning")  # the compiler warns of itself


@pytest.fixture(autouse=True)
def one_thread():
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def gradients(name, variant, **changes):
    """Return the gradients of the second of two steps, and what the variant says about itself."""
    workload = build(name, size="tiny", device=CPU, group=variant.group, **changes)
    variant.attach(workload)
    for _ in range(2):
        measure.zero_grads(workload)
        run_step(workload, variant)
    grads, stats = measure.host_copies(workload), variant.stats()
    variant.detach()
    workload.close()
    return grads, stats


def saved_by(function):
    """Return the tensors that a function's nodes save."""
    saved = []

    def pack(tensor):
        saved.append(tensor)
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        function()
    return saved


# --- The order of a step ---


def test_first_stage_runs_three_forwards_then_pairs_then_three_backwards():
    slots = list(map(str, one_f_one_b(20, stages=4)))
    assert slots[:7] == ["F0", "F1", "F2", "F3", "B0", "F4", "B1"]
    assert slots[-5:] == ["F19", "B16", "B17", "B18", "B19"]
    assert len(slots) == 40


@pytest.mark.parametrize(("chunks", "in_flight"), [(1, 4), (2, 11)])
def test_every_chunk_goes_forward_and_back_once_for_each_microbatch(chunks, in_flight):
    slots = one_f_one_b(20, stages=4, chunks=chunks)
    alive, most = set(), 0
    for slot in slots:
        key = slot.microbatch, slot.chunk
        if slot.kind == "forward":
            assert key not in alive
            alive.add(key)
        else:
            alive.remove(key)
        most = max(most, len(alive))
    assert not alive
    assert most == in_flight
    assert len(set(slots)) == len(slots) == 40 * chunks


def test_interleaved_backward_begins_with_the_last_chunk():
    slots = one_f_one_b(20, stages=4, chunks=2)
    assert " ".join(map(str, slots[:14])) == "F0 F1 F2 F3 F0.1 F1.1 F2.1 F3.1 F4 F5 F6 B0.1 F7 B1.1"
    place = {str(slot): index for index, slot in enumerate(slots)}
    assert all(place[f"B{m}.1"] < place[f"B{m}"] for m in range(20))


def test_interleaved_schedule_refuses_a_remainder():
    with pytest.raises(ValueError, match="multiple of 4 microbatches, not 6"):
        one_f_one_b(6, stages=4, chunks=2)


# --- What is saved, at full size and without memory ---


class FusedNorm(torch.autograd.Function):
    """Saves what CUDA's RMSNorm saves; on other devices torch builds it from many operations."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight, x.new_empty(x.shape[0], 1, dtype=torch.float32))
        return torch.empty_like(x)


class FusedAttention(torch.autograd.Function):
    """Saves what CUDA's fused attention saves."""

    @staticmethod
    def forward(ctx, q, k, v):
        batch, heads, tokens, _ = q.shape
        out = q.new_empty(batch, tokens, heads, v.shape[-1]).transpose(1, 2)
        ctx.save_for_backward(q, k, v, out, q.new_empty(batch, heads, tokens, dtype=torch.float32))
        return out


@pytest.fixture
def cuda_kernels(monkeypatch):
    monkeypatch.setattr(F, "rms_norm", lambda x, shape, weight, eps: FusedNorm.apply(x, weight))
    monkeypatch.setattr(F, "scaled_dot_product_attention", lambda q, k, v, is_causal: FusedAttention.apply(q, k, v))


def saved_storages(sizes):
    """Return the bytes of every storage that one layer saves for one microbatch, parameters and buffers aside."""
    layer = dsv3.DeepSeekStage(sizes, device=torch.device("meta"), router=dsv3.EvenRouter).blocks[0]
    x = torch.empty(sizes.tokens, sizes.hidden, dtype=torch.bfloat16, device="meta", requires_grad=True)
    saved = saved_by(lambda: layer(x))
    own = {tensor.untyped_storage() for tensor in (*layer.parameters(), *layer.buffers())}
    return [storage.nbytes() for storage in {tensor.untyped_storage() for tensor in saved} - own]


def test_layer_of_w1_saves_what_was_measured(cuda_kernels):
    storages = saved_storages(dsv3.Sizes())
    large = Counter(num_bytes // MIB for num_bytes in storages if num_bytes >= 50 * MIB)
    # Dispatched tokens and fc2 output; fc1 output and k/v up-projection; q and k; SwiGLU output and attention output; the norms' inputs and
    # outputs, which are saved seven times in all.
    assert large == {448: 2, 256: 2, 192: 2, 128: 2, 56: 4}
    assert sum(storages) / 1e6 == pytest.approx(2470, rel=0.002)


def test_tiny_layer_saves_the_same_tensors(cuda_kernels):
    assert len(saved_storages(dsv3.TINY)) == len(saved_storages(dsv3.Sizes()))


def test_expert_products_save_the_parameters_themselves():
    moe = dsv3.DeepSeekStage(dsv3.TINY, device=CPU).blocks[0].moe
    x = torch.randn(dsv3.TINY.tokens, dsv3.TINY.hidden, dtype=torch.bfloat16, requires_grad=True)
    saved = saved_by(lambda: moe(x))
    assert {id(moe.fc1), id(moe.fc2)} <= {id(tensor) for tensor in saved}


def test_full_glm_has_the_weights_that_were_measured():
    sizes = glm.Sizes()
    with torch.device("meta"):
        mlps = [glm.GatedMLP(sizes.hidden, sizes.dense, torch.bfloat16)]
        mlps += [glm.MixtureOfExperts(sizes, torch.bfloat16) for _ in range(sizes.num_layers - 1)]
        weights = [weight for mlp in mlps for weight in glm.Block(sizes, mlp, torch.bfloat16).parameters()]
    assert sum(weight.nbytes for weight in weights) / 1e9 == pytest.approx(9.36, abs=0.005)
    assert len(weights) + sizes.num_layers == 164  # what hooks see in a microbatch: the weights and the layers' inputs


@compiles
@pytest.mark.parametrize("name", ["W2c", "W2f"])
def test_checkpoints_of_compiled_blocks_save_layer_inputs_alone(name):
    workload = build(name, size="tiny", device=CPU)
    try:
        sharded = [isinstance(parameter, DTensor) for parameter in workload.chunks.parameters()]
        assert all(sharded) if name == "W2f" else any(sharded)
        ids, *inputs = saved_by(lambda: workload.forward(workload.slots[0]))
        assert ids is workload.ids
        assert [tuple(tensor.shape) for tensor in inputs] == [(glm.TINY.tokens, glm.TINY.hidden)] * glm.TINY.num_layers
        assert not any(tensor.is_leaf for tensor in inputs)  # a leaf lives as long as the graph, and can't leave
    finally:
        workload.close()


@compiles
@pytest.mark.parametrize("name", ["W2", "W2c", "W2f"])
def test_every_layer_input_of_w2_leaves_and_no_gradient_changes(name):
    plain, _ = gradients(name, variants.make("plain"))
    grads, stats = gradients(name, variants.make("backhaul:0"))
    assert all(torch.equal(grad, other) for grad, other in zip(grads, plain, strict=True))
    assert all(grad.isfinite().all() and grad.count_nonzero() for grad in grads)
    ids = glm.TINY.tokens * 8
    layers = glm.TINY.num_layers * glm.TINY.tokens * glm.TINY.hidden * 2
    assert stats["saved_bytes"] == 2 * (layers + ids)
    # From the second step on, the last layer's input is known to come back at once.
    assert stats["kept_by_reason"] == {"not worth moving": layers // glm.TINY.num_layers}
    assert stats["offloaded_bytes"] == stats["saved_bytes"] - layers // glm.TINY.num_layers


# --- The models are right ---


@pytest.mark.parametrize("weighted", [True, False])
def test_swiglu_has_the_gradient_of_its_formula(weighted):
    hidden = torch.randn(5, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.rand(5, 1, dtype=torch.float64, requires_grad=True) if weighted else None
    assert torch.autograd.gradcheck(dsv3.SwiGLU.apply, (hidden, weight))
    gate, up = hidden.chunk(2, dim=-1)
    torch.testing.assert_close(dsv3.SwiGLU.apply(hidden, weight), F.silu(gate) * up * (1 if weight is None else weight))


@pytest.mark.parametrize("router", [dsv3.TopKRouter, dsv3.EvenRouter])
def test_routed_experts_match_a_loop_over_tokens(router):
    sizes = dsv3.TINY
    stage = dsv3.DeepSeekStage(sizes, device=CPU, router=router)
    moe = stage.blocks[0].moe
    x = torch.randn(sizes.tokens, sizes.hidden, dtype=torch.bfloat16)
    scores = moe.router.gate(x).float().sigmoid()
    chosen = moe.router.choose(scores)
    expected = moe.shared_down(dsv3.SwiGLU.apply(moe.shared_gate(x), None)).float()
    for token in range(sizes.tokens):
        weights = scores[token, chosen[token]] / scores[token, chosen[token]].sum()
        for expert, weight in zip(chosen[token].tolist(), weights, strict=True):
            gate, up = (x[token].float() @ moe.fc1[expert].float()).chunk(2)
            expected[token] += (F.silu(gate) * up * weight) @ moe.fc2[expert].float()
    torch.testing.assert_close(moe(x).float(), expected, rtol=0.05, atol=0.05)


def test_top_k_router_makes_top_k_copies_of_every_token():
    router = dsv3.DeepSeekStage(dsv3.TINY, device=CPU).blocks[0].moe.router
    to = router(torch.randn(dsv3.TINY.tokens, dsv3.TINY.hidden, dtype=torch.bfloat16))
    assert torch.equal(torch.bincount(to.tokens), torch.full((dsv3.TINY.tokens,), dsv3.TINY.top_k))
    assert to.ends[-1] == dsv3.TINY.tokens * dsv3.TINY.top_k
    assert all(earlier <= later for earlier, later in pairwise(to.ends.tolist()))


def test_chunked_loss_is_the_models_own():
    pytest.importorskip("transformers")
    workload = build("W3", size="tiny", device=CPU)
    model = workload.chunks[0].model.float()
    ids = workload.ids[None]
    own = model(input_ids=ids[:, :-1], labels=ids[:, :-1], shift_labels=ids[:, 1:]).loss
    torch.testing.assert_close(workload.forward(workload.slots[0]), own)


def test_groups_go_around_every_layer_in_order():
    events = []

    class Recorded(Group):
        def __init__(self, name, tensor):
            super().__init__(name, tensor)
            self.name = name

        def __enter__(self):
            events.append(f"enter {self.name}")
            return super().__enter__()

        def __exit__(self, *error):
            events.append(f"exit {self.name}")

        def commit(self, output):
            events.append(f"commit {self.name}")
            return output

    workload = build("W1", size="tiny", device=CPU, group=Recorded)
    workload.forward(workload.slots[0])
    around = {name: [f"enter {name}", f"exit {name}"] for name in ("attn_norm", "mlp_norm", "expert_fc1", "moe_act")}
    layer = [*around["attn_norm"], "commit attn_norm", *around["mlp_norm"], *around["expert_fc1"], "commit expert_fc1", *around["moe_act"]]
    assert events == [*layer, "commit moe_act", "commit mlp_norm"] * dsv3.TINY.num_layers


# --- Variants ---


@pytest.mark.parametrize("name", ["W1", "W1s", "W1v"])
@pytest.mark.parametrize("kind", ["plain", "checkpoint", "selective", "save_on_cpu", "backhaul:0", "plan:0", "lean:0"])
def test_no_variant_changes_a_gradient(name, kind):
    small = {"tokens": 16, "microbatches": 4}
    plain, _ = gradients(name, variants.make("plain"), **small)
    grads, stats = gradients(name, variants.make(kind), **small)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, plain, strict=True))
    assert all(grad.isfinite().all() and grad.count_nonzero() for grad in grads)
    if kind.endswith(":0"):
        assert stats["offloaded_bytes"] > 0


@pytest.mark.parametrize("name", ["W3", "W4"])
@pytest.mark.parametrize("kind", ["plan:0", "lean:0", "tight:0"])
def test_no_plan_for_models_of_transformers_changes_a_gradient(name, kind):
    pytest.importorskip("transformers")
    plain, _ = gradients(name, variants.make("plain"))
    grads, stats = gradients(name, variants.make(kind))
    assert all(torch.equal(grad, other) for grad, other in zip(grads, plain, strict=True))
    assert stats["offloaded_bytes"] > 0
    assert stats["recomputed_bytes"] > 0


def test_a_tight_plan_leaves_less_to_offload_than_a_lean_one():
    pytest.importorskip("transformers")
    for name in ("W3", "W4"):
        offloaded = [gradients(name, variants.make(kind))[1]["offloaded_bytes"] for kind in ("lean:0", "tight:0")]
        assert offloaded[1] < 0.9 * offloaded[0]


def test_checkpoint_leaves_the_layers_as_they_were():
    workload = build("W1", size="tiny", device=CPU)
    variant = variants.make("checkpoint")
    variant.attach(workload)
    variant.detach()
    assert all("forward" not in vars(block) for block in workload.blocks)


def test_checkpoint_of_checkpointed_blocks_does_not_apply():
    class Compiled:
        blocks = ()

    with pytest.raises(variants.DoesNotApplyError, match="checkpointed already"):
        variants.make("checkpoint").attach(Compiled())


def flops(kind):
    """Return the floating-point operations of W1's matrix products in a forward and a backward."""
    variant = variants.make(kind)
    workload = build("W1", size="tiny", device=CPU)
    variant.attach(workload)
    with FlopCounterMode(display=False) as counted:
        with variant.microbatch(0):
            output = workload.forward(workload.slots[0])
        workload.backward(workload.slots[0], output)
    return counted.get_total_flops()


def test_selective_checkpoint_computes_no_matrix_product_again():
    assert flops("selective") == flops("plain") < flops("checkpoint")


@compiles
def test_compiler_keeps_what_the_memory_budget_allows():
    pytest.importorskip("transformers")
    saved_bytes = {}
    for kind in ("memory_budget:0", "memory_budget", "memory_budget:1"):
        variant = variants.make(kind)
        workload = build("W3", size="tiny", device=CPU)
        variant.attach(workload)
        with variant.microbatch(0):
            saved = saved_by(lambda workload=workload: workload.forward(workload.slots[0]))
        own = {parameter.untyped_storage() for parameter in workload.chunks.parameters()}
        saved_bytes[kind] = sum(storage.nbytes() for storage in {tensor.untyped_storage() for tensor in saved} - own)
        variant.detach()
        assert all("forward" not in vars(block) for block in workload.blocks)
    assert saved_bytes["memory_budget:0"] < saved_bytes["memory_budget"] < saved_bytes["memory_budget:1"]


@compiles
def test_compiled_layers_have_the_plain_gradients_but_for_rounding():
    pytest.importorskip("transformers")
    plain, _ = gradients("W3", variants.make("plain"))
    grads, _ = gradients("W3", variants.make("memory_budget"))
    for grad, other in zip(grads, plain, strict=True):
        torch.testing.assert_close(grad, other, rtol=0.02, atol=1e-4)


@compiles
def test_memory_budget_does_not_apply_where_a_block_does_not_compile_whole():
    workload = build("W1", size="tiny", device=CPU)
    variant = variants.make("memory_budget")
    variant.attach(workload)
    with pytest.raises(variants.DoesNotApplyError, match="does not compile whole"):
        run_step(workload, variant)
    variant.detach()


def test_a_plan_may_come_from_a_file(tmp_path):
    path = tmp_path / "mine.json"
    bh.Plan({"*.moe": "recompute", "*": "offload"}).save(path)
    small = {"tokens": 16, "microbatches": 4}
    plain, _ = gradients("W1", variants.make("plain"), **small)
    grads, stats = gradients("W1", variants.make(f"plan@{path}:0"), **small)
    assert all(torch.equal(grad, other) for grad, other in zip(grads, plain, strict=True))
    assert stats["recomputed_bytes"] > 0 and stats["offloaded_bytes"] > 0


BAD = {"megatron:3": "takes no argument", "nothing": "no variant is called 'nothing'", "lean@x": "no variant is called 'lean@x'"}


@pytest.mark.parametrize(("text", "message"), BAD.items())
def test_bad_variants_are_named(text, message):
    with pytest.raises(ValueError, match=message):
        variants.make(text)


def test_bad_workloads_are_named():
    with pytest.raises(ValueError, match="no workload is called 'W9'"):
        build("W9", size="tiny", device=CPU)
    with pytest.raises(ValueError, match="W3 has one microbatch"):
        build("W3", size="tiny", device=CPU, microbatches=4)


def test_comparison_sees_one_changed_element():
    workload = build("W1", size="tiny", device=CPU, tokens=16, microbatches=4)
    measure.zero_grads(workload)
    run_step(workload, variants.make("plain"))
    reference = measure.host_copies(workload)
    assert measure.compare(workload, reference) == measure.Comparison(equal=True, worst=0.0)
    measure.local_grads(workload)[3].view(-1)[7] += 1
    compared = measure.compare(workload, reference)
    assert not compared.equal
    assert compared.worst > 0


# --- The runner ---


def test_run_prints_a_row_for_every_variant_and_writes_json(tmp_path, capsys):
    path = tmp_path / "results.json"
    options = ["W1", "--size", "tiny", "--tokens", "16", "--microbatches", "4", "--steps", "1", "--warmup", "1", "--device", "cpu"]
    run.main([*options, "--variants", "plain,checkpoint,megatron,backhaul:0,nothing", "--profile", "--json", str(path)])
    printed = capsys.readouterr().out
    assert [line.split()[0] for line in printed.splitlines()[:6]] == ["variant", "plain", "checkpoint", "megatron", "backhaul:0", "nothing"]
    results = json.loads(path.read_text())
    rows = {row["variant"]: row for row in results["rows"]}
    assert rows["checkpoint"]["to_plain"] == {"equal": True, "worst": 0.0}
    assert rows["backhaul:0"]["to_plain"]["equal"]
    assert rows["plain"]["to_itself"]["equal"]
    assert rows["plain"]["waited_ms"] is None
    assert rows["backhaul:0"]["waited_ms"] >= 0
    assert len(rows["plain"]["steps_ms"]) == 1
    assert rows["plain"]["tokens_per_s"] == pytest.approx(16 * 4 / rows["plain"]["step_ms"] * 1e3)
    assert f" {rows['plain']['tokens_per_s']:.0f} " in printed.splitlines()[1]
    assert rows["megatron"]["note"]
    assert rows["nothing"]["note"].startswith("failed: no variant is called")
    assert results["torch"] == torch.__version__
    assert results["hidden"] == dsv3.TINY.hidden


def test_variants_that_plan_get_more_steps_to_settle(monkeypatch):
    warmups = {}

    def noted(workload, variant, name, *, warmup, **_):
        warmups[name] = warmup
        return measure.Row(variant=name, note="not run")

    monkeypatch.setattr(measure, "measure", noted)
    monkeypatch.setattr(measure, "host_copies", lambda workload: [])
    options = ["W1", "--size", "tiny", "--device", "cpu", "--warmup", "2", "--settle", "4"]
    run.run(run.parse([*options, "--variants", "plain,checkpoint,lean:0"]))
    assert warmups == {"plain": 2, "checkpoint": 2, "lean:0": 6}


def test_deterministic_kernels_are_left_as_they_were():
    with run.determinism(True):
        assert torch.are_deterministic_algorithms_enabled()
        assert not torch.utils.deterministic.fill_uninitialized_memory
    assert not torch.are_deterministic_algorithms_enabled()
    assert torch.utils.deterministic.fill_uninitialized_memory


# --- Watched steps ---


def kernel(start, end):
    return {"cat": "kernel", "name": "gemm", "ts": start, "dur": end - start, "args": {"stream": 7}}


def memcpy(name, start, end, num_bytes):
    return {"cat": "gpu_memcpy", "name": name, "ts": start, "dur": end - start, "args": {"stream": 13, "bytes": num_bytes}}


def test_waits_are_laid_to_the_copy_that_ended_before_the_next_kernel():
    events = [
        kernel(1000, 2000),
        memcpy("Memcpy DtoH (Device -> Pinned)", 1200, 2970, 64 * MIB),
        memcpy("Memcpy HtoD (Pinned -> Device)", 1500, 2500, 32 * MIB),
        memcpy("Memcpy DtoH (Device -> Pageable)", 2990, 2995, 8),  # the model's own
        kernel(3000, 4000),
        kernel(4050, 5000),  # too short a gap
        kernel(6000, 7000),  # nothing was copied: the host's
        {"cat": "cpu_op", "name": "aten::mm", "ts": 0, "dur": 9},
    ]
    kernels, copies = timeline.read_trace(events)
    assert [copy.direction for copy in copies] == ["d2h", "h2d"]
    spans = [
        timeline.SlotSpan(name="F0", kind="forward", start_ms=0, end_ms=1.5, allocated_bytes=0, peak_bytes=0),
        timeline.SlotSpan(name="B0", kind="backward", start_ms=1.5, end_ms=6, allocated_bytes=0, peak_bytes=0),
    ]
    first, second = timeline.find_waits(kernels, copies, spans)
    assert (first.start_ms, first.end_ms, first.slot, first.copy) == (1.0, 2.0, "B0", copies[0])
    assert (second.start_ms, second.end_ms, second.copy) == (4.0, 5.0, None)
    watched = timeline.Timeline(variant="some", slots=tuple(spans), copies=copies, waits=(first, second))
    assert "waited 1.0 ms for d2h, 0.0 ms for h2d, 1.0 ms for the host" in timeline.summarise(watched)


def test_watched_step_has_a_span_for_every_slot_and_can_be_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    from benchmarks.picture import draw

    variant = variants.make("plain")
    workload = build("W1", size="tiny", device=CPU, tokens=16, microbatches=4)
    watched = timeline.watch(workload, variant, "plain")
    assert [span.name for span in watched.slots] == list(map(str, workload.slots))
    assert all(earlier.end_ms == later.start_ms for earlier, later in pairwise(watched.slots))
    draw([watched, watched], tmp_path / "picture.png", title="W1")
    assert (tmp_path / "picture.png").stat().st_size > 10_000
