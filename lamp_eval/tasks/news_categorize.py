"""LaMP-2N, personalized news categorization: under which of 15 heads would this author file it?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = "Which category does this article relate to among the following categories?"
_CATEGORIES = (
    " Just answer with the category name without further explanation. categories: [travel, "
    "education, parents, style & beauty, entertainment, food & drink, science & technology, "
    "business, sports, healthy living, women, politics, crime, culture & arts, religion]\n"
)

TASK = Task(
    name="news_categorize",
    lamp_id="LaMP_2N",
    kind="label",
    text_field="text",
    gold_field="category",
    more_fields=("title",),
    labels=(
        "food & drink",
        "sports",
        "education",
        "parents",
        "religion",
        "travel",
        "business",
        "crime",
        "science & technology",
        "culture & arts",
        "entertainment",
        "politics",
        "women",
        "style & beauty",
        "healthy living",
    ),
    labels_pattern=r"categories: \[(.*?)\]",
    max_new_tokens=10,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + _CATEGORIES + " article: {} category:",
        record_prompt=_QUESTION + _CATEGORIES + " article: {text} category:",
        retrieval_history="article: {text} category: {category}\n",
        retrieval_query_train=_QUESTION + " arcicle: {text}",  # sic
        retrieval_query_test=_QUESTION + " arcicle: {}",
        input_pattern=r"\] article: (.*)",
    ),
    chat=ChatPrompts(
        index_fields=("text",),
        record='- Article: "{title}": "{text}" — categorized "{category}"',
        # The form of the benchmark's inputs; the harness had none for records.
        user_text=_QUESTION + _CATEGORIES.rstrip() + " article: {}",
    ),
)
