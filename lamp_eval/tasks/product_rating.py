"""LaMP-3, personalized product rating: how many stars did this user give with this review?"""

from lamp_eval.tasks.task import ChatPrompts, OppuPrompts, Task

_QUESTION = "What is the score of the following review on a scale of 1 to 5?"
_ANSWER_RULE = " just answer with 1, 2, 3, 4, or 5 without further explanation."

TASK = Task(
    name="product_rating",
    lamp_id="LaMP_3",
    kind="rating",
    text_field="text",
    gold_field="score",
    labels=("1", "2", "3", "4", "5"),
    answer_pattern="([1-5])",
    max_new_tokens=8,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + _ANSWER_RULE + " review: {}\n score:",
        record_prompt=_QUESTION + _ANSWER_RULE + " review: {text}\n score:",
        retrieval_history="review: {text} score: {score}\n",
        retrieval_query_train=_QUESTION + " review: {text}",
        retrieval_query_test=_QUESTION + " review: {}",
        input_pattern=r"without further explanation\. review: (.*)",
    ),
    chat=ChatPrompts(
        index_fields=("text",),
        record='- Review: "{text}" — the user rated it {score}/5',
        user_text=_QUESTION + _ANSWER_RULE + " review: {}",
        strips=True,
    ),
)
