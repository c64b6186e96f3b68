"""The rate of overlapping copies is that of the medium: neither idle time nor failed copies count, and it follows what is new."""

import pytest

from backhaul.tiers.rates import BusyRate

MiB = 2**20


def rate_after(*copies):
    """Return a rate that has seen copies, one after the other, each of so many MiB in so many seconds, with ten idle seconds between."""
    now = [0.0]
    rate = BusyRate(lambda: now[0])
    for num_mib, seconds in copies:
        with rate.measure(num_mib * MiB):
            now[0] += seconds
        now[0] += 10
    return rate


def test_idle_time_does_not_count():
    assert rate_after((100, 1), (300, 3)).gbps == pytest.approx(100 * MiB / 1e9)


def test_rate_follows_a_disk_that_gets_slower():
    before, after = [(100, 1)] * 100, [(100, 4)] * 100
    assert rate_after(*before, *after).gbps == pytest.approx(25 * MiB / 1e9, rel=0.02)
    assert rate_after(*before, *after[:1]).gbps > 80 * MiB / 1e9


def test_failed_copy_does_not_count():
    rate = rate_after((100, 1))
    with pytest.raises(OSError, match="broken"), rate.measure(100 * MiB):
        raise OSError("broken")
    assert rate.gbps == pytest.approx(100 * MiB / 1e9)
