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

from fedmix.data.labels import is_missing, words_as_numbers
from fedmix.errors import DataError

Array = npt.NDArray[Any]
Rule = Mapping[str, Any]

SEPARATORS = (",", ";", "\t", "|")
MISSING = ("", "na", "n/a", "nan", "null", "?")  # cells that hold nothing, whatever a column is
NO_NUMBER = "none"  # a gap among numbers; among words it may be an answer
CATEGORIES = 50  # a column with more different words than that is taken for a mistake
TRUTH = {"true": 1.0, "false": 0.0}  # truth values are numbers, however a program writes them
LINES_OF_A_CELL = 50  # a cell of more lines has a quotation mark that was never closed
SLIPS = 0.2  # a column is taken for numbers if at most this share of its cells are none
SHOWN = 3  # so many cells are shown where some are wrong

THOUSANDS = re.compile(r"[+-]?[1-9]\d{0,2}(\.\d{3})+(,\d+)?")
DECIMAL_POINT = re.compile(r"[+-]?\d*\.\d+([eE][+-]?\d+)?")
GROUPED = re.compile(r"[+-]?[1-9]\d{0,2}(,\d{3})+")
SIGNED = re.compile(r"[-+\u2212$\u20ac\u00a3\u00a5]*\s*\d[\d\s.,'\u202f\u00a0]*\s*[%\u2030\u20ac$]?")
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
    fill: bool = False  # whether gaps are filled, here or in new rows

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
            "fill": self.fill,
        }
        return {"numbers": self.numbers, "codes": self.codes, "table": np.array(json.dumps(about))}

    @staticmethod
    def from_arrays(arrays: Mapping[str, Array]) -> "Table":
        return Table(arrays["numbers"], arrays["codes"], **json.loads(str(arrays["table"])))


# -- reading -----------------------------------------------------------------------------------------------------------


def read_csv(path: Path, separator: str = "", decimal: str = "") -> Cells:
    """Read a CSV with a header. separator, decimal: "" finds them out."""
    text = _text(path)
    lines = text.replace("\r\n", "\n").replace("\r", "\n").rstrip("\n").split("\n")
    if not text.strip():
        raise DataError(f"{path} must be a CSV file in UTF-8 with a header. It is empty.")
    separator = separator or _separator_of(lines)
    if len(separator) != 1:
        raise DataError(f"data.args.separator must be one character, as in ';'. Got {separator!r}.")
    header, numbered_rows = _header_and_rows(path, lines, separator)
    if len(set(header)) != len(header):
        raise DataError(f"{path} must have a name of its own for each column. Its header is {', '.join(header)}.")
    for line, row in numbered_rows:
        if any(cell.count("\n") > LINES_OF_A_CELL for cell in row):
            raise DataError(
                f"{path}, line {line}: a quotation mark must be closed. It holds the lines before this one."
            )
        if len(row) != len(header):
            raise DataError(f"{path}, line {line} must have {len(header)} values. It has {len(row)}.")
    if not numbered_rows:
        raise DataError(f"{path} must have rows below its header. It has none.")
    numbers, rows = zip(*numbered_rows, strict=True)
    columns = dict(zip(header, map(list, zip(*rows, strict=True)), strict=True))
    return Cells(str(path), columns, list(numbers), _has_decimal_comma(columns, separator, decimal))


def _text(path: Path) -> str:
    if not path.is_file():
        raise DataError(f"{path} must be a CSV file. {'It is a folder' if path.is_dir() else 'It is not there'}.")
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
        counts = _columns_by(some, separator)
        if len(counts) == 1 and max(counts) > most:
            best, most = separator, max(counts)
    if most > 1:
        return best
    # Lines that differ are refused later, by number; the header tells what was meant.
    return max(SEPARATORS, key=some[0].count)


def _columns_by(lines: Sequence[str], separator: str) -> set[int]:
    """How many columns lines have with this separator; none where they cannot be read."""
    try:
        return {len(row) for row in csv.reader(lines, delimiter=separator)}
    except csv.Error:
        return set()


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
    everything = [cell for cells in columns.values() for cell in cells]
    with_comma = [cell for cell in everything if DECIMAL_COMMA.fullmatch(cell)]
    with_point = [cell for cell in everything if DECIMAL_POINT.fullmatch(cell) and not THOUSANDS.fullmatch(cell)]
    if not with_comma:
        return False
    if with_point or all(GROUPED.fullmatch(cell) for cell in with_comma):
        other = f" and {with_point[0]!r}" if with_point else ""
        raise DataError(
            f"a table must have one decimal sign. {with_comma[0]!r}{other} can be read in two ways; say which it is: "
            "decimal = ',' or decimal = '.' (data.args.decimal)."
        )
    return True


