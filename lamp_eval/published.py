"""The paper's tables 7 and 8, and the same tables from one's own runs.

Source: Geyko, Mosbach, Brinkmann, "Fine-Tuning a 3B-Parameter LLM on a Smartphone" (2026), with
SmolLM3-3B at 4 bits. Table 7 is of the benchmark's test split, whose answers are not public: runs
here evaluate another split, and compare only roughly.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

Row = Mapping[str, Any]

# By task and metric, in the paper's order.
_TABLE7_COLUMNS = (
    "n",
    "base arm",
    "base_retrieval arm",
    "task arm",
    "Δ task",
    "task_retrieval arm",
    "Δ task_retrieval",
)
_TABLE7: dict[tuple[str, str], tuple[float, ...]] = {
    ("citation", "accuracy"): (2500, 0.500, 0.549, 0.536, -0.012, 0.716, +0.167),
    ("movie_tagging", "accuracy"): (870, 0.136, 0.278, 0.468, +0.190, 0.547, +0.269),
    ("news_categorize", "accuracy"): (1274, 0.256, 0.542, 0.646, +0.104, 0.741, +0.199),
    ("product_rating", "accuracy"): (2500, 0.437, 0.648, 0.712, +0.064, 0.784, +0.136),
    ("product_rating", "mae"): (2500, 0.684, 0.442, 0.331, -0.111, 0.243, -0.200),
    ("news_headline", "rouge1"): (2376, 0.136, 0.148, 0.176, +0.028, 0.211, +0.063),
    ("scholarly_title", "rouge1"): (2500, 0.331, 0.336, 0.455, +0.118, 0.482, +0.146),
    ("tweet_paraphrase", "rouge1"): (1496, 0.395, 0.414, 0.516, +0.102, 0.535, +0.120),
}
_TABLE8_COLUMNS = ("users", "queries/user", "task arm", "user arm", "Δ", "Δᵤ")
_TABLE8: dict[tuple[str, str], tuple[float, ...]] = {
    ("news_categorize", "accuracy"): (49, 123, 0.805, 0.811, +0.006, +0.012),
    ("news_headline", "rouge1"): (100, 67, 0.158, 0.159, +0.001, +0.001),
    ("movie_tagging", "accuracy"): (100, 33, 0.361, 0.488, +0.127, +0.030),
    ("citation", "accuracy"): (100, 1.2, 0.634, 0.634, 0.000, +0.015),
    ("product_rating", "mae"): (101, 1.1, 0.223, 0.205, -0.018, -0.025),
    ("tweet_paraphrase", "rouge1"): (100, 1.1, 0.535, 0.530, -0.005, -0.003),
    ("scholarly_title", "rouge1"): (101, 1.1, 0.494, 0.486, -0.008, -0.006),
}
# Published values were scored by these rules: a label found in the answer, or the answer itself.
RULES = {"table7": "protocol", "table8": "official"}
TABLES = {"table7": (_TABLE7_COLUMNS, _TABLE7), "table8": (_TABLE8_COLUMNS, _TABLE8)}


def paper_table(name: str, rows: Iterable[Row]) -> list[dict[str, Any]]:
    """A table in the paper's shape: two lines for each task and metric, ours and the paper's.

    Args:
        name: `table7` or `table8`.
        rows: of a leaderboard, of any runs; of several runs of a task the last counts.

    Returns:
        Lines with `task`, `metric`, `whose` (`ours` or `paper`), `synthetic` (of ours) and the
        table's columns; None where our runs have no such number.
    """
    columns, published = TABLES[name]
    own = {
        (row["task"], row["metric"], row["arm"], row["reference"]): row
        for row in rows
        if row["rules"] == RULES[name]
    }
    lines = []
    for (task, metric), values in published.items():
        of_task = {key[2:]: row for key, row in own.items() if key[:2] == (task, metric)}
        found = _table7_values(of_task) if name == "table7" else _table8_values(of_task)
        synthetic = any(row["synthetic"] for row in of_task.values())
        for whose, numbers in (("ours", found), ("paper", values)):
            line: dict[str, Any] = {"task": task, "metric": metric, "whose": whose}
            line["synthetic"] = synthetic and whose == "ours"
            lines.append(line | dict(zip(columns, numbers, strict=True)))
    return lines


def _table7_values(rows: Mapping[tuple[str, str | None], Row]) -> list[float | None]:
    by_arm = {arm: row for (arm, _), row in rows.items()}

    def against_base_retrieval(arm: str) -> Row:
        return rows.get((arm, "base_retrieval"), {})

    return [
        max((row["n_queries"] for row in rows.values()), default=None),
        *(by_arm.get(arm, {}).get("value") for arm in ("base", "base_retrieval", "task")),
        against_base_retrieval("task").get("delta"),
        by_arm.get("task_retrieval", {}).get("value"),
        against_base_retrieval("task_retrieval").get("delta"),
    ]


def _table8_values(rows: Mapping[tuple[str, str | None], Row]) -> list[float | None]:
    row = rows.get(("user", "task"), {})
    n_users, n_queries = row.get("n_users"), row.get("n_queries")
    return [
        n_users,
        n_queries / n_users if n_users and n_queries is not None else None,
        *(row.get(name) for name in ("reference_value", "value", "delta", "delta_u")),
    ]
