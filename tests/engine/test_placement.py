"""What a core holds, against the published budget, and what is proposed when it does not fit."""

from __future__ import annotations

import dataclasses
import functools

import pytest

from deepinfer_neuron.checkpoint.config import ModelConfig, parse_config
from deepinfer_neuron.engine.layout import Layout, make_layout, parse_layout
from deepinfer_neuron.engine.placement import Memory, Reserves, measure, place, tokens_of
from deepinfer_neuron.engine.placement_search import Change, shortest_changes
from deepinfer_neuron.errors import ConfigError
from deepinfer_neuron.platform.simulator.cost import GIB, trn2_core
from tests.support.released import released_config


@functools.cache
def released() -> ModelConfig:
    """The released configuration."""
    return parse_config(released_config(), "config.json")


def layout(text: str) -> Layout:
    """A layout of the released model."""
    return parse_layout(text, released())


def memory(text: str) -> Memory:
    """Memory of the released model."""
    return measure(released(), layout(text), trn2_core())


def gib(size: Memory) -> dict[str, float]:
    """GiB of every component of the weights."""
    return {item.name: item.bytes / GIB for item in size.weights}


def test_the_weights_of_a_core_match_the_published_budget() -> None:
    parts = gib(memory("cores=64,nextn=5"))
    assert parts["attention"] + parts["shared expert"] == pytest.approx(6.04, abs=0.005)
    assert parts["gate, mixers, index, compressor"] == pytest.approx(0.37, abs=0.005)
    assert parts["Engram projection"] == pytest.approx(0.29, abs=0.005)
    assert parts["routed experts"] == pytest.approx(4.20, abs=0.005)
    assert parts["Engram tables"] == pytest.approx(2.95, abs=0.005)
    assert parts["embedding"] + parts["LM head"] == pytest.approx(2.47, abs=0.005)
    assert parts["drafts"] == pytest.approx(0.53 + 0.11 + 0.12, abs=0.015)
    (vision,) = memory("cores=64").host
    assert vision.bytes / GIB == pytest.approx(0.90, abs=0.005)


def test_the_sum_of_the_weights_of_64_cores() -> None:
    assert 16.3 <= round(memory("cores=64,nextn=0").weight_bytes / GIB, 1) <= 16.5
    assert 17.1 <= round(memory("cores=64,nextn=5").weight_bytes / GIB, 1) <= 17.3


def test_sharded_dense_matrices() -> None:
    parts = gib(memory("cores=64,nextn=0,dense=sharded"))
    # Per layer the narrow projections stay whole: 5120 x (1280 + 512) of the 126.6 M values.
    whole, divided = 5120 * 1792, 1280 * 32768 + 8192 * 4096 + 8192 * 5120
    assert parts["attention"] == pytest.approx(40 * (whole + divided / 64) / GIB, rel=1e-3)
    assert parts["shared expert"] == pytest.approx(40 * 3 * 5120 * 2304 / 64 / GIB, rel=1e-3)
    assert parts["LM head"] == parts["embedding"] == 129280 * 5120 * 2 / 64 / GIB
    assert parts["routed experts"] == pytest.approx(4.20, abs=0.005)


def test_states_of_the_sequences() -> None:
    states = {item.name: item.bytes for item in memory("cores=64,nextn=5,max_num_seqs=7").states}
    # 7 sequences and the dummy; 40 layers and 3 draft blocks; the window and 1 + 5 to undo.
    assert states["window rings"] == 8 * 43 * (128 + 6) * 528
    # 3 sources of ratio 2; an open pair and 5 to undo; score and value in fp32.
    assert states["compressor states"] == 8 * 3 * (2 + 5) * 2 * 512 * 4
    # The last 127 window keys of a block, in 43 layers.
    assert states["window page of padding"] == 43 * 127 * 528
    assert states["rotary tables"] == 2 * (16384 + 5) * 64 * 4


def test_a_token_takes_890_bytes() -> None:
    size = memory("cores=64,max_num_seqs=3,max_model_len=20000")
    assert size.block_bytes == 128 * 890
    # 20000 tokens are 157 blocks; one dummy block comes on top.
    assert (size.blocks_needed, size.blocks_wanted) == (158, 3 * 157 + 1)