def as_columns(rows: Any, where: str = "the table") -> Cells:
    """The columns of a DataFrame, of a dict of columns or of a list of dicts, as the text that a CSV would have."""
    if hasattr(rows, "columns") and hasattr(rows, "iloc"):
        names = [str(name) for name in rows.columns]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise DataError(f"{where} must have a name of its own for each column. {twice[0]!r} is there twice.")
        rows = {name: rows.iloc[:, i].tolist() for i, name in enumerate(names)}
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
    """A value as the cell of a file. A whole number is written in one way, whether it is a float or not."""
    if is_missing(value):
        return ""
    if isinstance(value, (float, np.floating)):
        number = float(value)
        return str(int(number)) if number.is_integer() and abs(number) < 1e15 else str(number)
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
    for name in words:
        cells.require(name)
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
    return Table(*taken, columns, standardise, rules, list(missing_values), missing == "impute")


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
        gap_words = {*MISSING, *(_as_text(word).lower() for word in more_gaps)}
        gap_numbers = {number_of(_as_text(word), cells.comma) for word in more_gaps} - {None}
        self._values = cells.columns[name]
        self._parsed = [number_of(value, cells.comma) for value in self._values]
        self._gaps = [
            value.lower() in gap_words or number in gap_numbers
            for value, number in zip(self._values, self._parsed, strict=True)
        ]
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

    def refuse_unnamed(self) -> None:
        rows = [i for i, gap in enumerate(self._gaps) if gap]
        if rows:
            shown = repr(self._values[rows[0]]) if self._values[rows[0]] else "empty"
            raise DataError(
                f"{self._cells.where}, {self._cells.row(rows[0])}: {self._name!r} must have a value. It is {shown}, as in "
                f"{len(rows)} of {len(self._values)} rows; fill it in, or leave these rows out."
            )

    def holds_words(self) -> bool:
        """Whether this is a column of words. Numbers with a few slips among them are neither, and refused."""
        there = len(self._values) - sum(self._gaps)
        wrong = len(self._no_numbers)
        if not wrong:
            return False
        if wrong > SLIPS * there:
            self._refuse_numbers_with_signs()
            return True
        raise DataError(
            f"{self._cells.where}: {self._name!r} must be numbers. {self._shown(self._no_numbers)} are not; correct them, name "
            f"them as gaps (data.args.missing_values), or name the column in data.args.words."
        )

    def _refuse_numbers_with_signs(self) -> None:
        """Refuse 12%, $5 or 1 000: as words each of them would be a kind of its own."""
        signed = [i for i in self._no_numbers if SIGNED.fullmatch(self._values[i])]
        if len(signed) > (1 - SLIPS) * len(self._no_numbers):
            raise DataError(
                f"{self._cells.where}: {self._name!r} must be numbers. {self._shown(signed)} have other signs in them; take "
                "these off, or name the column in data.args.words."
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
    if cell.lower() in TRUTH:
        return TRUTH[cell.lower()]
    if "_" in cell or cell.lower() in ("nan", "+nan", "-nan"):
        return None
    try:
        return float(cell)
    except ValueError:
        return None


def column_of(cells: Cells, name: str, missing_values: Sequence[str] = ()) -> Array:
    """A column that names something for each row (label, client, side information): text without gaps."""
    cells.require(name)
    _Column(cells, name, missing_values).refuse_unnamed()
    return np.array(cells.columns[name])


def kinds_of(cells: Cells, name: str, missing_values: Sequence[str] = ()) -> Array:
    """A column of classes or categories: floats where some are fractions, so that a measurement is known as one."""
    column = column_of(cells, name, missing_values)
    values = [number_of(cell, cells.comma) for cell in column.tolist()]
    if any(value is None for value in values) or {cell.lower() for cell in column.tolist()} <= set(TRUTH):
        return column
    numbers = np.array(values, dtype=np.float64)
    # 1.0 is the number 1, as some programs write it; 01 is a name.
    with_decimals = any("." in cell or "," in cell for cell in column.tolist())
    return numbers if with_decimals else words_as_numbers(column)


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
    keys = set(rule) - {"missing", "gaps", "indicator"} if isinstance(rule, Mapping) else set()
    if keys != {"column", "words"} and keys != {"column", "mean", "std"}:
        raise DataError(
            f"data.args.columns must be {{column, mean, std}} for numbers, {{column, words}} for words, with missing where "
            f"gaps are filled. Got {rule!r}."
        )
    return dict(rule)


def width_of(rule: Rule) -> int:
    """How many inputs a column becomes: one, or one for each word; and one more that tells gaps where they are filled."""
    return len(rule.get("words", [0])) + tells_gaps(rule)


def tells_gaps(rule: Rule) -> bool:
    """Whether one more input tells where the column has gaps: where it had some in training."""
    return bool(rule.get("indicator", "missing" in rule))


def make_rules(table: Table, train: Array) -> list[dict[str, Any]]:
    """How each column becomes inputs, from its training rows alone. Where gaps are filled, so are those of new rows."""
    if table.rules:
        return [dict(rule) for rule in table.rules]
    values = table.by_name()
    rules = [
        _rule_for(column, values[column["column"]], train, table.standardise, table.fill) for column in table.columns
    ]
    if not table.gap_words:
        return rules
    return [rule | {"gaps": list(table.gap_words)} if "missing" in rule else rule for rule in rules]


def _rule_for(column: Mapping[str, Any], values: Array, train: Array, standardise: bool, fill: bool) -> dict[str, Any]:
    had_gaps = bool(_is_gap(values).any())
    name, rule = column["column"], dict(column)
    there = values[train][~_is_gap(values[train])]
    if not len(there):
        raise DataError(f"{name!r} must have a value in some training row. It has none; leave the column out.")
    if "words" in column:
        if fill:
            rule |= {"missing": column["words"][int(np.bincount(there).argmax())], "indicator": had_gaps}
        return rule
    rule |= {"mean": 0.0, "std": 1.0}
    if standardise:
        with np.errstate(over="ignore", invalid="ignore"):
            mean, spread = float(there.mean()), float(there.std())
        if not np.isfinite([mean, spread]).all():
            raise DataError(f"{name!r} must be numbers of ordinary size. They are too large.")
        # A column that never changes has no deviation to divide by.
        rule |= {"mean": mean, "std": spread or 1.0}
    if fill:
        rule |= {"missing": float(np.median(there)), "indicator": had_gaps}
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
    if tells_gaps(rule):
        inputs = np.concatenate([inputs, gaps[:, None].astype(np.float32)], axis=1)
    return inputs


def encode_rows(cells: Cells, rules: Sequence[Rule]) -> Array:
    """New rows as the rows of training became inputs: [N, width]."""
    names = [rule["column"] for rule in rules]
    return encode(take_apart(cells, names, rules=rules), rules)
