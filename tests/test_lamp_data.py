"""The benchmark's own files as users: each oddity of the format, what is refused, the cache."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from lamp_eval.config import DataConfig, ProtocolConfig
from lamp_eval.data import load_corpus
from lamp_eval.data import questions as module
from lamp_eval.data.card import data_card
from lamp_eval.data.corpus import user_ids
from lamp_eval.data.files import stream_objects
from lamp_eval.data.questions import ArrowUsers
from lamp_eval.errors import UserError
from lamp_eval.tasks import TASKS

TWEET = "Paraphrase the following tweet without any explanation before or after it: "
TAGS = list(TASKS["movie_tagging"].labels)


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "lamp_eval" / "data"


def question(query_id: str, text: str, profile=(), **more):
    return {"id": query_id, "input": text, "profile": list(profile), **more}


def write(root: Path, lamp_id: str, split: str, rows, golds, *, task=None, kind="user") -> Path:
    folder = root / ("time" if kind == "time" else "") / lamp_id / split
    folder.mkdir(parents=True)
    (folder / f"{split}_questions.json").write_text(json.dumps(rows), encoding="utf-8")
    outputs = [{"id": query_id, "output": output} for query_id, output in golds.items()]
    (folder / f"{split}_outputs.json").write_text(
        json.dumps({"task": task or lamp_id, "golds": outputs}), encoding="utf-8"
    )
    return root


def load(task: str, root: Path, **options):
    return load_corpus(TASKS[task], DataConfig(source="lamp", dir=str(root), **options))


def tweets(root: Path, rows, split="dev", **options) -> Path:
    return write(root, "LaMP_7", split, rows, {row["id"]: "so tired" for row in rows}, **options)


def tags_input(text: str, tags=TAGS) -> str:
    return (
        "Which tag does this movie relate to among the following tags? Just answer with the tag "
        f"name without further explanation. tags: [{', '.join(tags)}] description: {text}"
    )


# The oddities of the format


def test_ids_are_strings_whose_leading_zeros_count(tmp_path):
    rows = [question(query_id, TWEET + "a") for query_id in ("0025", "25", "025")]
    corpus = load("tweet_paraphrase", tweets(tmp_path, rows))
    assert [user.id for user in corpus.users] == ["0025", "25", "025"]
    assert [user.queries[0].id for user in corpus.users] == ["0025", "25", "025"]


@pytest.mark.parametrize("wrong", [25, None, "", True, ["25"]])
def test_an_id_that_is_no_string_is_refused(tmp_path, wrong):
    rows = [question("1", TWEET + "a"), {"id": wrong, "input": TWEET + "b", "profile": []}]
    write(tmp_path, "LaMP_7", "dev", rows, {"1": "x"})
    with pytest.raises(UserError, match="entry 1, field 'id'"):
        load("tweet_paraphrase", tmp_path)


def test_ids_of_items_may_repeat_across_users(tmp_path):
    rows = [question(i, TWEET + i, [{"id": "70", "text": f"tweet of {i}"}]) for i in ("1", "2")]
    corpus = load("tweet_paraphrase", tweets(tmp_path, rows))
    texts = [user.history[0].fields["text"] for user in corpus.users]
    assert texts == ["tweet of 1", "tweet of 2"]


def test_every_question_is_a_user_where_none_are_named(tmp_path):
    same = [{"id": "1", "text": "x"}]
    rows = [question("1", TWEET + "a", same), question("2", TWEET + "b", same)]
    corpus = load("tweet_paraphrase", tweets(tmp_path, rows))
    assert [user.id for user in corpus.users] == ["1", "2"]


def test_questions_of_a_named_user_belong_together_if_the_profile_is_the_same(tmp_path):
    one, other = [{"id": "1", "text": "x"}], [{"id": "1", "text": "y"}]
    rows = [
        question("1", TWEET + "a", one, user_id="u"),
        question("2", TWEET + "b", one, user_id=7),  # published as numbers, too
        question("3", TWEET + "c", one, user_id="u"),
        question("4", TWEET + "d", one, user_id="w"),
        question("5", TWEET + "e", other, user_id="w"),
    ]
    corpus = load("tweet_paraphrase", tweets(tmp_path, rows))
    assert {user.id: [query.id for query in user.queries] for user in corpus.users} == {
        "u": ["1", "3"],
        "7": ["2"],
        "w, question 4": ["4"],
        "w, question 5": ["5"],
    }
    (note,) = corpus.notes
    assert "1 users have several profiles" in note


@pytest.mark.parametrize("folder", ["LaMP_2", "LaMP_2M"])
@pytest.mark.parametrize("name", ["LaMP_2", "LaMP_2M", "LaMP_8"])
def test_movie_tagging_is_called_lamp_2_today(tmp_path, folder, name):
    rows = [question("1", tags_input("a"), [{"description": "b", "tag": "action"}])]
    write(tmp_path, folder, "dev", rows, {"1": "comedy"}, task=name)
    corpus = load("movie_tagging", tmp_path)
    assert corpus.users[0].queries[0].gold == "comedy"


def test_news_in_the_old_folder_are_not_taken_for_movies(tmp_path):
    rows = [question("1", "… categories: [sports, women] article: x", [{"text": "b", "title": ""}])]
    write(tmp_path, "LaMP_2", "dev", rows, {"1": "sports"})
    with pytest.raises(UserError, match="field 'description'"):
        load("movie_tagging", tmp_path)


def test_one_input_without_its_instruction_is_noted_many_are_refused(tmp_path):
    rows = [question(str(i), tags_input("a film")) for i in range(100)]
    rows[42]["input"] = "A film without its instruction"
    golds = {row["id"]: "comedy" for row in rows}
    corpus = load("movie_tagging", write(tmp_path / "a", "LaMP_2M", "dev", rows, golds))
    (note,) = corpus.notes
    assert "1 of 100 inputs are not of the usual form, such as query '42'" in note
    assert corpus.users[42].queries[0].input == "A film without its instruction"
    rows[7]["input"] = "Another one"
    write(tmp_path / "b", "LaMP_2M", "dev", rows, golds)
    with pytest.raises(UserError) as error:
        load("movie_tagging", tmp_path / "b")
    assert "query '42', field 'input'" in str(error.value)
    assert "query '7', field 'input'" in str(error.value)


def test_labels_are_listed_in_any_order_but_are_those_of_the_task(tmp_path):
    rows = [question("1", tags_input("a")), question("2", tags_input("b", TAGS[::-1]))]
    golds = {"1": "action", "2": "action"}
    load("movie_tagging", write(tmp_path / "a", "LaMP_2M", "dev", rows, golds))
    rows[1]["input"] = tags_input("b", [*TAGS[:-1], "based on a true story"])
    write(tmp_path / "b", "LaMP_2M", "dev", rows, golds)
    with pytest.raises(UserError, match="based on a true story") as error:
        load("movie_tagging", tmp_path / "b")
    assert "query '2', field 'input'" in str(error.value)


def test_texts_are_kept_letter_by_letter(tmp_path):
    odd = " A \"quoted\" &amp; 'nested'\nline\ttab â€™ \u00e9 \U0001f600 \u2028 "
    rows = [question("1", TWEET + odd, [{"text": odd}])]
    (user,) = load("tweet_paraphrase", write(tmp_path, "LaMP_7", "dev", rows, {"1": odd})).users
    assert user.queries[0].input == TWEET + odd
    assert user.queries[0].gold == odd
    assert user.history[0].fields == {"text": odd}


def test_quotes_inside_the_options_of_a_citation(tmp_path):
    text = (
        'For an author who has written the paper with the title "On "why" we cite", which '
        "reference is related? Just answer with [1] or [2] without explanation. "
        '[1]: "A "quoted" [2] title" [2]: "Plain"'
    )
    rows = [question("1", text, [{"title": 'A "title"', "abstract": "", "id": "3"}])]
    (user,) = load("citation", write(tmp_path, "LaMP_1", "dev", rows, {"1": "[2]"})).users
    assert TASKS["citation"].oppu.texts(user.queries[0].input) == (
        'On "why" we cite', 'A "quoted" [2] title', "Plain",
    )  # fmt: skip
    assert user.history[0].fields == {"title": 'A "title"', "abstract": ""}  # no paper cited


def test_repeated_items_golds_in_profiles_and_empty_profiles_are_kept_and_counted(tmp_path):
    tweet = {"text": "so tired"}
    rows = [question("1", TWEET + "I am tired", [tweet, tweet]), question("2", TWEET + "b")]
    corpus = load("tweet_paraphrase", tweets(tmp_path, rows))
    assert [len(user.history) for user in corpus.users] == [2, 0]
    problems = data_card(TASKS["tweet_paraphrase"], corpus)["problems"]
    assert problems["users without a history"] == 1
    assert problems["records that repeat an earlier one"] == 1
    assert problems["golds that are in a record of their user"] == 1


def test_dated_records_are_put_in_order(tmp_path):
    dates = {"c": "2014-05-03", "a": "2013", "d": "2014-05-03", "b": "2014"}
    items = [{"text": text, "date": date} for text, date in dates.items()]
    rows = [question("1", TWEET + "x", items), question("2", TWEET + "y", [*items, {"text": "e"}])]
    first, second = load("tweet_paraphrase", tweets(tmp_path, rows, kind="time"), kind="time").users
    assert "".join(record.fields["text"] for record in first.history) == "abcd"
    assert [record.date for record in first.history][:2] == ["2013", "2014"]
    assert "".join(record.fields["text"] for record in second.history) == "cadbe"  # one undated


def test_dates_and_scores_may_be_integers(tmp_path):
    review = "What is the score … without further explanation. review: "
    rows = [question("1", review + "x", [{"text": "a", "score": 4, "date": 2013}])]
    (user,) = load("product_rating", write(tmp_path, "LaMP_3", "dev", rows, {"1": "5"})).users
    assert (user.history[0].fields["score"], user.history[0].date) == ("4", "2013")


def test_outputs_without_a_question_are_noted(tmp_path):
    rows = [question("1", TWEET + "a")]
    corpus = load("tweet_paraphrase", write(tmp_path, "LaMP_7", "dev", rows, {"1": "x", "2": "y"}))
    assert "1 of 2 outputs belong to no question" in corpus.notes[0]


def test_a_question_without_an_output_is_refused(tmp_path):
    rows = [question("01", TWEET + "a"), question("02", TWEET + "b")]
    write(tmp_path, "LaMP_7", "dev", rows, {"1": "x", "02": "y"})
    with pytest.raises(UserError, match="'01'"):
        load("tweet_paraphrase", tmp_path)


def test_all_problems_of_a_file_are_listed(tmp_path):
    rows = [
        question("1", TWEET + "a", [{"text": "x"}, {"id": "3"}, "y", {"text": ["z"]}]),
        question("1", None),
        {"id": "3", "input": TWEET},
    ]
    write(tmp_path, "LaMP_7", "dev", rows, {"1": "x"})
    with pytest.raises(UserError) as error:
        load("tweet_paraphrase", tmp_path)
    where = re.findall(r"question '(.*)", str(error.value))
    assert where == [
        "1', record 1, field 'text'", "1', record 2, field 'text'", "1', record 3, field 'text'",
        "1', field 'id'", "1', field 'input'", "3', field 'profile'",
    ]  # fmt: skip


@pytest.mark.parametrize("field", ["input", "text"])
def test_half_a_character_is_refused(tmp_path, field):
    rows = [question("1", TWEET + "a"), question("2", TWEET + "b", [{"text": "c"}])]
    text = json.dumps(rows).replace('b"' if field == "input" else 'c"', '\\ud800"')
    golds = {"1": "x", "2": "y"}
    (write(tmp_path, "LaMP_7", "dev", rows, golds) / "LaMP_7/dev/dev_questions.json").write_text(
        text
    )
    with pytest.raises(UserError, match="question '2'"):
        load("tweet_paraphrase", tmp_path)


def test_an_empty_file_of_questions_is_refused(tmp_path):
    write(tmp_path, "LaMP_7", "dev", [], {"1": "x"})
    with pytest.raises(UserError, match="an empty list"):
        load("tweet_paraphrase", tmp_path)


@pytest.mark.parametrize("missing", ["questions", "outputs"])
def test_a_missing_file_is_named_with_the_command_that_fetches_it(tmp_path, missing):
    tweets(tmp_path, [question("1", TWEET + "a")])
    (tmp_path / "LaMP_7" / "dev" / f"dev_{missing}.json").unlink()
    with pytest.raises(UserError, match="lamp_eval.download lamp --task LaMP_7 --split dev"):
        load("tweet_paraphrase", tmp_path)
    with pytest.raises(UserError, match="data.dir"):
        load_corpus(TASKS["tweet_paraphrase"], DataConfig(source="lamp"))


# Whom to evaluate, and who trains the task adapter


def split_files(root: Path) -> Path:
    def person(name, n):
        return question(name, TWEET + name, [{"text": f"{name} {i}"} for i in range(n)])

    tweets(root, [person(f"d{n}", n) for n in (3, 9, 1, 7, 5)])
    return tweets(root, [person(f"t{n}", n) for n in (4, 2, 8, 6)], split="train")


def test_the_longest_histories_are_evaluated_in_the_order_of_the_file(tmp_path):
    root = split_files(tmp_path)

    def ids(**options):
        return [user.id for user in load("tweet_paraphrase", root, **options).users]

    assert ids(select="longest", max_users=3) == ["d9", "d7", "d5"]
    assert ids(select="first", max_users=2) == ["d3", "d9"]
    assert ids(select="longest") == ["d3", "d9", "d1", "d7", "d5"]
    drawn = {tuple(ids(select="random", max_users=2, seed=seed)) for seed in range(9)}
    assert len(drawn) > 2
    assert ids(select="random", max_users=2, seed=1) == ids(select="random", max_users=2, seed=1)


def test_users_of_the_training_split_train_the_task_adapter(tmp_path):
    corpus = load("tweet_paraphrase", split_files(tmp_path), max_users=1)
    assert corpus.task_users_origin == "others"
    assert user_ids(corpus.task_users) == ["t2", "t4", "t6", "t8"]
    assert [user.id for user in corpus.task_users] == ["t2", "t4", "t6", "t8"]
    assert len(corpus.files) == 4
    limited = load("tweet_paraphrase", tmp_path, max_task_users=2)
    assert len(limited.task_users) == 2
    assert isinstance(limited.task_users, ArrowUsers)
    assert limited.checksum != corpus.checksum


def test_evaluated_users_never_train_the_task_adapter(tmp_path):
    root = split_files(tmp_path)
    corpus = load("tweet_paraphrase", root, split="train", select="longest", max_users=1)
    assert [user.id for user in corpus.users] == ["t8"]
    assert user_ids(corpus.task_users) == ["t2", "t4", "t6"]
    rows = [question("9", TWEET + "x", [{"text": "a"}], user_id="t4")]
    tweets(tmp_path / "b", rows)
    (tmp_path / "b/LaMP_7/train").symlink_to(root / "LaMP_7/train")
    corpus = load("tweet_paraphrase", tmp_path / "b")
    assert user_ids(corpus.task_users) == ["t2", "t6", "t8"]
    assert "1 users of the training split are evaluated" in corpus.notes[0]


def test_without_a_training_split_the_evaluated_users_train_it(tmp_path):
    root = tweets(tmp_path, [question("1", TWEET + "a", [{"text": "b"}])])
    assert load("tweet_paraphrase", root).task_users_origin == "evaluated"
    with pytest.raises(UserError, match="train_questions.json"):
        load("tweet_paraphrase", root, task_users="others")


def test_the_two_ways_to_split_are_different_files(tmp_path):
    tweets(tmp_path, [question("1", TWEET + "a")])
    with pytest.raises(UserError, match="time"):
        load("tweet_paraphrase", tmp_path, kind="time")
    tweets(tmp_path, [question("2", TWEET + "a")], kind="time")
    assert load("tweet_paraphrase", tmp_path, kind="time").users[0].id == "2"


def test_citations_from_the_benchmark_cannot_train_a_user_adapter_in_oppu(tmp_path):
    from test_prompts import make_tokenizer

    from lamp_eval.prompts import OppuEncoder

    text = (
        'For an author who has written the paper with the title "T", which reference is related? '
        'Just answer with [1] or [2] without explanation. [1]: "A" [2]: "B"'
    )
    rows = [question("1", text, [{"title": "P", "abstract": "Q"}])]
    (user,) = load("citation", write(tmp_path, "LaMP_1", "dev", rows, {"1": "[2]"})).users
    encode = OppuEncoder(make_tokenizer(), TASKS["citation"], ProtocolConfig(name="oppu"))
    assert "paper title: P\n" in encode.tokenizer.decode(encode.requests(user, 1)[0].prompt)
    with pytest.raises(UserError, match="protocol=lamp_chat"):
        encode.user_examples(user, 1)


# The table in the cache


def test_a_file_is_read_once_and_again_when_it_changes(tmp_path, cache, monkeypatch):
    root = tweets(tmp_path, [question("1", TWEET + "a")])
    first = load("tweet_paraphrase", root)
    assert len(list(cache.iterdir())) == 1
    calls = []
    write_table = module._write_table
    monkeypatch.setattr(module, "_write_table", lambda *a: (calls.append(a), write_table(*a)))
    assert load("tweet_paraphrase", root) == first
    assert not calls
    path = root / "LaMP_7/dev/dev_questions.json"
    path.write_text(json.dumps([question("1", TWEET + "b")]))
    assert load("tweet_paraphrase", root).users[0].queries[0].input == TWEET + "b"
    assert len(calls) == 1


def test_a_bad_file_leaves_nothing_in_the_cache(tmp_path, cache):
    rows = [question("1", TWEET + "a", [{"text": "x"}]), question("2", TWEET, [{"no": "text"}])]
    write(tmp_path, "LaMP_7", "dev", rows, {"1": "x", "2": "y"})
    with pytest.raises(UserError):
        load("tweet_paraphrase", tmp_path)
    assert list(cache.iterdir()) == []


def test_a_cache_that_cannot_be_written_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(UserError, match="XDG_CACHE_HOME"):
        load("tweet_paraphrase", tweets(tmp_path, [question("1", TWEET + "a")]))


# Streaming


@pytest.mark.parametrize("size", [1, 2, 3, 7, 64, 2**22])
def test_objects_are_found_wherever_the_file_is_cut(tmp_path, monkeypatch, size):
    monkeypatch.setattr("lamp_eval.data.files._CHUNK_CHARS", size)
    rows = [{}, {"a": 1.5, "b": [-2, {"c": None}], "d": 'é\n]}{"\\"'}, {"é": "\U0001f600" * 9}]
    for name, text in [
        ("compact", json.dumps(rows, separators=(",", ":"))),
        ("indented", json.dumps(rows, indent=2, ensure_ascii=False) + "\r\n"),
        ("spaced", " \n[ " + " ,\t".join(map(json.dumps, rows)) + " ] "),
    ]:
        path = tmp_path / name
        path.write_bytes(text.encode())
        assert list(stream_objects(path, "objects")) == rows
    path.write_text(" [ ] ")
    assert list(stream_objects(path, "objects")) == []


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("", "no list"),
        ("{}", "no list"),
        ("[", "no JSON object in entry 0"),
        ("[1]", "no JSON object in entry 0"),
        ("[{}", "not JSON after entry 0"),
        ("[{} {}]", "not JSON after entry 0"),
        ("[{},]", "no JSON object in entry 1"),
        ('[{"a": 1}, {"a": "cut', "not JSON in entry 1: Unterminated string"),
        ('[{"a":}]', "not JSON in entry 0"),
        ("[{}] []", "more text after the list"),
        ('[{"a":' * 100_000, "recursion"),
        ('[{"a": "\ud800"}]', "can't decode"),
    ],
)
def test_what_is_no_list_of_objects_is_refused(tmp_path, text, found):
    path = tmp_path / "questions.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    with pytest.raises(UserError, match=re.escape(found)):
        list(stream_objects(path, "objects"))


# Real files


@pytest.mark.parametrize(
    ("task", "split", "n_users", "n_records", "first"),
    [
        ("citation", "train", 300, None, "00762"),
        ("news_categorize", "train", 220, None, "104"),
        ("news_headline", "dev", 400, 400, "310"),
        ("scholarly_title", "train", 300, None, "500762"),
        ("tweet_paraphrase", "dev", 1000, None, "610"),
    ],
)
def test_real_files(lamp_data, task, split, n_users, n_records, first):
    corpus = load(task, lamp_data / "lamp", split=split, task_users="evaluated")
    assert len(corpus.users) == n_users
    assert corpus.users[0].id == first
    rows = json.loads(
        (lamp_data / "lamp" / TASKS[task].lamp_id / split / f"{split}_questions.json").read_text()
    )
    for user, row in zip(corpus.users, rows, strict=True):
        assert user.queries[0].input == row["input"]
        assert [dict(record.fields) for record in user.history] == [
            {name: item[name] for name in item if name != "id"} for item in row["profile"]
        ]
    assert n_records is None or sum(len(user.history) for user in corpus.users) == n_records
    if task == "news_headline":
        assert "1525 of 1925 outputs belong to no question" in corpus.notes[0]
    data_card(TASKS[task], corpus)
