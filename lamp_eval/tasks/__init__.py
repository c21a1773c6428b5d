"""The LaMP tasks. Adding one: a file here and a line in `TASKS`."""

from lamp_eval.tasks import movie_tagging, product_rating
from lamp_eval.tasks.task import Task

TASKS: dict[str, Task] = {task.name: task for task in (movie_tagging.TASK, product_rating.TASK)}

__all__ = ["TASKS", "Task"]
