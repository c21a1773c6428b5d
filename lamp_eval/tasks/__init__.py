"""The seven LaMP tasks and `movie_rating`. Adding one: a file here and a line in `TASKS`."""

from lamp_eval.tasks import (
    citation,
    movie_rating,
    movie_tagging,
    news_categorize,
    news_headline,
    product_rating,
    scholarly_title,
    tweet_paraphrase,
)
from lamp_eval.tasks.task import Task

TASKS: dict[str, Task] = {
    task.name: task
    for task in (
        citation.TASK,
        movie_tagging.TASK,
        news_categorize.TASK,
        product_rating.TASK,
        news_headline.TASK,
        scholarly_title.TASK,
        tweet_paraphrase.TASK,
        movie_rating.TASK,
    )
}

# Those of the benchmark, which have files and published numbers.
LAMP_TASKS = {name: task for name, task in TASKS.items() if task.lamp_id.startswith("LaMP_")}

__all__ = ["LAMP_TASKS", "TASKS", "Task"]
