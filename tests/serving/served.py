"""The engine in this process, and the library's own greedy output to hold it against."""

import contextlib
import dataclasses
import functools
import gc
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch

import kimi_graph as kg
from kimi_graph.config import KdaConfig

SETTINGS = {  # read when the engine is imported
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.update({name: os.environ.get(name, value) for name, value in SETTINGS.items()})

NEAR = 1e-4  # logits closer than this, of their scale: sums in another order decide, in float32


@contextlib.contextmanager
def engine(model: Path, **options: Any) -> Iterator[Any]:
    """vLLM's `LLM` in this process, float32 and eager."""
    import vllm
    from vllm.distributed import cleanup_dist_env_and_memory

    settings = {"dtype": "float32", "enforce_eager": True, "max_model_len": 1024, "disable_log_stats": False}
    settings |= {"enable_prefix_caching": True}  # as `serve` does; 0.27 has it off where layers have a memory
    llm = vllm.LLM(str(model), **settings | options)
    try:
        yield llm
    finally:
        llm.llm_engine.engine_core.shutdown()
        del llm
        gc.collect()
        cleanup_dist_env_and_memory()


@dataclass(frozen=True)
class Output:
    """Tokens of one prompt. cached: tokens of the prompt that were not computed. top: best logprobs of each step.
    retracted: how often it had to begin anew, where the engine says so of a request."""

    tokens: list[int]
    cached: int
    top: list[dict[int, float]]
    retracted: int = 0


def ask(llm: Any, prompts: Sequence[Sequence[int]], count: int = 8) -> list[Output]:
    """Greedy continuations of all prompts in one batch."""
    from vllm.inputs import TokensPrompt

    return [*map(_output, _generated(llm, [TokensPrompt(prompt_token_ids=list(p)) for p in prompts], count))]


def seen(llm: Any, pictures: Sequence[Any], text: str, count: int = 8) -> tuple[list[int], Output]:
    """A prompt with pictures before its text: its ids, with one for each embedding, and the greedy continuation."""
    from kimi_graph.serving.pictures import placeholder

    given: dict[str, Any] = {"prompt": placeholder() * len(pictures) + text}
    if pictures:
        given["multi_modal_data"] = {"image": list(pictures)}
    (out,) = _generated(llm, [given], count)
    return list(out.prompt_token_ids), _output(out)


def _generated(llm: Any, prompts: Sequence[Any], count: int) -> Any:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=2)
    return llm.generate(list(prompts), sampling, use_tqdm=False)


def _output(o: Any) -> Output:
    top = [{token: x.logprob for token, x in step.items()} for step in o.outputs[0].logprobs]
    return Output(list(o.outputs[0].token_ids), o.num_cached_tokens, top)


def differ_at_a_tie(one: Output, other: Output, rounding: float) -> bool:
    """Whether two answers are the same until one has a token that is as good as the other's but for rounding."""
    for a, b, best, again in zip(one.tokens, other.tokens, one.top, other.top, strict=True):
        if abs(max(best.values()) - max(again.values())) > rounding:
            return False
        if a != b:
            return b in best and best[a] - best[b] <= rounding
    return True


def tables_in_use(model: Any) -> list[Any]:
    """Which slots hold the experts of each layer, as a rank has it; asked of ranks in other processes."""
    return [shelf.placed for shelf in model.balance.shelves.values()]


def counted(llm: Any, name: str) -> float:
    """A counter of the engine's metrics."""
    return sum(m.value for m in llm.get_metrics() if m.name == name)


@contextlib.contextmanager
def reads() -> Iterator[list[str]]:
    """Files of the pages that were read and arrived, in engines whose scheduler is in this process. vLLM 0.32 has a
    counter of their bytes, 0.27 has none."""
    from kimi_graph.serving.tiers.files import Files

    asked: dict[int, list[str]] = {}
    arrived: list[str] = []
    begin, end = Files.submit_load, Files.get_finished_jobs

    def submit_load(tier: Any, job: Any) -> None:
        asked[job.job_id] = [tier.file_mapper.get_file_name(key) for key in job.keys]
        begin(tier, job)

    def get_finished_jobs(tier: Any) -> list[Any]:
        done = list(end(tier))
        for job in done:
            arrived.extend(asked.pop(job.job_id, []) if job.success else [])
        return done

    with mock.patch.multiple(Files, submit_load=submit_load, get_finished_jobs=get_finished_jobs):
        yield arrived


