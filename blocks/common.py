"""What all blocks here share: how they look in Prefect's UI, and how they refuse nonsense."""

from __future__ import annotations

from difflib import get_close_matches
from typing import Any

from pydantic import BaseModel, ConfigDict, HttpUrl, model_validator
from pydantic_core import PydanticCustomError

from gpu_reclaim.errors import BadInput
from gpu_reclaim.systemd import unit_name

DOCUMENTATION_URL = HttpUrl("https://docs.prefect.io/v3/concepts/blocks")

LOGO_URL = HttpUrl(
    "https://cdn.sanity.io/images/3ugk85nk/production/"
    "0b47a017e1b40381de770c17647c49cdf6388d1c-250x250.png"
)
"""The terminal that Prefect's own shell blocks show; the API takes no picture without an address
(a `data:` URL is refused by Prefect 3.9.1)."""


def full_unit_name(unit: str) -> str:
    """A unit's full name, for a block's form.

    Raises:
        PydanticCustomError: It is none.
    """
    try:
        return unit_name(unit)
    except BadInput as error:
        raise PydanticCustomError("unit", "{text}", {"text": str(error)}) from error


class Careful(BaseModel):
    """Refuses misspelt fields (Prefect's own blocks keep them), and never repeats its input.

    A validation error of pydantic quotes the input, which here may hold a private key.
    """

    model_config = ConfigDict(hide_input_in_errors=True)

    @model_validator(mode="before")
    @classmethod
    def _known_fields_only(cls, values: Any) -> Any:
        known = cls.model_fields
        for name in values if isinstance(values, dict) else ():
            # Prefect adds fields of its own, such as block_type_slug.
            if name not in known and not name.startswith(("block_", "_")):
                near = get_close_matches(name, known, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                text = f"{cls.__name__} has no field {name!r}{hint}"
                raise PydanticCustomError("unknown_field", "{text}", {"text": text})
        return values
