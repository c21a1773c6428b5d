"""The sample generator, the reader of the released per-user files, and what both refuse."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import replace

import pytest

from lamp_eval.config import DataConfig
from lamp_eval.data import Corpus, load_corpus
from lamp_eval.data.card import data_card
from lamp_eval.data.oppu import EVALUATED, EVALUATED_TWEETS, OTHERS
from lamp_eval.data.phrases import PHRASES
from lamp_eval.errors import UserError
from lamp_eval.records import Query, Record, User
from lamp_eval.tasks import TASKS

MOVIES, RATINGS = TASKS["movie_tagging"], TASKS["product_rating"]
CUES = PHRASES["movie_tagging"].cues
INPUT = (
    "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3, 4, "
    "or 5 without further explanation. review: "
)


def sample(**values) -> DataConfig:
    defaults = dict(
        source="sample", n_users=3, n_task_users=4, n_records=6, n_queries=3, signal=0.8
    )
    return DataConfig(**{**defaults, **values})


# The sample


def test_sample_is_deterministic():
    first, second = load_corpus(MOVIES, sample()), load_corpus(MOVIES, sample())
    assert first == second
    assert first.synthetic
    assert first.files == {}
    assert first.checksum != load_corpus(MOVIES, sample(seed=1)).checksum
    assert first.users[0].history != load_corpus(MOVIES, sample(seed=1)).users[0].history


def test_a_sample_user_does_not_depend_on_how_many_there_are():
    few = load_corpus(MOVIES, sample())
    many = load_corpus(MOVIES, sample(n_users=9, n_task_users=20))
    assert many.users[:3] == few.users
    assert many.task_users[:4] == few.task_users
    assert (len(many.users), len(many.task_users)) == (9, 20)


def test_sample_has_the_sizes_asked_for():
    corpus = load_corpus(MOVIES, sample())
    assert (len(corpus.users), len(corpus.task_users)) == (3, 4)
    for user in (*corpus.users, *corpus.task_users):
        assert (len(user.history), len(user.queries)) == (6, 3)
    assert load_corpus(MOVIES, sample(n_records=0)).users[0].history == ()


def test_evaluated_and_other_sample_users_are_different_people():
    corpus = load_corpus(MOVIES, sample())
    assert corpus.task_users_origin == "others"
    people = (*corpus.users, *corpus.task_users)
    assert len({user.id for user in people}) == len(people)
    assert len({str(user.history) for user in people}) == len(people)
    assert len({str(user.queries) for user in people}) == len(people)
    assert load_corpus(MOVIES, sample(task_users="evaluated")).task_users == corpus.users


def choices(user) -> list[tuple[tuple[str, ...], str]]:
    """Of all items the two tags whose cues the description carries, in order, and the chosen."""
    items = [(r.fields["description"], r.fields["tag"]) for r in user.history]
    items += [(q.input.split("] description: ")[1], q.gold) for q in user.queries]
    found = []
    for text, chosen in items:
        positions = {tag: max(text.find(cue) for cue in cues) for tag, cues in CUES.items()}
        pair = sorted((tag for tag in CUES if positions[tag] >= 0), key=positions.__getitem__)
        assert len(pair) == 2
        assert chosen in pair
        found.append((tuple(pair), chosen))
    return found


@pytest.mark.parametrize("signal", [0.0, 0.5, 0.8, 1.0])
def test_the_favourite_is_chosen_as_often_as_the_signal_says(signal):
    size = dict(n_users=4, n_task_users=1, n_records=600, n_queries=200)
    # With a full signal a user only ever chooses favourites, which shows them.
    revealing = load_corpus(MOVIES, sample(signal=1.0, **size)).users
    favourites = {user.id: {chosen for _, chosen in choices(user)} for user in revealing}
    assert all(len(tags) == 4 for tags in favourites.values())
    assert len({frozenset(tags) for tags in favourites.values()}) == len(favourites)

    n = n_favourite = n_first = 0
    for user in load_corpus(MOVIES, sample(signal=signal, **size)).users:
        for pair, chosen in choices(user):
            (favourite,) = set(pair) & favourites[user.id]  # always exactly one
            n += 1
            n_favourite += chosen == favourite
            n_first += chosen == pair[0]
    p = (1 + signal) / 2
    assert n == 3200
    assert abs(n_favourite / n - p) <= 4 * math.sqrt(p * (1 - p) / n)
    # Nor does the order of the cues give the answer away.
    assert abs(n_first / n - 0.5) <= 4 * math.sqrt(0.25 / n)


# The released format


def test_real_file(lamp_data):
    folder = lamp_data / "oppu"
    corpus = load_corpus(RATINGS, DataConfig(source="oppu", dir=str(folder)))
    users = corpus.users
    assert [(u.id, len(u.history), len(u.queries)) for u in users] == [
        ("00005228", 408, 40),
        ("00008075", 365, 40),
        ("00011077", 460, 40),
        ("00012502", 947, 40),
    ]
    assert users[0].history[0] == Record(
        {
            "text": "I've had this blender for over 2 years. Blends well, cleans up well, parts "
            "haven't rusted. Overall, very attractive!",
            "score": "5",
        }
    )
    assert users[0].history[407] == Record(
        {
            "text": "These are better than the rollerblade type IMO. These look sharp on my DX "
            "Racer ottoman, and roll well. The black and red looks really sharp.",
            "score": "5",
        }
    )
    assert users[2].history[0] == Record(
        {
            "text": "The book started with promise. However, since the story is too short, it "
            "never realy got the chance to fully develop into a 5-star story for me.",
            "score": "2",
        }
    )
    assert users[1].queries[0] == Query(
        "0000807500",
        INPUT + "Penelope Ward and Vi Keeland writing duo is an absolute auto buy for me. Simon, "
        "Bridget and Brendan story was so good. I love stories with children. Cant wait for the "
        "next masterpiece!!",
        "5",
    )
    assert [user.queries[-1].id for user in users] == [
        "0000522839", "0000807539", "0001107739", "0001250239",
    ]  # fmt: skip
    assert (corpus.task_users_origin, corpus.task_users) == ("evaluated", users)
    assert not corpus.synthetic
    path = folder / "product_rating" / EVALUATED
    assert corpus.files == {str(path): hashlib.sha256(path.read_bytes()).hexdigest()}
    # The folder of the task itself will do as well.
    direct = load_corpus(RATINGS, DataConfig(source="oppu", dir=str(folder / "product_rating")))
    assert direct.users == users


def test_limits_keep_the_newest(lamp_data):
    data = DataConfig(source="oppu", dir=str(lamp_data / "oppu"))
    whole = load_corpus(RATINGS, data)
    cut = load_corpus(RATINGS, replace(data, max_users=2, max_records=30, max_queries=5))
    assert [user.id for user in cut.users] == ["00005228", "00008075"]
    for user, full in zip(cut.users, whole.users, strict=False):
        assert user.history == full.history[-30:]
        assert user.queries == full.queries[-5:]
    assert cut.checksum != whole.checksum
    assert load_corpus(RATINGS, replace(data, max_records=0)).users[0].history == ()
    assert load_corpus(RATINGS, replace(data, max_records=10_000)).users == whole.users


def person(user_id="u1", n_records=2, n_queries=2):
    return {
        "user_id": user_id,
        "profile": [{"text": f"review {i}", "score": "4"} for i in range(n_records)],
        "query": [
            {"id": f"{user_id}-{i}", "input": f"{INPUT}item {i}", "gold": "5"}
            for i in range(n_queries)
        ],
    }


@pytest.fixture
def write(tmp_path):
    """Writes users (or bytes) as the released file, and gives the configuration to read them."""

    def write_(rows, others=None, **values) -> DataConfig:
        folder = tmp_path / "data" / "product_rating"
        folder.mkdir(parents=True, exist_ok=True)
        content = rows if isinstance(rows, bytes) else json.dumps(rows).encode()
        (folder / EVALUATED).write_bytes(content)
        if others is not None:
            (folder / OTHERS).write_text(json.dumps(others))
        return DataConfig(source="oppu", dir=str(tmp_path / "data"), **values)

    return write_


def refusal(data: DataConfig) -> str:
    with pytest.raises(UserError) as error:
        load_corpus(RATINGS, data)
    return str(error.value)


def test_integers_and_unused_fields_are_read(write):
    row = person()
    row["user_id"] = 7
    row["profile"][0] = {"text": "t", "score": 3, "date": 20200101, "id": "0025"}
    row["query"][0]["gold"] = 2
    row["extra"] = None
    (user,) = load_corpus(RATINGS, write([row])).users
    assert user.id == "7"
    assert user.history[0] == Record({"text": "t", "score": "3"}, date="20200101")
    assert user.queries[0].gold == "2"


def test_texts_are_kept_as_they_are(write):
    row = person("0025")
    text = " \"nested 'quotes'\" &amp; caf\u00c3\u00a9 {tag} \n trailing "
    row["profile"][0]["text"] = text
    row["query"][0]["input"] = INPUT + text
    (user,) = load_corpus(RATINGS, write([row])).users
    assert user.id == "0025"
    assert user.history[0].fields["text"] == text
    assert user.queries[0].input == INPUT + text


def task_file(folder, task, history, queries, name=EVALUATED) -> DataConfig:
    """The released file of another task, with one user."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = [{"id": f"q{i}", "input": text, "gold": gold} for i, (text, gold) in enumerate(queries)]
    content = [{"user_id": "u", "profile": history, "query": rows}]
    (folder / name).write_text(json.dumps(content))
    return DataConfig(source="oppu", dir=str(folder))


