"""The arms: one way each to serve a user."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from lamp_eval import methods
from lamp_eval.config import ProtocolConfig
from lamp_eval.seeds import user_seed


@dataclass(frozen=True)
class Arm:
    """How an arm serves a user.

    Attributes:
        name: as in `lamp_eval.config.ARMS`, or registered (`lamp_eval.methods`).
        task_adapter: whether the base has the task adapter merged in.
        user_adapter: `own`, `donor` (another user's) or None.
        n_retrieved: records in the prompt.
        method: whether a registered function answers, and no model.
    """

    name: str
    task_adapter: bool
    user_adapter: str | None
    n_retrieved: int
    method: bool = False


def arm(name: str, protocol: ProtocolConfig) -> Arm:
    """The arm of a name. `task`, `user` and `cross_user` see the same prompts.

    A registered function gets prompts without retrieved records, and the histories beside them.
    """
    k, adapter_k = protocol.k, protocol.adapter_k
    ours = {
        "base": Arm(name, False, None, 0),
        "base_retrieval": Arm(name, False, None, k),
        "task": Arm(name, True, None, adapter_k),
        "task_retrieval": Arm(name, True, None, k),
        "user": Arm(name, True, "own", adapter_k),
        "cross_user": Arm(name, True, "donor", adapter_k),
    }
    registered = {own: Arm(own, False, None, 0, method=True) for own in methods.registered()}
    return (registered | ours)[name]


# Which arm is compared with which. `user` against `cross_user` is the personal part of the gain:
# what a stranger's adapter also gives (longer training, repaired quantization) is not personal.
COMPARISONS = (
    ("base_retrieval", "base"),
    ("task", "base"),
    ("task", "base_retrieval"),
    ("task_retrieval", "base_retrieval"),
    ("user", "task"),
    ("cross_user", "task"),
    ("user", "cross_user"),
)
# A registered arm is worth something if it beats these; an adapter, if it beats that arm.
METHOD_REFERENCES = ("base", "task")


def comparisons(arms: Mapping[str, Arm]) -> list[tuple[str, str]]:
    """Which arm of a run is compared with which other of it."""
    own = [name for name, chosen in arms.items() if chosen.method]
    pairs = [*COMPARISONS, *((name, other) for name in own for other in METHOD_REFERENCES)]
    pairs += [("user", name) for name in own]
    return [(name, reference) for name, reference in pairs if {name, reference} <= set(arms)]


def donors(
    user_ids: Sequence[str], seed: int, groups: Mapping[str, str] | None = None
) -> dict[str, str]:
    """For each user the donor whose adapter the cross-user control serves them with.

    A seeded derangement: the users in the order of their seeds, each served by the next.

    Args:
        user_ids: all different.
        seed: the run's.
        groups: by user id the group that the donor must be of; not given or empty: all are one.

    Returns:
        The donor's id by user id, without users who are alone in their group.
    """
    circles: dict[str | None, list[str]] = {}
    for user_id in sorted(user_ids, key=lambda user_id: (user_seed(seed, user_id), user_id)):
        circles.setdefault(groups[user_id] if groups else None, []).append(user_id)
    return {
        user_id: donor_id
        for circle in circles.values()
        if len(circle) > 1
        for user_id, donor_id in zip(circle, circle[1:] + circle[:1], strict=True)
    }