@pytest.mark.parametrize("text", ["cores=64", "cores=64,nextn=0", "cores=128,dense=sharded"])
def test_every_byte_of_a_core_is_accounted_for(text: str) -> None:
    placement = place(released(), layout(text))
    assert placement is not None
    size = placement.memory
    parts = [item.bytes for item in (*size.weights, *size.states, *size.reserves)]
    caches = placement.blocks * 128 * 890 + placement.pages * placement.page_bytes
    used = sum(parts) + caches + placement.expanded_bytes
    assert used + placement.unused == 24 * GIB
    assert placement.unused >= 0
    assert placement.blocks_that_fit == (24 * GIB - sum(parts)) // (128 * 890)
    assert sum(item.bytes for item in size.reserves) == Reserves().total
    assert Reserves().free == 1.5 * GIB


def test_caches_for_all_sequences_come_before_expanded_matrices() -> None:
    placement = place(released(), layout("cores=64,max_num_seqs=4,max_model_len=32768"))
    assert placement is not None
    assert tokens_of(placement.blocks) == 4 * 32768
    full = place(released(), layout("cores=64,max_num_seqs=64,max_model_len=1048576"))
    assert full is not None
    assert full.blocks == full.blocks_that_fit
    assert full.expanded_bytes == 0


def test_graphs_of_the_released_model() -> None:
    placement = place(released(), layout("cores=64,nextn=5,max_num_seqs=4"))
    assert placement is not None
    found = dict(placement.graphs_by_region)
    # 1, 2, 4 sequences of 8 rows and prompts of 128, 256, 512, one table width: 6 passes, each with
    # rows of its own.
    per_pass = {
        "Preparation.prepare", "Embedding.start", "StaticEngram.remember", "LayerMixture.mix",
        "StaticAttention.attend[window]", "StaticDrafts.remember", "StaticHead.verify",
        "StaticHead.logits",
    }  # fmt: skip
    select = {name: n for name, n in found.items() if "attend_and_select" in name}
    # Ratio 2, ratio 1 with candidates, ratio 1 within candidates.
    assert list(select.values()) == [6, 6, 6]
    # Decode passes gather 512 keys per row at both ratios; a prompt gathers the whole table, of
    # 8192 entries at ratio 2 and 16384 at ratio 1.
    assert found["StaticAttention.attend[reuse]"] == 3 + 2 * 3
    # A prompt wants one row, a decode pass six of every sequence.
    wanted = {"StaticHead.chosen", "StaticDrafts.begin", "StaticDrafts.propose"}
    assert {found[name] for name in per_pass} == {6}
    assert {found[name] for name in wanted} == {4}
    assert found["StaticDraftLayer.draft"] == 3
    assert found["WindowRestorer.restore"] == 1
    assert placement.graphs == 6 * 8 + 3 * 6 + 9 + 4 * 3 + 3 + 1


@pytest.mark.parametrize(("sequences", "graphs"), [(1, 59), (4, 91), (32, 131)])
def test_graphs_in_the_document(sequences: int, graphs: int) -> None:
    placement = place(released(), layout(f"cores=64,nextn=5,max_num_seqs={sequences}"))
    assert placement is not None
    assert placement.graphs == graphs


