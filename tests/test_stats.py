"""What a handle counts and tells: the snapshot, its identities, the report."""

import dataclasses
import json

import pytest
import torch
from torch import Tensor

import backhaul as bh
from backhaul.reporting import Stats
from backhaul.testing import RecordingTier
from tests.conftest import Code, everything
from tests.models import X, build, step


def test_saved_bytes_are_kept_or_offloaded_and_the_reasons_add_up():
    for options in ({}, {"activation_budget": None}, {"min_bytes": 513}, {"activation_budget": "1KiB"}):
        model = build()
        with everything(model, **options) as handle:
            for _ in range(2):
                step(model)
                stats = handle.stats
                assert stats.saved_bytes == stats.kept_bytes + stats.offloaded_bytes + stats.recomputed_bytes
                assert stats.kept_bytes == sum(size for reason, size in stats.kept_by_reason.items() if "parameter" not in reason)
                assert min(stats.kept_by_reason.values()) > 0
                assert stats.futile_bytes <= stats.offloaded_bytes
                assert stats.resident_bytes == 0 < stats.peak_resident_bytes


def test_the_counts_agree_with_what_the_tier_saw():
    model, tier = build(), RecordingTier(deferred=True)
    with everything(model, tier) as handle:
        for _ in range(4):
            step(model)
        stats = handle.stats
        assert stats.offloaded_bytes == tier.bytes_of("store") == tier.bytes_of("free")
        assert stats.reloaded_bytes == tier.bytes_of("load")
        assert stats.num_offloads == sum(record.event == "store" for record in tier.records)
        assert stats.num_demand_reloads <= sum(record.event == "load" for record in tier.records)
        assert (stats.host_bytes, stats.peak_host_bytes) == (tier.used_bytes, tier.peak_bytes)
        assert stats.peak_host_bytes > stats.disk_bytes == stats.peak_disk_bytes == stats.pageable_bytes == 0
        assert stats.exposed_ms >= 0


def test_a_storage_counts_once_a_frame_however_many_views_of_it_are_saved():
    def run(x: Tensor) -> Tensor:
        y = x * 2
        return y.exp().sum() + (y[:, :8] * y[:, 8:]).sum() + y.t().sin().sum() + (y.view(-1) ** 2).sum()

    module, tier = Code(run), RecordingTier(deferred=True)
    x = torch.randn(8, 16, requires_grad=True)
    with everything(module, tier) as handle:
        module(x)
        # y, the result of exp, and what pow and sin save is y again
        assert handle.stats.saved_bytes == 2 * 8 * 16 * 4


def test_stats_are_a_frozen_snapshot():
    model = build()
    with everything(model) as handle:
        before = handle.stats
        copied = dataclasses.replace(before)
        step(model)
        assert before == copied
        assert before.saved_bytes == 0 < handle.stats.saved_bytes
        with pytest.raises(dataclasses.FrozenInstanceError):
            before.saved_bytes = 1  # type: ignore[misc]
    sums = "saved_bytes kept_bytes kept_by_reason offloaded_bytes reloaded_bytes recomputed_bytes futile_bytes"
    levels = "resident_bytes peak_resident_bytes host_bytes peak_host_bytes disk_bytes peak_disk_bytes pageable_bytes"
    assert " ".join(field.name for field in dataclasses.fields(Stats)) == f"{sums} {levels} num_offloads num_demand_reloads exposed_ms"


def test_resident_bytes_are_those_of_graphs_that_are_alive():
    model = build()
    with everything(model, min_bytes=1 << 30) as handle:
        first, second = model(X), model(X)
        two = handle.stats.resident_bytes
        del first
        one = handle.stats.resident_bytes
        assert 0 < one < two
        assert handle.stats.peak_resident_bytes == two
        del second
        assert handle.stats.resident_bytes == 0


def test_a_report_is_a_text_for_people_and_plain_data_for_programs():
    model = build()
    with everything(model) as handle:
        step(model)
        report = handle.report()
    text, data = str(report), report.to_dict()
    assert json.loads(json.dumps(data)) == json.loads(json.dumps(data))
    assert data["stats"]["offloaded_bytes"] == report.stats.offloaded_bytes > 0
    assert {row["fqn"] for row in data["modules"]} == {"", "blocks.0", "blocks.1", "blocks.2"}
    assert sum(row["saved_bytes"] for row in data["modules"]) == report.stats.saved_bytes
    assert sum(row["offloaded_bytes"] for row in data["modules"]) == report.stats.offloaded_bytes
    for word in ("saved", "offloaded", "reloaded", "kept", "resident", "blocks.1", "(root)", "on demand"):
        assert word in text
    assert "note" not in text


def test_a_report_says_why_nothing_moved():
    model = build()
    with everything(model, min_bytes="1GiB") as handle:
        assert "note: nothing was offloaded: no forward of a managed module has run" in str(handle.report())
        step(model)
        assert "note: nothing was offloaded: the largest saved tensor has 512 B, below min_bytes=1.0 GiB" in str(handle.report())


def test_a_report_says_that_others_save_what_a_rule_would_free():
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Identity(), torch.nn.Linear(8, 8))
    for plan, said in (({"1": "recompute"}, True), ({"1": "recompute", "*": "offload"}, False)):
        with bh.apply(model, plan, tier=RecordingTier(), activation_budget=0, min_bytes=0) as handle:
            model(torch.ones(4, 8)).sum().backward()
            assert ('add "*": "offload" as the last rule' in str(handle.report())) == said


def test_a_report_can_be_had_after_removal():
    model = build()
    with everything(model) as handle:
        step(model)
    assert handle.report().stats.offloaded_bytes > 0
