"""The synthetic users of all tasks: what a history tells, what it does not, and the official form.

Movie tagging has further tests in test_data.py.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass
from functools import cache
from statistics import fmean

import pytest

from lamp_eval.config import DataConfig
from lamp_eval.data import load_corpus
from lamp_eval.data.phrases import PHRASES
from lamp_eval.data.sample import INPUTS
from lamp_eval.metrics import QUERY_SCORES, score_output
from lamp_eval.records import Query, Record, User
from lamp_eval.tasks import LAMP_TASKS, Task

ALL = pytest.mark.parametrize("task", LAMP_TASKS.values(), ids=LAMP_TASKS)
NEW = pytest.mark.parametrize(
    "task",
    [task for name, task in LAMP_TASKS.items() if name != "movie_tagging"],
    ids=lambda t: t.name,
)


@cache
def corpus(task_name: str, **values):
    size = dict(n_users=3, n_task_users=4, n_records=24, n_queries=12, signal=0.8)
    return load_corpus(LAMP_TASKS[task_name], DataConfig(source="sample", **{**size, **values}))


@cache
def cue_pattern(task_name: str) -> tuple[re.Pattern, dict[str, str]]:
    kinds = {cue: kind for kind, cues in PHRASES[task_name].cues.items() for cue in cues}
    return re.compile(rf"(?<!\w)(?:{'|'.join(map(re.escape, kinds))})(?!\w)"), kinds


@cache
def answer_patterns(task_name: str) -> list[tuple[re.Pattern, str]]:
    phrases = PHRASES[task_name]
    answers = phrases.answers or {kind: (kind,) for kind in phrases.cues}
    return [
        (re.compile(re.sub(r"\\{\w+\\}", "(.+)", re.escape(form))), kind)
        for kind, forms in answers.items()
        for form in forms
    ]


def kinds_in(task: Task, text: str) -> tuple[str, ...]:
    """The kinds that a text hints at, in its order."""
    pattern, kinds = cue_pattern(task.name)
    return tuple(kinds[cue] for cue in pattern.findall(text))


def kind_and_subject(task: Task, answer: str) -> tuple[str, str]:
    """The one kind that an answer is of, and what it is about."""
    found = [
        (kind, "".join(match.groups()))
        for pattern, kind in answer_patterns(task.name)
        if (match := pattern.fullmatch(answer))
    ]
    assert len(found) == 1, answer
    return found[0]


def kinds_of_history(task: Task, user: User) -> Counter[str]:
    """How often each kind was chosen. Only answers are looked at: a tweet is nothing else."""
    return Counter(kind_and_subject(task, r.fields[task.gold_field])[0] for r in user.history)


def answer_of(task: Task, query: Query) -> str:
    """What the gold says: itself, or the paper it names."""
    if task.name != "citation":
        return query.gold
    _, *options = task.oppu.texts(query.input)
    return options[task.labels.index(query.gold)]


@dataclass(frozen=True)
class Question:
    """A query's two kinds, in the text's order, and the chosen one."""

    pair: tuple[str, ...]
    chosen: str

    @property
    def other(self) -> str:
        (other,) = set(self.pair) - {self.chosen}
        return other


def questions(task: Task, user: User) -> list[Question]:
    found = []
    for query in user.queries:
        pair = kinds_in(task, task.oppu.texts(query.input)[0])
        chosen = kind_and_subject(task, answer_of(task, query))[0]
        assert len(pair) == len(set(pair)) == 2
        assert chosen in pair
        found.append(Question(pair, chosen))
    return found


def rightness(chosen: int, other: int) -> float:
    """Of a guess at the more frequent of two kinds; a coin decides between equals."""
    return 0.5 if chosen == other else float(chosen > other)


# The form


def test_every_task_can_be_generated():
    assert set(PHRASES) == set(INPUTS) == set(LAMP_TASKS)
    for task in LAMP_TASKS.values():
        phrases = PHRASES[task.name]
        if task.labels and task.labelled_records:
            assert set(phrases.cues) <= set(task.labels)
            assert phrases.answers is None
        else:
            assert set(phrases.cues) == set(phrases.answers)


@pytest.mark.parametrize(
    ("values", "checksum"),
    [
        ({}, "8ee7bffa92f6c25c6a8414170f1de9dee41d8284d132995e134544734db97a95"),
        (
            dict(n_users=7, n_task_users=9, n_records=60, n_queries=30, signal=0.3, seed=5),
            "c358a36c9f1381324b3dcc2b54910ae0af8348c54c3048f455d975d577a42a2e",
        ),
    ],
)
def test_movies_are_those_of_the_first_generator(values, checksum):
    # As computed before the other tasks had a generator.
    assert corpus("movie_tagging", **(values or dict(n_users=5, n_task_users=60))).checksum == (
        checksum
    )


FIRST_AND_LAST = {
    "citation": (
        {
            "title": "From Spam Filtering to Query Optimization: A View from Public Schools",
            "citation": "Spam Filtering: A Primer",
        },
        {
            "title": "From Speech Recognition to Query Optimization: A View from Modern Banks",
            "citation": "Speech Recognition: A Primer",
        },
        'For an author who has written the paper with the title "Music Retrieval '
        'and Query Optimization for Public Farms", which reference is related? '
        'Just answer with [1] or [2] without explanation. [1]: "Query Optimization '
        'and Its Methods" [2]: "Advances in Music Retrieval"',
        "[1]",
    ),
    "news_categorize": (
        {
            "text": "Seen and heard in Denver: a daily walk against stress, then a recipe "
            "for lemon cake.",
            "category": "food & drink",
        },
        {
            "text": "Seen and heard in Nairobi: a senator who changed parties, then a goal "
            "in the last minute of the match.",
            "category": "sports",
        },
        "Which category does this article relate to among the following "
        "categories? Just answer with the category name without further "
        "explanation. categories: [food & drink, sports, education, parents, "
        "religion, travel, business, crime, science & technology, culture & arts, "
        "entertainment, politics, women, style & beauty, healthy living] article: "
        "Today in Lisbon: a burglary in broad daylight, and cheap flights to the "
        "islands.",
        "travel",
    ),
    "product_rating": (
        {
            "text": "The Italian chair: at times it is excellent, at times it is truly awful.",
            "score": "1",
        },
        {
            "text": "The electric pillow: at times it is truly awful, at times it is poor.",
            "score": "1",
        },
        "What is the score of the following review on a scale of 1 to 5? just "
        "answer with 1, 2, 3, 4, or 5 without further explanation. review: With "
        "this striped mirror I am torn: it is good, but then it is terrible.",
        "1",
    ),
    "news_headline": (
        {
            "text": "Readers asked us about wooden guitars. There is a dispute among "
            "neighbours. Old letters tell its history.",
            "title": "Dispute Over Wooden Guitars",
        },
        {
            "text": "Readers asked us about wooden tents. Most people make mistakes. This "
            "year science took a closer look.",
            "title": "Mistakes Everyone Makes With Wooden Tents",
        },
        "Generate a headline for the following article: Readers asked us about "
        "waterproof lamps. The danger is often overlooked. Beginners can start "
        "today.",
        "Danger Alert: Waterproof Lamps",
    ),
    "scholarly_title": (
        {
            "abstract": "Our subject is online query optimization. We attempt a replication. "
            "Ten systems meet in a benchmark.",
            "title": "Replication Study: Online Query Optimization",
        },
        {
            "abstract": "We study secure robot navigation. The effect of noise is measured. "
            "The fusion of methods works best.",
            "title": "Noise and Secure Robot Navigation",
        },
        "Generate a title for the following abstract of a paper: Much is known "
        "about parallel music retrieval. A new theory is proved. We attempt a "
        "replication.",
        "Theory of Parallel Music Retrieval",
    ),
    "tweet_paraphrase": (
        {
            "text": "proud, well done! jacket",
        },
        {
            "text": "proud, well done! jacket",
        },
        "Paraphrase the following tweet without any explanation before or after "
        "it: About the candle I am really sad, but annoyed as well.",
        "sad, poor me! candle",
    ),
}


@NEW
def test_literal_items(task):
    found = corpus(task.name)
    users, others = found.users, found.task_users
    assert [(len(u.history), len(u.queries)) for u in users + others] == [(24, 12)] * 7
    assert [u.id for u in users] == ["sample-000", "sample-001", "sample-002"]
    assert others[3].id == "other-003"
    first, last, asked, gold = FIRST_AND_LAST[task.name]
    assert users[0].history[0] == Record(first)
    assert others[3].history[23] == Record(last)
    assert users[2].queries[11] == Query("sample-002-011", asked, gold)


@ALL
def test_inputs_parse_back_to_what_was_asked(task):
    frames = PHRASES[task.name].frames
    pattern = "|".join(re.sub(r"\\{\w*\\}", ".+", re.escape(frame)) for frame in frames)
    for user in corpus(task.name).users:
        for query in user.queries:
            text, *options = task.oppu.texts(query.input)
            assert re.fullmatch(pattern, text)
            asked = INPUTS[task.name].format(text, labels=", ".join(task.labels))
            shown = "".join(f' [{i}]: "{title}"' for i, title in enumerate(options, 1))
            assert query.input == asked + shown
            assert len(options) == (2 if task.name == "citation" else 0)
        for record in user.history:
            assert set(record.fields) == {task.text_field, task.gold_field}
            if task.name != "tweet_paraphrase":
                assert re.fullmatch(pattern, record.fields[task.text_field])


def test_citation_options_are_one_paper_of_either_topic():
    task = LAMP_TASKS["citation"]
    firsts = 0
    for user in corpus("citation", n_users=100).users:
        for query, question in zip(user.queries, questions(task, user), strict=True):
            _, *options = task.oppu.texts(query.input)
            topics = {kind_and_subject(task, option)[0] for option in options}
            assert topics == set(question.pair)
            firsts += query.gold == "[1]"
    assert abs(firsts / 1200 - 0.5) < 4 * 0.5 / 1200**0.5  # the place gives nothing away


@ALL
def test_texts_are_short(task):
    # A token of SmolLM2 is about 0.8 of these words.
    for user in corpus(task.name, n_users=20).users:
        for query in user.queries:
            text, *options = task.oppu.texts(query.input)
            prompt = task.oppu.query_prompt.format(text, *options)
            assert len(re.findall(r"\w+|[^\w\s]", prompt)) <= 100
            assert len(query.gold.split()) <= 12


# What a user depends on


@ALL
def test_a_user_depends_on_the_task_the_seed_and_their_id_only(task):
    few, many = corpus(task.name), corpus(task.name, n_users=9, n_task_users=2)
    assert many.users[:3] == few.users
    assert few.task_users[:2] == many.task_users
    assert corpus(task.name, seed=1).users[0].history != few.users[0].history
    people = many.users + few.task_users
    assert len({str(user.history) for user in people}) == len(people)


@ALL
def test_the_signal_changes_choices_and_nothing_else(task):
    asked = [
        [query.input for user in corpus(task.name, signal=s).users for query in user.queries]
        for s in (0, 1)
    ]
    if task.name == "citation":  # its options stand in another order
        asked = [[text.split(" [1]: ")[0] for text in texts] for texts in asked]
    assert asked[0] == asked[1]
    golds = [
        [
            answer_of(task, query)
            for user in corpus(task.name, signal=s).users
            for query in user.queries
        ]
        for s in (0, 1)
    ]
    assert 0.25 < fmean(a == b for a, b in zip(*golds, strict=True)) < 0.75


@NEW
def test_nothing_comes_twice(task):
    for user in corpus(task.name, n_users=30).users:
        texts = [task.oppu.texts(query.input)[0] for query in user.queries]
        texts += [record.fields[task.text_field] for record in user.history]
        assert len(set(texts)) == len(texts) == 36
        if not task.labels:
            golds = [query.gold for query in user.queries]
            golds += [record.fields[task.gold_field] for record in user.history]
            assert len(set(golds)) == len(golds) == 36


def test_more_items_than_there_are_subjects_are_no_endless_search():
    (user,) = corpus("tweet_paraphrase", n_users=1, n_task_users=0, n_records=400).users
    subjects = {
        kind_and_subject(LAMP_TASKS["tweet_paraphrase"], record.fields["text"])[1]
        for record in user.history
    }
    assert len(user.history) == 400
    assert subjects == set(PHRASES["tweet_paraphrase"].subjects)


# The signal


@ALL
@pytest.mark.parametrize(("signal", "expected"), [(0.0, 0.5), (0.5, 0.75), (1.0, 1.0)])
def test_the_history_is_worth_what_the_signal_says(task, signal, expected):
    users = corpus(task.name, n_users=200, n_task_users=0, signal=signal).users
    histories = [kinds_of_history(task, user) for user in users]
    asked = [questions(task, user) for user in users]

    def right(histories) -> float:
        """How often the kind that is more frequent in a history is the one chosen."""
        return fmean(
            rightness(often[question.chosen], often[question.other])
            for often, of_user in zip(histories, asked, strict=True)
            for question in of_user
        )

    # Four standard errors of 2,400 coins; less with a signal, as 24 records show it imperfectly.
    assert expected - 0.07 * signal - 0.041 < right(histories) < expected + 0.041
    assert abs(right(histories[1:] + histories[:1]) - 0.5) < 0.041  # a stranger's


@NEW
def test_without_a_signal_a_user_chooses_all_kinds_alike(task):
    """Else a user's favourites, which stand in each of their texts, would be worth knowing."""
    (user,) = corpus(task.name, n_users=1, n_task_users=0, n_records=1000, signal=0.0).users
    found = kinds_of_history(task, user)
    kinds = PHRASES[task.name].cues
    share = 1 / len(kinds)
    for kind in kinds:
        assert abs(found[kind] / 1000 - share) < 4 * (share * (1 - share) / 1000) ** 0.5


