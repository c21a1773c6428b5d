"""Paired comparison of prediction files: `python -m lamp_eval.compare --golds G --a P1 --b P2`."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeGuard

from rich.console import Console
from rich.table import Table

from lamp_eval.data.files import parse_json, read_bytes
from lamp_eval.data.lamp import read_outputs, read_users
from lamp_eval.errors import UserError, fail, raise_if_any
from lamp_eval.metrics import LOWER_IS_BETTER, QUERY_SCORES, RULES, score_output
from lamp_eval.score import checked_pairs, task_named
from lamp_eval.statistics import by_history_length, compare, holm
from lamp_eval.tasks import Task

# Fields of a file of per-query scores, with the names of the published files behind them.
_PAIR_FIELDS = (("user_id",), ("score", "oppu_score"), ("reference_score", "task_score"))


@dataclass(frozen=True)
class Paired:
    """The scores of an arm and of its reference on the same queries.

    Attributes:
        task: the benchmark's id, or the file of the scores.
        metric: its name.
        higher_is_better: its direction.
        arm: the arm's name.
        reference: its reference's name.
        user_ids: the user of each query, (n_queries,).
        values: the arm's score of each query, (n_queries,).
        reference_values: the reference's, (n_queries,).
        n_left_out: queries without a score in one of them, which are not in the former.
        agreement: share of all queries on which both gave the same answer, surrounding white space
            aside; None if only scores are known.
    """

    task: str
    metric: str
    higher_is_better: bool
    arm: str
    reference: str
    user_ids: tuple[str, ...]
    values: tuple[float, ...]
    reference_values: tuple[float, ...]
    n_left_out: int = 0
    agreement: float | None = None


def pairs_of_files(
    golds: Path,
    arms: Sequence[Path],
    reference: Path,
    *,
    cross_user: Path | None = None,
    user_of: dict[str, str] | None = None,
    task: Task | None = None,
    rules: str = "official",
) -> list[Paired]:
    """Scores prediction files in the benchmark's format and pairs them query by query.

    Args:
        golds: as for `lamp_eval.score`.
        arms: predictions of one or more arms.
        reference: predictions of what each of them is compared with.
        cross_user: predictions with strangers' adapters. They are compared with the reference as
            well, and each arm with them: the personal part of its gain.
        user_of: the user of each query id; None: every query is a user of its own.
        task: the task; None: every task in `golds`.
        rules: one of `RULES`.

    Returns:
        One for each task, metric with a score per query, and pair of files.

    Raises:
        UserError: a file cannot be read, ids differ, or a query has no user.
    """
    wanted = [(arm, reference) for arm in arms]
    if cross_user is not None:
        wanted += [(cross_user, reference), *((arm, cross_user) for arm in arms)]
    files = list(dict.fromkeys(path for pair in wanted for path in pair))
    stems = [path.stem for path in files]
    name_of = {p: p.stem if stems.count(p.stem) == 1 else str(p) for p in files}
    right = read_outputs(golds)
    read = {path: checked_pairs(right, read_outputs(path), task) for path in files}
    paired = []
    for index, (of_task, gold, _) in enumerate(read[reference]):
        if user_of is not None:
            _check_users_known(user_of, gold.by_id, gold.where)
        users = [query_id if user_of is None else user_of[query_id] for query_id in gold.by_id]
        outputs = {path: [*read[path][index][2].by_id.values()] for path in files}
        scores = {
            path: [
                score_output(of_task, output, answer)[rules]
                for output, answer in zip(outputs[path], gold.by_id.values(), strict=True)
            ]
            for path in files
        }
        for metric in (m for m in of_task.metrics if m in QUERY_SCORES):
            for arm, other in wanted:
                rows: list[tuple[str, float | None, float | None]] = [
                    (user, own[QUERY_SCORES[metric]], theirs[QUERY_SCORES[metric]])
                    for user, own, theirs in zip(users, scores[arm], scores[other], strict=True)
                ]
                same = zip(outputs[arm], outputs[other], strict=True)
                paired.append(
                    _paired(
                        rows,
                        task=of_task.lamp_id,
                        metric=metric,
                        higher_is_better=metric not in LOWER_IS_BETTER,
                        arm=name_of[arm],
                        reference=name_of[other],
                        agreement=sum(a.strip() == b.strip() for a, b in same) / len(users),
                    )
                )
    return paired


def pairs_of_scores(path: Path, *, higher_is_better: bool = True) -> Paired:
    """Reads per-query scores, a JSON object per line: `{user_id, score, reference_score}`.

    The published names `oppu_score` and `task_score` are taken as well, and a field `diff` is
    checked: it is the gain, with the sign that makes positive better.

    Raises:
        UserError: with all problems of the file.
    """
    problems: list[UserError] = []
    rows: list[tuple[str, float | None, float | None]] = []
    for number, line in enumerate(read_bytes(path).splitlines(), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = parse_json(line, where, "a JSON object on each line")
        except UserError as error:
            problems.append(error)
            continue
        row = row if isinstance(row, dict) else {}
        user, score, reference = (
            next((row[name] for name in names if name in row), None) for names in _PAIR_FIELDS
        )
        if not (_is_text(user) and _is_number(score) and _is_number(reference)):
            problems.append(
                UserError(
                    expected="user_id (a string), score and reference_score (finite numbers)",
                    found=f"{user!r:.40}, {score!r:.40}, {reference!r:.40}",
                    where=where,
                    fix="correct the line",
                )
            )
            continue
        gain = (score - reference) * (1 if higher_is_better else -1)
        if "diff" in row and not (_is_number(row["diff"]) and abs(row["diff"] - gain) < 1e-9):
            problems.append(
                UserError(
                    expected=f"the gain, {gain:g}",
                    found=f"{row['diff']!r:.40}",
                    where=f"{where}, field 'diff'",
                    fix="say --lower-is-better if these are errors, or correct the line",
                )
            )
        rows.append((user, score, reference))
    raise_if_any(problems)
    return _paired(
        rows,
        task=str(path),
        metric="score",
        higher_is_better=higher_is_better,
        arm=path.stem,
        reference="its reference",
    )


def report(
    paired: Sequence[Paired],
    n_records: dict[str, int] | None = None,
    *,
    seed: int = 0,
    n_resamples: int = 9999,
) -> list[dict[str, Any]]:
    """Compares each pair; p-values are also corrected for the pairs of the same task and metric.

    Args:
        paired: what to compare.
        n_records: length of each user's history, for a breakdown by it.
        seed: of bootstrap and permutation test.
        n_resamples: of each.

    Returns:
        For each pair its names, the fields of `lamp_eval.statistics.Comparison`, `p_holm`,
        `wilcoxon_p_holm`, and `by_history`: the same fields by class of history length.

    Raises:
        UserError: a user's history length is not known, or there is nothing to compare.
    """
    rows = []
    for pair in paired:
        columns = (pair.user_ids, pair.values, pair.reference_values)
        options: dict[str, Any] = {
            "higher_is_better": pair.higher_is_better,
            "seed": seed,
            "n_resamples": n_resamples,
        }
        classes = {}
        if n_records:
            _check_users_known(n_records, pair.user_ids, "the length of each user's history")
            classes = by_history_length(*columns, n_records, **options)
        names = {k: v for k, v in vars(pair).items() if k not in _COLUMNS}
        rows.append(
            names
            | asdict(compare(*columns, **options))
            | {"by_history": {name: asdict(found) for name, found in classes.items()}}
        )
    for group in _groups(rows):
        for name in ("p", "wilcoxon_p"):
            for row, corrected in zip(group, holm([row[name] for row in group]), strict=True):
                row[f"{name}_holm"] = corrected
    return rows


_COLUMNS = ("user_ids", "values", "reference_values")


def _paired(rows: Sequence[tuple[str, float | None, float | None]], **names: Any) -> Paired:
    """A pair of the rows in which both have a score."""
    known = [(user, s, r) for user, s, r in rows if s is not None and r is not None]
    return Paired(
        user_ids=tuple(user for user, _, _ in known),
        values=tuple(score for _, score, _ in known),
        reference_values=tuple(reference for _, _, reference in known),
        n_left_out=len(rows) - len(known),
        **names,
    )


def _is_text(value: Any) -> TypeGuard[str]:
    return isinstance(value, str) and value != ""


def _is_number(value: Any) -> TypeGuard[float]:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and abs(value) <= sys.float_info.max  # as no NaN and no huge integer is


def _check_users_known(known: dict[str, Any], wanted: Iterable[str], where: str) -> None:
    missing = [name for name in dict.fromkeys(wanted) if name not in known]
    if missing:
        raise UserError(
            expected="an entry for each of them in the file given as --users",
            found=f"none for {len(missing)}: {', '.join(map(repr, missing[:10]))}"
            + (", …" if len(missing) > 10 else ""),
            where=where,
            fix="complete the file given as --users",
        )


def _groups(rows: Sequence[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each task and metric; rows of score files are one family."""
    groups: dict[Any, list[dict[str, Any]]] = {}
    for row in rows:
        key = None if row["metric"] == "score" else (row["task"], row["metric"])
        groups.setdefault(key, []).append(row)
    return list(groups.values())


