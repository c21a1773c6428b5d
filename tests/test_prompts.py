"""The prompts of the `oppu` protocol, as text and as token ids."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from pathlib import Path

import pytest

from lamp_eval.config import ProtocolConfig
from lamp_eval.errors import UserError
from lamp_eval.prompts import OppuEncoder
from lamp_eval.records import Query, Record, User
from lamp_eval.tasks import TASKS

MOVIE = (
    "Which tag does this movie relate to among the following tags? Just answer with the tag name "
    "without further explanation. tags: [sci-fi, based on a book, comedy, action, twist ending, "
    "dystopia, dark comedy, classic, psychology, fantasy, romance, thought-provoking, social "
    "commentary, violence, true story]\n description: {} tag:"
)
RATING = (
    "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3, 4, "
    "or 5 without further explanation. review: {}\n score:"
)
MOVIE_INPUT = (
    "Which tag does this movie relate to among the following tags? Just answer with the tag name "
    "without further explanation. tags: [romance, violence, sci-fi] description: {}"
)
RATING_INPUT = (
    "What is the score of the following review on a scale of 1 to 5? just answer with 1, 2, 3, 4, "
    "or 5 without further explanation. review: {}"
)
# Equal lengths, so that record 2 meets a tie; record 3 shares two words with record 0 alone.
MOVIES = (
    ("dragons guard a magic castle", "fantasy"),
    ("two strangers kiss at midnight", "romance"),
    ("robots dream of other planets", "sci-fi"),
    ("young dragons storm the castle", "fantasy"),
)
REVIEWS = (
    ("battery broke within days", "1"),
    ("lovely colour fits well", "5"),
    ("average sound poor cable", "3"),
    ("this battery broke again", "2"),
)
EOS, BOS = "<eos>", "<bos>"


def make_tokenizer(
    *, template: str = "$A", merges=(("Ġ", "t"), ("Ġt", "a"), ("a", "g")), regex=True
):
    """A byte-level BPE tokenizer with single digits, made in memory."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
    from transformers import PreTrainedTokenizerFast

    pieces = sorted(pre_tokenizers.ByteLevel.alphabet()) + ["".join(merge) for merge in merges]
    vocab = {piece: i for i, piece in enumerate([EOS, BOS, *pieces])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=list(merges)))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=regex),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=template, special_tokens=[(EOS, vocab[EOS]), (BOS, vocab[BOS])]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS, bos_token=BOS)


@pytest.fixture(scope="module")
def tokenizer():
    return make_tokenizer()


def encoder(tokenizer, task="movie_tagging", **protocol) -> OppuEncoder:
    return OppuEncoder(tokenizer, TASKS[task], ProtocolConfig(name="oppu", **protocol))


def user(task: str, items, query: str, gold: str, user_id: str = "u") -> User:
    names = {"movie_tagging": ("description", "tag"), "product_rating": ("text", "score")}[task]
    frame = {"movie_tagging": MOVIE_INPUT, "product_rating": RATING_INPUT}[task]
    history = tuple(Record(dict(zip(names, item, strict=True))) for item in items)
    return User(user_id, history, (Query("q", frame.replace("{}", query), gold),))


@pytest.fixture
def movie_fan() -> User:
    return user("movie_tagging", MOVIES, "strangers dream at midnight", "romance")


@pytest.fixture
def shopper() -> User:
    return user("product_rating", REVIEWS, "poor sound from the cable", "3")


def parts(tokenizer, example) -> tuple[str, str]:
    start = example.answer_start
    return tokenizer.decode(example.tokens[:start]), tokenizer.decode(example.tokens[start:])


