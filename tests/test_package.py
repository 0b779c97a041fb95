"""The package's public names and how quickly it can be imported."""

from __future__ import annotations

import importlib.metadata
import subprocess
import sys

import pytest

import deepinfer_neuron


def test_importing_the_package_does_not_load_torch() -> None:
    code = "import sys, deepinfer_neuron; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert (result.stdout, result.stderr) == ("False\n", "")


def test_public_names_are_listed_before_they_are_loaded() -> None:
    assert {"LLM", "SamplingParams", "__version__"} <= set(dir(deepinfer_neuron))


def test_public_names_come_from_their_modules() -> None:
    from deepinfer_neuron.llm import LLM
    from deepinfer_neuron.sampling.params import SamplingParams

    assert deepinfer_neuron.LLM is LLM
    assert deepinfer_neuron.SamplingParams is SamplingParams


def test_a_missing_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Llm'"):
        _ = deepinfer_neuron.Llm


def test_the_installed_version_is_the_package_s() -> None:
    assert importlib.metadata.version("deepinfer-neuron") == deepinfer_neuron.__version__
