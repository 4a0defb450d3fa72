"""SGLang in this process and its scheduler beside it, asked as `served` asks vLLM."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from tests.serving.served import Output


@contextlib.contextmanager
def sglang_engine(model: Path, **options: Any) -> Iterator[Any]:
    """SGLang's `Engine` on the CPU, float32; ids in and out."""
    import sglang

    settings = {"device": "cpu", "attention_backend": "torch_native", "dtype": "float32", "log_level": "warning"}
    settings |= {"skip_tokenizer_init": True, "max_total_tokens": 4096, "max_running_requests": 8}
    llm = sglang.Engine(model_path=str(model), **settings | options)
    try:
        yield llm
    finally:
        llm.shutdown()


def ask_sglang(llm: Any, prompts: Sequence[Sequence[int]], count: int = 8) -> list[Output]:
    """Greedy continuations of all prompts in one batch; `retracted(llm)` counts."""
    sampling = {"temperature": 0, "max_new_tokens": count, "ignore_eos": True}
    given = [list(p) for p in prompts]
    outs = llm.generate(input_ids=given, sampling_params=sampling, return_logprob=True, top_logprobs_num=2)
    return [_output(o["output_ids"], o["meta_info"]) for o in outs]


def _output(tokens: list[int], told: dict[str, Any]) -> Output:
    top = [{token: value for value, token, _ in step} for step in told["output_top_logprobs"]]
    return Output(tokens, told["cached_tokens"], top, told["num_retractions"])