def test_citation_records_name_a_paper_and_queries_an_option(tmp_path):
    question = (
        'For an author who has written the paper with the title "T", which reference is related? '
        'Just answer with [1] or [2] without explanation. [1]: "A" [2]: "B"'
    )
    history = [{"title": "Old", "citation": "Cited paper", "abstract": "x", "id": 1}]
    task = TASKS["citation"]
    corpus = load_corpus(task, task_file(tmp_path, task, history, [(question, "[2]")]))
    assert corpus.users[0].history == (
        Record({"title": "Old", "citation": "Cited paper", "abstract": "x"}),
    )
    with pytest.raises(UserError, match=r"one of \[1\], \[2\]"):
        load_corpus(task, task_file(tmp_path, task, history, [(question, "2")]))


def test_records_without_an_answer_are_counted_and_left_out(tmp_path):
    task = TASKS["news_headline"]
    history = [{"text": f"t{i}", "title": title} for i, title in enumerate(["A", "", " \n", "B"])]
    data = task_file(
        tmp_path, task, history, [("Generate a headline for the following article: t", "C")]
    )
    corpus = load_corpus(task, data)
    assert [record.fields["title"] for record in corpus.users[0].history] == ["A", "B"]
    assert corpus.n_records_left_out == 2
    # The newest are chosen among those with an answer.
    (user,) = load_corpus(task, replace(data, max_records=2)).users
    assert len(user.history) == 2