@dataclass
class Library:
    """The library's own greedy output, float32, without an end of sequence."""

    folder: Path
    seen: dict[tuple[int, ...], tuple[list[int], torch.Tensor]] = dataclasses.field(default_factory=dict)

    @functools.cached_property
    def config(self) -> Any:
        return kg.load_config(self.folder)

    @property
    def hybrid(self) -> bool:
        """Whether some layers have a memory of fixed size."""
        return any(isinstance(layer.mixer, KdaConfig) for layer in self.config.layers)

    @functools.cached_property
    def params(self) -> Any:
        return kg.load_params(self.folder, self.config, torch.float32)

    def prompts(self, *lengths: int, seed: int = 0) -> list[list[int]]:
        generator = torch.Generator().manual_seed(seed)
        return [torch.randint(0, 256, (n,), generator=generator).tolist() for n in lengths]

    def greedy(self, prompts: Sequence[Sequence[int]], count: int) -> None:
        """Read and continue prompts together, for `agrees` to look them up."""
        new = [p for p in dict.fromkeys(map(tuple, prompts)) if len(self.seen.get(p, ((),))[0]) < count]
        if not new:
            return
        longest = max(map(len, new))
        ids = torch.tensor([[0] * (longest - len(p)) + list(p) for p in new])
        mask = torch.arange(longest) >= longest - torch.tensor([len(p) for p in new])[:, None]
        state = kg.init_state(self.config, len(new), longest + count, torch.float32)
        with torch.no_grad():
            logits, state = kg.prefill(self.config, self.params, ids, state, mask=mask, last_only=True)
            self._keep(new, self._continued(logits, state, count))

    def _continued(self, logits: torch.Tensor, state: Any, count: int) -> torch.Tensor:
        """Logits `[B, count, V]` of greedy steps."""
        steps = [logits]
        for _ in range(count - 1):
            logits, state = kg.decode(self.config, self.params, logits.argmax(-1), state, donate=True)
            steps.append(logits)
        return torch.stack(steps, 1)

    def _keep(self, prompts: Sequence[tuple[int, ...]], logits: torch.Tensor) -> None:
        self.seen |= {p: (rows.argmax(-1).tolist(), rows) for p, rows in zip(prompts, logits, strict=True)}

    def see(self, ids: Sequence[int], count: int, pictures: Sequence[torch.Tensor]) -> None:
        """`greedy` of a prompt with pictures, given as embeddings: they are looked up by the prompt's ids alone."""
        state = kg.init_state(self.config, 1, len(ids) + count, torch.float32)
        with torch.no_grad():
            given = torch.tensor([list(ids)])
            logits, state = kg.prefill(self.config, self.params, given, state, last_only=True, vision=pictures or None)
            self._keep([tuple(ids)], self._continued(logits, state, count))

    def agrees(self, prompt: Sequence[int], got: Output) -> None:
        """The same tokens with the same logprobs. Where two logits are nearly equal the engine may take the other
        one; what follows is then another text, and is not compared."""
        want, logits = self.seen[tuple(prompt)]
        scale = float(logits.abs().max())
        for step, (token, expected) in enumerate(zip(got.tokens, want, strict=False)):
            row = logits[step]
            gap = float(row[expected] - row[token])
            assert gap <= NEAR * scale, f"token {step}: {got.tokens} rather than {want}; {gap:.1e} below the best"
            logprobs = row.log_softmax(-1)
            for other, value in got.top[step].items():
                assert abs(float(logprobs[other]) - value) <= NEAR * scale, (step, other)
            if token != expected:
                return
