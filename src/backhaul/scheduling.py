"""What a learned step tells about the next one: which blob should leave when, and when it should start back.

Covers: the schedule made from the record of a step and its pace ([Note: Schedule]).
Does not cover: what is known of a step beforehand (foresight.py), what to do while nothing is known or a step turns out different
(flow.py), or real copies (engine.py).

[Note: Schedule]
A step is a list of events, saves and needs, with the compute time between them. The schedule is found by playing the step against the
link, greedily, with its whole future known, and it is a list of decisions for each event:

* Copy out, whenever the lane is idle before the next event: the resident blob whose next use is furthest, if a round trip ends before that
  use. Where all that the link hides shall go, only with some slack, and if every reload that it joins can be in time.
* Release, only when room is needed: the copied blob whose next use is furthest and whose copy has ended. Where there is none, compute
  waits for the copy that ends first. Where all that the link hides shall go, release whatever has been copied, and what has been used only
  if it can be back in time for its next use.
* Reload in order of use: find the latest start that meets every coming use, and start then. A reload makes room by releasing what is used
  later.

Without a budget all that the link hides goes, but for what would leave when the peak is over. In a step of one pass, somewhat more goes
than the budget needs, unless compute waits longer then, or the device for the host, to which each copy is work: after the forward comes the
loss, which needs memory of which nothing is known here, so the peak may be still to come when the budget is met. In a pipeline there would
be no end to it.

Where the host reads from the device (``.item()``, a router's counts), its small copy waits for the chunk on the copy engine, and then the
device has nothing to do until the host has gone on. So a copy out does not run into such a moment, and little is issued just after it: what
is due then is issued before. Copies out may have to do without such manners where the budget is tight: both is played.

Bytes moved beyond what the budget needs slow down the other direction and the compute beside them, so only the longest-lived share of each
frame may leave. A few shares are played, and the one that costs least is kept; copies of what is then never released are left out, unless
sizes change from step to step, where they are spares.
"""

import heapq
import math
from bisect import bisect, insort
from collections.abc import Sequence

from backhaul.deadlines import Deadlines
from backhaul.foresight import Table
from backhaul.schedules import Schedule
from backhaul.steps import Step
from backhaul.wire import CopyOut, Decision, Link, Release, Reload, Wire

COPY_COST = 0.01  # ms that a ms of copying costs the compute beside it
READ_COST = 0.6  # ms that the host waits longer, about two reads one soon after the other, while the lane to the tier is busy
ISSUE_COST = 1e-9  # ms a byte that it takes to issue a copy: 30 us a chunk
SLACK_MS = 2.0  # reloads start so much sooner than they must, or just in time where the host is busy
TRUST = 0.98  # of the link's rates, so that copies that are a little late do not delay all that follow
QUIET_MS = 0.3  # before the host reads, in which no copy to the tier should run
POLITE = 0.7  # of the lane's time is enough, where copies keep out of the host's way
EAGER = 0.0005  # of a step that compute may wait longer for more to move than the budget needs
WORTH = 0.8  # of the peak, or less, and copies mind the host no more without a budget
OUTLOOK_MS = 400.0  # that the bytes which have to leave are foreseen for
SURPLUS = (1.1, 1.3)  # shares to try, as multiples of the share that the budget must move at the peak
MORE = 1.5  # the same in a step of one pass, as far as the link hides it


