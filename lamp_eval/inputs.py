"""What goes into a run's stages: examples and requests, made when they are first asked for."""

from __future__ import annotations

from functools import cached_property

from lamp_eval.arms import Arm, arm
from lamp_eval.config import RunConfig
from lamp_eval.data import Corpus
from lamp_eval.prompts import Encoder
from lamp_eval.records import Example, Request, User


class Inputs:
    """Examples and requests of a corpus.

    Attributes:
        arms: the run's, by name.
        needs_training: whether stage 1 has an adapter to train.
        needs_user_adapters: whether an arm is served by users' adapters.
        with_history: the evaluated users who have one.
    """

    def __init__(self, config: RunConfig, corpus: Corpus, encoder: Encoder) -> None:
        self.corpus, self.encoder = corpus, encoder
        self.arms: dict[str, Arm] = {name: arm(name, config.protocol) for name in config.arms}
        adapted = any(a.task_adapter for a in self.arms.values())
        self.needs_training = adapted and config.adapter.task.path is None
        self.needs_user_adapters = any(a.user_adapter for a in self.arms.values())
        self.with_history = [user for user in corpus.users if user.history]
        protocol = config.protocol
        self._train_k = protocol.adapter_k if protocol.train_k is None else protocol.train_k
        self._requests: dict[tuple[str, int], list[Request]] = {}
        self._examples: dict[str, list[Example]] = {}

    @cached_property
    def task_examples(self) -> list[Example]:
        """Stage 1's examples: of other users, or else of the evaluated users' records."""
        of = (
            self.encoder.task_examples
            if self.corpus.task_users_origin == "others"
            else self.encoder.user_examples
        )
        return [e for user in self.corpus.task_users for e in of(user, self._train_k)]

    def user_examples(self, user: User) -> list[Example]:
        """Stage 2's examples of a user."""
        if user.id not in self._examples:
            self._examples[user.id] = self.encoder.user_examples(user, self._train_k)
        return self._examples[user.id]

    def requests(self, arm_name: str, user: User) -> list[Request]:
        """The requests of an arm for a user; arms with the same prompts share them."""
        k = self.arms[arm_name].n_retrieved
        if (user.id, k) not in self._requests:
            self._requests[user.id, k] = self.encoder.requests(user, k)
        return self._requests[user.id, k]
