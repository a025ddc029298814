"""Typed settings from yaml files and `--key.sub=value` arguments: merged, validated, every mistake on its own line."""

import contextlib
import difflib
import os
import re
from collections.abc import Iterator, Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from src.config.errors import cause, explained


class Change(Enum):
    """What a change to a setting means for a run that is continued."""

    SAFE = "it arrives at the same weights, except for rounding"
    LENGTH = "it is longer or shorter"
    REOPENS = "a finished run goes on, or exports its model anew"


T = TypeVar("T")
ResumeSafe = Annotated[T, Change.SAFE]
Length = Annotated[T, Change.LENGTH, Change.REOPENS]
Reopens = Annotated[T, Change.REOPENS]
SafeReopens = Annotated[T, Change.SAFE, Change.REOPENS]


class Settings(BaseModel):
    """A group of settings. The docstring under each field is what `--help` prints."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _as_written(cls, value: Any, info: ValidationInfo) -> Any:
        """Return what the user meant. YAML and pydantic read `1e3` as text, though an integer can be written so.
        `None`, a word to YAML, is refused where null is meant; so are yes and true, which pydantic takes for 1. No
        shell expands the ~ in `--name=~/folder`."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        kinds = [get_args(kind)[0] if get_origin(kind) is Annotated else kind for kind in get_args(annotation)]
        kinds.append(annotation)
        if isinstance(value, bool) and (int in kinds or float in kinds):
            raise ValueError("must be a number")
        if isinstance(value, str) and value.startswith("~/"):
            return os.path.expanduser(value)
        if type(None) in kinds and isinstance(value, str) and value.lower() == "none":
            raise ValueError("write null for none")
        if isinstance(value, str) and str not in kinds and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
            return int(number) if (number := float(value)).is_integer() else number
        return value


class Yaml(yaml.SafeLoader):
    """Loads YAML safely, without the base 60 and base 8 of YAML 1.1, in which 1:30 is 90 and 010 is 8."""