@ALL
def test_without_the_history_one_kind_is_as_good_as_the_other(task):
    users = corpus(task.name, n_users=400, n_task_users=0, n_records=0, signal=1.0).users
    asked = [question for user in users for question in questions(task, user)]
    assert abs(fmean(q.chosen == q.pair[0] for q in asked) - 0.5) < 4 * 0.5 / 4800**0.5
    # What half of the people chose of two kinds does not say what the other half will.
    often = Counter((frozenset(q.pair), q.chosen) for q in asked[:2400])
    right = fmean(
        rightness(often[frozenset(q.pair), q.chosen], often[frozenset(q.pair), q.other])
        for q in asked[2400:]
    )
    assert abs(right - 0.5) < 0.07  # more than for coins: a user's choices hang together


@NEW
def test_the_right_kind_shows_in_the_metric(task):
    """A gold against the same item's answer of the other kind, by the task's main metric."""
    metric = QUERY_SCORES[task.metrics[0]]
    ours, theirs = (corpus(task.name, n_users=4, signal=s).users for s in (1, 0))
    right, wrong = [], []
    for mine, coin in zip(ours, theirs, strict=True):
        for query, other in zip(mine.queries, coin.queries, strict=True):
            right.append(score_output(task, query.gold, query.gold)["official"][metric])
            if answer_of(task, query) != answer_of(task, other):
                answer = other.gold
                if task.name == "citation":
                    (answer,) = set(task.labels) - {query.gold}
                wrong.append(score_output(task, answer, query.gold)["official"][metric])
    assert len(wrong) > 10
    assert abs(fmean(right) - fmean(wrong)) > 0.3
