"""The latest start of copies with deadlines, against one that is told by going through all of them."""

import math

from hypothesis import given
from hypothesis import strategies as st

from backhaul.deadlines import Deadlines


@given(
    gaps=st.lists(st.floats(0, 50), min_size=1, max_size=40),
    changes=st.lists(st.tuples(st.integers(0, 39), st.floats(0.001, 30), st.booleans()), max_size=60),
)
def test_the_latest_start_is_that_of_the_queue_in_order_of_its_deadlines(gaps, changes):
    at = [sum(gaps[: end + 1]) for end in range(len(gaps))]
    queue, copies = Deadlines(at), []
    for deadline, ms, leaves in changes:
        if leaves and copies:
            gone, took = copies.pop(deadline % len(copies))
            queue.add(gone, -took)
        else:
            copies.append((deadline % len(at), ms))
            queue.add(*copies[-1])
        latest, queued = math.inf, 0.0
        for each, took in sorted(copies):
            queued += took
            latest = min(latest, at[each] - queued)
        assert math.isclose(queue.latest_start, latest, abs_tol=1e-6) or queue.latest_start == latest


def test_nothing_is_left_of_copies_that_are_gone():
    queue = Deadlines([float(number) for number in range(100)])
    for number in range(1000):
        queue.add(number % 100, 0.1 * number)
    for number in reversed(range(1000)):
        queue.add(number % 100, -0.1 * number)
    assert queue.latest_start == math.inf
