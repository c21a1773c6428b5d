"""The prompts of the `lamp_chat` protocol, as text and as token ids."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from test_prompts import make_tokenizer

from lamp_eval.config import ProtocolConfig
from lamp_eval.errors import UserError
from lamp_eval.prompts import ChatEncoder
from lamp_eval.prompts.chat import FIELD_CHARS, MISSING, PREAMBLE
from lamp_eval.records import Query, Record, User
from lamp_eval.tasks import TASKS

CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# As SmolLM3's: it thinks unless told not to, and says what day it is.
DATED = (
    "{% if enable_thinking is not defined %}{% set enable_thinking = true %}{% endif %}"
    "Today Date: {{ strftime_now('%d %B %Y') }} {{ '/think' if enable_thinking else '/no_think' }}"
    "{% for m in messages %}<|{{ m['role'] }}|>"
    "{% if m['role'] == 'assistant' and not enable_thinking %}<think>\n\n</think>\n{% endif %}"
    "{{ m['content'] }}<end>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>"
    "{% if not enable_thinking %}<think>\n\n</think>\n{% endif %}{% endif %}"
)
CHAT_TASKS = sorted(name for name, task in TASKS.items() if task.chat)


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer(CHATML)


def chat_tokenizer(template: str | None):
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return tokenizer


def encoder(tokenizer, task="movie_tagging", profiles=None, **protocol) -> ChatEncoder:
    config = ProtocolConfig(name="lamp_chat", **{"k": 4, "adapter_k": 0, **protocol})
    return ChatEncoder(tokenizer, TASKS[task], config, profiles=profiles or {})


def rendered(system: str | None, user: str) -> str:
    start = "" if system is None else f"<|system|>{system}<end>"
    return f"{start}<|user|>{user}<end><|assistant|>"


def golden(task: str) -> tuple[User, dict]:
    """A small user of the task, and its messages.

    They were made from the published strings and formulas by a script of its own, not by our
    encoder.
    """
    content = json.loads((Path(__file__).parent / "golden" / f"{task}.json").read_text())
    chat = content["lamp_chat"]
    history = tuple(
        Record({name: text for name, text in fields.items() if name != "date"}, fields["date"])
        for fields in chat["history"]
    )
    return User("u", history, (Query("q", content["input"], content["gold"]),)), chat


def parts(tokenizer, example) -> tuple[str, str]:
    start = example.answer_start
    return tokenizer.decode(example.tokens[:start]), tokenizer.decode(example.tokens[start:])


@pytest.mark.parametrize("task", CHAT_TASKS)
def test_strings_are_the_published_ones(lamp_data, task):
    published = json.loads((lamp_data / "protocol" / "lamp_chat_prompts.json").read_text())
    key = {"LaMP_2M": "LaMP_2_movies", "LaMP_2N": "LaMP_2_news"}.get(
        TASKS[task].lamp_id, TASKS[task].lamp_id
    )
    chat, own = TASKS[task].chat, published["tasks"][key]
    limits = {"title": published["title_chars"]}
    shown = chat.record
    for name in FIELD_CHARS:
        n_chars = limits.get(name, published["entry_chars"])
        assert FIELD_CHARS[name] == n_chars
        shown = shown.replace(f"{{{name}}}", f"{{{name}|{n_chars}}}")
    assert shown == own["record"]
    assert ", else ".join(chat.index_fields) == own["index_field"]
    assert published["system_preamble"] == PREAMBLE
    assert published["missing_value"] == MISSING
    user_text = published["user_text"][key]
    if task in ("movie_tagging", "product_rating", "news_headline", "scholarly_title"):
        assert chat.user_text == user_text.replace(f"{{{TASKS[task].text_field}}}", "{}")
    if task in ("citation", "tweet_paraphrase"):
        assert chat.user_text is None
    assert chat.strips == (task in ("product_rating", "news_headline"))


@pytest.mark.parametrize("k", [0, 1, 4])
@pytest.mark.parametrize("task", CHAT_TASKS)
def test_golden_prompts(tokenizer, task, k):
    person, content = golden(task)
    encode, expected = encoder(tokenizer, task), content["expected"]
    found = encode.user_examples(person, k)
    assert len(found) == len(expected[f"history, k={k}"])
    for example, (system, user, answer) in zip(found, expected[f"history, k={k}"], strict=True):
        if user is None:  # text to continue
            assert tokenizer.decode(example.tokens) == answer + "<eos>"
            assert example.answer_start == 1
        else:
            assert parts(tokenizer, example) == (rendered(system, user), answer + "<eos>")
    system, user, answer = expected[f"query, k={k}"]
    assert encode.task_examples(person, k) == found  # the paper's are of records
    (request,) = encode.requests(person, k)
    assert tokenizer.decode(request.prompt) == rendered(system, user)
    assert (request.gold, request.n_cut_words) == (answer, 0)


@pytest.mark.slow
@pytest.mark.parametrize("task", CHAT_TASKS)
def test_golden_token_ids(smollm2_dir, task):
    from recipes.model_source import load_tokenizer

    person, content = golden(task)
    encode = encoder(load_tokenizer(smollm2_dir), task)
    ids = content["smollm2_ids"]
    assert list(encode.user_examples(person, 1)[-1].tokens) == ids["history, k=1, last"]
    (request,) = encode.requests(person, 4)
    assert list(request.prompt) == ids["query, k=4"]
    assert encode.max_new_tokens == TASKS[task].max_new_tokens  # enough for every label
    assert encode.eos_token_id == encode.tokenizer.eos_token_id


def movie_fan(dates=("2001", "2002", "2002", "2003")) -> User:
    items = [("a castle", "fantasy"), ("castle two", "classic"), ("castle three", "action"),
             ("castle four", "comedy")]  # fmt: skip
    history = tuple(
        Record({"description": text, "tag": tag}, date)
        for (text, tag), date in zip(items, dates, strict=True)
    )
    return User("u", history, (Query("q", "tags: [x, y] description: castle two", "action"),))


def test_a_record_sees_records_of_strictly_earlier_dates(tokenizer):
    def shown(user: User) -> list[int]:
        examples = encoder(tokenizer).user_examples(user, 9)
        return [parts(tokenizer, example)[0].count("- Movie") for example in examples]

    assert shown(movie_fan()) == [0, 1, 1, 3]
    assert shown(movie_fan(dates=("", "", "", ""))) == [0, 1, 2, 3]
    assert shown(movie_fan(dates=("2001", "", "2002", "2003"))) == [0, 1, 2, 3]
    assert shown(movie_fan(dates=("2001",) * 4)) == [0, 0, 0, 0]
    assert shown(movie_fan(dates=("2009", "2001", "2002", "2003"))) == [0, 1, 2, 3]


def test_without_records_there_is_no_system_message(tokenizer):
    alone = replace(movie_fan(), history=())
    for user, k in ((alone, 4), (movie_fan(), 0)):
        (request,) = encoder(tokenizer).requests(user, k)
        assert tokenizer.decode(request.prompt) == rendered(None, user.queries[0].input)


def test_more_than_the_history_holds_is_all_of_it(tokenizer):
    (request,) = encoder(tokenizer).requests(movie_fan(), 99)
    assert tokenizer.decode(request.prompt).count("- Movie") == 4


def test_the_input_is_shown_as_it_is(tokenizer):
    text = ' tags: [x]  description: "{0}" &amp; \n\n{{ messages }} '
    user = replace(movie_fan(), queries=(Query("q", text, "action"),))
    (request,) = encoder(tokenizer).requests(user, 0)
    assert tokenizer.decode(request.prompt) == rendered(None, text)


def test_thinking_is_off_and_the_date_is_pinned():
    tokenizer = chat_tokenizer(DATED)
    (request,) = encoder(tokenizer, date="2025-07-08").requests(movie_fan(), 0)
    text = tokenizer.decode(request.prompt)
    assert text.startswith("Today Date: 08 July 2025 /no_think")
    assert text.endswith("<|assistant|><think>\n\n</think>\n")
    (later,) = encoder(tokenizer, date="2025-07-09").requests(movie_fan(), 0)
    assert tokenizer.decode(later.prompt) == text.replace("08 July", "09 July")
    # Training continues exactly what generation starts from.
    example = encoder(tokenizer, date="2025-07-08").user_examples(movie_fan(), 0)[2]
    prompt, answer = parts(tokenizer, example)
    assert prompt.startswith("Today Date: 08 July 2025 /no_think")
    assert prompt.endswith("<|assistant|><think>\n\n</think>\n")
    assert answer == "action<eos>"


@pytest.mark.parametrize(
    "start", ["", "\n", "\n\n  ", "  {% if true %}\n  {% endif %}", "\n {% set x = 1 %}"]
)
def test_pinning_the_date_changes_nothing_else(start):
    tokenizer = chat_tokenizer(start + CHATML)
    (request,) = encoder(tokenizer).requests(movie_fan(), 0)
    message = {"role": "user", "content": movie_fan().queries[0].input}
    assert tokenizer.decode(request.prompt) == tokenizer.apply_chat_template(
        [message], tokenize=False, add_generation_prompt=True
    )


def test_the_template_decides_what_ends_an_answer():
    from tokenizers import AddedToken

    tokenizer = chat_tokenizer(CHATML)
    assert encoder(tokenizer).eos_token_id == tokenizer.eos_token_id  # "<end>" is only text
    tokenizer.add_tokens([AddedToken("<end>", special=True)], special_tokens=True)
    encode = encoder(tokenizer)
    assert encode.eos_token_id == tokenizer.convert_tokens_to_ids("<end>") != tokenizer.eos_token_id
    example = encode.user_examples(movie_fan(), 0)[0]
    assert example.tokens[-1] == encode.eos_token_id


def test_a_block_of_thinking_is_no_answer(tokenizer):
    encode = encoder(tokenizer)
    for text, answer in [
        ("<think>\n\n</think>\n action ", "action"),
        ("<think>a</think>x<think>b\nc</think>y", "xy"),
        ("  action\n", "action"),
        ("<think>cut off", "<think>cut off"),
    ]:
        assert encode.answer_text(tokenizer.encode(text)) == answer


def test_every_label_fits_into_an_answer(tokenizer):
    n_longest = max(len(tokenizer.encode(label)) for label in TASKS["movie_tagging"].labels)
    assert n_longest >= TASKS["movie_tagging"].max_new_tokens  # the premise: a poor tokenizer
    assert encoder(tokenizer).max_new_tokens == n_longest + 1
    assert encoder(tokenizer, "news_headline").max_new_tokens == 64
    assert encoder(tokenizer, decoding="oppu_sampled").max_new_tokens == 200


def test_records_are_cut_first_then_the_middle_of_the_text(tokenizer):
    user = movie_fan()
    text = user.queries[0].input
    n_answer = encoder(tokenizer).max_new_tokens
    (whole,) = encoder(tokenizer).requests(user, 1)
    limit = len(whole.prompt) + n_answer - 1
    (request,) = encoder(tokenizer, max_tokens=limit).requests(user, 1)
    shown = PREAMBLE + '- Movie: "castle two" — tagged'
    assert tokenizer.decode(request.prompt) == rendered(shown, text)
    assert request.n_cut_words == 1

    bare = len(tokenizer.encode(rendered(None, text)))
    (request,) = encoder(tokenizer, max_tokens=bare + n_answer).requests(user, 1)
    assert tokenizer.decode(request.prompt) == rendered(None, text)
    n_words = len('- Movie: "castle two" — tagged "classic"'.split(" "))
    assert request.n_cut_words == n_words
    (request,) = encoder(tokenizer, max_tokens=bare + n_answer - 1).requests(user, 1)
    shorter = text.replace("castle two", "castle")
    assert tokenizer.decode(request.prompt) == rendered(None, shorter)
    assert request.n_cut_words == n_words + 1

    with pytest.raises(UserError, match="query 'q', option protocol.max_tokens"):
        encoder(tokenizer, max_tokens=n_answer + 10).requests(user, 0)


def test_text_to_continue_is_cut_at_its_end(tokenizer):
    user = User("u", (Record({"text": "word " * 500}),), ())
    (example,) = encoder(tokenizer, "tweet_paraphrase", max_tokens=100).user_examples(user, 0)
    assert len(example.tokens) == 100
    assert example.tokens[-1] == tokenizer.eos_token_id


def test_records_without_text_or_answer_teach_nothing_but_are_shown(tokenizer):
    empty = (
        Record({"description": "castle", "tag": " "}),
        Record({"description": "", "tag": "action"}),
    )
    user = replace(movie_fan(dates=("",) * 4), history=(*empty, *movie_fan().history))
    assert len(encoder(tokenizer).user_examples(user, 0)) == 4
    (request,) = encoder(tokenizer).requests(user, 9)
    text = tokenizer.decode(request.prompt)
    assert '- Movie: "castle" — tagged "?"' in text
    assert '- Movie: "?" — tagged "action"' in text


def test_a_text_about_the_user_comes_first(tokenizer):
    encode = encoder(tokenizer, profiles={"u": "Likes castles."})
    (request,) = encode.requests(movie_fan(), 0)
    text = movie_fan().queries[0].input
    assert tokenizer.decode(request.prompt) == rendered("Likes castles.", text)
    (request,) = encode.requests(movie_fan(), 1)
    assert tokenizer.decode(request.prompt).startswith(
        f"<|system|>Likes castles.\n\n{PREAMBLE}- Movie"
    )
    (request,) = encode.requests(replace(movie_fan(), id="v"), 0)
    assert tokenizer.decode(request.prompt) == rendered(None, text)


def test_a_tokenizer_without_a_template_is_refused():
    with pytest.raises(UserError, match="chat template"):
        encoder(chat_tokenizer(None))


def test_a_template_without_system_messages_is_refused():
    template = (
        "{% if messages[0]['role'] == 'system' %}{{ raise_exception('no system') }}{% endif %}"
    )
    encode = encoder(chat_tokenizer(template + CHATML))
    assert encode.requests(movie_fan(), 0)
    with pytest.raises(UserError, match="no system"):
        encode.requests(movie_fan(), 1)


def test_a_task_without_chat_prompts_is_refused(tokenizer):
    task = replace(TASKS["movie_tagging"], chat=None)
    with pytest.raises(UserError, match="protocol=oppu"):
        ChatEncoder(tokenizer, task, ProtocolConfig(name="lamp_chat"))
