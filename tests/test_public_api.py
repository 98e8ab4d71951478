"""The public names, pinned: adding or removing one is a decision."""

import doctest
import importlib
import inspect
import tomllib
from pathlib import Path

import pytest

import ropelens

ROOT = Path(__file__).resolve().parent.parent
NAMES = [
    "Ablation",
    "AblationCurve",
    "ActivationAccumulator",
    "Areas",
    "BandAttribution",
    "BandMeans",
    "BandScores",
    "Bands",
    "EntropyAccumulator",
    "LesionResults",
    "ablate",
    "ablation_curve",
    "ablation_losses",
    "activation_hooks",
    "agreement",
    "area_losses",
    "areas",
    "band_activation",
    "band_attribution",
    "band_effects",
    "band_entropy",
    "band_fisher",
    "band_means",
    "band_taylor",
    "bands_where",
    "collect",
    "derotation_curve",
    "effect_ranks",
    "entropy_hooks",
    "frequencies",
    "inspect",
    "lesion",
    "lesion_sweep",
    "load",
    "observe",
    "patch_bands",
    "random_scores",
    "resample_frequencies",
    "set_frequencies",
    "share_groups",
    "windows",
]


def test_the_public_names():
    assert sorted(ropelens.__all__) == NAMES
    assert set(NAMES) <= set(dir(ropelens))


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_says_what_it_is(name):
    thing = getattr(ropelens, name)
    doc = inspect.getdoc(thing)
    assert doc, name
    first = doc.splitlines()[0]
    assert first.endswith("."), first
    assert first[0].isupper(), first


@pytest.mark.parametrize("name", [name for name in NAMES if name[0].islower()])
def test_a_public_function_has_an_example_and_says_what_it_raises(name):
    doc = inspect.getdoc(getattr(ropelens, name))
    assert "Example:" in doc
    assert doctest.DocTestParser().get_examples(doc) or "```python" in doc


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_in_the_docs(name):
    page = (ROOT / "docs" / "api.md").read_text()
    assert f"::: ropelens.{name}\n" in page


@pytest.mark.parametrize("name", ropelens.circuits.__all__)
def test_the_names_of_circuits_say_what_they_are(name):
    thing = getattr(ropelens.circuits, name)
    doc = inspect.getdoc(thing)
    assert doc, name
    assert doc.splitlines()[0].endswith("."), name
    if inspect.isfunction(thing):
        assert "Example:" in doc, name
        assert doctest.DocTestParser().get_examples(doc) or "```python" in doc, name
    assert f"::: ropelens.circuits.{name}\n" in (ROOT / "docs" / "api.md").read_text()
    assert name in dir(ropelens.circuits)


PACKAGES = ("circuits", "interventions", "lesions", "plots", "pretrain", "streaming")


@pytest.mark.parametrize("package", [*(f"ropelens.{name}" for name in PACKAGES), "ropelens_kernels"])
def test_what_a_package_for_users_exports_is_in_the_docs(package):
    page = (ROOT / "docs" / "api.md").read_text()
    module = importlib.import_module(package)
    for name in module.__all__:
        if callable(getattr(module, name)):
            homes = (package, "ropelens")
            assert any(f"::: {home}.{name}\n" in page for home in homes), f"{package}.{name}"


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="band_entrophy"):
        ropelens.band_entrophy  # noqa: B018
    with pytest.raises(AttributeError, match="has no attribute 'band_entrophy'"):
        ropelens.circuits.band_entrophy  # noqa: B018


def test_the_version_is_that_of_the_package():
    with (ROOT / "pyproject.toml").open("rb") as file:
        assert ropelens.__version__ == tomllib.load(file)["project"]["version"]