def test_a_query_without_a_gold_is_a_mistake(tmp_path):
    task = TASKS["news_headline"]
    data = task_file(
        tmp_path,
        task,
        [{"text": "t", "title": "A"}],
        [("Generate a headline for the following article: t", " ")],
    )
    with pytest.raises(UserError, match="expected: a text\n.*' '"):
        load_corpus(task, data)


def test_tweets_come_under_another_file_name(tmp_path):
    task = TASKS["tweet_paraphrase"]
    question = "Paraphrase the following tweet without any explanation before or after it: x"
    data = task_file(tmp_path, task, [{"text": "t"}], [(question, "y")], name=EVALUATED_TWEETS)
    corpus = load_corpus(task, data)
    assert corpus.users[0].history == (Record({"text": "t"}),)
    assert list(corpus.files) == [str(tmp_path / EVALUATED_TWEETS)]


def test_an_empty_history_is_no_mistake(write):
    (user,) = load_corpus(RATINGS, write([person(n_records=0)])).users
    assert user.history == ()
    assert len(user.queries) == 2


@pytest.mark.parametrize("user_id", ["../../etc/passwd", "a/b", "..", "/abs", "user \u00fc\n2"])
def test_user_ids_are_plain_text(write, user_id, tmp_path):
    (user,) = load_corpus(RATINGS, write([person(user_id)])).users
    assert user.id == user_id
    assert [p.name for p in tmp_path.rglob("*") if p.is_file()] == [EVALUATED]


