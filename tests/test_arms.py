"""What each arm is, and who serves whom in the cross-user control."""

from __future__ import annotations

import pytest

from lamp_eval.arms import COMPARISONS, Arm, arm, donors
from lamp_eval.config import ARMS, ProtocolConfig


def test_each_arm():
    protocol = ProtocolConfig(name="oppu", k=3, adapter_k=2)
    assert [arm(name, protocol) for name in ARMS] == [
        Arm("base", False, None, 0),
        Arm("base_retrieval", False, None, 3),
        Arm("task", True, None, 2),
        Arm("task_retrieval", True, None, 3),
        Arm("user", True, "own", 2),
        Arm("cross_user", True, "donor", 2),
    ]


def test_task_user_and_cross_user_see_the_same_prompts():
    for adapter_k in (0, 1, 4):
        protocol = ProtocolConfig(name="oppu", k=1, adapter_k=adapter_k)
        shown = {arm(name, protocol).n_retrieved for name in ("task", "user", "cross_user")}
        assert shown == {adapter_k}


def test_unknown_arm():
    with pytest.raises(KeyError):
        arm("nobody", ProtocolConfig(name="oppu"))


def test_comparisons_follow_the_protocol():
    assert {name for pair in COMPARISONS for name in pair} == set(ARMS)
    assert len(set(COMPARISONS)) == len(COMPARISONS)
    assert ("user", "task") in COMPARISONS
    assert ("cross_user", "task") in COMPARISONS
    assert all(arm_name != reference for arm_name, reference in COMPARISONS)


@pytest.mark.parametrize("n", [2, 3, 4, 7, 100])
@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1])
def test_donors_are_a_derangement(n, seed):
    ids = [f"user-{i}" for i in range(n)]
    donor_of = donors(ids, seed)
    assert set(donor_of) == set(ids)
    assert sorted(donor_of.values()) == sorted(ids)  # each is the donor of exactly one
    assert all(user != donor for user, donor in donor_of.items())


def test_a_donor_is_of_the_users_own_group():
    groups = {f"user-{i}": f"group-{i % 4}" for i in range(14)} | {"lonely": "group-4"}
    donor_of = donors(list(groups), 0, groups)
    assert set(donor_of) == set(groups) - {"lonely"}
    assert sorted(donor_of.values()) == sorted(donor_of)
    for user, donor in donor_of.items():
        assert user != donor
        assert groups[user] == groups[donor]
    assert donors(list(groups)[::-1], 0, groups) == donor_of
    assert len({str(sorted(donors(list(groups), seed, groups).items())) for seed in range(5)}) > 1
    assert donors(list(groups), 0, {}) == donors(list(groups), 0)


def test_donors_do_not_depend_on_the_order_of_users():
    ids = [f"user-{i}" for i in range(20)]
    assert donors(ids, 0) == donors(ids[::-1], 0) == donors(sorted(ids, key=hash), 0)


def test_donors_depend_on_the_seed():
    ids = [f"user-{i}" for i in range(20)]
    assert len({str(sorted(donors(ids, seed).items())) for seed in range(5)}) == 5


def test_donors_are_the_same_in_every_process():
    # SHA-256, not Python's salted hash: a literal that any run must give.
    assert donors(["a", "b", "c"], 0) == {"a": "b", "b": "c", "c": "a"}
