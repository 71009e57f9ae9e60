"""Tables: cells of a CSV, or columns of a DataFrame, and how they become numbers for a model.

A table is read first (`read_csv`, `as_columns`), then taken apart into numbers and words (`take_apart`). How a column becomes
inputs is a rule, {column, mean, std} or {column, words}, with `missing` where gaps are filled; rules are made from training
rows alone (`make_rules`) and are kept with a run, so that new rows become numbers in the same way (`encode`).
"""

import csv
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from fedmix.errors import DataError

Array = npt.NDArray[Any]
Rule = Mapping[str, Any]

SEPARATORS = (",", ";", "\t", "|")
MISSING = ("", "na", "n/a", "nan", "null", "?")  # cells that hold nothing, whatever a column is
NO_NUMBER = "none"  # a gap among numbers; among words it may be an answer
CATEGORIES = 50  # a column with more different words than that is taken for a mistake
SLIPS = 0.2  # a column is taken for numbers if at most this share of its cells are none
SHOWN = 3  # so many cells are shown where some are wrong

THOUSANDS = re.compile(r"[+-]?\d{1,3}(\.\d{3})+(,\d+)?")
DECIMAL_COMMA = re.compile(r"[+-]?\d*,\d+([eE][+-]?\d+)?|[+-]?\d{1,3}(\.\d{3})+,\d+")


@dataclass(frozen=True)
class Cells:
    """Columns of text as a file has them. lines: the line of the file that each row ends on. where: what to call it."""

    where: str
    columns: dict[str, list[str]]
    lines: list[int]
    comma: bool = False  # whether decimals have a comma

    def row(self, i: int) -> str:
        return f"line {self.lines[i]}"

    def require(self, name: str) -> None:
        if name not in self.columns:
            raise DataError(f"{self.where} must have a column {name!r}. It has {', '.join(self.columns)}.")


@dataclass(frozen=True)
class Roles:
    """What the columns of a table are for. side: a column, or several whose numbers are a vector."""

    label: str
    client: str = ""
    side: str | list[str] = ""
    features: Sequence[str] = ()
    leave_out: Sequence[str] = ()

    @property
    def not_features(self) -> list[str]:
        side = [] if isinstance(self.side, list) else [self.side]
        return [name for name in (self.label, self.client, *side) if name]


def feature_names(cells: Cells, roles: Roles, rules: Sequence[Rule]) -> list[str]:
    """Name the columns to learn from: those with a rule, else those that the user names, else all but the others."""
    taken = roles.not_features
    for name in [*taken, *roles.features, *roles.leave_out]:
        cells.require(name)
    names = [rule["column"] for rule in rules] or list(roles.features) or list(cells.columns)
    chosen = bool(rules or roles.features)
    in_both = set(names) & set(taken)
    if chosen and in_both:
        raise DataError(f"data.args.features must not name {min(in_both)!r}: it is the label, client or side.")
    names = [name for name in names if name not in {*taken, *roles.leave_out}]
    if not names:
        raise DataError(f"{cells.where} must have columns beside {', '.join(taken)} to learn from. It has none.")
    return names