@pytest.mark.parametrize("task", sorted(name for name in TASKS if name != "movie_rating"))
def test_prompt_strings_are_the_released_ones(lamp_data, task):
    released = json.loads((lamp_data / "protocol" / "oppu_prompts.json").read_text())[task]
    oppu = TASKS[task].oppu
    assert oppu.query_prompt == released["prompt"]
    assert oppu.record_prompt == released["OPPU_input"]
    assert oppu.retrieval_history == released["retrieval_history"]
    assert oppu.retrieval_query_train == released["retrieval_query"]
    assert oppu.retrieval_query_test == released["retrieval_query_wokey"]
    # The answer follows after one space, as in the released full strings.
    gold = TASKS[task].gold_field
    assert oppu.record_prompt + " {" + gold + "}" == released["OPPU_full"]


def golden(task: str) -> tuple[User, dict]:
    """A small user of the task, and what the released code makes of it.

    The files were made from the published strings (for movie ratings, ours) and rank-bm25 by the
    steps of `OPPU.py` and `task_LoRA.py`, not by our encoder.
    """
    content = json.loads((Path(__file__).parent / "golden" / f"{task}.json").read_text())
    history = tuple(Record(fields) for fields in content["history"])
    return User("u", history, (Query("q", content["input"], content["gold"]),)), content


@pytest.mark.parametrize("k", [0, 1, 2])
@pytest.mark.parametrize("task", sorted(TASKS))
def test_golden_prompts(tokenizer, task, k):
    person, content = golden(task)
    encode, expected = encoder(tokenizer, task), content["expected"]
    assert [list(parts(tokenizer, e)) for e in encode.user_examples(person, k)] == [
        [prompt, answer + EOS] for prompt, answer in expected[f"history, k={k}"]
    ]
    prompt, answer = expected[f"query, k={k}"]
    (example,) = encode.task_examples(person, k)
    assert parts(tokenizer, example) == (prompt, answer + EOS)
    (request,) = encode.requests(person, k)
    assert tokenizer.decode(request.prompt) == prompt
    assert request.gold == content["gold"]


@pytest.mark.parametrize("task", sorted(TASKS))
def test_as_released_some_tasks_train_on_records_without_retrieval(tokenizer, task):
    person, content = golden(task)
    encode = OppuEncoder(tokenizer, TASKS[task], ProtocolConfig(name="oppu_released"))
    k = 0 if task in ("citation", "tweet_paraphrase") else 1
    expected = content["expected"][f"history, k={k}"]
    assert [parts(tokenizer, e)[0] for e in encode.user_examples(person, 1)] == [
        prompt for prompt, _ in expected
    ]
    (request,) = encode.requests(person, 1)  # but they retrieve in evaluation
    assert tokenizer.decode(request.prompt) == content["expected"]["query, k=1"][0]


@pytest.mark.slow
@pytest.mark.parametrize("task", sorted(TASKS))
def test_golden_token_ids(smollm2_dir, task):
    from recipes.model_source import load_tokenizer

    person, content = golden(task)
    encode = encoder(load_tokenizer(smollm2_dir), task)
    ids = content["smollm2_ids"]
    assert list(encode.user_examples(person, 1)[2].tokens) == ids["history, k=1, record 2"]
    (request,) = encode.requests(person, 1)
    assert list(request.prompt) == ids["query, k=1"]


@pytest.mark.parametrize(
    ("lamp_path", "task", "n"),
    [
        ("LaMP_1/train/train", "citation", 300),
        ("LaMP_2N/train/train", "news_categorize", 220),
        ("LaMP_4/dev/dev", "news_headline", 400),
        ("LaMP_5/train/train", "scholarly_title", 300),
        ("LaMP_7/dev/dev", "tweet_paraphrase", 1000),
    ],
)
def test_texts_of_real_inputs(lamp_data, lamp_path, task, n):
    inputs = [
        row["input"]
        for row in json.loads((lamp_data / "lamp" / f"{lamp_path}_questions.json").read_text())
    ]
    assert len(inputs) == n
    for text in inputs:
        texts = TASKS[task].oppu.texts(text)
        assert texts is not None
        if task == "citation":
            assert text == (
                'For an author who has written the paper with the title "{}", which reference is '
                "related? Just answer with [1] or [2] without explanation. "
                '[1]: "{}" [2]: "{}"'
            ).format(*texts)
        else:
            (item,) = texts
            assert text.endswith(item)
            assert len(text) - len(item) < 420  # the instruction


