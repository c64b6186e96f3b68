"""Where the device's time goes, from a trace made by hand."""

import pytest

from benchmarks.kernels import Usage, compare, main, usage


def kernel(start: float, end: float, name: str = "void at::native::gemm") -> dict:
    return {"cat": "kernel", "ts": start, "dur": end - start, "name": name}


def copy(start: float, end: float, num_bytes: int, name: str = "Memcpy DtoH (Device -> Pinned)") -> dict:
    return {"cat": "gpu_memcpy", "ts": start, "dur": end - start, "name": name, "args": {"bytes": num_bytes}}


def test_each_gap_has_one_cause():
    found = usage(
        [
            kernel(0, 1000),
            copy(1300, 1302, 8),  # behind the chunk
            copy(900, 1290, 32 << 20),
            kernel(1500, 2000),
            copy(2010, 2012, 8),
            kernel(2100, 2200),
            kernel(2400, 3000),  # 200 us, soon after the last read
            kernel(3010, 4000),  # 10 us
            copy(4100, 4500, 32 << 20, "Memcpy HtoD (Pinned -> Device)"),
            kernel(5000, 6000),  # a second
        ]
    )
    assert found.gap_ms == {
        "a read behind a chunk": 0.5,
        "a read": 0.1,
        "the host, soon after a read": 0.2,
        "launches": 0.01,
        "the host": 1.0,
    }
    assert (found.busy_ms, found.span_ms) == (pytest.approx(4.19), 6.0)


def test_kernels_that_overlap_are_busy_once_and_counted_each():
    found = usage([kernel(0, 1000, "a"), kernel(500, 1500, "b"), kernel(600, 700, "b")])
    assert found.busy_ms == found.span_ms == 1.5
    assert found.kernel_ms == {"a": 1.0, "b": 1.1}
    assert not found.gap_ms


def test_the_largest_difference_comes_first():
    base, now = usage([kernel(0, 100, "a"), kernel(100, 200, "b")]), usage([kernel(0, 150, "a"), kernel(200, 1200, "c")])
    lines = compare(now, base).splitlines()
    assert [line.split()[-1] for line in lines] == ["c", "b", "a"]
    assert lines[0].split()[:3] == ["+1.00", "ms", "+1"]


def test_an_empty_trace_has_no_usage():
    assert usage([]) == Usage()


@pytest.mark.skipif("__import__('torch').cuda.is_available()")
def test_it_says_that_it_needs_a_device(capsys):
    with pytest.raises(SystemExit):
        main(["W1"])
    assert "no such device" in capsys.readouterr().err