@dataclass(frozen=True)
class Table:
    """Rows that are taken apart: numbers [N, A] with NaN for gaps, words as codes [N, B] with -1 for gaps.

    columns: in order, {"column": name} for numbers and {"column": name, "words": [...]} for words.
    rules: how they become inputs, where that is known already.
    """

    numbers: Array
    codes: Array
    columns: list[dict[str, Any]]
    standardise: bool = True
    rules: Sequence[Rule] = ()
    gap_words: Sequence[str] = ()  # what the user wrote for gaps, beside MISSING

    def __len__(self) -> int:
        return len(self.numbers)

    @property
    def width(self) -> int:
        """How many inputs a row becomes."""
        if self.rules:
            return sum(width_of(rule) for rule in self.rules)
        gaps = self._gaps()
        widths = [len(column.get("words", [0])) for column in self.columns]
        return sum(widths) + sum(gaps[column["column"]] for column in self.columns)

    def _gaps(self) -> dict[str, bool]:
        return {name: bool(_is_gap(values).any()) for name, values in self.by_name().items()}

    def by_name(self) -> dict[str, Array]:
        """The numbers or codes of each column."""
        values: dict[str, Array] = {}
        number = code = 0
        for column in self.columns:
            if "words" in column:
                values[column["column"]] = self.codes[:, code]
                code += 1
            else:
                values[column["column"]] = self.numbers[:, number]
                number += 1
        return values

    def arrays(self) -> dict[str, Array]:
        """The table as plain arrays; `from_arrays` reads them again."""
        rules = [dict(rule) for rule in self.rules]
        about = {
            "columns": self.columns,
            "standardise": self.standardise,
            "rules": rules,
            "gap_words": list(self.gap_words),
        }
        return {"numbers": self.numbers, "codes": self.codes, "table": np.array(json.dumps(about))}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> "Table":
        return Table(arrays["numbers"], arrays["codes"], **json.loads(str(arrays["table"])))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_csv(path: Path, separator: str = "", decimal: str = "") -> Cells:
    """Read a CSV with a header. separator, decimal: "" finds them out."""
    text = _text(path)
    lines = text.splitlines()
    if not text.strip():
        raise DataError(f"{path} must be a CSV file in UTF-8 with a header. It is empty.")
    separator = separator or _separator_of(lines)
    if len(separator) != 1:
        raise DataError(f"data.args.separator must be one character, as in ';'. Got {separator!r}.")
    header, numbered_rows = _header_and_rows(path, lines, separator)
    if len(set(header)) != len(header):
        raise DataError(f"{path} must have a name of its own for each column. Its header is {', '.join(header)}.")
    for line, row in numbered_rows:
        if len(row) != len(header):
            raise DataError(f"{path}, line {line} must have {len(header)} values. It has {len(row)}.")
    if not numbered_rows:
        raise DataError(f"{path} must have rows below its header. It has none.")
    numbers, rows = zip(*numbered_rows, strict=True)
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    return Cells(str(path), columns, list(numbers), _has_decimal_comma(columns, separator, decimal))


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} must be a CSV file in UTF-8 with a header. It is not ({error}); save it anew as UTF-8."
        ) from error


def _separator_of(lines: Sequence[str]) -> str:
    """The separator by which the first lines have the most columns, all of them equally many."""
    some = [line for line in lines[:50] if line.strip()]
    best, most = ",", 1
    for separator in SEPARATORS:
        counts = {len(row) for row in csv.reader(some, delimiter=separator)}
        if len(counts) == 1 and max(counts) > most:
            best, most = separator, max(counts)
    if most > 1:
        return best
    # Lines that differ are refused later, by number; the header tells what was meant.
    return max(SEPARATORS, key=some[0].count)


def _header_and_rows(path: Path, lines: Sequence[str], separator: str) -> tuple[list[str], list[tuple[int, list[str]]]]:
    """The names in the header, and the rows that are not empty, each with the line of the file that it ends on."""
    reader = csv.reader([line + "\n" for line in lines], delimiter=separator)
    try:
        not_empty = [(reader.line_num, [value.strip() for value in row]) for row in reader if row]
        (_, header), *numbered_rows = not_empty
    except (ValueError, csv.Error) as error:
        raise DataError(f"{path} must be a CSV file in UTF-8 with a header. It is not ({error}).") from error
    return header, numbered_rows


def _has_decimal_comma(columns: Mapping[str, Sequence[str]], separator: str, decimal: str) -> bool:
    if decimal not in ("", ".", ","):
        raise DataError(f"data.args.decimal must be '.' or ','. Got {decimal!r}.")
    if decimal or separator == ",":
        return decimal == ","
    return any(DECIMAL_COMMA.fullmatch(cell) for cells in columns.values() for cell in cells)


