"""Movie rating, not a LaMP task: how would this rater rate a sentence from a review?

The people are the raters of the VADER study (Hutto and Gilbert, ICWSM 2014), the scale is theirs.
The prompts are ours, in the form of the released ones for product ratings.
"""

from lamp_eval.tasks.task import OppuPrompts, Task

_QUESTION = (
    "What is the score of the following sentence from a movie review on a scale of -4 (extremely "
    "negative) to 4 (extremely positive)?"
)
_ANSWER_RULE = (
    " just answer with -4, -3, -2, -1, 0, 1, 2, 3, or 4 without further explanation. sentence: "
)

TASK = Task(
    name="movie_rating",
    lamp_id="movie_rating",
    kind="rating",
    text_field="text",
    gold_field="score",
    labels=("-4", "-3", "-2", "-1", "0", "1", "2", "3", "4"),  # no plus, as in the raters' data
    # A hyphen after a word is no minus ("score-3"); a digit of a longer number is no rating.
    answer_pattern=r"(?<![\w.])(-?[1-4]|0)(?!\d)",
    max_new_tokens=8,
    oppu=OppuPrompts(
        query_prompt=_QUESTION + _ANSWER_RULE + "{}\n score:",
        record_prompt=_QUESTION + _ANSWER_RULE + "{text}\n score:",
        retrieval_history="sentence: {text} score: {score}\n",
        retrieval_query_train=_QUESTION + " sentence: {text}",
        retrieval_query_test=_QUESTION + " sentence: {}",
        input_pattern=r"without further explanation\. sentence: (.*)",
    ),
)


def query_input(text: str) -> str:
    """A query in the form of the benchmark's inputs."""
    return _QUESTION + _ANSWER_RULE + text