def change(path, value=None):
    """A row with one value set, or removed where `value` is None."""
    row = person()
    *parents, last = path
    node = row
    for key in parents:
        node = node[key]
    if value is None:
        del node[last]
    else:
        node[last] = value
    return row


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        (("user_id",), None, ["user 0", "'user_id'", "nothing"]),
        (("user_id",), 1.5, ["user 0", "'user_id'", "float 1.5"]),
        (("profile",), None, ["'u1'", "'profile'", "a list", "nothing"]),
        (("profile",), {}, ["'u1'", "'profile'", "a list", "dict"]),
        (("query",), None, ["'u1'", "'query'", "a list"]),
        (("query",), "q", ["'u1'", "'query'", "a list", "str"]),
        (("profile", 1, "text"), None, ["'u1'", "record 1", "'text'", "nothing"]),
        (("profile", 1, "score"), None, ["'u1'", "record 1", "'score'", "nothing"]),
        (("profile", 0, "score"), True, ["'u1'", "record 0", "'score'", "bool True"]),
        (("profile", 0), "text", ["'u1'", "record 0", "'text'", "'score'"]),
        (("query", 1, "id"), None, ["'u1'", "query 1", "'id'"]),
        (("query", 1, "input"), None, ["'u1'", "query 1", "'input'"]),
        (("query", 1, "gold"), None, ["'u1'", "query 1", "'gold'"]),
        (("query", 0, "gold"), 4.5, ["'u1'", "query 0", "'gold'", "float 4.5"]),
        (("query", 0, "input"), ["x"], ["'u1'", "query 0", "'input'", "list"]),
    ],
)
def test_missing_and_mistyped_fields(write, path, value, named):
    message = refusal(write([change(path, value)]))
    for part in [EVALUATED, "product_rating", *named]:
        assert part in message


@pytest.mark.parametrize(
    ("content", "named"),
    [
        (b"", "not JSON"),
        (b'[{"user_id": "u1", "prof', "not JSON"),
        (b"\xff\xfe[]", "not JSON"),
        (b'{"user_id": "u1"}', "a JSON dict"),
        (b"null", "a JSON NoneType"),
        (b'["u1"]', "user 0"),
    ],
)
def test_not_a_list_of_users(write, content, named):
    message = refusal(write(content))
    assert EVALUATED in message
    assert named in message


def test_no_users(write):
    assert "at least one user" in refusal(write([]))


@pytest.mark.parametrize(
    ("rows", "named"),
    [
        ([change(("query", 1, "gold"), "6")], ["'u1'", "'u1-1'", "'gold'", "'6'", "1, 2, 3, 4, 5"]),
        ([change(("query", 1, "gold"), "5 ")], ["'u1'", "'u1-1'", "'gold'", "'5 '"]),
        ([change(("profile", 1, "score"), "4.0")], ["'u1'", "record 1", "'score'", "'4.0'"]),
        ([change(("query", 1, "id"), "u1-0")], ["'u1'", "'u1-0'", "'id'", "each query id once"]),
        (
            [person("a"), change(("query", 1, "id"), "a-0")],
            ["'u1'", "'a-0'", "'id'", "belongs to user 'a'"],
        ),
        ([person("a"), person("b"), person("a")], ["user 'a'", "each user once", "2 users"]),
        ([person(n_queries=0)], ["'u1'", "'query'", "at least one query"]),
        (
            [change(("query", 0, "input"), "Which tag? description: x")],
            ["'u1'", "'u1-0'", "'input'", "Which tag?", "product_rating"],
        ),
    ],
)
def test_values_that_would_spoil_a_result(write, rows, named):
    message = refusal(write(rows))
    for part in named:
        assert part in message


