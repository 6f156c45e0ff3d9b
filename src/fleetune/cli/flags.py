"""Flags of a command: those of the spec's fields, made from their declarations, and a few of its own."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import click

from fleetune.spec.declared import Declared, declared, section_titles
from fleetune.spec.errors import UserError, raise_if_any
from fleetune.spec.given import Source, flags_given

_METAVARS = {
    "text": "TEXT",
    "whole": "N",
    "number": "X",
    "words": "A,B",
    "numbers": "X,Y",
    "paths": "DATA",
    "columns": "ROLE=COLUMN,...",
}


@dataclass(frozen=True)
class Typed:
    """What was typed. fields: values of the spec's fields. own: of the command's own flags. words: positional words."""

    fields: dict[str, Any]
    own: dict[str, Any]
    words: list[str]

    def source(self) -> Source:
        return flags_given(self.fields)


class Flags(click.Command):
    """The flags of one command, for reading a command line and for its help.

    fields: names of the spec's fields that it takes. own: its other flags. usage: what stands behind the command's name.
    """

    def __init__(
        self, name: str, about: str, *, usage: str, fields: Iterable[str] = (), own: Sequence[click.Option] = ()
    ) -> None:
        self.taken = [declared()[field] for field in fields]
        self.own = list(own)
        self.usage_words = usage
        self._spellings = _spellings(self.taken)
        super().__init__(
            name,
            params=[*map(_option, self.taken), *own, click.Argument(["words"], nargs=-1, type=click.UNPROCESSED)],
            help=about,
            context_settings={
                "ignore_unknown_options": True,
                "help_option_names": ["-h", "--help"],
                "token_normalize_func": self._normalized,
                "max_content_width": 100,
            },
        )

    def read(self, words: Sequence[str]) -> Typed | None:
        """Read a command line; None when help was asked for, and given. Raises UserError with every unknown flag."""
        before, after = _split(words)
        try:
            context = self.make_context(f"fleetune {self.name}", before)
        except click.exceptions.Exit:
            return None
        except click.UsageError as error:
            raise UserError(*self._complaints(error, before)) from None
        rest = [*context.params.pop("words")]
        names = {field.name for field in self.taken}
        fields = {name: value for name, value in context.params.items() if name in names and value not in (None, ())}
        own = {name: value for name, value in context.params.items() if name not in names}
        unknown, words = _sort_rest(rest)
        if len(self.taken) < len(declared()):
            raise_if_any([self._unknown(flag) for flag in unknown])
        # Where all fields are flags, whoever checks the values tells of unknown names together with them.
        return Typed({**fields, **dict.fromkeys(unknown)}, own, [*words, *after])

    def format_usage(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        formatter.write_usage(ctx.command_path, self.usage_words)

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        groups: dict[str, list[tuple[str, str]]] = {}
        for field in self.taken:
            groups.setdefault(section_titles()[field.section], []).append((_written(field), _told(field)))
        own = [record for option in self.own if (record := option.get_help_record(ctx))]
        groups["Other flags"] = [*own, ("-h, --help", "Show this.")]
        for title, rows in groups.items():
            with formatter.section(title):
                formatter.write_dl(rows, col_max=34)

    def _normalized(self, token: str) -> str:
        plain = token.replace("_", "-")
        return self._spellings.get(plain, plain)

    def _unknown(self, flag: str) -> str:
        plain = flag.lstrip("-").replace("_", "-")
        own = [name[2:] for option in self.own for name in option.opts]
        near = difflib.get_close_matches(plain, [*own, *self._spellings], n=1, cutoff=0.75)
        if near:
            return f"there is no flag {flag}: did you mean --{near[0]}?"
        return f"fleetune {self.name} has no flag {flag}: see fleetune {self.name} --help for all of them"

    def _complaints(self, error: click.UsageError, words: Sequence[str]) -> list[str]:
        """click's words for a flag without a value, or a switch with one, in ours."""
        name = getattr(error, "option_name", "")
        field = next((field for field in self.taken if name in (field.flag, f"--no-{field.flag[2:]}")), None)
        if field is not None and field.kind == "switch":
            return [f"{name} takes no value: write {field.flag} or --no-{field.flag[2:]}"]
        if field is not None:
            return [f"{name} needs a value: give {field.allowed()}"]
        message = error.format_message().rstrip(".")
        return [f"{message[:1].lower()}{message[1:]}: see fleetune {self.name} --help"]


def _sort_rest(rest: Sequence[str]) -> tuple[list[str], list[str]]:
    """(unknown flags, positional words): what follows an unknown flag is taken for its value."""
    unknown: list[str] = []
    words: list[str] = []
    takes_value = False
    for word in rest:
        if word.startswith("-") and len(word) > 1:
            name, equals, _ = word.partition("=")
            unknown.append(name)
            takes_value = not equals
        elif takes_value:
            takes_value = False
        else:
            words.append(word)
    return unknown, words


def _spellings(fields: Iterable[Declared]) -> dict[str, str]:
    """Every spelling of a flag without its dashes -> the spelling that click knows."""
    known = {}
    for field in fields:
        shown = field.flag[2:]
        spellings = {shown, field.name.replace("_", "-"), *(alias.replace("_", "-") for alias in field.aliases)}
        known.update(dict.fromkeys(spellings, shown))
        if field.kind == "switch":
            known.update({f"no-{spelling}": f"no-{shown}" for spelling in spellings})
    return known


def switch(flag: str, about: str) -> click.Option:
    """A flag of a command's own that is on when given."""
    return click.Option([flag], is_flag=True, default=False, help=about)


def option(flag: str, about: str, **settings: Any) -> click.Option:
    """A flag of a command's own with a value."""
    return click.Option([flag], help=about, **settings)


def one_word(typed: Typed, what: str, example: str) -> str:
    """The only positional word of a command. Raises UserError."""
    if len(typed.words) != 1:
        many = f": {' '.join(typed.words)}" if typed.words else ""
        raise UserError(f"{len(typed.words)} words were given for one {what}{many}. Write {example}")
    return typed.words[0]


def _split(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """Words before and after a `--`, behind which nothing is a flag."""
    words = list(words)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _option(field: Declared) -> click.Option:
    flag = field.flag
    if field.kind == "switch":
        return click.Option([f"{flag}/--no-{flag[2:]}", field.name], default=None, help=field.description)
    return click.Option(
        [flag, field.name], default=None, type=click.UNPROCESSED, multiple=field.kind == "paths", help=field.description
    )


def _written(field: Declared) -> str:
    if field.kind == "switch":
        return f"{field.flag} / --no-{field.flag[2:]}"
    return f"{field.flag} {'|'.join(field.choices) if field.kind == 'choice' else _METAVARS[field.kind]}"


def _told(field: Declared) -> str:
    return f"{field.description} {bracketed(field)}".rstrip()


def bracketed(field: Declared) -> str:
    """Limits and default of a field, as help and reference show them."""
    notes = [field.limits] if field.limits else []
    if field.name in ("model", "data"):
        notes.append("required")
    elif field.kind == "switch":
        notes.append(f"default: {'on' if field.default else 'off'}")
    elif not field.optional and field.default not in ((), {}, ""):
        value = f"{field.default:g}" if isinstance(field.default, float) else field.default
        notes.append(f"default: {value}")
    return f"[{'; '.join(notes)}]" if notes else ""
