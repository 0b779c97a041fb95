"""Choosing the next token of every sequence in a step, and scoring prompts."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.ops.arithmetic import Arithmetic
from deepinfer_neuron.ops.philox import draw_words, seed_bits
from deepinfer_neuron.ops.sample import (
    Distribution,
    Transform,
    argmax,
    distribution,
    fixed_point_draw,
    fixed_point_weights,
    leading,
    log_softmax,
    random_sampling,
    sum_smaller_probs,
)
from deepinfer_neuron.ops.verify import accept_drafts
from deepinfer_neuron.sampling.drafts import SEED_OFFSET, Draft
from deepinfer_neuron.sampling.logprobs import Score, TokenResult, score
from deepinfer_neuron.sampling.masks import edit_logits
from deepinfer_neuron.sampling.params import GREEDY_BELOW, SamplingParams
from deepinfer_neuron.sampling.state import SamplingState

__all__ = ["Sampler", "TokenResult"]

_SEEDS = 1 << 64
_CHUNK_ELEMENTS = 1 << 16
"""Logits that are transformed together; a chunk of this size stays in the processor's cache."""


class Sampler:
    """Turns the logits of a step into one token per row.

    The pipeline of a row: blacklist, tokens that would end the sequence too early, logit bias,
    penalties, grammar, then (if ``force_topk`` is set) the restriction to the largest logits,
    temperature, min-p, top-k and top-p, and the draw. A greedy row takes the largest logit instead
    and computes probabilities only if they are reported. No row depends on another one.
    """

    def __init__(
        self,
        vocab_size: int,
        arithmetic: Arithmetic,
        blacklist: tuple[int, ...] = (),
        sum_smaller_probs: bool = False,
        force_topk: int = 0,
    ) -> None:
        """Build a sampler.

        Args:
            vocab_size: width of the logits.
            arithmetic: whose order sums and exponentials follow.
            blacklist: ids that are never chosen, except as forced tokens.
            sum_smaller_probs: report ``TokenResult.sum_smaller_probs`` for every token.
            force_topk: 0, or the number of largest logits (after the masks; the lower id first
                among equal ones) that a row consists of from there on. The draw then runs over
                the ranks, so it gives other tokens than over the vocabulary.

        Raises:
            ConfigError: a blacklisted id or ``force_topk`` is outside the vocabulary.
        """
        outside = [token for token in blacklist if not 0 <= token < vocab_size]
        if outside:
            raise ConfigError(
                f"the token blacklist names token {outside[0]}; give ids from 0 to {vocab_size - 1}"
            )
        if not 0 <= force_topk <= vocab_size:
            raise ConfigError(
                f"force_topk is {force_topk}; give 0 to switch it off, or at most the vocabulary "
                f"size {vocab_size}"
            )
        self._vocab_size = vocab_size
        self._order = arithmetic.order
        self._blacklist = torch.tensor(blacklist, dtype=torch.int64)
        self._sums = sum_smaller_probs
        self._force_topk = force_topk

    def sample(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        positions: Sequence[int],
        drafts: Sequence[Draft | None] = (),
    ) -> list[TokenResult]:
        """Choose the next token of every row and tell its state.

        A row that cannot go on (NaN or infinite logits, nothing left after the masks, a failed
        grammar) is reported in its result and its state; the others are not affected.

        Args:
            logits: fp32 ``[R, V]`` on the host. Overwritten.
            states: of the ``R`` sequences.
            positions: number of known tokens of each sequence, which is the index of the new one.
            drafts: proposals for the new tokens, ``None`` for a row without one; empty for no
                drafts at all. A row that draws uses its proposal without changing the
                distribution of its token; a greedy or forced row needs none. A draft is accepted
                where the result is its token.

        Returns:
            ``R`` results in the order of the rows.
        """
        if not states:
            return []
        with torch.inference_mode():
            raw_rows = [row for row, state in enumerate(states) if _wants(state, "raw")]
            raw = logits[raw_rows] if raw_rows else None
            edit_logits(logits, states, self._blacklist)
            step = self._start(logits, states, positions, drafts)
            for rows in _chunks(step.draws, self._chunk):
                self._transform(step, rows, draw=True)
            for rows in _chunks(step.scored, self._chunk):
                self._transform(step, rows, draw=False)
            if raw is not None:
                self._score_raw(step, raw_rows, raw)
            return [self._finish(step, row) for row in range(len(states))]

    def propose(
        self, logits: Tensor, states: Sequence[SamplingState], positions: Sequence[int]
    ) -> tuple[Tensor, list[Tensor | None]]:
        """Draw one draft per row.

        The temperature and the filters of the request act, but no mask, bias or penalty; a greedy
        row takes the largest logit.

        Args:
            logits: fp32 ``[R, V]`` on the host. Not changed.
            states: of the ``R`` sequences. Not changed.
            positions: index of the drafted token in each sequence.

        Returns:
            int64 ``[R]`` tokens, and per row the fp32 ``[V]`` log-probabilities that a drawn token
            came from.
        """
        with torch.inference_mode():
            logits, _ = _usable(logits)
            tokens = argmax(logits)
            laws: list[Tensor | None] = [None] * len(states)
            draws = [row for row, state in enumerate(states) if not state.params.is_greedy]
            for rows in _chunks(draws, self._chunk):
                table, ids = self._restrict(logits[rows])
                of = distribution(table, _transform_of([states[r] for r in rows]), self._order)
                seeds = seed_bits([(states[r].seed + SEED_OFFSET) % _SEEDS for r in rows])
                places = torch.tensor([positions[row] for row in rows])
                chosen = random_sampling(of.probabilities, seeds, places).clamp_min(0)
                law = of.logprobs
                if ids is not None:
                    chosen = ids.gather(-1, chosen[:, None])[:, 0]
                    law = torch.full_like(logits[rows], -math.inf).scatter(-1, ids, law)
                tokens[rows] = chosen
                for row, line in zip(rows, law, strict=True):
                    laws[row] = line
            return tokens, laws

    def is_plain(self, state: SamplingState) -> bool:
        """Whether the next tokens of a sequence are simply the largest logits, unreported."""
        params = state.params
        edited = state.bias is not None or state.counts is not None or state.matcher is not None
        forced = state.num_output_tokens < len(params.golden_token_ids)
        reported = params.logprobs is not None or self._sums or self._blacklist.numel() > 0
        untouched = not (edited or forced or reported or state.excluded_tokens())
        return params.is_greedy and untouched and state.failure is None

    def take(self, state: SamplingState, token: int) -> TokenResult:
        """Tell a plain sequence the token that was chosen elsewhere; negative for none."""
        if token < 0:
            state.failure = "invalid logits: the largest one is not finite"
        else:
            state.accept(token)
        if state.failure is not None:
            return TokenResult(0, failed=state.failure)
        return TokenResult(token)

    def score_prompt(
        self, logits: Tensor, targets: Sequence[int], params: SamplingParams
    ) -> list[TokenResult]:
        """Log-probabilities of prompt tokens.

        The temperature and the filters of the request act (with the mode ``"raw"``: nothing does),
        but no mask, bias or penalty. Besides the logits only a few rows are in memory at once, and
        a prompt may be scored in any pieces with the same results.

        Args:
            logits: fp32 ``[n, V]`` of the places before the targets, on the host. Not changed.
            targets: ``n`` prompt tokens; one outside the vocabulary scores lowest.
            params: of the request; ``prompt_logprobs`` of ``None`` counts as 0.

        Returns:
            ``n`` results; ``failed`` is set where logits are NaN or infinite.
        """
        results: list[TokenResult] = []
        with torch.inference_mode():
            for rows in _chunks(range(len(targets)), self._chunk):
                part, failures = _usable(logits[rows[0] : rows[-1] + 1])
                wanted = [targets[row] for row in rows]
                scores = self._score_rows(part, wanted, params)
                for target, failure, item in zip(wanted, failures, scores, strict=True):
                    if failure is None:
                        results.append(TokenResult(target, item.logprob, item.top))
                    else:
                        results.append(TokenResult(target, failed=failure))
        return results

    @property
    def _chunk(self) -> int:
        """Rows that are transformed together."""
        return max(1, _CHUNK_ELEMENTS // (self._force_topk or self._vocab_size))

    def _restrict(self, logits: Tensor) -> tuple[Tensor, Tensor | None]:
        """Logits to choose from, and the vocabulary ids of their columns if they differ."""
        if not self._force_topk:
            return logits, None
        ids = leading(logits, self._force_topk)
        return logits.gather(-1, ids), ids

    def _start(
        self,
        logits: Tensor,
        states: Sequence[SamplingState],
        positions: Sequence[int],
        drafts: Sequence[Draft | None],
    ) -> _Step:
        """Greedy and forced tokens, and the rows that need more than those."""
        logits, failures = _usable(logits)
        table, ids = self._restrict(logits)
        # Restricted rows are in rank order, so their largest logit comes first.
        best = argmax(logits).tolist() if ids is None else [0] * len(states)
        step = _Step(states, positions, drafts or [None] * len(states), table, ids, best)
        for row, state in enumerate(states):
            state.failure = state.failure or failures[row]
            if state.failure is not None:
                continue
            forced = state.forced_token
            if forced is not None:
                step.columns[row] = _column(ids, row, forced)
            if forced is None and not state.params.is_greedy:
                step.draws.append(row)
            elif self._sums or _wants(state, "processed"):
                step.scored.append(row)
        return step

    def _transform(self, step: _Step, rows: list[int], *, draw: bool) -> None:
        """Compute the distribution of some rows, and their tokens if they are drawn."""
        states = [step.states[row] for row in rows]
        logits = step.table[rows[0] : rows[0] + 1] if len(rows) == 1 else step.table[rows]
        needed = draw or self._sums
        of = distribution(logits, _transform_of(states), self._order, probabilities=needed)
        if draw:
            self._draw(step, rows, of)
        columns = [step.columns[row] for row in rows]
        if self._sums:
            sums = sum_smaller_probs(of, torch.tensor(columns), self._order)
            step.sums.update(zip(rows, sums.tolist(), strict=True))
        if any(_wants(state, "processed") for state in states):
            ids = None if step.ids is None else step.ids[rows]
            counts = [state.params.logprobs or 0 for state in states]
            scores = score(logits, of.logprobs, columns, counts, ids)
            step.scores.update(zip(rows, scores, strict=True))

    def _draw(self, step: _Step, rows: list[int], of: Distribution) -> None:
        """Draw the tokens of some rows, those with a draft by verifying it."""
        seeds = seed_bits([step.states[row].seed for row in rows])
        positions = torch.tensor([step.positions[row] for row in rows])
        drafted = [place for place, row in enumerate(rows) if step.drafts[row] is not None]
        fresh = [place for place, row in enumerate(rows) if step.drafts[row] is None]
        drawn = torch.empty(len(rows), dtype=torch.int64)
        if fresh:
            words = draw_words(seeds[fresh], positions[fresh])
            weights = fixed_point_weights(_rows(of.probabilities, fresh))
            drawn[fresh] = fixed_point_draw(weights, words)
        if drafted:
            kept = Distribution(_rows(of.logprobs, drafted), _rows(of.probabilities, drafted))
            columns, laws = self._draft_laws(step, [rows[place] for place in drafted])
            drawn[drafted] = accept_drafts(
                kept,
                laws,
                columns,
                torch.ones_like(columns, dtype=torch.bool),
                seeds[drafted],
                positions[drafted],
                self._order,
            ).candidates
        for row, column in zip(rows, drawn.tolist(), strict=True):
            step.columns[row] = column

    def _draft_laws(self, step: _Step, rows: list[int]) -> tuple[Tensor, Tensor]:
        """Columns int64 ``[n]`` of the drafts, -1 where the row lacks one, and the log-probability
        of every column under the draft, fp32 ``[n, columns]``."""
        columns, laws = [], []
        for row in rows:
            draft = step.drafts[row]
            assert draft is not None
            law = draft.logprobs
            if law is None:
                law = torch.full((self._vocab_size,), -math.inf)
                law[draft.token_id] = 0.0
            columns.append(_column(step.ids, row, draft.token_id))
            laws.append(law if step.ids is None else law[step.ids[row]])
        return torch.tensor(columns), torch.stack(laws)

    def _score_raw(self, step: _Step, rows: list[int], raw: Tensor) -> None:
        """Log-probabilities of the model's own logits, fp32 ``[n, V]``, for the given rows."""
        for places in _chunks(range(len(rows)), self._chunk):
            logits, failures = _usable(raw[places[0] : places[-1] + 1])
            chosen = [rows[place] for place in places]
            scores = score(
                logits,
                log_softmax(logits, [1.0] * len(places), self._order),
                [step.token(row) for row in chosen],
                [step.states[row].params.logprobs or 0 for row in chosen],
            )
            for row, item, failure in zip(chosen, scores, failures, strict=True):
                step.scores[row] = item
                step.states[row].failure = step.states[row].failure or failure

    def _score_rows(
        self, logits: Tensor, targets: Sequence[int], params: SamplingParams
    ) -> list[Score]:
        """Scores of prompt tokens, a chunk of rows."""
        rows = len(targets)
        counts = [params.prompt_logprobs or 0] * rows
        if params.logprobs_mode == "raw":
            return score(logits, log_softmax(logits, [1.0] * rows, self._order), targets, counts)
        table, ids = self._restrict(logits)
        transform = Transform(
            [max(params.temperature, GREEDY_BELOW)] * rows,
            [params.min_p] * rows,
            [params.top_p] * rows,
            [params.top_k] * rows,
        )
        of = distribution(table, transform, self._order, probabilities=False)
        columns = [_column(ids, row, target) for row, target in enumerate(targets)]
        return score(table, of.logprobs, columns, counts, ids)

    def _finish(self, step: _Step, row: int) -> TokenResult:
        """Tell the state its token and gather what is reported."""
        state = step.states[row]
        if state.failure is None:
            token = step.token(row)
            state.accept(token)
        if state.failure is not None:
            return TokenResult(0, failed=state.failure)
        total = step.sums.get(row)
        if state.params.logprobs is None:
            return TokenResult(token, sum_smaller_probs=total)
        item = step.scores[row]
        return TokenResult(token, item.logprob, item.top, total)


@dataclass
class _Step:
    """Working data of one call.

    A column is a place in ``table``: a token id, or with ``ids`` the place of one in its row.
    """

    states: Sequence[SamplingState]
    positions: Sequence[int]
    drafts: Sequence[Draft | None]
    table: Tensor
    ids: Tensor | None
    columns: list[int]
    """Chosen column per row; -1 for a forced token that the row lacks."""
    draws: list[int] = field(default_factory=list)
    scored: list[int] = field(default_factory=list)
    """Rows without a draw whose probabilities are reported."""
    scores: dict[int, Score] = field(default_factory=dict)
    sums: dict[int, float] = field(default_factory=dict)

    def token(self, row: int) -> int:
        """Vocabulary id of the chosen token."""
        forced = self.states[row].forced_token
        if forced is not None:
            return forced
        column = self.columns[row]
        return column if self.ids is None else int(self.ids[row, column])


def _transform_of(states: Sequence[SamplingState]) -> Transform:
    """What the requests of some rows ask for."""
    return Transform(
        [state.temperature for state in states],
        [state.params.min_p for state in states],
        [state.params.top_p for state in states],
        [state.params.top_k for state in states],
    )


def _rows(table: Tensor, rows: list[int]) -> Tensor:
    """Some rows of ``[n, V]``, without a copy if it is all of them."""
    return table if len(rows) == table.shape[0] else table[rows]


def _column(ids: Tensor | None, row: int, token: int) -> int:
    """Column of a token; -1 if the row lacks it."""
    if ids is None:
        return token
    places = (ids[row] == token).nonzero()
    return int(places[0, 0]) if places.shape[0] else -1


def _wants(state: SamplingState, mode: str) -> bool:
    return state.params.logprobs is not None and state.params.logprobs_mode == mode


def _chunks(rows: Sequence[int], size: int) -> Iterator[list[int]]:
    for start in range(0, len(rows), size):
        yield list(rows[start : start + size])


def _usable(logits: Tensor) -> tuple[Tensor, list[str | None]]:
    """Logits whose rows all have a distribution, and what was wrong with the rows replaced by 0.

    A row has none if its largest logit is NaN or infinite: one NaN or ``+inf``, or ``-inf`` alone.
    """
    largest = logits.amax(-1)
    finite = torch.isfinite(largest)
    if bool(finite.all()):
        return logits, [None] * logits.shape[0]
    failures = [None if math.isfinite(value) else _reason(value) for value in largest.tolist()]
    return logits.masked_fill(~finite[:, None], 0.0), failures


def _reason(largest: float) -> str:
    if largest == -math.inf:
        return (
            "no token is possible: every logit is minus infinity (check that the masks, the "
            "grammar and min_tokens leave a token)"
        )
    return f"invalid logits: the largest one is {largest}, so the row has no distribution"
