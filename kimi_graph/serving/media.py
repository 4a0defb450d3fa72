# pyright: reportMissingImports=false
"""Pictures of requests, loaded by vLLM's own loader; one that is too large to be unpacked is a fault of the request.

Pillow refuses such a picture by its header, with an error that vLLM 0.32 takes for the server's own (status 500).
"""

import contextlib
from collections.abc import Iterator
from typing import Any

from PIL import Image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

NAME = "kimi_graph"  # what VLLM_MEDIA_CONNECTOR says, see `launch.DEFAULTS`


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class Loader(MediaConnector):
    """vLLM's loader. Of its errors a `ValueError` is answered with status 400."""

    def fetch_image(self, *args: Any, **options: Any) -> Any:
        """A picture of a URL."""
        with refused():
            return super().fetch_image(*args, **options)

    async def fetch_image_async(self, *args: Any, **options: Any) -> Any:
        """A picture of a URL."""
        with refused():
            return await super().fetch_image_async(*args, **options)


@contextlib.contextmanager
def refused() -> Iterator[None]:
    """Inside, a picture that is too large is a `ValueError`."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