def test_what_is_left_out_gets_a_default() -> None:
    assert layout("cores=64") == Layout(
        cores=64, ep=64, cp=1, nextn=5, max_model_len=16384, max_num_seqs=32,
        max_num_batched_tokens=512, dense="replicated", host_embed=False,
    )  # fmt: skip
    # 48 cores, 384 experts, 128 draft experts: 16 divides all; without drafts 48 does.
    assert layout("cores=48").ep == 16
    assert layout("cores=48,nextn=0").ep == 48
    assert layout("cores=64,max_num_seqs=256").max_num_batched_tokens == 256 * 6
    assert layout(" cores = 64 , host_embed=1 ").host_embed


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no part of a plan"),
        ("cores", "'cores' is no part of a plan"),
        ("cores=64,hosts=2", "'hosts=2' is no part"),
        ("cores=64,cores=64", "gives cores twice"),
        ("ep=2", "how many cores"),
        ("cores=0", "cores=0 is out of range"),
        ("cores=abc", "cores=abc is out of range"),
        ("cores=-4", "cores=-4 is out of range"),
        ("cores=99999999999", "out of range"),
        ("cores=64,ep=0", "ep=0 is out of range"),
        ("cores=64,ep=128", "ep=128 does not divide cores=64"),
        ("cores=60,ep=5", "ep=5 does not divide the 384 routed experts"),
        ("cores=96,ep=3", "ep=3 does not divide the 128 routed experts"),
        ("cores=64,cp=3", "cp=3 does not divide cores=64"),
        ("cores=64,nextn=8", "nextn=8 is out of range"),
        ("cores=64,dense=split", "dense=split is not known"),
        ("cores=64,host_embed=2", "host_embed=2 is out of range"),
        ("cores=64,max_num_seqs=0", "max_num_seqs=0"),
        ("cores=64,max_num_seqs=9,max_num_batched_tokens=8", "is less than max_num_seqs=9"),
        ("cores=64,max_model_len=1048577", "at most 1048576"),
        ("cores=64,max_model_len=16383", "2048 blocks of 8 entries.* at least 16384"),
    ],
)
def test_a_wrong_plan_is_refused(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        layout(text)


def test_a_model_without_drafts_or_candidates() -> None:
    raw = released_config()
    text = raw["text_config"]
    assert isinstance(text, dict)
    text["candidate_source_layer_id"] = None
    text["num_nextn_predict_layers"] = 0
    text["compress_ratios"] = [0, 0] + [2] * 18 + [1] * 20
    for key in [key for key in text if key.startswith("dspark")]:
        del text[key]
    config = parse_config(raw, "config.json")
    assert make_layout({"cores": "64"}, config).nextn == 0
    assert make_layout({"cores": "64", "max_model_len": "300"}, config).max_model_len == 300
    with pytest.raises(ConfigError, match="no draft blocks"):
        make_layout({"cores": "64", "nextn": "1"}, config)


def apply(plan: Layout, changes: tuple[Change, ...]) -> Layout:
    """The plan with changes, written out and read again; ``ep`` stays if it was given."""
    values = {key: str(value) for key, value in dataclasses.asdict(plan).items() if key != "ep"}
    values["host_embed"] = str(int(plan.host_embed))
    for change in changes:
        values[change.setting] = change.value
    return make_layout(values, released())


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("cores=32", 1),
        ("cores=1", 1),
        ("cores=64,max_num_seqs=4096", 1),
        ("cores=64,max_model_len=1048576,max_num_seqs=1024", 1),
        ("cores=32,max_num_seqs=16384", 2),
    ],
)
def test_the_proposed_changes_make_it_fit(text: str, size: int) -> None:
    plan = layout(text)
    assert place(released(), plan) is None
    ways = shortest_changes(released(), plan, trn2_core())
    assert ways
    for changes in ways:
        assert len(changes) == size
        assert place(released(), apply(plan, changes)) is not None


def test_changes_are_as_mild_as_possible() -> None:
    ways = shortest_changes(released(), layout("cores=32"), trn2_core())
    assert [[str(change) for change in way] for way in ways] == [["dense=sharded"], ["cores=64"]]
    (way,) = [
        way
        for way in shortest_changes(released(), layout("cores=64,max_num_seqs=4096"), trn2_core())
        if way[0].setting == "max_num_seqs"
    ]
    kept = int(way[0].value)
    assert place(released(), layout(f"cores=64,max_num_seqs={kept}")) is not None
    assert place(released(), layout(f"cores=64,max_num_seqs={2 * kept}")) is None


def test_experts_on_too_few_ranks_are_spread_first() -> None:
    ways = shortest_changes(released(), layout("cores=64,ep=16"), trn2_core())
    assert (Change("ep", "64"),) in ways


def test_nothing_helps_a_core_that_is_too_small() -> None:
    tiny = dataclasses.replace(trn2_core(), hbm_bytes=GIB)
    assert place(released(), layout("cores=64"), tiny) is None
    assert shortest_changes(released(), layout("cores=64"), tiny) == ()