def test_movie_examples_without_retrieval(tokenizer, movie_fan):
    examples = encoder(tokenizer).user_examples(movie_fan, 0)
    assert [parts(tokenizer, e) for e in examples] == [
        (MOVIE.format(text), f" {tag}{EOS}") for text, tag in MOVIES
    ]
    (example,) = encoder(tokenizer).task_examples(movie_fan, 0)
    assert parts(tokenizer, example) == (
        MOVIE.format("strangers dream at midnight"),
        f" romance{EOS}",
    )


def test_movie_examples_with_one_retrieved_record(tokenizer, movie_fan):
    examples = encoder(tokenizer).user_examples(movie_fan, 1)
    first = "description: dragons guard a magic castle tag: fantasy\n\n"
    second = "description: two strangers kiss at midnight tag: romance\n\n"
    assert [parts(tokenizer, e)[0] for e in examples] == [
        MOVIE.format("dragons guard a magic castle"),
        first + MOVIE.format("two strangers kiss at midnight"),
        second + MOVIE.format("robots dream of other planets"),  # a tie: the later record
        first + MOVIE.format("young dragons storm the castle"),
    ]
    assert [parts(tokenizer, e)[1] for e in examples] == [f" {tag}{EOS}" for _, tag in MOVIES]
    (example,) = encoder(tokenizer).task_examples(movie_fan, 1)
    query_prompt = second + MOVIE.format("strangers dream at midnight")
    assert parts(tokenizer, example) == (query_prompt, f" romance{EOS}")
    (request,) = encoder(tokenizer).requests(movie_fan, 1)
    assert tokenizer.decode(request.prompt) == query_prompt
    assert (request.user_id, request.query_id, request.gold) == ("u", "q", "romance")
    assert request.n_cut_words == 0


@pytest.mark.parametrize("k", [0, 1])
def test_rating_examples(tokenizer, shopper, k):
    documents = ["", *(f"review: {REVIEWS[i][0]} score: {REVIEWS[i][1]}\n\n" for i in (0, 1, 0))]
    shown = documents if k else [""] * 4
    encode = encoder(tokenizer, "product_rating")
    assert [parts(tokenizer, e) for e in encode.user_examples(shopper, k)] == [
        (document + RATING.format(text), f" {score}{EOS}")
        for document, (text, score) in zip(shown, REVIEWS, strict=True)
    ]
    prompt = RATING.format("poor sound from the cable")
    if k:
        prompt = "review: average sound poor cable score: 3\n\n" + prompt
    (example,) = encode.task_examples(shopper, k)
    assert parts(tokenizer, example) == (prompt, f" 3{EOS}")
    (request,) = encode.requests(shopper, k)
    assert tokenizer.decode(request.prompt) == prompt


def test_recency_shows_the_record_before(tokenizer, movie_fan):
    encode = encoder(tokenizer, retrieval="recency")
    shown = [f"description: {text} tag: {tag}\n\n" for text, tag in MOVIES]
    assert [parts(tokenizer, e)[0] for e in encode.user_examples(movie_fan, 1)] == [
        before + MOVIE.format(text) for before, (text, _) in zip(["", *shown], MOVIES, strict=False)
    ]
    (request,) = encode.requests(movie_fan, 1)
    assert tokenizer.decode(request.prompt).startswith(shown[-1])


def test_random_retrieval_is_seeded_per_run_and_user(tokenizer, movie_fan):
    def prompts(seed: int, user_id: str) -> list[tuple[int, ...]]:
        protocol = ProtocolConfig(name="oppu", retrieval="random")
        encode = OppuEncoder(tokenizer, TASKS["movie_tagging"], protocol, seed)
        return [e.tokens for e in encode.user_examples(replace(movie_fan, id=user_id), 1)]

    assert prompts(0, "u") == prompts(0, "u")
    assert len({tuple(prompts(seed, user)) for seed in range(4) for user in "uvw"}) > 2


