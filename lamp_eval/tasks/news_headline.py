"""LaMP-4, personalized news headline: how would this author title the article?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = "Generate a headline for the following article"

TASK = Task(
    name="news_headline",
    lamp_id="LaMP_4",
    kind="text",
    text_field="text",
    gold_field="title",
    max_new_tokens=64,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + ".\narticle: {} headline:",
        record_prompt=_QUESTION + ".\n article: {text} headline:",  # with a space, as released
        retrieval_history="article: {text} headline: {title}\n",
        retrieval_query_train=_QUESTION + ": {text}",
        retrieval_query_test=_QUESTION + ": {}",
        input_pattern="Generate a headline for the following article: (.*)",
    ),
    chat=ChatPrompts(
        index_fields=("text",),
        record='- Article: "{text}" — the user\'s headline: "{title}"',
        user_text="{}",
        strips=True,
    ),
)