def schedule(
    step: Step,
    gaps: Sequence[float],
    *,
    link: Link,
    budget: int | None,
    reads: Sequence[int] = (),
    host_is_ahead: bool = True,
    trust: float = 1.0,
) -> Schedule:
    """Find when each blob of a step should leave and come back ([Note: Schedule]).

    Args:
        step: what is expected to happen again.
        gaps: ms of compute between each of its events and the next.
        link: rates of the tier.
        budget: bytes that may be resident; ``None`` moves what the link hides.
        reads: events just before which the host read from the device, sorted.
        host_is_ahead: whether the host gives the device work in time, so that more copies cost nothing.
        trust: the part of the link's rates to count on for what nothing shall wait for.
    """
    table = Table(step, gaps, reads)
    link = link.slower(TRUST)
    hiding = link.slower(trust)
    manners = (True, False) if reads else (True,)
    if budget is None:
        best, *others = (_Play(table, hiding, None, 1.0, polite=polite).run() for polite in manners)
        found = min(others, key=lambda each: each.peak_bytes, default=best)
        return (found if found.peak_bytes < WORTH * best.peak_bytes else best).up_to_peaks(step, turn=table.turn)
    excess = 1 - budget / (max(table.alive) or 1)
    if excess <= 0:
        return Schedule({}, table.at, 0.0, 0.0)

    def least(link: Link) -> Schedule:
        """Return the play that costs least and moves what the budget needs."""
        best = Schedule({}, table.at, math.inf, math.inf, math.inf)
        for polite in manners:
            for share in (1.0, *(excess * surplus for surplus in SURPLUS if excess * surplus < 1)):
                found = _Play(table, link, budget, share, polite=polite).run(limit=best.cost_ms)
                best = min(best, found, key=lambda each: each.cost_ms)
        return best

    best = least(link)
    if table.is_one_pass and host_is_ahead:
        # On a link that is trusted less, what the budget needs takes longer, too.
        most = (best if hiding == link else least(hiding)).wait_ms + EAGER * table.at[-1]
        share = min(1.0, excess * MORE)
        plays = [_Play(table, hiding, budget, share, polite=polite, eager=True).run(limit=most) for polite in manners]
        found = min(plays, key=lambda each: each.wait_ms)
        best = found.up_to_peaks(step, turn=table.turn, budget=budget) if found.wait_ms <= most else best
    return best


