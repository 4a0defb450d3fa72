"""What `--tiers` asks for, and the engine's configuration that says the same. Needs no engine."""

import hashlib
import json
import re
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kimi_graph.errors import ConfigError
from kimi_graph.serving.warden import SHARED

POLICIES = ("lru", "arc")  # of shared memory: what leaves it first
UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12}
UNITS |= {"KIB": 2**10, "MIB": 2**20, "GIB": 2**30, "TIB": 2**40}
CODES = ("int8", "fp8")  # of attention pages in files
LEAST = 10**6  # bytes of a tier: less has room for no page
EXAMPLE = "host=4GB,file=DIR:100GB,policy=lru"
SAMPLE = 1 << 16  # bytes of a file's beginning and end that tell weights apart


@dataclass(frozen=True, kw_only=True)
class Tiers:
    """Tiers below the engine's own cache, nearest first.

    Attributes:
        host: bytes of the node's shared memory.
        policy: what leaves it first, one of `POLICIES`.
        files: folder of the file tier, None without.
        most: bytes that it may fill, None without a bound.
        low: how attention pages are written to files, one of `CODES`; None: as they are. Memories of recurrent layers
            always are written as they are.
    """

    host: int
    policy: str = "lru"
    files: Path | None = None
    most: int | None = None
    low: str | None = None

    @staticmethod
    def parse(text: str) -> "Tiers":
        """Of `host=SIZE[,file=DIR[:SIZE]][,policy=NAME][,low=CODE]`.

        Raises:
            ConfigError: the word that is wrong, and what it can be.
        """
        given: dict[str, str] = {}
        for word in text.split(","):
            key, found, value = (part.strip() for part in word.partition("="))
            if not found or not value or key not in ("host", "file", "policy", "low"):
                raise ConfigError(
                    f"--tiers {text}: {word!r} is not host=, file=, policy= or low= with a value; as {EXAMPLE}."
                )
            if key in given:
                raise ConfigError(f"--tiers {text}: {key}= twice; expected once.")
            given[key] = value
        if "host" not in given:
            raise ConfigError(f"--tiers {text}: no host=; every tier is reached through shared memory, as {EXAMPLE}.")
        files, most = _folder(given["file"]) if "file" in given else (None, None)
        for key, names in (("policy", POLICIES), ("low", CODES)):
            if given.get(key, names[0]) not in names:
                raise ConfigError(f"--tiers {key}={given[key]}: expected one of {', '.join(names)}.")
        if "low" in given and files is None:
            raise ConfigError(f"--tiers {text}: low= is how files are written; expected file=DIR beside it.")
        policy, low = given.get("policy", POLICIES[0]), given.get("low")
        return Tiers(host=size_of(given["host"]), policy=policy, files=files, most=most, low=low)

    def check_room(self) -> None:
        """Hold the tiers against this machine; makes the folder of files.

        Raises:
            KimiGraphError: shared memory is smaller than asked for; the folder may not be written.
        """
        if SHARED.is_dir() and self.host > (there := shutil.disk_usage(SHARED).total):
            raise ConfigError(f"--tiers host={self.host / 1e9:g}GB: {SHARED} has {there / 1e9:.1f} GB in all.")
        if self.files is not None:
            try:
                self.files.mkdir(parents=True, exist_ok=True)
                with tempfile.TemporaryFile(dir=self.files):
                    pass
            except OSError as error:
                raise ConfigError(f"--tiers file={self.files}: {error.strerror}; choose another place.") from None

    def engine_config(self, checkpoint: Path) -> dict[str, Any]:
        """The engine's `--kv-transfer-config`.

        Args:
            checkpoint: whose caches they are: files lie in a folder of its mark, see `mark_of`.
        """
        extra: dict[str, Any] = {
            "spec_name": "HostTiers",
            "spec_module_path": f"{__package__}.host",
            "cpu_bytes_to_use": self.host,
            "eviction_policy": self.policy,
            "offload_prompt_only": False,  # the next turn of a conversation reads this one's answer
        }
        if self.files is not None:
            folder = self.files.resolve() / f"{mark_of(checkpoint)}-{self.low or 'whole'}"
            tier = {"type": "Files", "module_path": f"{__package__}.files", "root_dir": str(folder)}
            extra["secondary_tiers"] = [tier | {"most": self.most, "low": self.low}]
        return {
            "kv_connector": "OffloadingConnector",
            "kv_role": "kv_both",
            "kv_connector_extra_config": extra,
        }


def _folder(text: str) -> tuple[Path, int | None]:
    """`DIR` or `DIR:SIZE`."""
    folder, found, size = text.rpartition(":")
    path = Path(folder if found else text)
    if path.exists() and not path.is_dir():
        raise ConfigError(f"--tiers file={path}: a file; expected a folder, or a name for a new one.")
    return path, size_of(size) if found else None


def size_of(text: str, flag: str = "--tiers") -> int:
    """Bytes of `4GB` or `512MiB`; units are decimal unless they have an i.

    Raises:
        ConfigError: it is no size with a unit, or less than a megabyte.
    """
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([A-Za-z]*)", text)
    unit = UNITS.get(found[2].upper()) if found else None
    size = int(float(found[1]) * unit) if found and unit else 0
    if size < LEAST:
        raise ConfigError(f"{flag}: {text!r}; expected 1MB or more in KB, MB, GB, TB or KiB to TiB, as 4GB or 512MiB.")
    return size


def mark_of(checkpoint: Path) -> str:
    """Tells checkpoints apart whose caches must not be mixed; the engine itself goes by the folder's name alone.

    Config, headers, sizes, and the beginning and end of each file's weights: not all of them, which would be read for
    minutes.
    """
    digest = hashlib.sha256((checkpoint / "config.json").read_bytes())
    for path in sorted(checkpoint.glob("*.safetensors")):
        digest.update(json.dumps([path.name, path.stat().st_size]).encode())
        with path.open("rb") as file:
            digest.update(file.read(int.from_bytes(file.read(8), "little")))
            digest.update(file.read(SAMPLE))
            file.seek(max(file.tell(), path.stat().st_size - SAMPLE))
            digest.update(file.read())
    return digest.hexdigest()[:16]
