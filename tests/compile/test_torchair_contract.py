"""The parts of torchair that are used are there: in the one at hand, and on request in other releases.

`pytest -m wheels tests/compile/test_torchair_contract.py` downloads the wheels of torch-npu 2.10 to 2.14.
"""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from kimi_graph import ops
from kimi_graph.compile import torchair_contract, torchair_host
from kimi_graph.compile.capture import capture
from kimi_graph.compile.convert import convert
from kimi_graph.compile.driver import Request, compile_bundle, legal_phases
from kimi_graph.compile.targets import target
from kimi_graph.compile.torchair_host import Host
from tests.compile.family import FAMILY, small_model

WHEELS = ("2.10.0.post7", "2.11.0", "2.12.0", "2.13.0", "2.14.0")


def step(x, weight, up, table, tokens, gate, cache):
    """A bit of everything: own types, helpers, torchair's converters for ATen."""
    y = ops.rms_norm(x + F.embedding(tokens, table), weight, 1e-5)
    y = ops.gated_rms_norm(y, gate, weight, 1e-5)
    y = torch.sigmoid(y @ up.t())
    low, high = y.float()[:, :4], y.float()[:, 4:]
    y = torch.cat([F.softplus(low), high.square().sum(-1, keepdim=True).rsqrt()], 1).clamp(max=3.0)
    picked = torch.gather(cache, 0, tokens[:, None].expand(-1, 8))
    return {"y": F.silu(y), "picked": picked.view(2, -1).permute(1, 0)[3].unsqueeze(0)}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def op_types(host: Host) -> dict[str, int]:
    args = {
        "x": meta(4, 16),
        "weight": meta(16),
        "up": meta(8, 16),
        "table": meta(32, 16),
        "tokens": meta(4, dtype=torch.int64),
        "gate": meta(4, 16),
        "cache": meta(32, 8, dtype=torch.float32),
    }
    made = convert(capture(step, args).module, name="step", host=host, target=None, cann="")
    return dict(sorted(Counter(op.type for op in made.model.graph[0].op).items()))


def model_types(host: Host) -> dict[str, dict[str, int]]:
    """Nodes by type of the graphs of every small model."""
    found = {}
    for name in FAMILY:
        config = small_model(name)
        sizes: dict[str, Any] = {"chunk": 16, "max_len": 96, "page": 16, "patches": 16 if config.vision else None}
        for chip in ("a3", "950dt"):
            request = Request(config=config, target=target(chip), phases=legal_phases(config), **sizes)
            for graph in compile_bundle(request, host, None)["graphs"]:
                found[f"{name} {chip} {graph['name']}"] = dict(sorted(graph["ops"].items()))
    return found


def test_torchair_keeps_the_contract(host):
    assert torchair_contract.broken(host) == []


def test_a_renamed_or_changed_name_is_reported(host, monkeypatch):
    monkeypatch.delattr(host.ge, "Cast")
    monkeypatch.setattr(host.converters, "set_ge_outputs", lambda outputs: None)
    assert [p.rpartition(".")[2] for p in torchair_contract.broken(host)] == [
        "Cast is missing",
        "set_ge_outputs takes no 'ge_outputs', only outputs",
        "set_ge_outputs takes no 'meta_outputs', only outputs",
    ]


@pytest.fixture(scope="module")
def wheels(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("wheels")


@pytest.mark.wheels
@pytest.mark.parametrize("version", WHEELS)
def test_other_releases_keep_the_contract_and_give_the_same_nodes(version, host, wheels):
    wheel = torchair_host.download(version, wheels)
    command = [sys.executable, __file__, str(wheel), str(wheels / "cache")]  # a process holds one torchair
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["version"] == version
    assert report["broken"] == []
    assert report["ops"] == op_types(host)
    assert report["models"] == model_types(host)


if __name__ == "__main__":
    other = torchair_host.load(sys.argv[1], cache=sys.argv[2])
    broken = torchair_contract.broken(other)
    made = {} if broken else {"ops": op_types(other), "models": model_types(other)}
    print(json.dumps({"version": other.version, "broken": broken, **made}))
