"""A run's configuration without the command line: the same files, defaults and checks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hydra import compose, initialize_config_dir
from hydra.core.config_store import ConfigStore
from hydra.core.global_hydra import GlobalHydra
from hydra.errors import HydraException
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from lamp_eval.config import RunConfig
from lamp_eval.errors import UserError

_HERE = Path(__file__).resolve().parent
# In the source tree conf/ stands beside the package; an installed wheel carries it inside.
CONF_DIR = _HERE.parent / "conf" if (_HERE.parent / "conf").is_dir() else _HERE / "conf"

ConfigStore.instance().store("run_config", RunConfig)


def compose_config(choices: Mapping[str, str], values: Mapping[str, Any]) -> RunConfig:
    """The configuration that the command line would have.

    Args:
        choices: of groups the file in `conf/`, e.g. `{"data": "sample"}`.
        values: what differs from it, nested as in `RunConfig`, e.g. `{"data": {"n_users": 3}}`.

    Raises:
        UserError: a group or an option is not known, or values are out of range.
    """
    hydra = GlobalHydra.instance()
    outer = hydra.hydra  # of an application that is itself written with Hydra
    hydra.clear()
    known = "a file of each group in conf/"
    try:
        with initialize_config_dir(version_base="1.3", config_dir=str(CONF_DIR)):
            composed = compose("config", [f"{group}={name}" for group, name in choices.items()])
        options = (f"{group}.{name}" for group in choices for name in composed[group])
        known = f"options among {', '.join(options)}, each of its type"
        config = OmegaConf.to_object(OmegaConf.merge(composed, values))
    except (HydraException, OmegaConfBaseException) as error:
        message = str(error).split("Config search path")[0].split("full_key")[0]
        raise UserError(
            expected=known,
            found=" ".join(message.split()),
            where=f"the options {dict(values)} with {dict(choices)}",
            fix="python -m lamp_eval --help lists all groups and options",
        ) from error
    finally:
        GlobalHydra.instance().hydra = outer
    assert isinstance(config, RunConfig)
    return config
