"""LaMP-1, personalized citation identification: which of two papers would this author cite?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = (
    "Identify the most relevant reference for the listed publication by the researcher. "
    "Select the reference paper that is most closely related to the researcher's work. "
)

TASK = Task(
    name="citation",
    lamp_id="LaMP_1",
    kind="label",
    text_field="title",
    gold_field="citation",
    more_fields=("abstract",),
    labels=("[1]", "[2]"),
    labelled_records=False,  # a record names the paper cited
    answer_pattern=r"\[?\s*([12])\s*\]?",
    max_new_tokens=8,
    oppu=OppuPrompts(
        # The released prompt lacks the two options; this is the repaired one (Geyko et al. 2026).
        query_prompt=_QUESTION + "Just answer with [1] or [2] without explanation.\n"
        "paper title: {}\n[1]: {}\n[2]: {}\nreference:",
        record_prompt="paper title: {title} reference:",
        retrieval_history="paper title: {title}\n",
        retrieval_query_train=_QUESTION
        + "Please respond with only the number that corresponds to the reference.\n"
        "paper title: {title}",
        retrieval_query_test=_QUESTION
        + "Please respond with only the number that corresponds to the reference.\n"
        "paper title: {}",
        # Titles hold quotation marks themselves.
        input_pattern=r'written the paper with the title "(.*)", which reference is related\?'
        r'.*?\[1\]: "(.*)"\s*\[2\]: "(.*)"',
        trains_alone=True,
    ),
    chat=ChatPrompts(
        index_fields=("abstract", "title"),
        record='- "{title}": {abstract}',
        raw_fields=("title", "abstract"),
    ),
)
