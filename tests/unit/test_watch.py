"""What a group will probably be dealt, and what may fall to it when others are lost."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from lightkeeper.lighthouse.deal import deal, deal_rest
from lightkeeper.manager import local
from lightkeeper.manager.watch import feared_share, probable_share


def plan(slot: int, members: int = 3, speeds: tuple[int, ...] = ()) -> local.Plan:
    names = tuple(f"g{i}" for i in range(members))
    return local.Plan(
        epoch=4, term=1, lighthouse="a", members=names, slot=slot, step=7, share=(), total=0, speeds=speeds
    )


def test_the_probable_share_is_what_the_groups_deal_themselves() -> None:
    assert [probable_share(plan(slot), 7) for slot in range(3)] == [(0, 1, 2), (3, 4), (5, 6)]
    assert probable_share(plan(2, speeds=(1000, 1000, 0)), 6) == ()
    assert probable_share(plan(0, speeds=(500, 1000, 0)), 6) == (0, 1)


def test_who_is_suspected_decides_what_may_fall_to_whom() -> None:
    assert feared_share(plan(0), 6, (0, 1), ["g2"]) == (4,)
    assert feared_share(plan(1), 6, (2, 3), ["g2"]) == (5,)
    assert feared_share(plan(0), 6, (0, 1), ["g1", "g2"]) == (2, 3, 4, 5)


def test_if_nobody_is_named_each_may_be_the_one() -> None:
    assert feared_share(plan(0), 6, (0, 1), []) == (2, 4)
    assert feared_share(plan(0), 6, (0, 1), ["g0"]) == (2, 4), "the own group is not lost to itself"
    assert feared_share(plan(0, members=1), 6, tuple(range(6)), []) == ()


def test_what_was_dealt_in_a_recovery_is_not_feared_again() -> None:
    """g0 holds 5 besides its own, after somebody was lost in this very step."""
    assert 5 not in feared_share(plan(0, members=2), 6, (0, 1, 2, 5), [])


@given(st.integers(2, 6), st.integers(0, 20), st.integers(0, 5), st.lists(st.integers(0, 2000), min_size=6, max_size=6))
def test_it_is_what_the_lighthouse_will_deal_after_a_first_loss(
    members: int, total: int, lost: int, speeds: list[int]
) -> None:
    lost, by = lost % members, tuple(speeds[:members])
    names = [f"g{i}" for i in range(members)]
    shares = dict(zip(names, deal(total, by), strict=True))
    stay = [name for name in names if name != names[lost]]
    held = {name: shares[name] for name in stay}
    dealt = deal_rest(total, held, stay, [by[names.index(name)] for name in stay])
    for name in stay:
        p = plan(names.index(name), members, by)
        assert feared_share(p, total, shares[name], [names[lost]]) == dealt[name][len(shares[name]) :]