INT, FLOAT = "tag:yaml.org,2002:int", "tag:yaml.org,2002:float"
Yaml.yaml_implicit_resolvers = {
    first: [(tag, pattern) for tag, pattern in found if tag not in (INT, FLOAT)]
    for first, found in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
Yaml.add_implicit_resolver(INT, re.compile(r"[-+]?\d+$"), list("-+0123456789"))
Yaml.add_implicit_resolver(FLOAT, re.compile(r"[-+]?(\.\d+|\d+\.\d*)([eE][-+]\d+)?$"), list("-+.0123456789"))
Yaml.add_constructor(INT, lambda loader, node: int(node.value))


def read_arguments(argv: list[str], mistakes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merge the files that `--config` names, in order, and then the other arguments.

    Returns:
        The values by dotted name and, for messages, how the user wrote each. What could not be read is appended to
        `mistakes`.
    """
    files: list[str] = []
    options: dict[str, str] = {}
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        name = name.replace("-", "_")
        if argument == "--config" or (name == "config" and equals):
            if file := value if equals else next(arguments, ""):
                files.append(file)
            else:
                mistakes.append(f"{argument}: name a yaml file, --config=FILE.yaml")
        elif argument.startswith("--") and (equals or name in ("check", "dry_run")):
            options[name] = value if equals else "true"
        else:
            mistakes.append(f"{argument}: not understood; settings are written --name=value")

    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for file in files:
        for name, value in flatten(_read_yaml(file, mistakes)):
            values[name], written[name] = value, f"{file}: {name}: {value}"
    for name, text in options.items():
        written[name] = f"--{name}={text}"
        values[name], repeated = _parse(text)
        mistakes += [f"{written[name]}: {line}" for line in repeated]
    return values, written


def validate(
    model: type[Settings],
    values: Mapping[str, Any],
    written: Mapping[str, str],
    mistakes: list[str],
    renamed: Mapping[str, str],
) -> tuple[Settings, set[str]]:
    """Build `model` from dotted names; append a line to `mistakes` for each name or value that it refuses.

    Args:
        written: how the user wrote each value, for messages.
        renamed: settings of earlier versions, and what they are called now.

    Returns:
        The settings with every refused value replaced by its default, and the names of those refused.
    """
    known = dict(fields(model))
    groups = {name.rpartition(".")[0] for name in known} - {""}
    good = dict(values)
    bad: set[str] = set()
    for name in values:
        if name in groups:
            example = next(setting for setting in known if setting.startswith(f"{name}."))
            if values[name] is not None or written[name].startswith("--"):  # a yaml's group may just be empty
                mistakes.append(f"{written[name]}: {name} is a group; write, for example, --{example}=…")
        elif not any(f"{name}.".startswith(f"{setting}.") for setting in known):
            hint = f", it is now {renamed[name]}" if name in renamed else nearest(name, list(known))
            mistakes.append(f"{written[name]}: unknown setting{hint}")
        else:
            is_text = name in known and known[name].annotation in (str, str | None)
            if is_text and isinstance(values[name], list | dict) and written[name].startswith("--"):
                good[name] = written[name].partition("=")[2]  # [PAD], or "lr: 3"
            continue
        bad.add(name)
        del good[name]
    try:
        return model.model_validate(_unflatten(good)), bad
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(map(str, problem["loc"]))
            name = next(setting for setting in known if f"{where}.".startswith(f"{setting}."))
            mistakes.append(f"{written.get(where, written.get(name, name))}: {complaint(problem)}")
            bad.add(name)
    good = {name: value for name, value in good.items() if not any(f"{name}.".startswith(f"{b}.") for b in bad)}
    return model.model_validate(_unflatten(good)), bad


def complaint(problem: Any) -> str:
    """Return what is wrong with a value, from pydantic's error."""
    message = problem["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
    better = {
        "string_type": "must be text: write it in quotes",
        "string_too_short": "is empty",
        "list_type": f"must be a list: write [{problem['input']}]",
    }
    return str(better.get(problem["type"], message))


def fields(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted names of all settings in `model` and its groups, with their pydantic fields."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def marked(model: type[Settings], mark: Change, prefix: str = "", is_inherited: bool = False) -> set[str]:
    """Return the dotted names of the settings that have this mark, or are in a group that has it."""
    names = set()
    for name, field in model.model_fields.items():
        is_marked = is_inherited or mark in field.metadata
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            names |= marked(field.annotation, mark, f"{prefix}{name}.", is_marked)
        elif is_marked:
            names.add(f"{prefix}{name}")
    return names


def describe(model: type[Settings]) -> str:
    """Return the settings as `--help` shows them: name, default, choices and documentation."""
    lines = []
    for name, field in fields(model):
        default = yaml.safe_dump(field.get_default(call_default_factory=True), default_flow_style=True)
        choices = map(str, get_args(field.annotation)) if get_origin(field.annotation) is Literal else ()
        lines.append(f"  --{name}={default.splitlines()[0]}" + (f"   ({' | '.join(choices)})" if choices else ""))
        lines.append(f"        {' '.join((field.description or '').split())}")
    return "\n".join(lines)


def nearest(name: str, names: list[str]) -> str:
    """Return `, did you mean …?` with the closest of `names`, whole or by its last part; empty if none is close."""
    last_parts = {re.split("[./]", candidate)[-1]: candidate for candidate in reversed(names)}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    close = close or [last_parts[p] for p in difflib.get_close_matches(re.split("[./]", name)[-1], last_parts, n=1)]
    return f", did you mean {close[0]}?" if close else ""


def _read_yaml(file: str, mistakes: list[str]) -> dict[str, Any]:
    path = Path(file)
    try:
        text = path.read_text(encoding="utf-8")
        content, repeated = read_yaml(text, Yaml)
        content = {} if content is None else content
        mistakes += [f"--config={file}: {line}" for line in repeated]
    except FileNotFoundError:
        there = [str(p) for p in sorted(path.parent.glob("*.yaml"))]
        mistakes.append(f"--config={file}: no such file{nearest(file, there)}")
    except (OSError, UnicodeDecodeError) as error:
        mistakes.append(f"--config={file}: cannot be read, {getattr(error, 'strerror', None) or 'it is not text'}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        mistakes.append(f"--config={file}: not yaml, " + (f"see line {mark.line + 1}" if mark else cause(error)))
    else:
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            return content
        mistakes.append(f"--config={file}: must hold settings, one `name: value` per line")
    return {}


def read_yaml(text: str | bytes, loader: type[yaml.SafeLoader] = yaml.SafeLoader) -> tuple[Any, list[str]]:
    """Return what YAML text holds, and a line for each key that it repeats, of which the last value counts.

    Raises:
        yaml.YAMLError: the text is not YAML, a value is not of its type, or the nesting has no end.
    """
    lines: dict[str, list[int]] = {}

    def collect(node: yaml.Node | None, prefix: str) -> None:
        for key, value in node.value if isinstance(node, yaml.MappingNode) else ():
            if isinstance(key, yaml.ScalarNode):
                lines.setdefault(f"{prefix}{key.value}", []).append(key.start_mark.line + 1)
                collect(value, f"{prefix}{key.value}.")
        for number, item in enumerate(node.value if isinstance(node, yaml.SequenceNode) else ()):
            collect(item, f"{prefix}{number}.")

    with (
        explained("", (ValueError, LookupError, AttributeError), yaml.YAMLError),  # 2024-02-30, !!bool x
        explained("nested too deeply, or in itself, ", RecursionError, yaml.YAMLError),
    ):
        collect(yaml.compose(text, Loader=loader), "")
        content = yaml.load(text, Loader=loader)
    repeated = {name: numbers for name, numbers in lines.items() if len(numbers) > 1}
    return content, [
        f"{name} appears {len(numbers)} times, in lines {' and '.join(map(str, numbers))}: keep one"
        for name, numbers in repeated.items()
        if not any(name.startswith(f"{group}.") for group in repeated)
    ]


def _parse(text: str) -> tuple[Any, list[str]]:
    """Parse `null`, lists and mappings as read_yaml does; return all other text as it is, for the field's type."""
    with contextlib.suppress(yaml.YAMLError):
        value, repeated = read_yaml(text, Yaml)
        if isinstance(value, list | dict) or text.lower() in ("null", "~"):
            return value, repeated
    return text, []


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the values of nested mappings with their dotted names."""
    for name, value in tree.items():
        if isinstance(value, dict) and value:
            yield from flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _unflatten(values: Mapping[str, Any]) -> dict[str, Any]:
    tree: dict[str, Any] = {}
    for name, value in values.items():
        *groups, last = name.split(".")
        branch = tree
        for group in groups:
            branch = branch.setdefault(group, {})
            if not isinstance(branch, dict):  # `--seed.x=1` beside `--seed=1`
                break
        else:
            parts = branch.get(last)  # the same mapping's, set one by one before
            branch[last] = {**parts, **value} if isinstance(parts, dict) and isinstance(value, dict) else value
    return tree
