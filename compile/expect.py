"""Whether a bundle is for what somebody wants to load it for: a model, a target, a CANN release, a mesh.

A field that differs is named, with what was found and what was expected.
"""

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from kimi_graph.config import ModelConfig, arranged, canonical
from kimi_graph.errors import BundleError
from kimi_graph.parallel import Mesh
from kimi_graph.read_config import load_config, parse_config

from .bundle import MANIFEST, Bundle
from .manifest import differences, short

# Of a config, what graphs do not depend on: ids of tokens, and how a checkpoint stores and spells its weights.
FREE = ("quant", "names", "bos", "eos", "pad")
ONE_RANK = "none"  # what stands for no mesh


def bundle_config(bundle: Bundle) -> ModelConfig:
    """The model that a bundle was made of.

    Raises:
        BundleError: it is not the one that the manifest names.
    """
    source = bundle.manifest["model"]
    config = parse_config(source["config"], origin=f"{bundle.folder}: manifest.json, model.config", name=source["name"])
    if config.fingerprint != source["fingerprint"]:
        raise BundleError(
            f"{bundle.folder}: model.config has the fingerprint {config.fingerprint[:16]}..., the manifest says "
            f"{source['fingerprint'][:16]}...; the bundle was made for another model."
        )
    return config


def config_changes(old: ModelConfig, new: ModelConfig, leave_out: tuple[str, ...] = ()) -> Iterator[str]:
    """`layers.3.ffn.experts is 16, was 8` for every field of two models that differs."""
    first, second = (json.loads(canonical(arranged(c))) for c in (old, new))
    for name in leave_out:
        first[name] = second[name] = None
    if len(first["layers"]) != len(second["layers"]):
        yield f"the number of layers is {len(second['layers'])}, was {len(first['layers'])}"
        first["layers"] = second["layers"] = []
    for key, before, now in differences("", first, second):
        yield f"{key.removeprefix('.')} is {short(now)}, was {short(before)}"


def check_model(bundle: Bundle, model: ModelConfig, what: str) -> None:
    """Whether graphs of a bundle are those of a model.

    Args:
        what: names the model in the error.

    Raises:
        BundleError: the first field that differs.
    """
    for change in config_changes(bundle_config(bundle), model, FREE):
        raise BundleError(f"{bundle.folder}: made for another model than {what}: there {change} in the bundle.")


def check_checkpoint_model(bundle: Bundle, folder: Path) -> None:
    """Whether the config beside a checkpoint's weights, if there is one, is of the bundle's model.

    Raises:
        BundleError: it is not.
        ConfigError: it cannot be read.
    """
    config = folder / "config.json"
    if config.is_file():
        check_model(bundle, load_config(config), str(folder))


@dataclass(frozen=True, kw_only=True)
class Expected:
    """What a bundle is to be loaded for; None: whatever it says. `model`: a preset, a config.json or a checkpoint
    folder. `mesh`: "none" for one rank."""

    model: str | None = None
    target: str | None = None
    cann: str | None = None
    mesh: str | None = None

    def __bool__(self) -> bool:
        return any(value is not None for value in asdict(self).values())

    def check(self, bundle: Bundle) -> str:
        """Hold a bundle against it; returns what was compared, in words.

        Raises:
            BundleError: the first field that differs.
            ConfigError, ShardingError: something that cannot be expected.
        """
        manifest = bundle.manifest
        if self.model is not None:
            check_model(bundle, load_config(self.model), self.model)
        mesh = None if manifest["mesh"] is None else manifest["mesh"]["text"]
        for field, found, expected in (
            ("target.name", manifest["target"]["name"], self.target),
            ("target.cann", manifest["target"]["cann"], self.cann),
            ("mesh", _mesh(mesh), self._mesh()),
        ):
            if expected is not None and expected != found:
                where = bundle.folder / MANIFEST
                raise BundleError(f"{where}: {field} is {found}, expected {expected}; compile it again for that.")
        return ", ".join(f"{name} {value}" for name, value in asdict(self).items() if value is not None)

    def _mesh(self) -> str | None:
        return self.mesh if self.mesh in (None, ONE_RANK) else _mesh(self.mesh)


def _mesh(text: str | None) -> str:
    return ONE_RANK if text is None else str(Mesh.parse(text))
