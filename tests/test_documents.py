"""Documents that repeat what the code says, and links between documents."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from deepinfer_neuron.platform.simulator import RULES
from deepinfer_neuron.platform.simulator.rules import rules_table

ROOT = Path(__file__).parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")])
NEURON = ROOT / "docs" / "neuron.md"


def test_the_rules_of_the_device_are_those_of_the_catalogue() -> None:
    text = NEURON.read_text(encoding="utf-8")
    table = text.partition("<!-- rules:")[2].partition("-->\n")[2].partition("\n<!-- end")[0]
    assert table == rules_table(), "replace the table by what rules_table() returns"
    assert table.count("\n") == 1 + len(RULES)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
        if not target.startswith("http"):
            assert (page.parent / target).exists(), target


def test_every_environment_variable_of_the_device_is_explained() -> None:
    from deepinfer_neuron.platform.neuron_parts import required_environment

    text = NEURON.read_text(encoding="utf-8")
    for name, value in required_environment().items():
        assert f"`{name}={value}`" in text
    settings = (ROOT / "deepinfer_neuron" / "settings.py").read_text(encoding="utf-8")
    for name in sorted(set(re.findall(r"DEEPINFER_NEURON_[A-Z_]+", settings))):
        assert f"`{name}`" in text
