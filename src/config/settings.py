"""Typed settings from yaml files and `--key.sub=value` arguments: merge and validate them, report every mistake."""

import contextlib
import difflib
import io
import json
import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterator
from enum import Enum
from pathlib import Path
from textwrap import wrap
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ValidationError, ValidationInfo, field_validator
from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from src.config.errors import cause, reraised_as
from src.config.terminal import masked


class Change(Enum):
    """The effect of changing a setting before a run resumes."""

    SAFE = "same weights, up to rounding"
    REOPENS = "a finished run resumes, or exports its model again"


Values = dict[str, Any]
"""Values of settings, by dotted name."""
Written = dict[str, str]
"""How the user wrote each value, by dotted name."""
T = TypeVar("T")
ResumeSafe = Annotated[T, Change.SAFE]
Reopens = Annotated[T, Change.REOPENS]
SafeReopens = Annotated[T, Change.SAFE, Change.REOPENS]
MAX_VALUES = 100_000
"""Values that a yaml may have, as JSON: a key, a colon and a comma count too. Nine lines of aliases can stand for
10^9."""
TEXT = (str, str | None)
"""Types of fields whose values are taken literally."""


class Settings(BaseModel, extra="forbid", frozen=True, use_attribute_docstrings=True, allow_inf_nan=False):
    """A group of settings, which never change. `--help` prints the docstring under each field."""

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Expand the ~ in `--name=~/folder`, which no shell does. Refuse `None`, which is a word in YAML, where null is
        meant."""
        annotation = cls.model_fields[str(info.field_name)].annotation
        if isinstance(value, bool) and annotation not in TEXT:
            return str(value)  # which is no number
        if not isinstance(value, str):
            return value
        if value.lower() == "none" and annotation is not str:
            raise ValueError("use null, not None")
        return os.path.expanduser(value) if value.startswith("~/") else value

    def validation_errors(self) -> Iterator[str]:
        """Yield an error line for each mistake that no single field can find, before anything is loaded: contradictory
        settings, missing files. Those of the groups within are found here."""
        for _, value in self:
            if isinstance(value, Settings):
                yield from value.validation_errors()


def read_arguments(argv: list[str], mistakes: list[str]) -> tuple[Values, Written]:
    """Return the values, and how the user wrote each: the files named by `--config`, in order, overridden by the other
    arguments, whose values are text, lists of words, True or None. Append a line to `mistakes` for whatever could not
    be read."""
    options: list[list[str]] = []
    is_open = False
    for word in argv:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            options.append([name.replace("-", "_"), *[value] * len(equals)])
            is_open = not equals
        elif is_open:
            options[-1].append(word)
        else:
            mistakes.append(f"{word}: not understood; settings are written --name=value")

    values: Values = {}
    written: Written = {}
    for name, *words in sorted(options, key=lambda option: option[0] != "config"):  # the other arguments override files
        if name == "config":
            for file in words or [""]:
                for setting, value in flatten(_read_file(file, mistakes)):
                    values[setting], written[setting] = value, f"{file}: {setting}: {value}"
        elif len(words) == 1:
            values[name] = None if words[0] in ("null", "~") else words[0]
            written[name] = f"--{name}={words[0]}"
        else:
            values[name], written[name] = words or True, " ".join([f"--{name}", *words])
    for name, how in written.items():
        written[name] = masked(how)
        if written[name] != how:
            mistakes.append(
                f"{written[name]}: it has a secret, which the run would write down: keep that in ~/.netrc, fsspec's "
                "configuration or the environment, as docs/running.md says"
            )
    return values, written


def validate(model: type[Settings], values: Values, written: Written, mistakes: list[str]) -> tuple[Any, set[str]]:
    """Build `model` from values by dotted name. Append a line to `mistakes` for each wrong name or value, and for each
    contradiction.

    Returns:
        The settings, with defaults in place of wrong values (None if a setting without a default is missing), and the
        names of those that are wrong.
    """
    known = {name: field.annotation for name, field, _ in setting_fields(model)}
    given: Values = {}
    wrong: dict[str, str] = {}
    for name, value in values.items():
        if known.get(name) not in TEXT:  # text is taken literally: [PAD], or "lr: 3"
            value = read_value(value)
        inside = [setting for setting in known if setting.startswith(f"{name}.")]
        if not inside or isinstance(value, dict):
            parts = dict(flatten({name: value}))
            given |= parts
            written = dict.fromkeys(parts, written.get(name, name)) | written
        elif value is not None:  # a group in a yaml may be empty
            wrong[name] = f"{name} is a group; write, for example, --{inside[0]}=…"

    settings = None
    while not settings:
        good = {name: value for name, value in given.items() if name not in wrong}
        try:
            settings = model.model_validate(nested(good))
        except ValidationError as error:
            refused: dict[str, list[str]] = defaultdict(list)
            for problem in error.errors():
                for name in _names_at(problem["loc"], good):
                    refused[name].append(_reason(name, problem, [*known]))
            wrong |= {name: "; ".join(dict.fromkeys(refused[name])) for name in refused if name not in wrong}
            if good.keys().isdisjoint(refused):  # a setting without a default is missing
                break
    mistakes.extend(f"{written.get(name, name)}: {why}" for name, why in wrong.items())
    if settings:
        contradictions = settings.validation_errors()  # but for those of defaults that stand in for wrong values
        mistakes.extend(line for line in contradictions if wrong.keys().isdisjoint(re.findall(r"[\w.]+", line)))
    return settings, {*wrong}


def _names_at(place: tuple[int | str, ...], given: Values) -> list[str]:
    """Return the given settings at the location of a pydantic error, around it or in it. If none is given, return the
    name of what is missing."""
    where = ".".join(map(str, place))
    if where in given:
        return [where]
    return [name for name in given if where.startswith(f"{name}.") or name.startswith(f"{where}.")] or [where]


def _reason(name: str, problem: Any, known: list[str]) -> str:
    """Return why pydantic refuses the setting of this name, or a value within it."""
    *_, place = problem["loc"]
    # of a mapping in a list
    is_within = isinstance(place, str) and place not in (name, *name.split("."))
    match problem["type"]:
        case "extra_forbidden":
            why = f"unknown setting{nearest(place if is_within else name, known)}"
        case "list_type":
            why = f"must be a list: write [{problem['input']}]"
        case "string_type":
            why = "must be text: write it in quotes"
        case _:
            why = str(problem["msg"]).replace("Input should be", "must be").removeprefix("Value error, ")
    return f"{place}: {why}" if is_within else why


def setting_fields(
    model: type[Settings], prefix: str = "", inherited: Collection[Any] = ()
) -> Iterator[tuple[str, Any, Collection[Any]]]:
    """Yield the dotted name of each setting in `model` and its groups, its pydantic field, and its marks, including
    those of its groups."""
    for name, field in model.model_fields.items():
        marks = [*inherited, *field.metadata]
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from setting_fields(field.annotation, f"{prefix}{name}.", marks)
        else:
            yield prefix + name, field, marks


def help_lines(model: type[Settings], defaults: Values) -> Iterator[str]:
    """Yield the settings as `--help` shows them: name, default, choices and documentation. `defaults` replace those of
    the model."""
    for name, field, _ in setting_fields(model):
        default = write_yaml(defaults.get(name, field.get_default()), is_in_one_line=True)
        is_choice = get_origin(field.annotation) is Literal
        choices = f"   ({'|'.join(map(str, get_args(field.annotation)))})" if is_choice else ""
        yield f"  --{name}={default.splitlines()[0]}{choices}"
        yield from (f"        {line}" for line in wrap(field.description or "", 72))


def nearest(name: str, names: list[str]) -> str:
    """Return `, did you mean …?` with the closest of `names`, compared as a whole or by its last part; empty if none is
    close."""
    part, *parts = (re.split(r"/|\.(?!yaml)", each)[-1] for each in (name, *names))
    close = difflib.get_close_matches(name, names, 1, 0.75)
    close = close or [names[parts.index(found)] for found in difflib.get_close_matches(part, parts, 1, 0.7)]
    return f", did you mean {close[0]}?" if close else ""


def _read_file(file: str, mistakes: list[str]) -> Values:
    path = Path(file)
    try:
        content = read_yaml(path.read_text(encoding="utf-8")) or {}
        if isinstance(content, dict):
            return content
        problem = "must hold settings, one `name: value` per line"
    except FileNotFoundError:
        there = [*map(str, sorted(path.parent.glob("*.yaml")))]
        problem = f"no such file{nearest(file, there)}"
    except (OSError, UnicodeDecodeError, YAMLError) as error:
        problem = f"cannot be read as yaml, {cause(error)}"
    mistakes.append(f"--config={file}: {problem}")
    return {}


def read_yaml(text: str | bytes) -> Any:
    """Parse YAML 1.2, in which 010 is 10, and 1:30, yes and on are text.

    Raises:
        YAMLError: the text is not YAML, repeats a key, has a value that does not fit its tag, contains itself, or
            stands for more than MAX_VALUES.
    """
    with reraised_as(YAMLError, ""):
        content = YAML(typ="safe", pure=True).load(text)
        parts = json.JSONEncoder(default=str).iterencode(content)  # an error for what contains itself
        if any(number > MAX_VALUES for number, _ in enumerate(parts)):
            raise ValueError(f"stands for more than {MAX_VALUES:,} values")
    return content


def write_yaml(content: Any, is_in_one_line: bool = False) -> str:
    """Return `content` as YAML text, which `read_yaml` reads back."""
    stream = io.StringIO()
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.default_flow_style = is_in_one_line
    yaml.sort_base_mapping_type_on_output = False
    yaml.dump(content, stream)
    return stream.getvalue()


def read_value(value: Any) -> Any:
    """Return text as the YAML that it is, or else as it is. What is empty or no text stays as it is."""
    with contextlib.suppress(YAMLError):
        return read_yaml(value) if value and isinstance(value, str) else value
    return value


def flatten(tree: dict[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted name and the value of each leaf in nested mappings."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def nested(values: Values) -> Values:
    """Return nested mappings of values by dotted name. A name within another value stays as it is."""
    tree: Values = {}
    for name in sorted(values):
        *groups, last = name.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
            if not isinstance(branch, dict):  # `--seed.x=1` beside `--seed=1`
                branch, last = tree, name
                break
        branch[last] = values[name]
    return tree