def as_columns(rows: Any, where: str = "the table") -> Cells:
    """The columns of a DataFrame, of a dict of columns or of a list of dicts, as the text that a CSV would have."""
    if hasattr(rows, "columns") and hasattr(rows, "to_dict"):
        rows = {str(name): rows[name].tolist() for name in rows.columns}
    if isinstance(rows, Sequence) and rows and all(isinstance(row, Mapping) for row in rows):
        names = list(rows[0])
        rows = {name: [row.get(name) for row in rows] for name in names}
    if not isinstance(rows, Mapping):
        raise DataError(
            f"{where} must be a DataFrame, a dict of columns or a list of dicts. Got {type(rows).__name__}."
        )
    columns = {str(name): [_as_text(value) for value in _listed(values)] for name, values in rows.items()}
    lengths = {name: len(values) for name, values in columns.items()}
    if len(set(lengths.values())) > 1:
        raise DataError(f"{where} must have columns of one length. Got {lengths}.")
    count = next(iter(lengths.values()), 0)
    return Cells(where, columns, list(range(1, count + 1)))


def joined(several: Sequence[Cells]) -> Cells:
    """The rows of several tables below each other; they must have the same columns."""
    first = several[0]
    for cells in several[1:]:
        other = sorted(set(first.columns) ^ set(cells.columns))
        if other:
            raise DataError(
                f"tables must have the same columns. {other[0]!r} is in {first.where} or {cells.where} alone."
            )
    columns = {name: [value for cells in several for value in cells.columns[name]] for name in first.columns}
    lines = [line for cells in several for line in cells.lines]
    where = first.where if len(several) == 1 else "the clients' tables"
    return Cells(where, columns, lines, any(cells.comma for cells in several))


def _listed(values: Any) -> list[Any]:
    if isinstance(values, str) or not isinstance(values, Iterable):
        return [values]
    listed: list[Any] = values.tolist() if hasattr(values, "tolist") else list(values)
    return listed


def _as_text(value: Any) -> str:
    if value is None or value != value:  # NaN and pandas' NaT are not equal to themselves
        return ""
    if str(value) == "<NA>":
        return ""
    if isinstance(value, bool):
        return str(int(value))
    return str(value).strip()


# -- taking apart ------------------------------------------------------------------------------------------------------


def take_apart(
    cells: Cells,
    names: Sequence[str],
    missing: str = "refuse",
    missing_values: Sequence[str] = (),
    words: Sequence[str] = (),
    standardise: bool = True,
    rules: Sequence[Rule] = (),
) -> Table:
    """Take columns apart into numbers and words. What cannot be used is refused by line.

    missing: "refuse" gaps, or "impute" them. missing_values: more cells that mean a gap. words: columns of words, though their
    words may look like numbers. rules: how columns become inputs, where that is known already.
    """
    if missing not in ("refuse", "impute"):
        raise DataError(f"data.args.missing must be 'refuse' or 'impute'. Got {missing!r}.")
    known = {rule["column"]: rule for rule in rules}
    numbers, codes, columns = [], [], []
    for name in names:
        cells.require(name)
        rule = known.get(name)
        reader = _Column(cells, name, [*missing_values, *(rule or {}).get("gaps", [])])
        if missing == "refuse" and (rule is None or "missing" not in rule):
            reader.refuse_gaps()
        if _is_of_words(reader, name, words, rule):
            column = reader.words(rule["words"] if rule else None)
            codes.append(column.codes)
            columns.append({"column": name, "words": column.names})
        else:
            numbers.append(reader.numbers())
            columns.append({"column": name})
    rows = len(cells.lines)
    taken = _stacked(numbers, rows, np.float64), _stacked(codes, rows, np.int32)
    return Table(*taken, columns, standardise, rules, list(missing_values))


def _is_of_words(reader: "_Column", name: str, words: Sequence[str], rule: Rule | None) -> bool:
    if rule is not None:
        return "words" in rule
    return name in words or reader.holds_words()


def _stacked(columns: Sequence[Array], rows: int, kind: Any) -> Array:
    return np.stack(columns, axis=1).astype(kind) if columns else np.zeros((rows, 0), kind)


@dataclass(frozen=True)
class _Words:
    names: list[str]
    codes: Array


