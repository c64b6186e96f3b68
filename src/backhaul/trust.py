"""How much of a link's measured rates a plan may count on where nothing shall wait.

Covers: less after compute has waited longer than foreseen, more again once it waits less ([Note: Trust]).
Does not cover: what a plan foresees (scheduling.py), or when it is made anew (course.py).

[Note: Trust]
A lane knows how fast its copies are, not how fast they will be: others may use the link, and beside some kernels it is slower. A plan that
counts on too much of it has copies come back late. So trust falls by as much as was waited, and rises halfway to what was too much. Where
that is near and still too little, what was too much may be over: trust may rise to all of the rates, but is ever slower to try that again.
"""

MOST_OFF = 0.01  # of a step that compute may wait longer or shorter than foreseen
ENOUGH = 2  # times in a row are no accident
LEAST = 0.4  # of the rates
LEAST_CUT, MOST_CUT = 0.1, 0.4  # of the trust there is, at once
NEAR = 0.025  # is no difference


class Trust:
    """The part of a link's rates to count on.

    >>> trust = Trust()
    >>> for _ in range(2):  # compute waited a fifth of a step longer than foreseen
    ...     trust.note(0.2)
    >>> trust.adjust(), trust.share
    (True, 0.8)
    """

    def __init__(self) -> None:
        self.share = 1.0
        self._too_much = 1.0  # a share that the link did not deserve
        self._off = 0.0  # share of the latest step that compute waited longer than foreseen
        self._num_longer = 0  # times in a row that it was too much longer,
        self._num_shorter = 0  # or shorter
        self._patience = ENOUGH  # times shorter until it is worth a try whether what was too much still is

    def note(self, off: float) -> None:
        """Note by which share of a step compute has waited longer than the plan for it foresaw."""
        self._off = off
        self._num_longer = self._num_longer + 1 if off > MOST_OFF else 0
        self._num_shorter = self._num_shorter + 1 if off < -MOST_OFF else 0

    def adjust(self) -> bool:
        """Trust the link less, or more again, if it is time to. Say whether that is worth another plan."""
        before = self.share
        if self._num_longer >= ENOUGH:
            self._too_much = before
            self.share = max(LEAST, before * (1 - min(MOST_CUT, max(LEAST_CUT, self._off))))
        elif self._num_shorter >= ENOUGH:
            if self._too_much - before < NEAR and self._num_shorter >= self._patience:
                self._too_much = 1.0
                self._patience *= 2
            if self._too_much - before >= NEAR:
                self.share = (before + self._too_much) / 2
        return self.share != before

    def start_anew(self) -> None:
        """Count afresh: there is another plan."""
        self._num_longer = self._num_shorter = 0
