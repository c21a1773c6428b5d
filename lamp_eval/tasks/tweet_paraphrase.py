"""LaMP-7, personalized tweet paraphrasing: how would this user have tweeted it?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = "Paraphrase the following text into tweet without any explanation before or after it"

TASK = Task(
    name="tweet_paraphrase",
    lamp_id="LaMP_7",
    kind="text",
    text_field="text",
    gold_field="text",  # a record is a tweet and nothing else
    max_new_tokens=64,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + ".\n text: {} tweet:",
        record_prompt="tweet:",
        retrieval_history="tweet: {text}\n",
        retrieval_query_train=_QUESTION + ": {text}",
        retrieval_query_test=_QUESTION + ": {}",
        input_pattern="Paraphrase the following tweet without any explanation before or after it: "
        "(.*)",
        trains_alone=True,
    ),
    chat=ChatPrompts(index_fields=("text",), record='- "{text}"', raw_fields=("text",)),
)