class _Column:
    """One column of cells, and what it can be."""

    def __init__(self, cells: Cells, name: str, more_gaps: Sequence[str] = ()) -> None:
        self._cells, self._name = cells, name
        gap_words = {*MISSING, *(word.strip().lower() for word in more_gaps)}
        self._values = cells.columns[name]
        self._gaps = [value.lower() in gap_words for value in self._values]
        self._parsed = [number_of(value, cells.comma) for value in self._values]
        self._no_numbers = [
            i
            for i, value in enumerate(self._parsed)
            if value is None and not self._gaps[i] and self._values[i].lower() != NO_NUMBER
        ]

    def refuse_gaps(self) -> None:
        if not any(self._gaps):
            return
        rows = [i for i, gap in enumerate(self._gaps) if gap]
        shown = repr(self._values[rows[0]]) if self._values[rows[0]] else "empty"
        raise DataError(
            f"{self._cells.where}, {self._cells.row(rows[0])}: {self._name!r} must have a value. It is {shown}, as in "
            f"{len(rows)} of {len(self._values)} rows; fill it in, leave the column out, or set data.args.missing = 'impute'."
        )

    def holds_words(self) -> bool:
        """Whether this is a column of words. Numbers with a few slips among them are neither, and refused."""
        there = len(self._values) - sum(self._gaps)
        wrong = len(self._no_numbers)
        if not wrong:
            return False
        if wrong > SLIPS * there:
            return True
        raise DataError(
            f"{self._cells.where}: {self._name!r} must be numbers. {self._shown(self._no_numbers)} are not; correct them, name "
            f"them as gaps (data.args.missing_values), or name the column in data.args.words."
        )

    def _shown(self, rows: Sequence[int]) -> str:
        some = [f"{self._values[i]!r} ({self._cells.row(i)})" for i in rows[:SHOWN]]
        more = f" and {len(rows) - SHOWN} more" if len(rows) > SHOWN else ""
        return ", ".join(some) + more

    def numbers(self) -> Array:
        if self._no_numbers:
            raise DataError(
                f"{self._cells.where}: {self._name!r} must be numbers. {self._shown(self._no_numbers)} are not."
            )
        values = np.array([np.nan if value is None else value for value in self._parsed], dtype=np.float64)
        values[np.array(self._gaps, dtype=bool)] = np.nan
        if np.isinf(values).any():
            raise DataError(f"{self._cells.where}: {self._name!r} must be finite. It holds infinity.")
        return values

    def words(self, known: Sequence[str] | None) -> _Words:
        there = [value for value, gap in zip(self._values, self._gaps, strict=True) if not gap]
        names = list(known) if known is not None else sorted(set(there))
        if known is None and len(names) > CATEGORIES:
            raise DataError(
                f"{self._cells.where}: {self._name!r} must be numbers, or words of at most {CATEGORIES} kinds. It has "
                f"{len(names)} kinds, {names[0]!r} among them; leave it out with data.args.leave_out."
            )
        position = {word: i for i, word in enumerate(names)}
        strange = next((word for word in there if word not in position), None)
        if strange is not None:
            raise DataError(
                f"{self._cells.where}: {self._name!r} must be one of {', '.join(position)}. It has {strange!r}."
            )
        codes = [-1 if gap else position[value] for value, gap in zip(self._values, self._gaps, strict=True)]
        return _Words(names, np.array(codes, dtype=np.int32))


def number_of(cell: str, comma: bool) -> float | None:
    """The number that a cell holds, or None."""
    if comma:
        if THOUSANDS.fullmatch(cell):
            cell = cell.replace(".", "")
        elif "." in cell:
            return None
        cell = cell.replace(",", ".")
    if "_" in cell or cell.lower() in ("nan", "+nan", "-nan"):
        return None
    try:
        return float(cell)
    except ValueError:
        return None


def column_of(cells: Cells, name: str, missing_values: Sequence[str] = ()) -> Array:
    """A column that names something for each row (label, client, side information): text without gaps."""
    cells.require(name)
    _Column(cells, name, missing_values).refuse_gaps()
    return np.array(cells.columns[name])


