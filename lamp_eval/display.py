"""What a person sees of a run: the header, the progress bars, the final table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    Task,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)
from rich.table import Table
from rich.text import Text

from lamp_eval.results import Measurement

if TYPE_CHECKING:
    from lamp_eval.agreement import Agreement


class _SpeedColumn(TextColumn):
    """Tokens per second of a bar; its `tokens` field counts them."""

    def __init__(self) -> None:
        super().__init__("")

    def render(self, task: Task) -> Text:
        tokens = task.fields.get("tokens", 0)
        elapsed = task.finished_time or task.elapsed
        return Text(f"{tokens / elapsed:6.0f} tokens/s" if tokens and elapsed else "")


def progress(console: Console) -> Progress:
    """Progress bars with tokens per second."""
    return Progress(
        TextColumn("{task.description:<40}"),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        _SpeedColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        console=console,
    )


def duration(seconds: float) -> str:
    """E.g. `45 s`, `3 min 20 s`, `2 h 05 min`."""
    total = round(seconds)
    if total < 60:
        return f"{total} s"
    if total < 3600:
        return f"{total // 60} min {total % 60:02d} s"
    return f"{total // 3600} h {total % 3600 // 60:02d} min"


def show_leaderboard(
    console: Console, rows: Sequence[Mapping[str, Any]], *, title: str, with_blocks: bool = False
) -> None:
    """The table of arms: value, Δ and Δᵤ with their intervals, p, wins/ties/losses by user."""
    table = Table(title=title, title_justify="left", title_style="bold")
    columns = ["arm", "against", "metric", "value", "reference", "Δ [95 %]", "Δᵤ [95 %]", "p",
               "users +/=/−"]  # fmt: skip
    for name in (["blocks"] if with_blocks else []) + columns:
        justify: Any = "left" if name in ("arm", "against", "metric") else "right"
        table.add_column(name, justify=justify, overflow="fold")
    for row in rows:
        cells = [
            row["arm"],
            row["reference"] or "",
            row["metric"],
            _number(row["value"]),
            _number(row["reference_value"]),
            _interval(row, "delta", "ci_low", "ci_high"),
            _interval(row, "delta_u", "ci_u_low", "ci_u_high"),
            "" if row["p"] is None else f"{row['p']:.3f}",
            ""
            if row["user_wins"] is None
            else f"{row['user_wins']}/{row['user_ties']}/{row['user_losses']}",
        ]
        style = "bold" if row["arm"] == "user" and row["reference"] == "task" else ""
        table.add_row(*([str(row["blocks"])] if with_blocks else []), *cells, style=style)
    console.print(table)


def show_agreement(console: Console, found: Agreement) -> None:
    """The gain with each backend's adapters, and how many answers differ."""
    users = "SYNTHETIC users" if found.synthetic else "users"
    table = Table(
        title=f"{found.task}: one recipe, two backends, {len(found.users)} {users}",
        title_justify="left",
        title_style="bold",
    )
    for column in ("arm user against task", "mlx", "torch", "mlx − torch"):
        table.add_column(column, justify="left" if column.startswith("arm") else "right")
    ours, theirs, both = found.rows["mlx"], found.rows["torch"], asdict(found.comparison)
    table.add_row(found.metric, *(_number(row["value"]) for row in (ours, theirs)),
                  f"{both['delta']:+.3f}")  # fmt: skip
    for name, *fields in (
        ("Δ [95 %]", "delta", "ci_low", "ci_high"),
        ("Δᵤ [95 %]", "delta_u", "ci_u_low", "ci_u_high"),
    ):
        low, high = fields[1:]
        table.add_row(name, *(_interval(row, fields[0], low, high) for row in (ours, theirs, both)))
    table.add_row("other answers", "", "", f"{found.share_different:.1%}")
    if found.loss_difference is not None:
        table.add_row("largest difference of a loss", "", "", f"{found.loss_difference:.1e}")
    console.print(table)
    console.print("the paper's phone and server: within one point of accuracy, 7.8% other answers")


def show_paper_table(console: Console, name: str, lines: Sequence[Mapping[str, Any]]) -> None:
    """A table in the paper's shape, our numbers above the published ones."""
    synthetic = ", ours of SYNTHETIC users" if any(line["synthetic"] for line in lines) else ""
    table = Table(title=f"the paper's {name}{synthetic}", title_justify="left", title_style="bold")
    columns = [column for column in lines[0] if column != "synthetic"]
    for column in columns:
        table.add_column(column, justify="left" if column in columns[:3] else "right")
    for line in lines:
        if line["whose"] == "ours":
            table.add_section()
        cells = [_paper_cell(column, line[column]) for column in columns]
        table.add_row(*cells, style="bold" if line["whose"] == "ours" else "")
    console.print(table)


def _paper_cell(column: str, value: Any) -> str:
    if value is None or isinstance(value, str):
        return value or ""
    if column in ("n", "users", "queries/user"):
        return f"{value:.2g}" if value < 10 else f"{value:.0f}"
    return f"{value:+.3f}" if column.startswith("Δ") else f"{value:.3f}"


def show_card(console: Console, card: Mapping[str, Mapping[str, object]], *, title: str) -> None:
    """The data card, a section after the other; problems that are there stand out."""
    table = Table(title=title, title_justify="left", title_style="bold", show_header=False)
    for section, values in card.items():
        table.add_section()
        for name, value in values.items():
            shown = f"{value:.3f}" if isinstance(value, float) else str(value)
            table.add_row(name, shown, style="yellow" if section == "problems" and value else "")
    console.print(table)


def show_measurement(console: Console, measurement: Measurement) -> None:
    """Its tables, and what they say."""
    for content in measurement.tables:
        table = Table(title=content.title, title_justify="left", title_style="bold")
        for column in content.columns:
            justify: Any = "left" if column in ("phase", "path") else "right"
            table.add_column(column, justify=justify, overflow="fold")
        first = None
        for cells in content.cells():
            if first is not None and cells[0] != first:
                table.add_section()
            first = cells[0]
            table.add_row(*cells)
        console.print(table)
    for line in measurement.findings:
        console.print(f"· {line}", markup=False, highlight=False)


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _interval(row: Mapping[str, Any], name: str, low: str, high: str) -> str:
    if row[name] is None:
        return ""
    if row[low] is None:
        return f"{row[name]:+.3f}"
    return f"{row[name]:+.3f} [{row[low]:+.3f}, {row[high]:+.3f}]"
