# pyright: reportMissingImports=false
"""Pictures of requests, loaded by vLLM's own loader; one that it will not load is a fault of the request.

Some of its refusals vLLM 0.32 takes for faults of the server (status 500): that of Pillow, by its header, of a picture
too large to be unpacked, its own of a path on the server's disk, and an address that does not answer.
"""

import contextlib
from collections.abc import Iterator
from typing import Any

import aiohttp
import requests
from PIL import Image
from vllm.multimodal.media import MEDIA_CONNECTOR_REGISTRY, MediaConnector

NAME = "kimi_graph"  # what VLLM_MEDIA_CONNECTOR says, see `launch.DEFAULTS`


@MEDIA_CONNECTOR_REGISTRY.register(NAME)
class Loader(MediaConnector):
    """vLLM's loader. Of its errors a `ValueError` is answered with status 400."""

    def fetch_image(self, image_url: str, **options: Any) -> Any:
        """A picture of a URL."""
        with refused(image_url):
            return super().fetch_image(image_url, **options)

    async def fetch_image_async(self, image_url: str, **options: Any) -> Any:
        """A picture of a URL."""
        with refused(image_url):
            return await super().fetch_image_async(image_url, **options)


@contextlib.contextmanager
def refused(image_url: str) -> Iterator[None]:
    """Inside, a picture that is too large or does not come, or a file where none may be read, is a `ValueError`."""
    try:
        yield
    except Image.DecompressionBombError as error:
        raise ValueError(str(error)) from error
    except (aiohttp.ClientError, requests.RequestException, TimeoutError) as error:
        raise ValueError(f"{image_url[:200]}: {error or type(error).__name__}") from error
    except RuntimeError as error:
        if image_url.startswith("file:"):
            raise ValueError(str(error)) from error
        raise
