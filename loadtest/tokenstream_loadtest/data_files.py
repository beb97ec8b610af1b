"""Finds and reads the data files of workloads and scenarios: shipped ones by name, anybody's own by path.

Whatever is wrong with one is a ValueError of one line: which file, which field, what stands there, what would be right.
It does not know what the files mean.
"""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

SHIPPED = Path(__file__).parent
_LONGEST_VALUE = 60  # characters of a wrong value that are shown
_QUOTES = "'"
Model = TypeVar("Model", bound=BaseModel)


class Table(BaseModel):
    """One table of such a file: it cannot be changed, and a field that it does not know is an error."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


def shipped_names(folder: str) -> list[str]:
    """The names of the shipped files in a folder of this package ("workloads", "scenarios"), sorted."""
    return sorted(path.stem for path in (SHIPPED / folder).glob("*.toml"))


def locate(folder: str, name_or_path: str) -> Path:
    """The file of a shipped name, or of a path. ValueError if there is none."""
    shipped = SHIPPED / folder / f"{name_or_path}.toml"
    if "/" not in name_or_path and shipped.is_file():
        return shipped
    path = Path(name_or_path)
    if path.suffix == ".toml" and path.is_file():
        return path
    what = folder.removesuffix("s")
    raise ValueError(
        f"no {what} {name_or_path!r}: give the path of a .toml file, or one of {', '.join(shipped_names(folder))}"
    )


def read_table(path: Path, model: type[Model]) -> Model:
    """What a TOML file holds, checked. ValueError in one line."""
    try:
        return checked(model, tomllib.loads(read_text(path)), str(path))
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{path} is no TOML: {error}") from None


def read_text(path: Path) -> str:
    """A text file. ValueError in one line if it cannot be read or is no UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no UTF-8: {error.reason} at byte {error.start}") from None
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}") from None


def checked(model: type[Model], values: object, where: str) -> Model:
    """`values` as a `model`. ValueError of one line that begins with `where`."""
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ValueError(f"{where}: {_one_line(error.errors()[0], values)}") from None


def _one_line(error: ErrorDetails, values: object) -> str:
    field, place = "", values
    for part in error["loc"]:
        if isinstance(place, dict) and part not in place and part in place.values():
            continue  # pydantic's tag of a union: a value in the file, not a field
        field += f"[{part}]" if isinstance(part, int) else f".{part}" if field else part
        place = _inside(place, part)
    message = error["msg"].removeprefix("Value error, ")
    match error["type"]:
        case "extra_forbidden":
            return f"{field}: there is no such field"
        case "missing":
            return f"{field} is missing"
        case "union_tag_not_found":
            return f"{field}.{error['ctx']['discriminator'].strip(_QUOTES)} is missing"
        case "union_tag_invalid":
            tag, tags = error["ctx"]["tag"], error["ctx"]["expected_tags"]
            return f"{field}.{error['ctx']['discriminator'].strip(_QUOTES)} = {tag!r}: should be one of {tags}"
        case "value_error" if isinstance(error["input"], dict):
            return f"{field}: {message}" if field else message
    shown = repr(error["input"])
    shown = shown if len(shown) <= _LONGEST_VALUE else f"{shown[:_LONGEST_VALUE]}..."
    return f"{field} = {shown}: {message[:1].lower()}{message[1:]}"


def _inside(place: object, part: int | str) -> object:
    try:
        return place[part]  # type: ignore[index]
    except (TypeError, KeyError, IndexError):
        return None
