"""Which clients belong together, as a report says it."""

import pytest

from fedmix.report.membership import membership, words_of


class Made:
    """A run with what the report asks of it."""

    def __init__(self, lines, groups=None, names=("north", "south", "east", "west")):
        self.lines = lines
        self.federation = {"clients": list(names), "groups": groups}


def line(t, main, sure=0.95, experts=(0, 1), **more):
    rest = 1 - sure
    q = [[sure if k == expert else rest for k in (0, 1)] for expert in main]
    return {"round": t, "q_zs": q, "experts": list(experts), **more}


SPLIT = {"what": "split", "expert": 0, "into": [0, 1], "clients": [2, 2]}


def test_groups_their_members_and_since_when():
    run = Made([line(2, [0, 0, 0, 0], structure=[SPLIT]), line(4, [0, 0, 1, 1]), line(6, [0, 0, 1, 1])])
    found = membership(run)
    assert [(group["expert"], group["clients"]) for group in found["groups"]] == [
        (0, ["north", "south"]),
        (1, ["east", "west"]),
    ]
    assert found["since"] == 4
    assert found["sure"] == pytest.approx(0.95)
    assert found["tree"][0]["words"] == "expert 0 is split into 0, 1 with 2, 2 clients"
    assert words_of(found) == "2 groups of 2, 2 clients, unchanged since round 4; mean largest q(z|s) 0.95."


def test_true_groups_are_exact_from_the_round_after_which_they_stay():
    lines = [line(2, [1, 1, 0, 0]), line(4, [0, 1, 0, 1]), line(6, [0, 0, 1, 1]), line(8, [1, 1, 0, 0])]
    found = membership(Made(lines, groups=[0, 0, 1, 1]))
    assert found["exact_since"] == 6  # experts may change their numbers, groups stay the same
    assert words_of(found).endswith("They are the 2 true groups from round 6 on.")
    other = membership(Made(lines, groups=[0, 1, 0, 1]))
    assert other["exact_since"] is None
    assert words_of(other).endswith("They are not the 2 true groups.")


def test_unsure_clients_are_counted():
    found = membership(Made([line(2, [0, 0, 1, 1], sure=0.6)]))
    assert found["unsure"] == ["north", "south", "east", "west"]
    assert "4 clients are unsure (below 0.9)" in words_of(found)


def test_experts_that_are_not_about_clients_make_no_groups():
    without = {key: value for key, value in line(2, [0, 0, 1, 1]).items() if key != "experts"}
    assert membership(Made([without])) is None
    assert membership(Made([])) is None
    assert membership(Made([without], groups=[0, 0, 1, 1]))["exact_since"] == 2


def test_clients_that_never_took_part_are_in_no_group():
    lines = [line(2, [0, 0, 0, 0], clients=[0]), line(4, [0, 1, 0, 0], clients=[1])]
    found = membership(Made(lines, groups=[0, 1, 0, 1]))
    assert [group["clients"] for group in found["groups"]] == [["north"], ["south"]]
    assert found["unseen"] == 2
    assert found["exact_since"] == 4
    assert "2 clients have not taken part yet." in words_of(found)
