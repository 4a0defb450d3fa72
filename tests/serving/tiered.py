"""A process that serves some prompts with tiers, for tests of a restart: JSON in, JSON out."""

import json
import sys
from pathlib import Path

from tests.serving.served import ask, engine, reads


def main() -> None:
    given = json.loads(sys.argv[1])
    with reads() as read, engine(Path(given["folder"]), kv_transfer_config=given["tiers"], **given["options"]) as llm:
        outs = ask(llm, given["prompts"], given["count"])
    print(json.dumps({"answers": [[o.tokens, o.cached] for o in outs], "read": read}))


if __name__ == "__main__":
    main()
