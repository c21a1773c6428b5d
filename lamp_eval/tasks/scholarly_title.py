"""LaMP-5, personalized scholarly title: how would this author title the paper?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = "Generate a title for the following abstract of a paper"

TASK = Task(
    name="scholarly_title",
    lamp_id="LaMP_5",
    kind="text",
    text_field="abstract",
    gold_field="title",
    max_new_tokens=64,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + ".\n abstract: {} title:",
        record_prompt=_QUESTION + ".\n abstract: {abstract} title:",
        retrieval_history="abstract: {abstract} title: {title}\n",
        retrieval_query_train=_QUESTION + ": {abstract}",
        retrieval_query_test=_QUESTION + ": {}",
        input_pattern="Generate a title for the following abstract of a paper: (.*)",
    ),
    chat=ChatPrompts(
        index_fields=("abstract", "title"),
        record='- "{title}": {abstract}',
        user_text=_QUESTION + ": {}",
    ),
)
