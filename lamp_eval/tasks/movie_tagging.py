"""LaMP-2M, personalized movie tagging: which of 15 tags would this user give the movie?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = (
    "Which tag does this movie relate to among the following tags? "
    "Just answer with the tag name without further explanation."
)
_TAGS = (
    " tags: [sci-fi, based on a book, comedy, action, twist ending, dystopia, dark comedy, "
    "classic, psychology, fantasy, romance, thought-provoking, social commentary, violence, "
    "true story]"
)

TASK = Task(
    name="movie_tagging",
    lamp_id="LaMP_2M",
    kind="label",
    text_field="description",
    gold_field="tag",
    labels=(
        "sci-fi",
        "based on a book",
        "comedy",
        "action",
        "twist ending",
        "dystopia",
        "dark comedy",
        "classic",
        "psychology",
        "fantasy",
        "romance",
        "thought-provoking",
        "social commentary",
        "violence",
        "true story",
    ),
    labels_pattern=r"tags: \[(.*?)\]",
    max_new_tokens=10,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + _TAGS + "\n description: {} tag:",
        record_prompt=_QUESTION + _TAGS + "\n description: {description} tag:",
        retrieval_history="description: {description} tag: {tag}\n",
        retrieval_query_train=_QUESTION + "\n description: {description}",
        retrieval_query_test=_QUESTION + "\n description: {}",
        input_pattern=r"\] description: (.*)",
    ),
    chat=ChatPrompts(
        index_fields=("description",),
        record='- Movie: "{description}" — tagged "{tag}"',
        user_text=_QUESTION + _TAGS + " description: {}",
    ),
)
