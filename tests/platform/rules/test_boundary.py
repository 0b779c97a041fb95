"""Rules about memory, copies and work outside regions, and what to write instead."""

from __future__ import annotations

import torch
from torch import Tensor

from tests.support.rule_snippets import (
    Pair,
    Snippet,
    in_region,
    in_step,
    outside,
    rule,
    uploads,
    zeros,
)
from tests.support.simulated_device import Device

# Memory.


@rule("M01")
def test_m01_more_than_a_core_holds() -> Pair:
    def fill(count: int) -> Snippet:
        return lambda d: [d.zeros(2**16) for _ in range(count)]

    return fill(5), fill(4)


@rule("M02")
def test_m02_large_allocation_in_a_step() -> Pair:
    def allocate(size: int) -> Snippet:
        return in_step(lambda: torch.empty(size, dtype=torch.uint8, device="neuron"))

    return allocate(2**16 + 1), allocate(2**16)


@rule("M03")
def test_m03_whole_weight_decoded() -> Pair:
    def decoded(x: Tensor, codes: Tensor) -> Tensor:
        return x @ codes.to(torch.bfloat16).t()

    def in_chunks(x: Tensor, codes: Tensor) -> Tensor:
        return torch.cat([decoded(x, chunk) for chunk in codes.split(32)], -1)

    args = (zeros(2, 32, dtype=torch.bfloat16), zeros(64, 32, dtype=torch.int8))
    return in_region(decoded, *args), in_region(in_chunks, *args)


@rule("M05")
def test_m05_large_results_in_between() -> Pair:
    def outer(rows: Tensor) -> Tensor:
        return (rows.view(-1, 1) + rows).sum(-1)

    def in_blocks(rows: Tensor) -> Tensor:
        return torch.cat([(part.view(-1, 1) + rows).sum(-1) for part in rows.split(64)])

    return in_region(outer, zeros(512)), in_region(in_blocks, zeros(512))


@rule("M09")
def test_m09_weight_as_a_constant() -> Pair:
    def with_constant(x: Tensor) -> Tensor:
        return x + torch.tensor([0.5] * 128)

    return in_region(with_constant, zeros(128)), in_region(torch.add, zeros(128), zeros(128))


# The boundary to the host, and work outside regions.


@rule("H01")
def test_h01_value_read_in_a_step() -> Pair:
    return in_step(lambda x: x[0].item(), zeros(4)), outside(lambda x: x[0].item(), zeros(4))


@rule("H01")
def test_h01_truth_of_a_tensor() -> Pair:
    return in_step(bool, zeros(1)), outside(bool, zeros(1))


@rule("H01")
def test_h01_blocking_download() -> Pair:
    def download(d: Device) -> None:
        x = d.zeros(4)
        with d.simulator.step():
            d.platform.download(x)

    return in_step(lambda x: x.cpu(), zeros(4)), download


@rule("H01")
def test_h01_blocking_upload() -> Pair:
    return in_step(lambda: torch.zeros(4).to("neuron")), uploads(1)


@rule("H01")
def test_h01_twouploads() -> Pair:
    return uploads(2), uploads(1)


@rule("H03")
def test_h03_number_in_an_operator() -> Pair:
    return (
        in_step(lambda x: x * 0.5, zeros(4)),
        in_step(lambda x, half: x * half, zeros(4), zeros(1)),
    )


@rule("H03")
def test_h03_filled_tensor() -> Pair:
    return (
        in_step(lambda: torch.full((4,), 0.5, device="neuron")),
        in_step(lambda: torch.zeros(4, device="neuron")),
    )


@rule("H04")
def test_h04_operator_without_a_kernel() -> Pair:
    def as_region(d: Device) -> None:
        x = d.zeros(4)
        with d.simulator.step():
            d.run(lambda x: x.cumsum(0), x)

    return in_step(lambda x: x.cumsum(0), zeros(4)), as_region


@rule("H05")
def test_h05_wide_index() -> Pair:
    return (
        outside(lambda x: x.argmax(-1), zeros(4, 4)),
        in_region(lambda x: x.argmax(-1).to(torch.int32), zeros(4, 4)),
    )


@rule("H06")
def test_h06_weights_transformed_on_the_device() -> Pair:
    def load(shapes: int) -> Snippet:
        def snippet(d: Device) -> None:
            for size in range(1, shapes + 1):
                d.zeros(size).neg_()
            with d.simulator.step():
                pass

        return snippet

    return load(6), load(5)


@rule("H07")
def test_h07_many_operators_in_a_step() -> Pair:
    def adds(count: int) -> Snippet:
        return in_step(lambda x, y: [torch.add(x, y) for _ in range(count)], zeros(4), zeros(4))

    return adds(4), adds(3)


@rule("H08")
def test_h08_cast_outside_regions() -> Pair:
    return (
        outside(lambda x: x.to(torch.bfloat16), zeros(4)),
        in_region(lambda x: x.to(torch.bfloat16), zeros(4)),
    )


@rule("H08")
def test_h08_transposition_outside_regions() -> Pair:
    return (
        outside(lambda x: x.t().contiguous(), zeros(2, 4)),
        lambda d: d.put(torch.zeros(2, 4).t().contiguous()),
    )


@rule("H09")
def test_h09_strided_assignment() -> Pair:
    return (
        outside(lambda x, y: x[:, 1].copy_(y), zeros(4, 2), zeros(4)),
        outside(lambda x, y: x[1].copy_(y), zeros(2, 4), zeros(4)),
    )


@rule("H11")
def test_h11_logits_downloaded() -> Pair:
    def read(size: int) -> Snippet:
        def snippet(d: Device) -> None:
            x = d.zeros(size)
            with d.simulator.step():
                d.platform.download(x)

        return snippet

    return read(65), read(64)
