"""A process that serves some prompts with tiers, for tests of a restart: JSON in, JSON out."""

import json
import sys
from pathlib import Path

from tests.serving.served import ask, engine


def main() -> None:
    given = json.loads(sys.argv[1])
    with engine(Path(given["folder"]), kv_transfer_config=given["tiers"]) as llm:
        outs = ask(llm, given["prompts"], given["count"])
    print(json.dumps([[o.tokens, o.cached] for o in outs]))


if __name__ == "__main__":
    main()