def test_several_retrieved_records_follow_each_other_best_first(tokenizer, movie_fan):
    # The second shares the word "the" with the query's instruction, which has it twice.
    (request,) = encoder(tokenizer).requests(movie_fan, 2)
    assert tokenizer.decode(request.prompt) == (
        "description: two strangers kiss at midnight tag: romance\n"
        "description: young dragons storm the castle tag: fantasy\n\n"
        + MOVIE.format("strangers dream at midnight")
    )


def test_a_record_never_retrieves_itself_or_a_later_one(tokenizer):
    # Equal texts: the record itself, or any later one, would score as high as the one before.
    scores = ["1", "2", "3", "4", "5"]
    person = user("product_rating", [("good value", s) for s in scores], "good value", "5")
    encode = encoder(tokenizer, "product_rating")
    prompts = [parts(tokenizer, e)[0] for e in encode.user_examples(person, 1)]
    assert prompts[0] == RATING.format("good value")
    for i, prompt in enumerate(prompts[1:], 1):
        assert prompt.startswith(f"review: good value score: {scores[i - 1]}\n\n")
    all_earlier = [parts(tokenizer, e)[0] for e in encode.user_examples(person, 99)]
    for i, prompt in enumerate(all_earlier):
        assert prompt.count("review: good value score:") == i
        assert f"score: {scores[i]}\n" not in prompt


@pytest.mark.parametrize("task", ["movie_tagging", "product_rating"])
@pytest.mark.parametrize("k", [0, 1])
def test_training_and_evaluation_see_the_same_prompt(tokenizer, task, k):
    items = {"movie_tagging": MOVIES, "product_rating": REVIEWS}[task]
    text, label = items[-1]
    encode = encoder(tokenizer, task)
    trained = encode.user_examples(user(task, items, "x", label), k)[-1]
    person = user(task, items[:-1], text, label)
    (asked,) = encode.requests(person, k)
    (task_example,) = encode.task_examples(person, k)
    assert trained.tokens[: trained.answer_start] == asked.prompt
    assert task_example == trained


def test_text_of_a_query_may_hold_braces_and_the_marker(tokenizer):
    text = "{0} {tag} tags: [a] description: two  spaces\nand a line "
    person = user("movie_tagging", MOVIES, text, "comedy")
    (request,) = encoder(tokenizer).requests(person, 0)
    assert tokenizer.decode(request.prompt) == MOVIE.replace("{}", text)


def test_users_without_history_get_the_bare_prompt(tokenizer):
    person = user("movie_tagging", (), "a quiet film", "classic")
    assert encoder(tokenizer).user_examples(person, 1) == []
    (request,) = encoder(tokenizer).requests(person, 1)
    assert tokenizer.decode(request.prompt) == MOVIE.format("a quiet film")


@pytest.mark.parametrize("template", ["$A", f"{BOS} $A", f"{BOS} $A {EOS}", f"$A {EOS}"])
def test_special_tokens(template, movie_fan):
    tokenizer = make_tokenizer(template=template)
    encode = encoder(tokenizer)
    n_bos = int(BOS in template)
    examples = encode.user_examples(movie_fan, 1) + encode.task_examples(movie_fan, 1)
    for example, (_, tag) in zip(examples, (*MOVIES, ("", "romance")), strict=True):
        prompt = example.tokens[: example.answer_start]
        assert example.tokens.count(tokenizer.bos_token_id) == n_bos
        assert prompt.count(tokenizer.bos_token_id) == n_bos
        assert not n_bos or prompt[0] == tokenizer.bos_token_id
        assert example.tokens.count(tokenizer.eos_token_id) == 1
        assert tokenizer.decode(example.tokens[example.answer_start :]) == f" {tag}{EOS}"
        assert example.n_supervised_tokens == len(example.tokens) - len(prompt)
    (request,) = encode.requests(movie_fan, 1)
    assert request.prompt.count(tokenizer.bos_token_id) == n_bos
    assert tokenizer.eos_token_id not in request.prompt
    assert request.prompt == examples[-1].tokens[: examples[-1].answer_start]