class _Play:
    """One playing of a step against the wire, in which the share of each frame that lives longest may leave."""

    def __init__(self, table: Table, link: Link, budget: int | None, share: float, *, polite: bool = True, eager: bool = False) -> None:
        self.table = table
        self.polite = polite  # copies to the tier keep out of the host's way where they can afford to
        self.budget = budget
        self.eager = eager or budget is None  # moves what the link hides, whether the budget needs it or not
        self.share = share
        self.wire = Wire(link)
        self.sizes = table.step.sizes
        self.num_events = len(table.step.events)
        self.resident = [False] * len(self.sizes)
        self.has_copy = [False] * len(self.sizes)
        self.resident_bytes = 0  # movable ones
        self.levels: list[int] = []  # by event: bytes that are resident after it
        self.leavers: list[tuple[int, int]] = []  # heap of (-next use, item): resident, not copied, within the share
        self.others: list[tuple[int, int]] = []  # the same, beyond the share: they leave if the budget cannot be met otherwise
        self.copied: list[tuple[int, int]] = []  # the same, resident and copied
        self.back: list[tuple[int, int]] = []  # the same, and brought back for a use to come, where the others leave as soon as they can
        self.absent: list[tuple[int, int]] = []  # (next use, item), sorted
        self.reloads = Deadlines(table.at)  # of these, were there no more stalls
        self.pledged: dict[int, int] = {}  # item: next use, of what has been copied and not used since, if eager
        self.deadlines = Deadlines(table.at)  # of the reloads that these may need
        self.next_use = [needs[0] if needs else self.num_events for needs in table.needs]
        self.num_uses = [0] * len(self.sizes)
        self.decisions: dict[int, list[Decision]] = {}
        self.issued: list[Decision] = []
        self.at: list[float] = []  # by event: when it happened
        self.slip = 0.0  # ms of stall so far
        self.num_reads = 0  # of the host, so far
        self.quiet = math.inf  # when the host reads next, were there no more stalls; inf where copies need not care
        self.host_is_busy = False
        self.host_ms = 0.0  # that the host is kept from giving the device work

    def run(self, limit: float = math.inf) -> Schedule:
        """Play the step to its end, or until it costs more than ``limit``."""
        table, wire, gaps = self.table, self.wire, self.table.gaps
        for position, event in enumerate(table.step.events):
            for item in table.drops.get(position, ()):
                self._drop(item)
            self.issued = []
            item = event if event >= 0 else ~event
            arrival = wire.now
            self.at.append(arrival)
            room = None if self.budget is None else self.budget - table.step.fixed[position]
            if self.num_reads < len(table.reads) and (position >= table.reads[self.num_reads] or not position):
                self._mind_the_host(position, room)
            was_busy, self.host_is_busy = self.host_is_busy, table.is_busy(position)
            if self.host_is_busy and not was_busy and wire.backlog_out():
                self.host_ms += READ_COST
            if event >= 0:
                self._arrive(item)
                self._offer(item)
            else:
                self._use(item, room)
            if room is not None:
                self._make_room(room, item)
            due = wire.now + gaps[position]
            if wire.coming(item):
                due += wire.eta_in(item)
            if self.eager:
                self._release_copied(item, due)
            is_alone = event < 0 and self.resident_bytes == self.sizes[item] and table.step.drops[item] <= position + 1
            if room is not None and is_alone:
                room += self.sizes[item]
            busy_ms = max(0.0, table.free_at[position] - table.at[position] - gaps[position])
            self._reload_until(due + busy_ms, room)
            self._copy_out_until(due + busy_ms if self.quiet == math.inf else due)
            if event < 0:
                wire.wait_in(item)
                self._offer_again(item)
            self.levels.append(self.resident_bytes + table.step.fixed[position])
            self.slip += wire.now - arrival
            if self.issued:
                self.decisions[position] = self.issued
            if self.slip + self.host_ms > limit:
                return Schedule(self.decisions, self.at, self.slip, math.inf, math.inf)
            wire.advance(wire.now + gaps[position])
        wait_ms = self.slip + self.host_ms
        cost_ms = wait_ms + COPY_COST * (wire.bytes_out * wire.out_ms + wire.bytes_in * wire.in_ms)
        return Schedule(self.decisions, self.at, self.slip, cost_ms, wait_ms, self.levels, self.eager)

    def _keep_host(self, item: int) -> None:
        """Count what it costs to issue a copy of the item."""
        if self.host_is_busy:
            self.host_ms += ISSUE_COST * self.sizes[item]

    def _arrive(self, item: int) -> None:
        self.resident[item] = True
        self.resident_bytes += self.sizes[item]

    def _drop(self, item: int) -> None:
        if self.resident[item]:
            self.resident_bytes -= self.sizes[item]
            self.resident[item] = False
        elif self.has_copy[item] and self.next_use[item] < self.num_events:
            self._unlist(item)
        self._redeem(item)
        self.next_use[item] = -1

    def _offer(self, item: int) -> None:
        """Let the item be chosen to leave, if it may."""
        if self.has_copy[item]:
            heapq.heappush(self.copied, (-self.next_use[item], item))
        elif self.table.depth[item] < math.inf:
            heapq.heappush(self.leavers if self.table.depth[item] < self.share else self.others, (-self.next_use[item], item))

    def _use(self, item: int, room: int | None) -> None:
        """Bring the item back if it is away, and let its next use be the one after."""
        if not self.resident[item]:
            if room is not None:
                self._make_room(room - self.sizes[item], item)
            self._reload(item)
        self.num_uses[item] += 1
        needs = self.table.needs[item]
        more = self.num_uses[item] < len(needs)
        self._redeem(item)
        self.next_use[item] = needs[self.num_uses[item]] if more else self.num_events

    def _offer_again(self, item: int) -> None:
        """Let the item that was just needed leave from the next event on.

        What is needed no more but stays alive, as between the halves of a split backward, is the first to go where that costs no copy.
        """
        use = self.next_use[item]
        if self.eager and self.has_copy[item] and use < self.num_events:
            if not self._pays(item, use):  # it would have to come back at once
                if self.budget is not None:  # but may have to make room
                    heapq.heappush(self.back, (-use, item))
                return
            self._pledge(item)
        if use < self.num_events or (self.has_copy[item] and self.table.step.drops[item] > len(self.at)):
            self._offer(item)

    def _pledge(self, item: int) -> None:
        """Promise to have the item back in time, wherever it is."""
        self.pledged[item] = self.next_use[item]
        self.deadlines.add(self.next_use[item], self.sizes[item] * self.wire.in_ms)

    def _redeem(self, item: int) -> None:
        use = self.pledged.pop(item, None)
        if use is not None:
            self.deadlines.add(use, -self.sizes[item] * self.wire.in_ms)

    def _unlist(self, item: int) -> None:
        self.absent.remove((self.next_use[item], item))
        self.reloads.add(self.next_use[item], -self.sizes[item] * self.wire.in_ms)

    def _reload(self, item: int) -> None:
        self._unlist(item)
        self._arrive(item)
        self.issued.append(Reload(item))
        self._keep_host(item)
        self.wire.copy_in(item, self.sizes[item])

    def _release(self, item: int) -> None:
        self.wire.play(Release(item), 0)
        self.issued.append(Release(item))
        self.resident[item] = False
        self.resident_bytes -= self.sizes[item]
        if self.next_use[item] < self.num_events:  # else nobody wants it back
            insort(self.absent, (self.next_use[item], item))
            self.reloads.add(self.next_use[item], self.sizes[item] * self.wire.in_ms)
            if self.eager and item not in self.pledged:  # it was brought back, and has to go once more
                self._pledge(item)

    def _copy_out(self, item: int) -> None:
        self.issued.append(CopyOut(item))
        self._keep_host(item)
        self.wire.copy_out(item, self.sizes[item])
        self.has_copy[item] = True
        if self.eager:
            self._pledge(item)
        self._offer(item)

    def _victim(self, spared: int, later_than: int = -1) -> int | None:
        """Take the copied resident item whose next use is furthest and whose copies have ended, if that use is late enough."""
        for heap in sorted((heap for heap in (self.copied, self.back) if heap), key=lambda heap: heap[0]):
            found = self._furthest(heap, spared, later_than)
            if found is not None:
                return found
        return None

    def _furthest(self, copied: list[tuple[int, int]], spared: int, later_than: int = -1) -> int | None:
        waiting = []
        found = None
        while copied and found is None:
            entry = heapq.heappop(copied)
            use, item = -entry[0], entry[1]
            if not self.resident[item] or use != self.next_use[item]:
                continue
            if use <= later_than:
                waiting.append(entry)
                break
            if item == spared or self.wire.leaving(item) or self.wire.coming(item):
                waiting.append(entry)
            else:
                found = item
        for entry in waiting:
            heapq.heappush(copied, entry)
        return found

    def _make_room(self, room: int, spared: int) -> None:
        while self.resident_bytes > room:
            item = self._victim(spared)
            if item is None:
                item = self._soonest(spared)
            if item is None:
                return
            self._release(item)

    def _soonest(self, spared: int) -> int | None:
        """Return the item whose copy out ends first; start one if there is none."""
        for item in self.wire.queue_out():
            if item != spared and self.resident[item] and self.next_use[item] >= 0:
                return item
        kept = []
        found = None
        while found is None and (self.leavers or self.others):
            heap = min((heap for heap in (self.leavers, self.others) if heap), key=lambda heap: heap[0])
            entry = heapq.heappop(heap)
            use, item = -entry[0], entry[1]
            if not self.resident[item] or self.has_copy[item] or use != self.next_use[item]:
                continue
            if item == spared:
                kept.append((heap, entry))
                continue
            found = item
            self._copy_out(item)
        for heap, entry in kept:
            heapq.heappush(heap, entry)
        return found

    def _reload_until(self, due: float, room: int | None) -> None:
        """Start the reloads that must start before then so that every coming use is met.

        Where nothing is resident but what the node at work has been given, and that goes with it, the budget is for what comes after.
        """
        wire = self.wire
        due = due if self.host_is_busy else due + SLACK_MS
        while self.absent and wire.now + wire.backlog_in() < due:
            if self.reloads.latest_start + self.slip > due:
                return
            use, item = self.absent[0]
            while room is not None and self.resident_bytes + self.sizes[item] > room:
                victim = self._victim(item, use)
                if victim is None:
                    return
                self._release(victim)
            self._reload(item)
            if room is not None:
                heapq.heappush(self.back if self.eager else self.copied, (-use, item))

    def _copy_out_until(self, due: float) -> None:
        """Keep the lane to the tier busy until then."""
        wire = self.wire
        while self.leavers and wire.now + wire.backlog_out() < due and not (self.host_is_busy and self.quiet < math.inf):
            use, item = -self.leavers[0][0], self.leavers[0][1]
            if not self.resident[item] or self.has_copy[item] or use != self.next_use[item]:
                heapq.heappop(self.leavers)
            elif not self._pays(item, use) or self._disturbs(item):
                return
            else:
                heapq.heappop(self.leavers)
                self._copy_out(item)

    def _pays(self, item: int, use: int) -> bool:
        """Say whether a round trip ends before the item is used, and, where all goes that the link hides, every other use is met."""
        wire, at = self.wire, self.table.at
        size = self.sizes[item]
        back = wire.now + wire.backlog_out() + size * (wire.out_ms + wire.in_ms)
        if back + (SLACK_MS if self.eager else 0.0) > at[use] + self.slip:
            return False
        if not self.eager:
            return True
        self.deadlines.add(use, size * wire.in_ms)
        latest = self.deadlines.latest_start
        self.deadlines.add(use, -size * wire.in_ms)
        return latest + self.slip >= wire.now + wire.backlog_in() + SLACK_MS

    def _mind_the_host(self, position: int, room: int | None) -> None:
        """Note when the host reads next, and whether copies can afford to keep out of its way until then."""
        table = self.table
        while self.num_reads < len(table.reads) and table.reads[self.num_reads] <= position:
            self.num_reads += 1
        self.quiet = table.at[table.reads[self.num_reads]] if self.num_reads < len(table.reads) else math.inf
        if not self.polite:
            self.quiet = math.inf
        if self.quiet == math.inf or room is None:
            return
        # Bytes that have to be released, by event, beside those that can be at once, against what so much of the lane moves until then.
        at_hand = (item for use, item in (*self.copied, *self.back) if self.next_use[item] == -use and self.resident[item])
        pressing = self.resident_bytes - room - sum(map(self.sizes.__getitem__, at_hand))
        returning = iter((*self.absent, (self.num_events, -1)))
        use, item = next(returning)
        for peak in range(bisect(table.peaks, position), len(table.peaks)):
            later = table.peaks[peak]
            while use < later:
                pressing += self.sizes[item]
                use, item = next(returning)
            ms = table.at[later] - table.at[position]
            if ms > OUTLOOK_MS:
                return
            if pressing + table.alive[later] - table.alive[position] > POLITE * ms / self.wire.out_ms:
                self.quiet = math.inf
                return

    def _disturbs(self, item: int) -> bool:
        """Say whether a copy out would run into a moment at which the host reads, and can wait until it has."""
        took = self.sizes[item] * self.wire.out_ms
        fits = took < self.quiet - self.table.since[len(self.at) - 1] - QUIET_MS  # between two reads at all
        return fits and self.wire.now + self.wire.backlog_out() + took > self.quiet + self.slip - QUIET_MS

    def _release_copied(self, spared: int, due: float) -> None:
        """Release what has been copied. Under a budget, nothing that would have to start back before then: it can still make room."""
        while (item := self._furthest(self.copied, spared)) is not None:
            use = self.next_use[item]
            start = self.table.at[use] + self.slip - self.sizes[item] * self.wire.in_ms
            if self.budget is not None and use < self.num_events and start < due + SLACK_MS:
                self._redeem(item)
                heapq.heappush(self.back, (-use, item))
            else:
                self._release(item)