@pytest.mark.parametrize("in_others", [False, True])
def test_values_that_would_spoil_a_result_name_the_file(write, in_others):
    bad = change(("query", 1, "gold"), "6")
    data = write([person("a")], [bad]) if in_others else write([bad])
    assert (OTHERS if in_others else EVALUATED) in refusal(data)


def test_all_problems_are_named_at_once(write):
    first, second = change(("profile", 0, "text")), person("u2")
    del second["query"][1]["gold"]
    message = refusal(write([first, second, {"user_id": "u3"}]))
    for part in ["record 0, field 'text'", "'u2', query 1, field 'gold'",
                 "'u3', field 'profile'", "'u3', field 'query'"]:  # fmt: skip
        assert part in message

    bad_gold = change(("query", 0, "gold"), "9")
    bad_record = person("u2")
    bad_record["profile"][1]["score"] = "ten"
    same_query = person("u3")
    same_query["query"][1]["id"] = "u3-0"
    message = refusal(write([bad_gold, bad_record, same_query, person("u4", n_queries=0)]))
    for part in ["'9'", "'ten'", "'u3-0'", "'u4'"]:
        assert part in message


def test_a_long_list_of_problems_is_cut_short_and_counted(write):
    rows = [person(f"u{i}") for i in range(30)]
    for row in rows:
        row["query"][0]["gold"] = "bad"
    message = refusal(write(rows))
    assert message.count("'bad'") == 20
    assert "10 more" in message


def test_missing_places(tmp_path, lamp_data):
    message = refusal(DataConfig(source="oppu", dir=str(tmp_path / "nowhere")))
    assert "data.dir" in message
    assert "is not a directory" in message
    message = refusal(DataConfig(source="oppu", dir=str(tmp_path)))
    assert EVALUATED in message
    assert "no such file" in message
    assert "data.dir" in refusal(DataConfig(source="oppu"))
    with pytest.raises(UserError, match="movie_tagging"):
        load_corpus(MOVIES, DataConfig(source="oppu", dir=str(lamp_data / "oppu")))


def test_other_users_train_the_task_adapter(write):
    rows, others = [person("a")], [person("b"), person("c")]
    corpus = load_corpus(RATINGS, write(rows, others))
    assert corpus.task_users_origin == "others"
    assert [user.id for user in corpus.task_users] == ["b", "c"]
    assert sorted(path.rsplit("/")[-1] for path in corpus.files) == [OTHERS, EVALUATED]
    evaluated = load_corpus(RATINGS, write(rows, others, task_users="evaluated"))
    assert evaluated.task_users_origin == "evaluated"
    assert evaluated.task_users == evaluated.users


def test_other_users_must_not_be_evaluated_and_must_be_there_if_asked_for(write):
    message = refusal(write([person("a")], [person("b"), person("a")]))
    assert OTHERS in message
    assert "user 'a'" in message
    assert "user 'b'" not in message


def test_a_missing_file_of_others(write):
    assert OTHERS in refusal(write([person("a")], task_users="others"))


def test_checksum_follows_every_part_of_the_data(write):
    checksums = {
        load_corpus(RATINGS, write([row])).checksum
        for row in (
            person(),
            person("u2"),
            change(("profile", 0, "text"), "other"),
            change(("profile", 0, "score"), "1"),
            change(("query", 0, "id"), "other"),
            change(("query", 0, "input"), INPUT + "other"),
            change(("query", 0, "gold"), "1"),
        )
    }
    assert len(checksums) == 7


# The data card