def test_prompt_tokens_stay_a_prefix_where_the_tokenizer_merges_across_the_border(movie_fan):
    tokenizer = make_tokenizer(merges=[(":", "Ġ")], regex=False)
    whole = tokenizer.encode(MOVIE.format(MOVIES[0][0]) + " fantasy")
    prompt = tokenizer.encode(MOVIE.format(MOVIES[0][0]))
    assert whole[: len(prompt)] != prompt  # the premise
    example = encoder(tokenizer).user_examples(movie_fan, 0)[0]
    assert list(example.tokens[: example.answer_start]) == prompt
    assert parts(tokenizer, example) == (MOVIE.format(MOVIES[0][0]), f" fantasy{EOS}")


def test_retrieved_records_are_cut_first(tokenizer, movie_fan):
    whole = encoder(tokenizer).user_examples(movie_fan, 1)[3]
    cut_by = len(" castle tag: fantasy\n") + 1  # at most one token per byte
    limit = len(whole.tokens) - cut_by
    example = encoder(tokenizer, max_tokens=limit).user_examples(movie_fan, 1)[3]
    prompt, answer = parts(tokenizer, example)
    document, instruction = prompt.split("\n", 1)
    assert instruction == MOVIE.format("young dragons storm the castle")
    assert answer == f" fantasy{EOS}"
    assert document and "description: dragons guard a magic castle tag: fantasy".startswith(
        document
    )
    assert (
        document.split(" ") == ["description:", *MOVIES[0][0].split(" ")][: document.count(" ") + 1]
    )
    assert limit - 12 <= len(example.tokens) <= limit  # as much as fits, to the word


def test_request_counts_the_words_cut_from_retrieved_records(tokenizer, movie_fan):
    (whole,) = encoder(tokenizer).requests(movie_fan, 1)
    n_answer = TASKS["movie_tagging"].max_new_tokens
    words = "description: two strangers kiss at midnight tag: romance\n".split(" ")
    for n_cut in (1, 3, 7):
        shown = " ".join(words[:-n_cut])
        text = shown + "\n" + MOVIE.format("strangers dream at midnight")
        limit = len(tokenizer.encode(text)) + n_answer
        (request,) = encoder(tokenizer, max_tokens=limit).requests(movie_fan, 1)
        assert tokenizer.decode(request.prompt) == text
        assert request.n_cut_words == n_cut
        assert len(request.prompt) + n_answer <= limit
    assert whole.n_cut_words == 0


def test_sampled_answers_have_200_tokens_of_room(tokenizer, movie_fan):
    (whole,) = encoder(tokenizer).requests(movie_fan, 1)
    sampled = {"decoding": "oppu_sampled", "max_tokens": len(whole.prompt) + 200}
    assert encoder(tokenizer, **sampled).max_new_tokens == 200
    assert encoder(tokenizer, **sampled).requests(movie_fan, 1) == [whole]
    sampled["max_tokens"] -= 1
    (cut,) = encoder(tokenizer, **sampled).requests(movie_fan, 1)
    assert cut.n_cut_words > 0


