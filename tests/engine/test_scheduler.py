"""The scheduler alone: a plain simulation runs its plans and checks every promise."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import hypothesis.strategies as st
import pytest
from hypothesis import given, settings

from deepinfer_neuron.cache.blocks import BlockManager
from deepinfer_neuron.cache.pools import BLOCK_TOKENS
from deepinfer_neuron.engine.request import Request, State
from deepinfer_neuron.engine.scheduler import Scheduled, Scheduler, SchedulerConfig
from deepinfer_neuron.runner.plan import CONTINUE, StepPlan
from deepinfer_neuron.sampling.params import SamplingParams


@dataclass
class FakeData:
    """Stands for what the executor knows of a sequence."""

    scores_prompt: bool = False


def request(name: str, prompt: list[int], max_tokens: int, arrival: float = 0.0) -> Request:
    data: Any = FakeData()
    params = SamplingParams(max_tokens=max_tokens)
    return Request(name, prompt, params, data, arrival, len(prompt) + max_tokens)


@dataclass
class Applied:
    """What a simulated step did for a request."""

    tokens: list[int]
    cached: int
    drafts: int


@dataclass
class Simulation:
    """Runs plans without a network: token ``i`` of a request is ``1000 + i``.

    A draft is right with probability ``quality``. ``contents`` remembers which token each cache
    place holds, so a row that would read something else than its own sequence is caught.
    """

    scheduler: Scheduler
    depth: int
    """Steps in flight before results are applied."""
    quality: float = 0.5
    rng: random.Random = field(default_factory=lambda: random.Random(1))
    inflight: list[tuple[Scheduled, list[Applied]]] = field(default_factory=list)
    contents: dict[tuple[int, int], int] = field(default_factory=dict)
    tokens: dict[str, list[int]] = field(default_factory=dict)
    drafts: dict[str, list[int]] = field(default_factory=dict)

    def known(self, item: Request) -> list[int]:
        """Tokens the executor would know, those of steps in flight included."""
        return self.tokens.setdefault(item.request_id, list(item.prompt_token_ids))

    def step(self) -> bool:
        """Plan and run a step; apply the results of the one ``depth`` steps before.

        Returns ``False`` once there is nothing left to plan or to apply.
        """
        scheduled = self.scheduler.schedule()
        busy = scheduled is not None or bool(self.inflight)
        if scheduled is not None:
            self.inflight.append((scheduled, self.run(scheduled)))
        while len(self.inflight) > (self.depth if scheduled is not None else 0):
            self.apply(*self.inflight.pop(0))
        return busy

    def once(self) -> Scheduled:
        """Plan a step, run it and apply it."""
        scheduled = self.scheduler.schedule()
        assert scheduled is not None
        self.apply(scheduled, self.run(scheduled))
        return scheduled

    def run(self, scheduled: Scheduled) -> list[Applied]:
        plan = scheduled.plan
        assert plan.num_rows <= self.scheduler.config.max_num_batched_tokens
        assert len(set(plan.slots.tolist())) == len(plan.slots)
        assert 0 not in plan.slots
        return [self._run_one(item, plan, i) for i, item in enumerate(scheduled.requests)]

    def _run_one(self, item: Request, plan: StepPlan, entry: int) -> Applied:
        known, table, rows = self.known(item), plan.tables[entry], int(plan.rows[entry])
        begin, drafts = int(plan.begin[entry]), self.drafts.get(item.request_id, [])
        if begin == CONTINUE:
            if len(known) == item.max_length:
                return Applied([], 0, 0)
            begin = len(known) - 1
        verified = drafts[: begin + rows - len(known)] if plan.samples[entry] else []
        end = len(known) + len(verified) if plan.samples[entry] else begin + rows
        fed = known + verified
        for position in range(begin, end):
            block = int(table[position // BLOCK_TOKENS])
            assert block > 0
            self.contents[block, position % BLOCK_TOKENS] = fed[position]
        for position in range(end):
            place = int(table[position // BLOCK_TOKENS]), position % BLOCK_TOKENS
            assert self.contents[place] == fed[position], "read a stranger's key"
        if not plan.samples[entry]:
            return Applied([], end, 0)
        new = [1000 + len(known)]
        for draft in verified:
            if draft != new[-1]:
                break
            new.append(new[-1] + 1)
        known += new
        count = max(0, min(self.scheduler.config.nextn, item.max_length - len(known) - 1))
        self.drafts[item.request_id] = [
            1000 + len(known) + i if self.rng.random() < self.quality else -1 for i in range(count)
        ]
        return Applied(new, len(known) - 1, count)

    def apply(self, scheduled: Scheduled, results: list[Applied]) -> None:
        plan = scheduled.plan
        for i, (item, result) in enumerate(zip(scheduled.requests, results, strict=True)):
            if plan.samples[i]:
                item.inflight.popleft()
            if item.state is State.FINISHED:
                continue
            item.token_ids += result.tokens
            item.drafts = result.drafts if result.tokens else item.drafts
            if item.slot and result.cached:
                self.scheduler.commit(item, result.cached)
            if item.known == item.max_length:
                self.scheduler.finish(item)


def make(
    num_blocks: int = 20,
    seqs: int = 4,
    budget: int = 64,
    pages: int | None = None,
    interval: int = 1,
    nextn: int = 0,
) -> Scheduler:
    config = SchedulerConfig(seqs, budget, 16, interval, nextn)
    manager = BlockManager(num_blocks, num_blocks if pages is None else pages, 1)
    return Scheduler(config, manager)


def drain(simulation: Simulation, limit: int = 5000) -> int:
    """Run until nothing is left; returns the number of steps."""
    for count in range(limit):
        if not simulation.step():
            return count
    raise AssertionError("the scheduler does not come to an end")


class TestOrder:
    def test_a_lone_prompt_starts_at_once(self) -> None:
        scheduler = make()
        scheduler.add(request("a", [1] * 10, 3))
        scheduled = scheduler.schedule()
        assert scheduled is not None
        assert scheduled.plan.rows.tolist() == [10]

    def test_running_requests_get_their_row_before_prompts_get_the_rest(self) -> None:
        scheduler = make(budget=8)
        simulation = Simulation(scheduler, depth=0)
        scheduler.add(request("a", [1] * 4, 50))
        simulation.step()
        scheduler.add(request("long", [2] * 100, 5))
        for _ in range(14):
            scheduled = simulation.once()
            assert scheduled.requests[0].request_id == "a"
            assert scheduled.plan.num_rows == 8

    def test_the_attempt_interval_spaces_prompt_rows(self) -> None:
        scheduler = make(budget=8, interval=3)
        simulation = Simulation(scheduler, depth=0)
        scheduler.add(request("a", [1] * 4, 50))
        simulation.step()
        scheduler.add(request("long", [2] * 100, 5))
        sizes = []
        for _ in range(9):
            sizes.append(simulation.once().plan.num_rows)
        assert sizes == [1, 1, 8] * 3

    def test_first_come_first_served(self) -> None:
        scheduler = make(seqs=1)
        for name in "abc":
            scheduler.add(request(name, [1] * 4, 2))
        simulation = Simulation(scheduler, depth=0)
        order = []
        while scheduler.num_unfinished:
            order += [item.request_id for item in simulation.once().requests]
        assert order == ["a", "a", "b", "b", "c", "c"]


class TestPreemption:
    def test_the_youngest_gives_way_and_comes_back(self) -> None:
        scheduler = make(num_blocks=4, budget=400)
        old = request("old", [1] * 120, 150, arrival=0.0)
        young = request("young", [2] * 120, 100, arrival=1.0)
        scheduler.add(old)
        scheduler.add(young)
        simulation = Simulation(scheduler, depth=0)
        drain(simulation)
        assert old.preemptions == 0
        assert young.preemptions > 0
        assert len(young.token_ids) == 100
        assert scheduler.counters.preemptions == young.preemptions

    @pytest.mark.parametrize("depth", [0, 1])
    def test_everything_is_free_afterwards(self, depth: int) -> None:
        scheduler = make(num_blocks=6, budget=300, seqs=3)
        for index in range(8):
            scheduler.add(request(str(index), [index] * 100, 120, arrival=float(index)))
        drain(Simulation(scheduler, depth))
        assert scheduler.blocks.usage().used == 0
        assert scheduler.num_unfinished == 0


class TestDrafts:
    @pytest.mark.parametrize("depth", [0, 1])
    def test_good_drafts_take_fewer_steps(self, depth: int) -> None:
        steps = []
        for quality in (0.0, 1.0):
            scheduler = make(nextn=5)
            scheduler.add(request("a", [1] * 10, 60))
            steps.append(drain(Simulation(scheduler, depth, quality)))
        assert steps[1] < 15 < 60 <= steps[0]

    def test_drafts_leave_rows_for_prompts(self) -> None:
        """A budget below all whole blocks: a prompt starts beside a request that drafts."""
        scheduler = make(seqs=4, budget=8, nextn=7)
        simulation = Simulation(scheduler, depth=0, quality=0.0)
        scheduler.add(request("a", [1] * 3, 40))
        for _ in range(3):
            simulation.once()
        late = request("b", [2] * 3, 4)
        scheduler.add(late)
        for _ in range(3):
            simulation.once()
        assert late.token_ids

    def test_a_resumed_request_waits_for_room_for_its_drafts(self) -> None:
        scheduler = make(num_blocks=8, budget=64, nextn=5)
        simulation = Simulation(scheduler, depth=0, quality=1.0)
        item = request("a", [1] * 60, 40)
        scheduler.add(item)
        simulation.once()
        assert (item.known, item.drafts) == (61, 5)
        scheduler._preempt(item)
        assert simulation.once().plan.rows.tolist() == [60]
        assert simulation.once().plan.rows.tolist() == [6]

    def test_rows_share_the_budget_when_it_is_too_small_for_all_drafts(self) -> None:
        scheduler = make(seqs=4, budget=10, nextn=5)
        for name in "abcd":
            scheduler.add(request(name, [1] * 2, 40))
        simulation = Simulation(scheduler, depth=0)
        for _ in range(3):
            scheduled = simulation.once()
        assert scheduled.plan.rows.tolist() == [2, 2, 2, 2]

    @pytest.mark.parametrize("depth", [0, 1])
    @pytest.mark.parametrize("limit", [1, 2, 3, 7])
    def test_the_last_block_of_the_pool_holds_the_last_token(self, depth: int, limit: int) -> None:
        """One sequence, exactly as long as the pool: no draft asks for another block."""
        scheduler = make(num_blocks=3, budget=300, nextn=7)
        item = request("a", [1] * (2 * BLOCK_TOKENS - limit), limit)
        scheduler.add(item)
        drain(Simulation(scheduler, depth, quality=1.0))
        assert len(item.token_ids) == limit
        assert item.preemptions == 0

    def test_a_preempted_request_goes_on_with_its_drafts(self) -> None:
        scheduler = make(num_blocks=4, budget=400, nextn=5)
        scheduler.add(request("old", [1] * 120, 150, arrival=0.0))
        young = request("young", [2] * 120, 100, arrival=1.0)
        scheduler.add(young)
        simulation = Simulation(scheduler, depth=0, quality=1.0)
        while not young.preemptions:
            simulation.step()
        known, waiting = young.known, young.drafts
        assert waiting > 0
        while young.state is State.WAITING:
            scheduled = simulation.once()
        entry = scheduled.requests.index(young)
        assert scheduled.plan.begin[entry] + scheduled.plan.rows[entry] == known + waiting
        drain(simulation)
        assert len(young.token_ids) == 100


class TestPrefixes:
    def test_a_shared_prefix_is_computed_once(self) -> None:
        scheduler = make(num_blocks=200, seqs=32, budget=512)
        shared = [7] * 512
        for index in range(32):
            scheduler.add(request(str(index), [*shared, index, index + 1], 2))
        drain(Simulation(scheduler, depth=0))
        assert scheduler.counters.prefill_tokens == 512 + 32 * 2
        assert scheduler.counters.prefix_hits == 31 * 512

    def test_a_prompt_that_scores_its_tokens_skips_the_cache(self) -> None:
        scheduler = make(num_blocks=20, budget=512)
        for name in "ab":
            item = request(name, [7] * 300, 2)
            item.data.scores_prompt = True  # type: ignore[misc]
            scheduler.add(item)
        drain(Simulation(scheduler, depth=0))
        assert scheduler.counters.prefix_hits == 0
        assert scheduler.counters.prefill_tokens == 600

    def test_at_least_one_token_is_computed(self) -> None:
        scheduler = make(num_blocks=20, budget=512)
        simulation = Simulation(scheduler, depth=0)
        for name in "ab":
            scheduler.add(request(name, [7] * 256, 2))
            drain(simulation)
        assert scheduler.counters.prefix_hits == 128

    def test_an_aborted_owner_frees_those_who_wait_for_it(self) -> None:
        scheduler = make(num_blocks=20, budget=64)
        owner, other = request("owner", [7] * 300, 2), request("other", [7] * 300, 2)
        scheduler.add(owner)
        scheduler.add(other)
        simulation = Simulation(scheduler, depth=0)
        simulation.step()
        assert other.state is State.WAITING
        scheduler.finish(owner)
        drain(simulation)
        assert len(other.token_ids) == 2


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 2**32),
    num_blocks=st.integers(5, 24),
    pages=st.integers(1, 24),
    budget=st.integers(4, 200),
    depth=st.integers(0, 1),
    interval=st.integers(1, 4),
    nextn=st.integers(0, 7),
    quality=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
)
def test_any_load_is_served_completely(
    seed: int,
    num_blocks: int,
    pages: int,
    budget: int,
    depth: int,
    interval: int,
    nextn: int,
    quality: float,
) -> None:
    """Random arrivals, drafts, shared prefixes and aborts: right keys, all tokens, no leak."""
    rng = random.Random(seed)
    scheduler = make(num_blocks, 4, max(budget, 4), min(pages, num_blocks), interval, nextn)
    most = (num_blocks - 1) * BLOCK_TOKENS
    simulation = Simulation(scheduler, depth, quality, rng)
    everyone: list[Request] = []
    aborted: set[str] = set()
    for number in range(14):
        length = rng.randint(1, min(400, most - 1))
        prefix = rng.choice([0, 128, 256])
        prompt = ([rng.randint(1, 2)] * prefix + [number + 10] * length)[:length]
        limit = rng.randint(1, min(60, most - length))
        item = request(str(number), prompt, limit, arrival=float(number))
        everyone.append(item)
        scheduler.add(item)
        for _ in range(rng.randint(0, 6)):
            simulation.step()
        if rng.random() < 0.3:
            victim = rng.choice(everyone)
            if victim.state is not State.FINISHED:
                aborted.add(victim.request_id)
                scheduler.finish(victim)
    drain(simulation)
    for item in everyone:
        assert item.state is State.FINISHED
        if item.request_id not in aborted:
            assert item.known == item.max_length
    assert scheduler.blocks.usage().used == 0
    assert scheduler.num_unfinished == 0