def corpus_of(task, users, others=()) -> Corpus:
    origin = "others" if others else "evaluated"
    return Corpus(
        tuple(users), tuple(others or users), origin, synthetic=False, n_records_left_out=2,
        checksum="", files={},
    )  # fmt: skip


def headline_user(user_id, records, queries) -> User:
    frame = "Generate a headline for the following article: "
    return User(
        user_id,
        tuple(Record({"text": text, "title": title}) for text, title in records),
        tuple(
            Query(f"{user_id}-{i}", frame + text, gold) for i, (text, gold) in enumerate(queries)
        ),
    )


def test_the_data_card_counts_what_could_be_looked_up():
    a = headline_user(
        "a",
        [
            ("Heavy rain in the north.", "Rain"),
            ("sun in the south", "Sun"),
            ("sun in the south", "Sun"),
        ],
        [("rain in the north", "It rains"), ("snow", "Why it snows"), ("snow", "Sun")],
    )
    b = headline_user("b", [], [("fog in the west", "Fog")])
    other = headline_user("c", [("snow", "Snow falls")], [("fog in the west", "Grey")])
    card = data_card(TASKS["news_headline"], corpus_of("news_headline", [a, b], [other]))
    assert card["size"] == {
        "users": 2,
        "users of the task adapter": "1 (others)",
        "synthetic": "no",
        "records": 3,
        "records without an answer, left out": 2,
        "records of a user": "0 … 3, median 1.5, mean 1.5",
        "queries": 4,
        "queries of a user": "1 … 3, median 2, mean 2.0",
        "largest share of the queries": 0.75,
    }
    assert card["answers"]["words of a gold"] == "1 … 3, median 1.5, mean 1.8"
    assert card["problems"] == {
        "users without a history": 1,
        "records that repeat an earlier one": 1,
        "queries that repeat an earlier one": 1,
        "queries whose text is in a record of their user": 1,
        "queries whose text the task adapter's users have": 3,
        "queries whose text is in a record of another user": 0,
        "queries whose text another user is asked as well": 0,
        "golds that are in a record of their user": 1,
    }
    # Where the task adapter is trained on the histories alone, their queries are no leak.
    card = data_card(TASKS["news_headline"], corpus_of("news_headline", [a, b]))
    assert card["problems"]["queries whose text the task adapter's users have"] == 0


def test_the_data_card_shows_the_balance_of_labels():
    corpus = load_corpus(MOVIES, sample())
    answers = data_card(MOVIES, corpus)["answers"]
    assert list(answers) == list(MOVIES.labels)
    golds = [query.gold for user in corpus.users for query in user.queries]
    records = [r.fields["tag"] for user in corpus.users for r in user.history]
    for label, shown in answers.items():
        share, of_records = golds.count(label) / len(golds), records.count(label) / len(records)
        assert shown == f"{share:.3f} of the golds, {of_records:.3f} of records"


def test_the_data_card_of_real_reviews(lamp_data):
    config = DataConfig(source="oppu", dir=str(lamp_data / "oppu"))
    card = data_card(RATINGS, load_corpus(RATINGS, config))
    assert (card["size"]["records"], card["size"]["queries"]) == (2180, 160)
    assert card["answers"]["5"] == "0.769 of the golds, 0.801 of records"
    assert card["problems"]["records that repeat an earlier one"] == 70


def test_the_users_with_the_longest_histories_are_selected(write):
    rows = [person(name) for name in "abcd"]
    for row, n_records in zip(rows, (2, 1, 3, 3), strict=True):
        row["profile"] = [{"text": f"r{i}", "score": "3"} for i in range(n_records)]
        row["query"][0]["id"] = row["user_id"]

    def ids(**options):
        data = replace(write(rows), **options)
        return "".join(user.id for user in load_corpus(RATINGS, data).users)

    assert ids(select="longest", max_users=3) == "acd"
    assert ids(select="longest", max_users=1) == "c"  # of equal ones by the id
    assert ids(max_users=2) == "ab"
    assert len({ids(select="random", max_users=2, seed=seed) for seed in range(9)}) > 2
