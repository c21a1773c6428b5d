"""Synthetic LaMP-shaped users with a planted personal signal of adjustable strength.

Every text carries the cues of two kinds (two tags, two scores, two ways to write a headline), so
that two answers are plausible. One of the two is always a favourite of the user, and the user
chooses the favourite with probability (1 + signal) / 2. With signal 0 the choice is a fair coin:
nothing personal can be learned. Nobody can know a stranger's favourites, so without the user's
history no model is right about the kind more often than half the time. That makes the sample a
positive and a negative control for everything downstream.

How much of it a model learns is another matter. Records of citation identification name a paper and
queries an option, and a tweet's record lacks the text it paraphrases: there a history helps only a
model that carries a habit over from one form to the other.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

from lamp_eval.config import DataConfig
from lamp_eval.data.phrases import PHRASES, Phrases
from lamp_eval.errors import UserError
from lamp_eval.records import Query, Record, User
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task

# The official questions; `{}` is the text, and `{labels}` those of the task.
INPUTS = {
    "citation": 'For an author who has written the paper with the title "{}", which reference is '
    "related? Just answer with [1] or [2] without explanation.",
    "movie_tagging": "Which tag does this movie relate to among the following tags? Just answer "
    "with the tag name without further explanation. tags: [{labels}] description: {}",
    "news_categorize": "Which category does this article relate to among the following "
    "categories? Just answer with the category name without further explanation. categories: "
    "[{labels}] article: {}",
    "product_rating": "What is the score of the following review on a scale of 1 to 5? just answer "
    "with 1, 2, 3, 4, or 5 without further explanation. review: {}",
    "news_headline": "Generate a headline for the following article: {}",
    "scholarly_title": "Generate a title for the following abstract of a paper: {}",
    "tweet_paraphrase": "Paraphrase the following tweet without any explanation before or after "
    "it: {}",
}

MAX_DRAWS = 100  # for an item that the user does not have yet


@dataclass(frozen=True)
class _Item:
    """A text that fits two kinds, the answer of the chosen one, and that of the other."""

    text: str
    subject: str
    answer: str
    rejected: str


def generate(task: Task, data: DataConfig) -> tuple[tuple[User, ...], tuple[User, ...]]:
    """Generates the evaluated users and the users of the task adapter; no one is in both.

    A user depends on the task, the seed and their own id only, not on how many users there are.

    Raises:
        UserError: the task has no phrases to generate users from.
    """
    if task.name not in PHRASES:
        raise UserError(
            expected=f"a task with synthetic users: {', '.join(PHRASES)}",
            found=f"task={task.name}",
            where="option data",
            fix="choose the task's own data, or one of these tasks",
        )
    evaluated = [_user(f"sample-{i:03d}", task, data) for i in range(data.n_users)]
    others = [_user(f"other-{i:03d}", task, data) for i in range(data.n_task_users)]
    return tuple(evaluated), tuple(others)


def _user(user_id: str, task: Task, data: DataConfig) -> User:
    rng = random.Random(user_seed(data.seed, user_id))
    phrases = PHRASES[task.name]
    favourites = rng.sample(list(phrases.cues), phrases.n_favourites or len(phrases.cues) // 2)
    rest = [kind for kind in phrases.cues if kind not in favourites]
    seen: set[str] = set()

    def item() -> _Item:
        """An item whose text is new or, if answers are texts, whose subject is: so both are."""
        for _ in range(MAX_DRAWS):
            found = _item(rng, phrases, favourites, rest, data.signal)
            new = found.text if task.labels else found.subject
            if phrases.may_repeat or new not in seen:
                break
        seen.add(new)
        return found

    # A tweet has one field for both: its answer, which comes second, stays.
    history = tuple(
        Record({task.text_field: found.text, task.gold_field: found.answer})
        for found in (item() for _ in range(data.n_records))
    )
    queries = tuple(_query(rng, f"{user_id}-{i:03d}", task, item()) for i in range(data.n_queries))
    return User(user_id, history, queries)


def _item(
    rng: random.Random, phrases: Phrases, favourites: list[str], rest: list[str], signal: float
) -> _Item:
    pair = [rng.choice(favourites), rng.choice(rest)]
    chosen, other = pair if rng.random() < (1 + signal) / 2 else reversed(pair)
    rng.shuffle(pair)
    cues = [rng.choice(phrases.cues[kind]) for kind in pair]
    frame = rng.choice(phrases.frames)
    subject = rng.choice(phrases.subjects) if phrases.subjects else ""

    def answer(kind: str) -> str:
        if not phrases.answers:
            return kind
        form = rng.choice(phrases.answers[kind])
        return form.format(subject=subject, Subject=subject.title())

    return _Item(frame.format(*cues, subject=subject), subject, answer(chosen), answer(other))


def _query(rng: random.Random, query_id: str, task: Task, item: _Item) -> Query:
    """The item in the form of the official files."""
    question = INPUTS[task.name].format(item.text, labels=", ".join(task.labels))
    if task.name != "citation":
        return Query(query_id, question, item.answer)
    options = [item.answer, item.rejected]
    rng.shuffle(options)
    shown = " ".join(f'[{i}]: "{option}"' for i, option in enumerate(options, 1))
    return Query(query_id, f"{question} {shown}", task.labels[options.index(item.answer)])