def main(arguments: Sequence[str] | None = None) -> None:
    """The command line; exits with 2 after a user's mistake."""
    parser = argparse.ArgumentParser(
        prog="python -m lamp_eval.compare",
        description="Compares arms on the same queries: Δ over queries, Δᵤ over users.",
    )
    parser.add_argument("--golds", type=Path, help="{task, golds: [{id, output}]}")
    parser.add_argument("--a", type=Path, action="append", help="an arm's predictions; repeatable")
    parser.add_argument("--b", type=Path, help="the predictions that it is compared with")
    parser.add_argument("--cross-user", type=Path, help="predictions with strangers' adapters")
    parser.add_argument(
        "--users",
        type=Path,
        help="whose query is which: the benchmark's questions, {id: user_id} or "
        "{id: {user_id, n_records}}; without it every query is its own user",
    )
    parser.add_argument("--task", type=task_named, help="LaMP_1 … LaMP_7 (as --golds says)")
    parser.add_argument("--rules", choices=RULES, default="official")
    parser.add_argument(
        "--pairs",
        type=Path,
        action="append",
        help="instead: a file with {user_id, score, reference_score} on each line; repeatable",
    )
    parser.add_argument("--lower-is-better", action="store_true", help="--pairs holds errors")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")
    options = parser.parse_args(arguments)
    from_files = (options.golds, options.a, options.b)
    if options.pairs and any((*from_files, options.cross_user, options.users)):
        parser.error("--pairs stands alone: its lines name users and scores")
    if not options.pairs and not all(from_files):
        parser.error("--golds, --a and --b are needed, or --pairs")
    try:
        user_of, n_records = read_users(options.users) if options.users else (None, None)
        if options.pairs:
            higher = not options.lower_is_better
            paired = [pairs_of_scores(path, higher_is_better=higher) for path in options.pairs]
        else:
            paired = pairs_of_files(
                options.golds,
                options.a,
                options.b,
                cross_user=options.cross_user,
                user_of=user_of,
                task=options.task,
                rules=options.rules,
            )
        rows = report(paired, n_records, seed=options.seed)
    except UserError as error:
        fail(error)
    if options.json:
        print(json.dumps(rows, indent=2, ensure_ascii=False))
        return
    console = Console(width=None if sys.stdout.isatty() else 120)
    for group in _groups(rows):
        _show(console, group, options.rules)
    if not options.pairs and user_of is None:
        console.print("Without --users every query counts as a user of its own.")


