"""Counters as a Report: its forms (table, JSON, HTML), and the sum of several."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ._html import Markup, element, table

_FORMAT = 1  # of the JSON text


@dataclass(frozen=True)
class Report:
    """How many calls each target served and how many fell back to stock, with the reasons.

    A unit is a loss call, or a parameter that ``SGD.step`` updated; a refusal of a whole parameter group counts once.
    ``str()`` gives a table, a notebook shows one, ``to_dict()`` and ``to_json()`` are for programs. Reports of several
    processes add up: ``first + second``, or ``Report.merge(*reports)``.

    Attributes:
        kept_bytes: memory of former gradients and other large results of the losses that is kept at this moment for the
            next ones, at most 128 MiB; ``disable()`` gives it back.
        processes: the number of processes whose counters these are.
        first_lines: the line of your code at which a fallback for a reason first happened, in its process:
            ``{"sgd": {"sparse_grad": "/home/me/train.py:12"}}``.
        on_cuda: how many of a target's fast calls were served on CUDA devices, where any were: ``{"sgd": 3}``.
        verified: how many losses, gradients of losses and steps were compared with PyTorch's, where any were: see
            ``enable(verify=...)``.
    """

    _counts: dict[str, tuple[int, dict[str, int]]]
    _reasons: dict[str, str]
    kept_bytes: int = 0
    processes: int = 1
    first_lines: dict[str, dict[str, str]] = field(default_factory=dict)
    on_cuda: dict[str, int] = field(default_factory=dict)
    verified: dict[str, int] = field(default_factory=dict)
    _advice: dict[str, str] = field(default_factory=dict)  # of a reason; none in reports of earlier versions

    def to_dict(self) -> dict[str, dict[str, Any]]:
        """``{"sgd": {"fast": 3, "fallback": {"sparse_grad": 1}}, ...}``"""
        return {name: {"fast": fast, "fallback": dict(reasons)} for name, (fast, reasons) in self._counts.items()}

    def to_json(self) -> str:
        """A text that ``from_json`` reads: ``targets`` is ``to_dict()``; ``reasons`` and ``advice`` have a sentence for
        each reason that occurs.

        >>> json.loads(fastpatch.report().to_json())["targets"]["sgd"]["fast"]
        3
        """
        occurring = {reason: self._reasons[reason] for _, _, reasons in self._lines() for reason, _ in reasons}
        data = {
            "format": _FORMAT,
            "processes": self.processes,
            "kept_bytes": self.kept_bytes,
            "targets": self.to_dict(),
            "reasons": occurring,
            "advice": {reason: self._advice[reason] for reason in occurring if reason in self._advice},
            "first_lines": self.first_lines,
            "on_cuda": self.on_cuda,
            "verified": self.verified,
        }
        return json.dumps(data, indent=2) + "\n"

    @classmethod
    def from_json(cls, text: str | bytes) -> Report:
        """The report that ``to_json`` wrote, in this process or another.

        Raises:
            ValueError: the text is none of these.
        """
        try:
            data = json.loads(text)
            if data["format"] != _FORMAT:
                raise ValueError(f"its format is {data['format']!r}, not {_FORMAT}")
            counts = {
                str(name): (_number(counted["fast"]), {str(c): _number(n) for c, n in counted["fallback"].items()})
                for name, counted in data["targets"].items()
            }
            reasons = {str(code): str(sentence) for code, sentence in data["reasons"].items()}
            if missing := {code for _, codes in counts.values() for code in codes} - set(reasons):
                raise ValueError(f"it has no sentence for {', '.join(sorted(missing))}")
            lines = {
                str(name): {str(code): str(line) for code, line in lines.items()}
                for name, lines in data.get("first_lines", {}).items()
            }
            on_cuda, verified = (
                {str(name): _number(n) for name, n in data.get(key, {}).items()} for key in ("on_cuda", "verified")
            )
            advice = {str(code): str(sentence) for code, sentence in data.get("advice", {}).items()}
            kept, processes = _number(data["kept_bytes"]), _number(data["processes"])
            return cls(counts, reasons, kept, processes, lines, on_cuda, verified, advice)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            start = text[:60]
            why = f"no {error}" if isinstance(error, KeyError) else error
            raise ValueError(f"fastpatch.Report.from_json: {start!r} is not a report ({why})") from error

    @staticmethod
    def merge(*reports: Report) -> Report:
        """The sum of reports, of other processes for example.

        Raises:
            TypeError: something that is no report, or nothing at all.
        """
        for report in reports:
            if not isinstance(report, Report):
                raise TypeError(f"fastpatch.Report.merge: {report!r} is not a Report")
        if not reports:
            raise TypeError("fastpatch.Report.merge: give at least one Report")
        total, *others = reports
        for other in others:
            total = total + other
        return total

    def __add__(self, other: Report) -> Report:
        if not isinstance(other, Report):
            return NotImplemented
        counts = {name: _plus(self._count(name), other._count(name)) for name in {**self._counts, **other._counts}}
        return Report(
            counts,
            {**self._reasons, **other._reasons},
            self.kept_bytes + other.kept_bytes,
            self.processes + other.processes,
            {
                name: {**other.first_lines.get(name, {}), **self.first_lines.get(name, {})}
                for name in {**self.first_lines, **other.first_lines}
            },
            _sum(self.on_cuda, other.on_cuda),
            _sum(self.verified, other.verified),
            {**self._advice, **other._advice},
        )

    def _count(self, name: str) -> tuple[int, dict[str, int]]:
        return self._counts.get(name, (0, {}))

    def counts_anything(self) -> bool:
        """Has any call been counted?"""
        return any(fast or reasons for _, fast, reasons in self._lines())

    def since(self, earlier: Report) -> Report:
        """What was counted after ``earlier``, a report of the same process."""
        counts = {name: _minus(counted, earlier._count(name)) for name, counted in self._counts.items()}
        lines = {
            name: {code: line for code, line in lines.items() if code in counts[name][1]}
            for name, lines in self.first_lines.items()
        }
        return Report(
            counts,
            self._reasons,
            first_lines={name: found for name, found in lines.items() if found},
            on_cuda=_rises(self.on_cuda, earlier.on_cuda),
            verified=_rises(self.verified, earlier.verified),
            _advice=self._advice,
        )

    def _lines(self) -> Iterator[tuple[str, int, list[tuple[str, int]]]]:
        """For each target its name, fast count, and reasons with counts, the most frequent first."""
        for name, (fast, reasons) in self._counts.items():
            yield name, fast, sorted(reasons.items(), key=lambda item: -item[1])

    def _first_line(self, name: str, reason: str) -> str:
        return self.first_lines.get(name, {}).get(reason, "")

    def _because(self, name: str, reason: str) -> Markup:
        line, advice = self._first_line(name, reason), self._advice.get(reason)
        text = f": {self._reasons[reason]}" + (f"; first at {line}" if line else "")
        parts = element("code", reason) + element("span", text)
        return Markup(parts + (element("p", f"advice: {advice}") if advice else ""))

    def _notes(self) -> Iterator[str]:
        if self.processes > 1:
            yield f"in {self.processes} processes"
        if self.kept_bytes:
            yield f"memory kept for the next large results: {self.kept_bytes / 2**20:.1f} MiB"

    def __str__(self) -> str:
        """A table that fits 80 columns."""
        lines = [f"{'target':<16} {'fast':>12} {'fallback':>12}"]
        for name, fast, reasons in self._lines():
            lines.append(f"{name:<16} {fast:>12} {sum(count for _, count in reasons):>12}")
            for words, numbers in (("on CUDA", self.on_cuda), ("verified", self.verified)):
                if number := numbers.get(name):
                    lines.append(f"  {words:<14} {number:>12}")
            for reason, count in reasons:
                lines.append(f"{'':<29} {count:>12}  {reason}:")
                lines += _indented(self._reasons[reason])
                if advice := self._advice.get(reason):
                    lines += _indented(f"advice: {advice}")
                if line := self._first_line(name, reason):
                    lines.append(f"      first at {line if len(line) <= 65 else '...' + line[-62:]}")
        return "\n".join([*lines, *self._notes()])

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        """For IPython."""
        printer.text(str(self))

    def _repr_html_(self) -> str:
        rows: list[tuple[object, ...]] = []
        for name, fast, reasons in self._lines():
            notes = ((self.on_cuda.get(name), "on CUDA"), (self.verified.get(name), "verified"))
            note = ", ".join(f"{number} {words}" for number, words in notes if number)
            rows.append((element("strong", name), fast, sum(count for _, count in reasons), note))
            rows += [("", "", count, self._because(name, reason)) for reason, count in reasons]
        return table(("target", "fast", "fallback", "reason"), rows) + "".join(
            element("p", note) for note in self._notes()
        )


def _indented(text: str) -> list[str]:
    return textwrap.wrap(text, 80, initial_indent=" " * 6, subsequent_indent=" " * 6, break_on_hyphens=False)


def _number(value: object) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 0:
        raise ValueError(f"{value!r} is no count")
    return value


def _plus(one: tuple[int, dict[str, int]], two: tuple[int, dict[str, int]]) -> tuple[int, dict[str, int]]:
    return one[0] + two[0], _sum(one[1], two[1])


def _sum(one: dict[str, int], two: dict[str, int]) -> dict[str, int]:
    return {name: one.get(name, 0) + two.get(name, 0) for name in {**one, **two}}


def _rises(now: dict[str, int], then: dict[str, int]) -> dict[str, int]:
    rises = {name: _rise(number, then.get(name, 0)) for name, number in now.items()}
    return {name: number for name, number in rises.items() if number}


def _minus(now: tuple[int, dict[str, int]], then: tuple[int, dict[str, int]]) -> tuple[int, dict[str, int]]:
    return _rise(now[0], then[0]), _rises(now[1], then[1])


def _rise(new: int, old: int) -> int:
    """A counter that fell was reset meanwhile: all of it is new."""
    return new - old if new >= old else new
