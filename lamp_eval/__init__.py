"""Does a small adapter trained on one person's own history make a model better for them?

The command line is `python -m lamp_eval`. In Python:

    import lamp_eval

    users = lamp_eval.load_data("movie_tagging", n_users=3).users
    requests = lamp_eval.build_requests("movie_tagging", users, tokenizer, arm="base")
    outputs = [my_model(request.prompt) for request in requests]
    scores = lamp_eval.score_outputs("movie_tagging", outputs, [r.gold for r in requests])

All functions raise `UserError` for a mistake in what they are given. docs/tutorial.md has more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lamp_eval.errors import UserError
from lamp_eval.records import Query, Record, Request, User
from lamp_eval.tasks import TASKS, Task

if TYPE_CHECKING:  # what these import takes seconds, and is imported where it is needed
    import evaluate

    from lamp_eval.data import Corpus
    from lamp_eval.metrics import Scores
    from lamp_eval.statistics import Comparison

__version__ = "0.1.0"

__all__ = [
    "TASKS",
    "Query",
    "Record",
    "Request",
    "Task",
    "User",
    "UserError",
    "build_requests",
    "compare_scores",
    "evaluate_metric",
    "load_data",
    "read_leaderboard",
    "rebuild_leaderboard",
    "score_arm",
    "score_outputs",
]


def load_data(task: str | Task, data: str = "sample", **options: Any) -> Corpus:
    """Reads or generates users, as `task=… data=… data.<option>=…` on the command line does.

    Args:
        task: the task, or its name, e.g. `movie_tagging`; `TASKS` has all of them.
        data: the source: a file of `conf/data`, e.g. `sample` or `oppu`.
        options: of that group, e.g. `n_users=3` or `dir="…"`; the others keep their values.

    Returns:
        The corpus: in `users` those to evaluate, each with history and queries; in `task_users`
        those that train a task adapter; `synthetic` says whether the texts were generated.

    Raises:
        UserError: a name or option is not known, or with all problems found in the data.
    """
    from lamp_eval.compose import compose_config
    from lamp_eval.data import load_corpus

    found = _task(task)
    config = compose_config({"data": data}, {"task": found.name, "data": options})
    return load_corpus(found, config.data)


def build_requests(
    task: str | Task,
    users: Sequence[User],
    tokenizer: Any,
    *,
    arm: str,
    protocol: str = "oppu",
    seed: int = 0,
    profiles: Mapping[str, str] | None = None,
    **options: Any,
) -> list[Request]:
    """Builds the prompts that an arm answers, as `protocol=… protocol.<option>=…` does in a run.

    Args:
        task: the task, or its name.
        users: from `load_data`, or made of `User`, `Record` and `Query`; golds may be empty.
        tokenizer: a transformers tokenizer with an EOS token.
        arm: decides how many retrieved records a prompt shows: `base` none, `base_retrieval` and
            `task_retrieval` `k`; `task`, `user` and `cross_user` `adapter_k`.
        protocol: how prompts are built: a file of `conf/protocol`.
        seed: of random retrieval, ≥ 0.
        profiles: by user id, a text about the user for all their prompts.
        options: of that group, e.g. `k=2`; the others have the values of a run with the default
            setting.

    Returns:
        A request for each query, users and queries in their order.

    Raises:
        UserError: a name or option is not known, the users are not of this task, an instruction
            alone is longer than a prompt may be, or retrieval is dense, which a run alone has.
    """
    from lamp_eval.arms import arm as arm_named
    from lamp_eval.compose import compose_config
    from lamp_eval.data.checks import check_users
    from lamp_eval.prompts import make_encoder

    found = _task(task)
    # Adapter arms need their reference in a run, and so in its configuration.
    arms = ["task", arm] if arm in ("user", "cross_user") else [arm]
    config = compose_config(
        {"protocol": protocol},
        {"task": found.name, "arms": arms, "seed": seed, "protocol": options},
    )
    check_users(users, found, "these users", golds=False)
    build = make_encoder(tokenizer, found, config.protocol, seed, None, profiles)
    k = arm_named(arm, config.protocol).n_retrieved
    return [request for user in users for request in build.requests(user, k)]


def score_outputs(
    task: str | Task, outputs: Sequence[str], golds: Sequence[str]
) -> list[dict[str, Scores]]:
    """Scores each output by both sets of rules.

    Args:
        task: the task, or its name.
        outputs: what was answered, (n_queries,).
        golds: the right answers, (n_queries,).

    Returns:
        Of each query, by `official` and `protocol`: `failed_parse`, and what the task's kind has
        of `correct`, `absolute_error`, `rouge1` and `rougeL`, as `lamp_eval.metrics.score_output`
        explains.

    Raises:
        UserError: the lengths differ, an output is no string, or a gold is no label of the task.
    """
    from lamp_eval.metrics import score_output

    found = _task(task)
    _check_outputs(outputs, golds)
    return [score_output(found, o, gold) for o, gold in zip(outputs, golds, strict=True)]


def score_arm(
    task: str | Task, outputs: Sequence[str], golds: Sequence[str]
) -> dict[str, dict[str, float | None]]:
    """Computes the metrics of all outputs together, by both sets of rules.

    Args:
        task: the task, or its name.
        outputs: what was answered, (n_queries,); at least one.
        golds: the right answers, (n_queries,).

    Returns:
        By `official` and `protocol` the task's metrics, the main one first, then
        `failed_parse_rate`. None where no output could be parsed that a metric needs.

    Raises:
        UserError: as `score_outputs`, or there are none.
    """
    from lamp_eval.metrics import arm_metrics

    score_outputs(task, outputs, golds)  # checks them
    return arm_metrics(_task(task), outputs, golds)


def evaluate_metric(
    task: str | Task, rules: str = "official", cache_dir: str | None = None
) -> evaluate.Metric:
    """A task's metrics as an `evaluate.Metric`, which needs no network.

    Args:
        task: the task, or its name.
        rules: `official` or `protocol`.
        cache_dir: where `evaluate` makes its empty folders; None: in the user's home.

    Returns:
        Its `compute(predictions=outputs, references=golds)` gives what `score_arm` gives by these
        rules; it combines with other metrics.

    Raises:
        UserError: there is no such task or set of rules.
    """
    from lamp_eval.metrics import RULES
    from lamp_eval.metrics import evaluate_metric as build

    if rules not in RULES:
        raise UserError(
            expected=f"one of {', '.join(RULES)}",
            found=repr(rules),
            where="evaluate_metric, argument rules",
            fix="choose one of these",
        )
    return build(_task(task), rules, cache_dir)


def compare_scores(
    user_ids: Sequence[str],
    scores: Sequence[Mapping[str, Scores]],
    reference_scores: Sequence[Mapping[str, Scores]],
    *,
    metric: str,
    rules: str = "official",
    seed: int = 0,
    n_resamples: int = 9999,
) -> Comparison:
    """Compares an arm with a reference: Δ over queries, Δᵤ over users, and how certain they are.

    Queries without a score in one of them are left out; `n_queries` counts the rest.

    Args:
        user_ids: the user of each query, (n_queries,).
        scores: the arm's, from `score_outputs`, (n_queries,).
        reference_scores: the reference's on the same queries, (n_queries,).
        metric: one of the task's: `accuracy`, `mae`, `rouge1` or `rougeL`.
        rules: `official` or `protocol`.
        seed: of bootstrap and permutation test, ≥ 0.
        n_resamples: of each, ≥ 1.

    Returns:
        `delta`, `delta_u`, their intervals, `p`, wins and losses, whether it `improves` and more:
        the attributes of `lamp_eval.statistics.Comparison`.

    Raises:
        UserError: the lengths differ, the scores have no such metric or rules, or none is left.
    """
    from lamp_eval.metrics import LOWER_IS_BETTER, QUERY_SCORES, paired_scores
    from lamp_eval.statistics import compare

    lengths = (len(user_ids), len(scores), len(reference_scores))
    if len(set(lengths)) > 1:
        raise UserError(
            expected="as many user ids as scores and reference scores",
            found="{} user ids, {} scores, {} reference scores".format(*lengths),
            where="compare_scores",
            fix="compare arms that answered the same queries",
        )
    for row in (*scores, *reference_scores):
        known = {r: [m for m, name in QUERY_SCORES.items() if name in row[r]] for r in row}
        if metric not in known.get(rules, ()):
            raise UserError(
                expected=f"rules and a metric among {known}",
                found=f"rules {rules!r}, metric {metric!r}",
                where="compare_scores",
                fix="choose those that the scores have",
            )
    rows = paired_scores(user_ids, scores, reference_scores, rules, metric)
    return compare(
        [user_id for user_id, _, _ in rows],
        [score for _, score, _ in rows],
        [reference for _, _, reference in rows],
        higher_is_better=metric not in LOWER_IS_BETTER,
        seed=seed,
        n_resamples=n_resamples,
    )


def read_leaderboard(output_dir: str | Path) -> tuple[list[dict[str, Any]], list[str]]:
    """Reads the rows of all finished runs below an outputs folder; writes nothing.

    Returns:
        The rows with the columns of `leaderboard.csv`, None where it is empty; and a line for each
        `run.json` that could not be read.

    Raises:
        UserError: there is no such folder.
    """
    from lamp_eval import results

    return results.read_leaderboard(_folder(output_dir))


def rebuild_leaderboard(output_dir: str | Path) -> tuple[Path, list[str]]:
    """Writes `leaderboard.csv` in an outputs folder from all finished runs below it.

    Returns:
        The file, and a line for each `run.json` that could not be read.

    Raises:
        UserError: there is no such folder.
    """
    from lamp_eval import results

    return results.rebuild_leaderboard(_folder(output_dir))


def _task(task: str | Task) -> Task:
    if isinstance(task, Task):
        return task
    if task not in TASKS:
        raise UserError(
            expected=f"one of {', '.join(TASKS)}",
            found=repr(task),
            where="the task",
            fix="choose one of these",
        )
    return TASKS[task]


def _check_outputs(outputs: Sequence[str], golds: Sequence[str]) -> None:
    for name, texts in (("outputs", outputs), ("golds", golds)):
        wrong = [i for i, text in enumerate(texts) if not isinstance(text, str)]
        if isinstance(texts, str) or len(outputs) != len(golds) or wrong:
            raise UserError(
                expected="two lists of strings, an output for each gold",
                found=f"{type(texts[wrong[0]]).__name__} as item {wrong[0]}"
                if wrong
                else f"{type(texts).__name__} of length {len(texts)}",
                where=f"the {name}",
                fix="give one output for each query, '' where there is no answer",
            )


def _folder(output_dir: str | Path) -> Path:
    if not Path(output_dir).is_dir():
        raise UserError(
            expected="a folder with the outputs of runs",
            found="no such folder",
            where=str(output_dir),
            fix="give the output_dir of the runs",
        )
    return Path(output_dir)