def _show(console: Console, rows: Sequence[dict[str, Any]], rules: str) -> None:
    """One column for each comparison."""
    first = rows[0]
    title = "scores" if first["metric"] == "score" else f"{first['task']}, {rules} rules"
    table = Table(title=title, title_justify="left", title_style="bold")
    table.add_column(first["metric"])
    for row in rows:
        table.add_column(f"{row['arm']}\n− {row['reference']}", justify="right")

    def add(name: str, *fields: str, form: str = "{}") -> None:
        cells = []
        for row in rows:
            values = [row[field] for field in fields]
            cells.append("" if None in values else form.format(*values))
        if any(cell not in ("", "0") for cell in cells):
            table.add_row(name, *cells)

    add("queries", "n_queries")
    add("without a score", "n_left_out")
    add("users", "n_users")
    add("value", "value", form="{:.6f}")
    add("reference", "reference_value", form="{:.6f}")
    add("Δ", "delta", form="{:+.6f}")
    add("  95 %, over users", "ci_low", "ci_high", form="[{:+.6f}, {:+.6f}]")
    add("  95 %, normal", "normal_ci_low", "normal_ci_high", form="[{:+.6f}, {:+.6f}]")
    add("Δᵤ", "delta_u", form="{:+.6f}")
    add("  95 %, over users", "ci_u_low", "ci_u_high", form="[{:+.6f}, {:+.6f}]")
    add("  95 %, normal", "normal_ci_u_low", "normal_ci_u_high", form="[{:+.6f}, {:+.6f}]")
    add("  detectable (80 %)", "mde", form="±{:.6f}")
    add("p, permutation", "p", form="{:.3g}")
    if len(rows) > 1:
        add("  Holm", "p_holm", form="{:.3g}")
    add("p, Wilcoxon", "wilcoxon_p", form="{:.3g}")
    if len(rows) > 1:
        add("  Holm", "wilcoxon_p_holm", form="{:.3g}")
    add("queries +/=/−", "query_wins", "query_ties", "query_losses", form="{}/{}/{}")
    add("users +/=/−", "user_wins", "user_ties", "user_losses", form="{}/{}/{}")
    add("same answers", "agreement", form="{:.3%}")
    for name in dict.fromkeys(name for row in rows for name in row["by_history"]):
        cells = []
        for row in rows:
            found = row["by_history"].get(name)
            cells.append(f"{found['delta_u']:+.6f} ({found['n_users']})" if found else "")
        table.add_row(f"Δᵤ, {name} records (users)", *cells)
    console.print(table)


if __name__ == "__main__":
    main()
