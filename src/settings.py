"""Typed settings from yaml files and `--key.sub=value` arguments: merged, validated, every mistake in its own line."""

import difflib
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator


class Settings(BaseModel):
    """A group of settings. The docstring under each field is what `--help` prints."""

    model_config = ConfigDict(extra="forbid", use_attribute_docstrings=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _scientific_notation(cls, value: Any, info: ValidationInfo) -> Any:
        """YAML and pydantic read `1e3` as text; as a whole number it is welcome in an integer field too."""
        annotation = cls.model_fields[info.field_name or ""].annotation
        is_text = str in (annotation, *get_args(annotation))
        if isinstance(value, str) and not is_text and re.fullmatch(r"[+-]?\d+(\.\d*)?[eE][+-]?\d+", value):
            return int(number) if (number := float(value)).is_integer() else number
        return value


def read_arguments(argv: list[str], mistakes: list[str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Merges the files that `--config` names, in order, and then the other arguments.

    Returns:
        The values by their dotted name, and, for messages, how the user wrote each.
        What could not be read is appended to `mistakes`.
    """
    files: list[str] = []
    options: dict[str, str] = {}
    arguments = iter(argv)
    for argument in arguments:
        name, equals, value = argument.removeprefix("--").partition("=")
        if argument == "--config":
            files.append(next(arguments, ""))
        elif name == "config" and equals:
            files.append(value)
        elif argument == "--check":
            options["check"] = "true"
        elif argument.startswith("--") and equals:
            options[name] = value
        else:
            mistakes.append(f"{argument}: not understood, settings are written --name=value")

    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    for file in files:
        for name, value in flatten(_read_yaml(file, mistakes)):
            values[name], written[name] = value, f"{file}: {name}: {value}"
    for name, text in options.items():
        values[name], written[name] = _parse(text), f"--{name}={text}"
    return values, written


def validate(
    model: type[Settings], values: Mapping[str, Any], written: Mapping[str, str], mistakes: list[str]
) -> tuple[Settings, set[str]]:
    """Builds `model` from dotted names; appends a line to `mistakes` for each name or value that it refuses.

    Returns:
        The settings with every refused value replaced by its default, and the names of the refused.
    """
    known = dict(fields(model))
    groups = {name.rpartition(".")[0] for name in known} - {""}
    good = dict(values)
    bad: set[str] = set()
    for name in values:
        if name in groups:
            example = next(setting for setting in known if setting.startswith(f"{name}."))
            mistakes.append(f"{written[name]}: {name} is a group, write for example --{example}={values[name]}")
        elif not any(name == setting or name.startswith(f"{setting}.") for setting in known):
            mistakes.append(f"{written[name]}: unknown setting{nearest(name, list(known))}")
        else:
            is_text = name in known and known[name].annotation in (str, str | None)
            if is_text and isinstance(values[name], list) and written[name].startswith("--"):
                good[name] = written[name].partition("=")[2]  # [PAD]
            continue
        bad.add(name)
        del good[name]
    try:
        return model.model_validate(_unflatten(good)), bad
    except ValidationError as error:
        for problem in error.errors():
            where = ".".join(map(str, problem["loc"]))
            name = next(setting for setting in known if where == setting or where.startswith(f"{setting}."))
            says = problem["msg"].replace("Input should be", "must be").removeprefix("Value error, ")
            mistakes.append(f"{written.get(where, written.get(name, name))}: {says}")
            bad.add(name)
    good = {name: value for name, value in good.items() if not any((name + ".").startswith(f"{b}.") for b in bad)}
    return model.model_validate(_unflatten(good)), bad


def fields(model: type[Settings], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The dotted names of all settings in `model` and its groups, with their pydantic fields."""
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Settings):
            yield from fields(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field


def describe(model: type[Settings]) -> str:
    """The settings as `--help` shows them: name, default, choices and documentation."""
    lines = []
    for name, field in fields(model):
        default = yaml.safe_dump(field.get_default(call_default_factory=True), default_flow_style=True)
        choices = " | ".join(get_args(field.annotation)) if get_origin(field.annotation) is Literal else ""
        lines.append(f"  --{name}={default.splitlines()[0]}" + (f"   ({choices})" if choices else ""))
        lines.append(f"        {' '.join((field.description or '').split())}")
    return "\n".join(lines)


def nearest(name: str, names: list[str]) -> str:
    """`, did you mean …?` with the closest of `names`, in whole or in its last part; empty where none is close."""
    last_parts = {candidate.rpartition(".")[2]: candidate for candidate in reversed(names)}
    close = difflib.get_close_matches(name, names, n=1, cutoff=0.75)
    close = close or [last_parts[p] for p in difflib.get_close_matches(name.rpartition(".")[2], last_parts, n=1)]
    return f", did you mean {close[0]}?" if close else ""


def _read_yaml(file: str, mistakes: list[str]) -> dict[str, Any]:
    path = Path(file)
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        there = [str(p) for p in sorted(path.parent.glob("*.yaml"))] if file else []
        mistakes.append(f"--config={file}: no such file{nearest(file, there)}")
    except (OSError, UnicodeDecodeError) as error:
        mistakes.append(f"--config={file}: cannot be read, {getattr(error, 'strerror', None) or 'it is not text'}")
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        mistakes.append(f"--config={file}: not yaml" + (f", see line {mark.line + 1}" if mark else ""))
    else:
        if isinstance(content, dict) and all(isinstance(key, str) for key in content):
            return content
        mistakes.append(f"--config={file}: must hold settings, one `name: value` a line")
    return {}


def _parse(text: str) -> Any:
    """Text stays text, for the field's type to read; only `null`, lists and mappings are YAML."""
    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError:
        return text
    return value if text and (value is None or isinstance(value, list | dict)) else text


def flatten(tree: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """The values of nested mappings with their dotted names."""
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
            branch[last] = value
    return tree