def number_columns(cells: Cells, names: Sequence[str]) -> Array:
    """Several columns of numbers without gaps as one array [N, D]."""
    if not names:
        raise DataError("data.args.side must name a column, or a list of one or more. Got an empty list.")
    columns = []
    for name in names:
        cells.require(name)
        column = _Column(cells, name)
        column.refuse_gaps()
        columns.append(column.numbers())
    return np.stack(columns, axis=1)


# -- rules -------------------------------------------------------------------------------------------------------------


def checked_rule(rule: Any) -> dict[str, Any]:
    keys = set(rule) - {"missing", "gaps"} if isinstance(rule, Mapping) else set()
    if keys != {"column", "words"} and keys != {"column", "mean", "std"}:
        raise DataError(
            f"data.args.columns must be {{column, mean, std}} for numbers, {{column, words}} for words, with missing where "
            f"gaps are filled. Got {rule!r}."
        )
    return dict(rule)


def width_of(rule: Rule) -> int:
    """How many inputs a column becomes: one, or one for each word; and one more that tells gaps where they are filled."""
    return len(rule.get("words", [0])) + ("missing" in rule)


def make_rules(table: Table, train: Array) -> list[dict[str, Any]]:
    """How each column becomes inputs, from its training rows alone. A column with gaps anywhere gets a way to fill them."""
    if table.rules:
        return [dict(rule) for rule in table.rules]
    values = table.by_name()
    rules = [_rule_for(column, values[column["column"]], train, table.standardise) for column in table.columns]
    if not table.gap_words:
        return rules
    return [rule | {"gaps": list(table.gap_words)} if "missing" in rule else rule for rule in rules]


def _rule_for(column: Mapping[str, Any], values: Array, train: Array, standardise: bool) -> dict[str, Any]:
    name, rule = column["column"], dict(column)
    there = values[train][~_is_gap(values[train])]
    if not len(there):
        raise DataError(f"{name!r} must have a value in some training row. It has none; leave the column out.")
    if "words" in column:
        if _is_gap(values).any():
            rule["missing"] = column["words"][int(np.bincount(there).argmax())]
        return rule
    rule |= {"mean": 0.0, "std": 1.0}
    if standardise:
        with np.errstate(over="ignore", invalid="ignore"):
            mean, spread = float(there.mean()), float(there.std())
        if not np.isfinite([mean, spread]).all():
            raise DataError(f"{name!r} must be numbers of ordinary size. They are too large.")
        # A column that never changes has no deviation to divide by.
        rule |= {"mean": mean, "std": spread or 1.0}
    if _is_gap(values).any():
        rule["missing"] = float(np.median(there))
    return rule


def _is_gap(values: Array) -> Array:
    gaps: Array = np.isnan(values) if values.dtype.kind == "f" else values < 0
    return gaps


def encode(table: Table, rules: Sequence[Rule]) -> Array:
    """The inputs that rows become: [N, width]."""
    values = table.by_name()
    blocks = [_inputs_of(rule, values[rule["column"]]) for rule in rules]
    return np.concatenate(blocks, axis=1) if blocks else np.zeros((len(table), 0), np.float32)


def _inputs_of(rule: Rule, values: Array) -> Array:
    gaps = _is_gap(values)
    if "words" in rule:
        if "missing" in rule:
            values = np.where(gaps, list(rule["words"]).index(rule["missing"]), values)
        inputs = np.eye(len(rule["words"]), dtype=np.float32)[values]
    else:
        filled = np.where(gaps, rule.get("missing", np.nan), values)
        with np.errstate(over="ignore", invalid="ignore"):
            inputs = ((filled - rule["mean"]) / rule["std"])[:, None].astype(np.float32)
        if not np.isfinite(inputs).all():
            raise DataError(f"{rule['column']!r} must be numbers of ordinary size. They are too large.")
    if "missing" in rule:
        inputs = np.concatenate([inputs, gaps[:, None].astype(np.float32)], axis=1)
    return inputs


def encode_rows(cells: Cells, rules: Sequence[Rule]) -> Array:
    """New rows as the rows of training became inputs: [N, width]."""
    names = [rule["column"] for rule in rules]
    return encode(take_apart(cells, names, rules=rules), rules)
