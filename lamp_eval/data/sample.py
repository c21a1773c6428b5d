"""Synthetic LaMP-shaped users with a planted personal signal of adjustable strength.

Every movie description carries the cues of two tags, so that two answers are plausible. One of the
two is always a favourite of the user, and the user chooses the favourite with probability
(1 + signal) / 2. With signal 0 the choice is a fair coin: nothing personal can be learned. Nobody
can know a stranger's favourites, so without the user's history no model is right more often than
half the time. That makes the sample a positive and a negative control for everything downstream.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from lamp_eval.config import DataConfig
from lamp_eval.errors import UserError
from lamp_eval.records import Query, Record, User
from lamp_eval.seeds import user_seed
from lamp_eval.tasks import Task

N_FAVOURITES = 4

CUES: dict[str, tuple[str, ...]] = {
    "sci-fi": ("a spaceship crew stranded light years from home", "an android that learns to dream"),
    "based on a book": ("a faithful adaptation of a bestselling novel", "a story first told in a novel"),
    "comedy": ("a string of hilarious mishaps", "laugh-out-loud jokes at every turn"),
    "action": ("car chases and gunfights", "an explosive rescue mission"),
    "twist ending": ("a final reveal that nobody sees coming", "a last scene that turns everything around"),
    "dystopia": ("a totalitarian future state that watches everyone", "survivors in a ruined future city"),
    "dark comedy": ("jokes told at a funeral", "a hilariously bungled murder"),
    "classic": ("a beloved black-and-white picture from the 1940s", "one of the oldest masterpieces of cinema"),
    "psychology": ("a therapist who questions her own mind", "a man losing his grip on his sanity"),
    "fantasy": ("dragons and a young wizard", "a magical kingdom under a spell"),
    "romance": ("two strangers who fall in love", "a love letter that arrives years late"),
    "thought-provoking": ("hard questions about what it means to be human", "ideas that linger for days"),
    "social commentary": ("a sharp look at class and inequality", "a critique of modern society"),
    "violence": ("brutal and bloody fights", "a gruesome killing spree"),
    "true story": ("real events that happened in 1972", "the actual life of a forgotten hero"),
}  # fmt: skip

_FRAMES = (
    "This film has {} and {}.",
    "Expect {}, along with {}.",
    "The plot brings together {} and {}.",
    "It offers {}, and also {}.",
    "A picture with {} as well as {}.",
)


def generate(task: Task, data: DataConfig) -> tuple[tuple[User, ...], tuple[User, ...]]:
    """Generates the evaluated users and the users of the task adapter; no one is in both.

    A user depends on the seed and their own id only, not on how many users there are.

    Raises:
        UserError: the task has no generator.
    """
    if task.name != "movie_tagging":
        raise UserError(
            expected="task=movie_tagging, the one task that data=sample generates",
            found=f"task={task.name}",
            where="option data",
            fix="choose data=oppu with data.dir=…, or task=movie_tagging",
        )
    evaluated = [_user(f"sample-{i:03d}", data, task.labels) for i in range(data.n_users)]
    others = [_user(f"other-{i:03d}", data, task.labels) for i in range(data.n_task_users)]
    return tuple(evaluated), tuple(others)


def _user(user_id: str, data: DataConfig, tags: Sequence[str]) -> User:
    rng = random.Random(user_seed(data.seed, user_id))
    favourites = rng.sample(list(tags), N_FAVOURITES)
    rest = [tag for tag in tags if tag not in favourites]

    def movie() -> tuple[str, str]:
        pair = [rng.choice(favourites), rng.choice(rest)]
        chosen = pair[0] if rng.random() < (1 + data.signal) / 2 else pair[1]
        rng.shuffle(pair)
        cues = [rng.choice(CUES[tag]) for tag in pair]
        return rng.choice(_FRAMES).format(*cues), chosen

    history = tuple(
        Record({"description": description, "tag": tag})
        for description, tag in (movie() for _ in range(data.n_records))
    )
    queries = tuple(
        Query(f"{user_id}-{i:03d}", _lamp_input(tags, description), tag)
        for i, (description, tag) in enumerate(movie() for _ in range(data.n_queries))
    )
    return User(user_id, history, queries)


def _lamp_input(tags: Sequence[str], description: str) -> str:
    """The query in the form of the official LaMP-2M files."""
    return (
        "Which tag does this movie relate to among the following tags? Just answer with the tag "
        f"name without further explanation. tags: [{', '.join(tags)}] description: {description}"
    )
