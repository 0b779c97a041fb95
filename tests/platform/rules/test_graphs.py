"""Rules about graphs: what breaks each of them, and what to write instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor

from tests.support.rule_snippets import (
    Layer,
    Pair,
    Snippet,
    double,
    in_region,
    ints,
    rule,
    zeros,
)
from tests.support.simulated_device import Device

# Graphs.


@rule("G01")
def test_g01_select_by_mask() -> Pair:
    return (
        in_region(lambda x: x[x > 0], zeros(4)),
        in_region(lambda x: torch.where(x > 0, x, 0.0), zeros(4)),
    )


@rule("G01")
def test_g01_positions_of_nonzeros() -> Pair:
    return (
        in_region(lambda x: x.nonzero().to(torch.int32), zeros(4)),
        in_region(lambda x: (x != 0).to(torch.int32), zeros(4)),
    )


@rule("G02")
def test_g02_new_shape_after_warmup() -> Pair:
    def run(rows: int) -> Snippet:
        def snippet(d: Device) -> None:
            d.run(double, d.zeros(4), module=d.module)
            d.regions.seal()
            d.run(double, d.zeros(rows), module=d.module)

        return snippet

    return run(8), run(4)


@rule("G03")
def test_g03_more_shapes_than_torch_keeps() -> Pair:
    def run(shapes: int) -> Snippet:
        def snippet(d: Device) -> None:
            for rows in range(1, shapes + 1):
                d.run(double, d.zeros(rows), module=d.module)

        return snippet

    return run(3), run(2)


@rule("G04")
def test_g04_layer_number_in_a_region() -> Pair:
    def with_number(m: Layer, x: Tensor) -> Tensor:
        return x * m.number

    def with_buffer(m: Layer, x: Tensor) -> Tensor:
        return x * m.scale

    def run(body: Callable[..., Tensor]) -> Snippet:
        def snippet(d: Device) -> None:
            for number in (2, 3):
                d.run(body, d.zeros(4), module=Layer(d, number))

        return snippet

    return run(with_number), run(with_buffer)


@rule("G06")
def test_g06_side_effect_in_a_region() -> Pair:
    def printing(x: Tensor) -> Tensor:
        print(x)
        return x + 1

    return in_region(printing, zeros(4)), in_region(lambda x: x + 1, zeros(4))


@rule("G07")
def test_g07_branch_on_a_value() -> Pair:
    def branching(x: Tensor) -> Tensor:
        return x + 1 if x.sum() > 0 else x

    return (
        in_region(branching, zeros(4)),
        in_region(lambda x: torch.where(x.sum() > 0, x + 1, x), zeros(4)),
    )


@rule("G07")
def test_g07_value_as_a_python_number() -> Pair:
    return (
        in_region(lambda x: x * x.sum().item(), zeros(4)),
        in_region(lambda x: x * x.sum(), zeros(4)),
    )


@rule("G08")
def test_g08_six_rows() -> Pair:
    def run(*rows: int) -> Snippet:
        def snippet(d: Device) -> None:
            attention = Layer(d, 0)
            attention.rows_pow2 = True
            for count in rows:
                d.run(double, d.zeros(count, 2), module=attention)

        return snippet

    return run(6), run(1, 8)


@rule("G09")
def test_g09_odd_width() -> Pair:
    def pair(width: int) -> Snippet:
        args = (zeros(4, 8, dtype=torch.bfloat16), zeros(8, width, dtype=torch.bfloat16))
        return in_region(torch.mm, *args)

    return pair(85), pair(88)


@rule("G10")
def test_g10_every_second_element() -> Pair:
    return (
        in_region(lambda x: x[:, ::2] + 1, zeros(2, 8)),
        in_region(lambda x: x.view(2, 4, 2).unbind(-1)[0] + 1, zeros(2, 8)),
    )


@rule("G11")
def test_g11_too_large_a_product() -> Pair:
    def product(rows: int) -> Snippet:
        return in_region(torch.mm, zeros(rows, 128), zeros(128, 16))

    return product(9 * 128), product(8 * 128)


@rule("G12")
def test_g12_many_regions_in_a_step() -> Pair:
    def run(regions: int) -> Snippet:
        def snippet(d: Device) -> None:
            x = d.zeros(4)
            with d.simulator.step():
                for _ in range(regions):
                    d.run(double, x, module=d.module)

        return snippet

    return run(3), run(2)


@rule("G13")
def test_g13_strided_cache_of_a_layer() -> Pair:
    return (
        lambda d: d.run(double, d.zeros(8, 4, 2)[:, 1], module=d.module),
        lambda d: d.run(double, d.zeros(4, 8, 2)[1], module=d.module),
    )


@rule("G14")
def test_g14_number_given_to_a_region() -> Pair:
    @dataclasses.dataclass(frozen=True)
    class Sizes:
        factor: int

    return (
        lambda d: d.run(lambda x, n: x * n, d.zeros(4), 3),
        lambda d: d.run(lambda x, n: x * n.factor, d.zeros(4), Sizes(3)),
    )


@rule("G15")
def test_g15_host_tensor_given_to_a_region() -> Pair:
    return (
        lambda d: d.run(torch.mul, d.zeros(4), torch.ones(4)),
        lambda d: d.run(torch.mul, d.zeros(4), d.zeros(4)),
    )


@rule("G16")
def test_g16_wide_result() -> Pair:
    return (
        in_region(lambda x: x.argmax(-1), zeros(4, 4)),
        in_region(lambda x: x.argmax(-1).to(torch.int32), zeros(4, 4)),
    )


@rule("G17")
def test_g17_view_of_a_written_input() -> Pair:
    def returning(cache: Tensor, at: Tensor, rows: Tensor) -> Tensor:
        return cache.index_put_((at,), rows)[:2]

    def writing(cache: Tensor, at: Tensor, rows: Tensor) -> None:
        cache.index_put_((at,), rows)

    args = (zeros(4, 2), ints(1, 2), zeros(2, 2))
    return in_region(returning, *args), in_region(writing, *args)
