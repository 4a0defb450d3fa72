"""Read a released `config.json`: every key is known, every value is meant, nothing is guessed.

A family of models is a table of keys (`families/`), each with a reader and, where the released code has one, a
default. A key that is in no table is refused, since the one thing worse than an error is a setting that was silently
ignored; keys without influence on the result are listed as `inert`. All faults of a file are reported at once.
"""

import difflib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from .config import ModelConfig
from .config_keys import SHOWN, found, known_part, read_section, show
from .errors import ConfigError
from .families import FAMILIES
from .files import from_json

# Released files, unchanged, from public mirrors (fact sheet, section 0); a file that is not released as it is says in
# words what it assumes, under "assumptions".
PRESETS = Path(__file__).parent / "presets"
MAX_FILE = 4 << 20  # bytes; the largest released config.json has 7,006: anything this long is another kind of file


def load_config(source: str | Path) -> ModelConfig:
    """The model that `source` means.

    Args:
        source: a preset's name (`presets()`; it goes before a folder of the same name, which is `./name`), a
            config.json, or a folder that has one.

    Raises:
        ConfigError: nothing is there, or the file is not a config of a known model, each fault with its key.
    """
    path, name = _find(source)
    return parse_config(read_json(path, MAX_FILE, ConfigError), origin=str(source), name=name)


def load_known(source: str | Path) -> tuple[ModelConfig, tuple[str, ...]]:
    """The model that `source` would mean if unknown keys had no influence, and the paths of those keys.

    For looking at what else there is to say about a new model.

    Raises:
        ConfigError: any other fault, see `load_config`.
    """
    path, name = _find(source)
    data = read_json(path, MAX_FILE, ConfigError)
    kind = data.get("model_type")
    unknown: list[str] = []
    if isinstance(kind, str) and kind in FAMILIES:
        outside = {key: data[key] for key in ("model_type", "architectures") if key in data}
        kept, unknown = known_part(FAMILIES[kind].section, {k: v for k, v in data.items() if k not in outside})
        data = outside | kept
    return parse_config(data, origin=str(source), name=name), tuple(unknown)


def _find(source: str | Path) -> tuple[Path, str]:
    """The file that `source` means, and what the model is called."""
    if not isinstance(source, str | os.PathLike):
        raise ConfigError(
            f"model: found {type(source).__name__}, expected a preset's name, a config.json or a checkpoint's folder."
        )
    path = Path(source)
    if isinstance(source, str) and source in presets():
        path, name = PRESETS / f"{source}.json", source
    elif not str(source).strip():
        raise ConfigError(f"model: found an empty name. {_presets_like('')}")
    elif _exists(path, Path.is_dir):
        path, name = path / "config.json", path.resolve().name
        if not path.is_file():
            raise ConfigError(
                f"{source}: this folder has no config.json; expected a checkpoint's folder. {_presets_like(name)}"
            )
    elif _exists(path, Path.is_file):
        name = path.resolve().parent.name if path.name == "config.json" else path.stem
    else:
        raise ConfigError(f"{str(source)[:200]}: no preset, file or folder of this name. {_presets_like(path.name)}")
    return path, name


def presets() -> list[str]:
    """Names of the released configs that come with the package."""
    return sorted(path.stem for path in PRESETS.glob("*.json"))


def _exists(path: Path, what: Callable[[Path], bool]) -> bool:
    try:
        return what(path)
    except (OSError, ValueError):  # a name too long for any file, or with a zero byte
        return False


def _presets_like(name: str) -> str:
    near = difflib.get_close_matches(name.lower()[:64], presets(), n=3, cutoff=0.5)
    if near:
        return f"Did you mean the preset {' or '.join(near)}?"
    return f"Presets: {', '.join(presets())}."


def read_json(path: Path, limit: int, error: type[Exception]) -> dict[str, Any]:
    """The JSON object in a file; a key given twice, NaN or Infinity is not JSON. `limit`: largest size in bytes."""
    try:
        size = path.stat().st_size
        if size > limit:
            raise error(f"{path}: {size:,} bytes; a file of this kind has at most {limit:,}.")
        return parse_json(path.read_bytes(), str(path), error)
    except OSError as e:
        raise error(f"{path}: cannot be read ({e.strerror}).") from e


def parse_json(text: bytes, where: str, error: type[Exception]) -> dict[str, Any]:
    """Like `read_json`, of bytes that came from `where`."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        members = dict(pairs)
        if len(members) < len(pairs):
            seen: set[str] = set()
            twice = next(k for k, _ in pairs if k in seen or seen.add(k))
            raise error(f"{where}: the key {show(twice)} is given twice; delete one.")
        return members

    def refuse(word: str) -> Any:
        raise error(f"{where}: found {word}, which is not a JSON number.")

    try:
        data = from_json(text.decode("utf-8-sig"), object_pairs_hook=unique, parse_constant=refuse)
    except UnicodeDecodeError as e:
        raise error(f"{where}: not text (byte {e.start} is not UTF-8); expected JSON.") from e
    except json.JSONDecodeError as e:
        raise error(f"{where}: not JSON at line {e.lineno}, column {e.colno}: {e.msg}. Is the file complete?") from e
    except ValueError as e:
        raise error(f"{where}: not JSON that can be read: {e}.") from e
    if not isinstance(data, dict):
        raise error(f"{where}: expected a JSON object ({{...}}), found {show(data)}.")
    return data


def parse_config(data: Mapping[str, Any], *, origin: str, name: str) -> ModelConfig:
    """A config from the object in a file.

    Args:
        data: the object.
        origin: where it came from, for messages.
        name: what the model is called.

    Raises:
        ConfigError: see `load_config`.
    """
    kind = data.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None:
        near = difflib.get_close_matches(str(kind), FAMILIES, n=1)
        hint = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(
            f"{origin}: model_type: {found(data, 'model_type')}, expected one of {', '.join(FAMILIES)}.{hint}"
        )
    rest = {k: v for k, v in data.items() if k != "model_type"}
    problems: list[str] = []
    legal = [[name] for name in family.architectures]
    names = rest.pop("architectures", None)
    if "architectures" in data and names not in legal:
        either = " or ".join(map(show, legal))
        problems.append(f"architectures: found {show(names)}, expected {either}, as model_type is {kind}.")
    values = read_section(family.section, rest, "", problems)
    values |= {"model_type": kind, "architecture": names[0] if names in legal else None}
    if not problems:
        problems.extend(family.contradictions(values))
    if problems:
        more = len(problems) - SHOWN
        lines = problems[:SHOWN] + ([f"... and {more} more"] if more > 0 else [])
        raise ConfigError("\n".join(f"{origin}: {line}" for line in lines))
    return ModelConfig(name=name, model_type=str(kind), source=dict(data), **family.build(values))
