"""What the blocks look like in Prefect's UI."""

from __future__ import annotations

from pydantic import HttpUrl

DOCUMENTATION_URL = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

LOGO_URL = HttpUrl(
    "https://cdn.sanity.io/images/3ugk85nk/production/"
    "0b47a017e1b40381de770c17647c49cdf6388d1c-250x250.png"
)
"""The terminal that Prefect's own shell blocks show; the API takes no picture without an address
(a `data:` URL is refused by Prefect 3.9.1)."""
