"""How much of a link's rates a plan counts on, step after step."""

from collections.abc import Callable

import pytest

from backhaul.trust import LEAST, Trust


def plans(trust: Trust, off: Callable[[float], float], num_steps: int) -> list[float]:
    """Return the shares that plans counted on, in steps after which compute has waited so much longer than foreseen."""
    shares = []
    for _ in range(num_steps):
        trust.note(off(trust.share))
        if trust.adjust():
            trust.start_anew()
            shares.append(trust.share)
    return shares


def test_one_slow_step_changes_nothing():
    offs = iter([0.0, 0.5, 0.0, 0.5, 0.0, -0.5, 0.0])
    assert plans(Trust(), lambda share: next(offs), 7) == []


@pytest.mark.parametrize(("off", "share"), [(0.02, 0.9), (0.2, 0.8), (0.9, 0.6)])
def test_trust_falls_by_as_much_as_was_waited_within_bounds(off, share):
    assert plans(Trust(), lambda _: off, 2) == [pytest.approx(share)]


def test_trust_does_not_fall_below_its_least_and_then_makes_no_more_plans():
    shares = plans(Trust(), lambda _: 0.3, 100)
    assert shares == sorted(shares, reverse=True)
    assert shares[-1] == LEAST
    assert len(shares) == len(set(shares))


def test_what_was_too_much_is_approached_and_not_reached():
    trust = Trust()
    shares = plans(trust, lambda share: 0.3 if share > 0.9 else -0.05 if share < 0.8 else 0.0, 50)
    assert shares[0] == pytest.approx(0.7)
    assert 0.8 <= trust.share < 0.9
    assert len(shares) == 2


def test_a_link_that_has_recovered_is_trusted_again():
    trust = Trust()
    plans(trust, lambda share: 0.1 if share > 0.5 else 0.0, 50)
    assert trust.share <= 0.5
    plans(trust, lambda share: -0.05 if share < 0.95 else 0.0, 50)
    assert trust.share > 0.95


def test_a_link_that_never_fits_is_tried_ever_more_rarely():
    shares = plans(Trust(), lambda share: 0.1 if share > 0.8 else -0.02, 2000)
    num_early = len(plans(Trust(), lambda share: 0.1 if share > 0.8 else -0.02, 200))
    assert num_early > 10  # it is tried
    assert len(shares) < 2 * num_early
