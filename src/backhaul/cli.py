"""The ``backhaul`` command.

Covers: options, progress, tables and exit codes.
Does not cover: the work behind a command (demo.py).
"""

import json
import statistics
import subprocess
import sys
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Literal

try:
    import typer
    from rich.console import Console
    from rich.progress import Progress
    from rich.table import Table
except ModuleNotFoundError as missing:
    sys.exit(f"the backhaul command needs {missing.name}; install it with: pip install 'backhaul[cli]'")

from backhaul.sizes import parse_bytes

if TYPE_CHECKING:
    from backhaul.demo import Comparison, Config

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False)

_HEAD_SIZE = 64  # as in demo_model.py, which is not imported here: --help need not wait for torch


@app.callback()
def main() -> None:
    """Activation memory for PyTorch: saved tensors leave the device and come back bit for bit."""


def _whole_heads(hidden: int | None) -> int | None:
    if hidden is not None and hidden % _HEAD_SIZE:
        raise typer.BadParameter(f"{hidden} is not a multiple of {_HEAD_SIZE}, the size of an attention head")
    return hidden


@app.command()
def demo(
    device: Annotated[str | None, typer.Option(help="Where to train: cpu, cuda, cuda:1 ...; by default the best one present.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Training steps of each variant.")] = None,
    layers: Annotated[int | None, typer.Option(min=1, help="Transformer blocks.")] = None,
    hidden: Annotated[int | None, typer.Option(min=1, help="Width of the model.", callback=_whole_heads)] = None,
    seq: Annotated[int | None, typer.Option(min=1, help="Bytes of text per sequence.")] = None,
    tier: Annotated[Literal["host", "disk"] | None, typer.Option(help="Where activations go; host from a GPU, disk from a CPU.")] = None,
    budget: Annotated[
        str | None,
        typer.Option(help="Most bytes of saved tensors to stay, as 100MB; by default a quarter of what plain keeps."),
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print every measurement as JSON instead of the table.")] = False,
) -> None:
    """Train a small mixture of experts twice, plain and offloaded, and compare time, memory and every gradient.

    Exits with 1 if a loss or a gradient differs by a single bit, and with 2 if a variant could not run.
    """
    from backhaul.demo import Config, compare

    try:
        limit = None if budget is None else parse_bytes(budget, what="--budget")
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    try:
        config = Config.for_device(device, tier=tier, steps=steps, layers=layers, hidden=hidden, seq=seq, activation_budget=limit)
    except ValueError as error:
        raise typer.BadParameter(str(error)) from None
    with Progress(console=Console(stderr=True), transient=True) as progress:
        tasks = {variant: progress.add_task(f"{variant:<9}", total=config.steps) for variant in ("plain", "offloaded")}

        def on_step(variant: str, loss: float) -> None:
            progress.update(tasks[variant], advance=1, description=f"{variant:<9} loss {loss:.3f}")

        try:
            comparison = compare(config, on_step)
        except subprocess.CalledProcessError as failure:
            typer.echo(f"the {failure.cmd[3]} variant ended with exit status {failure.returncode}; what it said is above", err=True)
            raise typer.Exit(2) from None
    if as_json:
        typer.echo(json.dumps(asdict(comparison) | {"num_compared": comparison.num_compared, "differences": comparison.differences}))
    else:
        _print(comparison)
    if comparison.differences:
        raise typer.Exit(1)


def _print(comparison: "Comparison") -> None:
    config, plain, offloaded = comparison.config, comparison.plain, comparison.offloaded
    whose = "process" if config.device.startswith("cpu") else "device"
    console = Console()
    table = Table(title=_title(config), title_justify="left")
    table.add_column()
    table.add_column("plain", justify="right")
    table.add_column(f"offloaded to {config.tier}", justify="right")
    table.add_row("step time, median", *(f"{statistics.median(one.step_s):.3f} s" for one in (plain, offloaded)))
    table.add_row("saved tensors on the device, peak", *(_mb(one.peak_saved_bytes) for one in (plain, offloaded)))
    table.add_row("  the budget", "none", _mb(config.activation_budget or 0))
    table.add_row("bytes out, a step", *(_mb(one.offloaded_bytes / config.steps) for one in (plain, offloaded)))
    table.add_row("bytes in, a step", *(_mb(one.reloaded_bytes / config.steps) for one in (plain, offloaded)))
    table.add_row(f"peak memory of the {whose}", *(_mb(one.peak_bytes) for one in (plain, offloaded)))
    table.add_row("  of it, while training", *(_mb(one.peak_bytes - one.baseline_bytes) for one in (plain, offloaded)))
    console.print(table)
    if comparison.differences:
        console.print(f"[bold red]{len(comparison.differences)} of {comparison.num_compared} losses and gradients differ[/]:")
        for difference in comparison.differences[:10]:
            console.print(f"  {difference}", markup=False)
    else:
        console.print(f"[bold green]all {comparison.num_compared} losses and gradients are identical[/], bit for bit")


def _title(config: "Config") -> str:
    return (
        f"a mixture of experts on {config.device}: {config.layers} layers of width {config.hidden}, "
        f"{config.batch} x {config.seq} bytes of text a step, {config.steps} steps"
    )


def _mb(num_bytes: float) -> str:
    return f"{num_bytes / 1e6:,.0f} MB"