def test_then_the_middle_of_the_text_is_cut(tokenizer):
    words = [f"w{i}" for i in range(10, 50)]
    person = user(
        "movie_tagging", [*MOVIES, (" ".join(words), "comedy")], " ".join(words), "comedy"
    )
    n_prompt = len(tokenizer.encode(MOVIE.format(" ".join(words[:5] + words[-5:]))))
    n_answer = len(tokenizer.encode(" comedy")) + 1

    example = encoder(tokenizer, max_tokens=n_prompt + n_answer).user_examples(person, 1)[-1]
    expected = MOVIE.format(" ".join(words[:5] + words[-5:]))
    assert parts(tokenizer, example) == (expected, f" comedy{EOS}")
    assert len(example.tokens) == n_prompt + n_answer

    room = n_prompt + TASKS["movie_tagging"].max_new_tokens
    (request,) = encoder(tokenizer, max_tokens=room).requests(person, 0)
    assert tokenizer.decode(request.prompt) == expected
    assert request.n_cut_words == len(words) - 10
    (request,) = encoder(tokenizer, max_tokens=room).requests(person, 1)
    assert tokenizer.decode(request.prompt) == expected
    # All words of the retrieved record are gone as well: two names around the text.
    assert request.n_cut_words == len(words) - 10 + len(words) + 3


def test_special_tokens_are_counted_once(movie_fan):
    tokenizer = make_tokenizer(template=f"{BOS} $A")
    for example, k in ((encoder(tokenizer).user_examples(movie_fan, k)[-1], k) for k in (0, 1)):
        fitting = encoder(tokenizer, max_tokens=len(example.tokens))
        assert fitting.user_examples(movie_fan, k)[-1] == example
        shorter = encoder(tokenizer, max_tokens=len(example.tokens) - 1)
        assert shorter.user_examples(movie_fan, k)[-1] != example


def test_one_word_longer_than_the_limit_is_cut(tokenizer):
    person = user("movie_tagging", (), "x" * 5000, "comedy")
    (request,) = encoder(tokenizer).requests(person, 0)
    assert tokenizer.decode(request.prompt) == MOVIE.format("")
    assert request.n_cut_words == 1


@pytest.mark.parametrize("method", ["user_examples", "task_examples", "requests"])
def test_an_instruction_that_does_not_fit_is_the_users_mistake(tokenizer, movie_fan, method):
    encode = encoder(tokenizer, max_tokens=64)
    with pytest.raises(UserError) as error:
        getattr(encode, method)(movie_fan, 1)
    message = str(error.value)
    assert "user 'u'" in message
    assert "protocol.max_tokens" in message
    assert ("record 0" if method == "user_examples" else "query 'q'") in message


def test_words_are_cut_at_768_in_training_and_368_in_evaluation(tokenizer):
    words = [f"w{i}" for i in range(1000, 1900)]
    text = "  ".join(words)  # whitespace words: the double spaces are gone afterwards
    person = user("product_rating", [(text, "4"), ("a short one", "2")], " ".join(words), "4")
    encode = encoder(tokenizer, "product_rating", max_tokens=100_000)

    first, second = encode.user_examples(person, 1)
    in_training = " ".join(words[:768])
    assert parts(tokenizer, first)[0] == RATING.format(in_training)
    assert parts(tokenizer, second)[0] == (
        f"review: {in_training} score: 4\n\n" + RATING.format("a short one")
    )
    (request,) = encode.requests(person, 1)
    # As released: the fields of the records are cut, the text of the query is not.
    assert tokenizer.decode(request.prompt) == (
        f"review: {' '.join(words[:368])} score: 4\n\n" + RATING.format(" ".join(words))
    )
    (example,) = encode.task_examples(person, 0)
    assert parts(tokenizer, example)[0] == RATING.format(in_training)
    assert ProtocolConfig().train_words == 768
    assert ProtocolConfig().eval_words == 368


def test_records_are_never_changed(tokenizer):
    text = " ".join(f"w{i}" for i in range(900))
    person = user("product_rating", [(text, "4"), (text, "2")], text, "4")
    before = copy.deepcopy(person)
    encode = encoder(tokenizer, "product_rating", max_tokens=3000)
    examples = encode.user_examples(person, 1)
    requests = encode.requests(person, 1)
    encode.task_examples(person, 1)
    assert person == before
    # In any order the same: evaluation does not see twice-cut text.
    assert encode.requests(person, 1) == requests
    assert encode.user_examples(person, 1) == examples
