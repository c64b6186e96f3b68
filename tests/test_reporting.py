"""The text of a report: what a person reads of it, for small and for large models."""

import re

import torch
from torch import nn

import backhaul as bh
from backhaul.reporting import MOST_ROWS
from backhaul.sizes import format_bytes
from tests.planned import MIXED, Layer, X, apply, build, step


def test_parameters_stand_apart_from_what_is_kept_of_what_was_saved():
    model = build()
    with apply(model, MIXED) as handle, torch.autocast("cpu", torch.bfloat16):
        step(model)
        stats, lines = handle.stats, str(handle.report()).splitlines()
    kept = lines.index(f"kept       {format_bytes(stats.kept_bytes):>12}")
    parameters = next(index for index, line in enumerate(lines) if line.startswith("parameters"))
    reasons = {line[2:34].strip(): line[34:].strip() for line in lines[kept + 1 : parameters]}
    rest = {reason: size for reason, size in stats.kept_by_reason.items() if "parameter" not in reason}
    assert reasons == {reason: format_bytes(size) for reason, size in rest.items()}
    assert sum(rest.values()) == stats.kept_bytes
    assert {"parameter", "cast of a parameter"} <= set(stats.kept_by_reason)
    told = format_bytes(sum(stats.kept_by_reason.values()) - stats.kept_bytes)
    assert lines[parameters] == f"parameters {told:>12}  stay in any case, and are not in saved"


def test_modules_of_a_large_model_that_differ_in_numbers_alone_are_one_row_with_their_sums():
    depth = MOST_ROWS
    model = nn.Sequential(*[Layer() for _ in range(depth)])
    with apply(model, {"*.norm": "recompute", "*": "offload"}) as handle:
        step(model, X)
        report = handle.report()
    assert {row.fqn for row in report.modules} >= {f"{index}.norm" for index in range(depth)}
    rows = [re.split(r" {2,}", line) for line in str(report).partition("module ")[2].splitlines()[1:]]
    saved = {glob: sum(row.saved_bytes for row in report.modules if row.fqn.endswith(".norm") is (glob[-1] == "m")) for glob, *_ in rows}
    assert {glob: size for glob, size, *_ in rows} == {glob: format_bytes(size) for glob, size in saved.items()}
    assert set(saved) == {f"{{0..{depth - 1}}}", f"{{0..{depth - 1}}}.norm"}
    assert len(report.to_dict()["modules"]) == len(report.modules)


def test_a_long_name_moves_the_columns_and_not_just_its_row():
    inner = nn.Sequential(nn.Linear(16, 16), nn.Tanh())
    model = nn.Sequential()
    model.add_module("a_name_that_is_longer_than_most_of_those_that_one_sees_in_models", nn.ModuleList([inner]))
    model.forward = lambda x: inner(x)  # type: ignore[method-assign]
    with bh.apply(model, {"*": "offload"}, tier="host", min_bytes=0, activation_budget=0) as handle:
        model(X).sum().backward()
    header, *rows = str(handle.report()).splitlines()[-2:]
    assert len({len(line) for line in (header, *rows)}) == 1
