"""Mutants: small wrong changes to a source file, one each, that some test ought to notice.

A mutant replaces a stretch of the text, found through the syntax tree, so the rest of the file keeps its form and a
survivor can be read as a diff of one line. The operators are those that arithmetic code gets wrong: a comparison off by
its equality, a sum for a difference, a constant off by one, a condition turned round, min for max, two arguments
swapped, a cast, clamp or rounding left out, a statement or a returned value left out.

Left alone: annotations, decorators, docstrings, messages (f-strings, raise, assert), code that runs on a GPU only.
"""

from __future__ import annotations

import ast
import re
import zlib
from collections.abc import Iterator
from typing import NamedTuple

COMPARE = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "==", "is": "is not", "is not": "is"}
COMPARE |= {"in": "not in", "not in": "in"}
ARITHMETIC = {"+": "-", "-": "+", "*": "/", "/": "*", "//": "*", "%": "+", "<<": ">>", ">>": "<<", "&": "|", "|": "&"}
OPPOSITE = {"min": "max", "amin": "amax", "minimum": "maximum", "floor": "ceil", "any": "all"}
OPPOSITE |= {there: here for here, there in OPPOSITE.items()}
DROPPED = {
    "to",
    "float",
    "double",
    "contiguous",
    "abs",
    "round",
    "clamp",
    "nan_to_num",
    "relu",
    "t",
    "flatten",
    "detach",
}
DROPPED |= {"abs_", "round_", "clamp_", "nan_to_num_", "relu_", "reciprocal", "sqrt"}
SWAPPED = {"where": (1, 2), "clamp": (0, 1), "divide": (0, 1), "quotient": (0, 1), "sub": (0, 1), "pow": (0, 1)}
SYMBOLS: dict[type[ast.AST], str] = {
    ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=", ast.Eq: "==", ast.NotEq: "!=", ast.Is: "is",
    ast.IsNot: "is not", ast.In: "in", ast.NotIn: "not in", ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/",
    ast.FloorDiv: "//", ast.Mod: "%", ast.LShift: "<<", ast.RShift: ">>", ast.BitAnd: "&", ast.BitOr: "|",
}  # fmt: skip
# a condition that holds on a GPU alone
ON_GPU = re.compile(r"""is_cuda|\.cuda\b|['"]cuda['"]|current_stream|capability|triton|!= ['"]cpu['"]""")


class Mutant(NamedTuple):
    """start, end: the byte range of the source that `text` replaces. before, after: its first line, stripped, to
    read. function: the qualified name of the innermost function around it, "" outside of functions.
    """

    file: str
    line: int
    operator: str
    before: str
    after: str
    start: int
    end: int
    text: str
    function: str = ""

    def apply(self, source: bytes) -> bytes:
        return source[: self.start] + self.text.encode() + source[self.end :]


def mutants(file: str, source: bytes) -> list[Mutant]:
    """All mutants of a source file, in the order of its text; a few of them may not compile."""
    tree, finder = ast.parse(source), _Finder(file, source)
    functions = list(finder.functions(tree))  # an inner one after the one around it
    found = [
        m._replace(function=next((name for start, end, name in reversed(functions) if start <= m.start < end), ""))
        for m in finder.walk(tree)
    ]
    return sorted(found, key=lambda m: (m.start, m.end, m.text))


def compiles(source: bytes) -> bool:
    try:
        compile(source, "mutant", "exec", dont_inherit=True)
    except (SyntaxError, ValueError):
        return False
    return True


class _Finder:
    def __init__(self, file: str, source: bytes) -> None:
        self.file, self.source = file, source
        self.starts = [0]
        for line in source.splitlines(keepends=True):
            self.starts.append(self.starts[-1] + len(line))

    def functions(self, node: ast.AST, prefix: str = "") -> Iterator[tuple[int, int, str]]:
        """Yield first byte, end and qualified name of each function."""
        for child in ast.iter_child_nodes(node):
            inner = prefix
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield self._start(child), self._end(child), prefix + child.name
                inner = f"{prefix}{child.name}.<locals>."
            elif isinstance(child, ast.ClassDef):
                inner = f"{prefix}{child.name}."
            yield from self.functions(child, inner)

    def walk(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.JoinedStr | ast.Raise | ast.Assert | ast.Import | ast.ImportFrom):
            return
        if isinstance(node, ast.If | ast.IfExp) and (_never_here(self._text(node.test)) or _is_type_checking(node)):
            for child in node.orelse if isinstance(node.orelse, list) else [node.orelse]:
                yield from self.walk(child)
            return
        yield from self._of(node)
        for name, value in ast.iter_fields(node):
            if name in ("annotation", "returns", "decorator_list", "type_params", "bases"):
                continue
            for child in value if isinstance(value, list) else [value]:
                if isinstance(child, ast.AST):
                    yield from self.walk(child)

    def _of(self, node: ast.AST) -> Iterator[Mutant]:
        if isinstance(node, ast.Compare):
            yield from self._compare(node)
        elif isinstance(node, ast.BinOp):
            yield from self._arithmetic(node)
        elif isinstance(node, ast.Constant):
            yield from self._constant(node)
        elif isinstance(node, ast.BoolOp):
            word, other = ("and", "or") if isinstance(node.op, ast.And) else ("or", "and")
            for left, right in zip(node.values, node.values[1:], strict=False):
                yield from self._between("and/or", left, right, rf"\b{word}\b", other)
        elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            yield self._replace("drop not", node, f"({self._text(node.operand)})")
        elif isinstance(node, ast.If | ast.While | ast.IfExp):
            yield from self._condition(node)
        elif isinstance(node, ast.Call):
            yield from self._call(node)
        elif isinstance(node, ast.AugAssign) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
            yield self._replace("drop statement", node, "pass")

    def _compare(self, node: ast.Compare) -> Iterator[Mutant]:
        sides = [node.left, *node.comparators]
        for left, op, right in zip(sides, node.ops, sides[1:], strict=False):
            symbol = SYMBOLS[type(op)]
            pattern = (
                r"\b" + symbol.replace(" ", r"\s+") + r"\b" if symbol.isalpha() or " " in symbol else re.escape(symbol)
            )
            yield from self._between("compare", left, right, pattern, COMPARE[symbol])

    def _arithmetic(self, node: ast.BinOp) -> Iterator[Mutant]:
        symbol = SYMBOLS.get(type(node.op))
        if symbol is None or _is_text(node.left) or _is_text(node.right) or (symbol == "|" and _is_class(node.right)):
            return
        yield from self._between("arithmetic", node.left, node.right, re.escape(symbol), ARITHMETIC[symbol])

    def _constant(self, node: ast.Constant) -> Iterator[Mutant]:
        value = node.value
        if isinstance(value, bool):
            yield self._replace("constant", node, str(not value))
        elif isinstance(value, int):
            other = value + (-1 if zlib.crc32(self._line(node)) & 1 else 1)  # one of the two, always the same one
            yield self._replace("constant", node, str(other) if other >= 0 else f"({other})")
        elif isinstance(value, float):
            yield self._replace("constant", node, repr(value * 2 if value else 1.0))

    def _condition(self, node: ast.If | ast.While | ast.IfExp) -> Iterator[Mutant]:
        test = self._text(node.test)
        yield self._replace("turn condition", node.test, f"(not ({test}))")
        if isinstance(node, ast.If) and not node.orelse:  # a guard
            yield self._replace("drop guard", node.test, "False")
            last = node.body[-1]
            if isinstance(last, ast.Return) and last.value and self._text(last.value) not in ("None", "False"):
                yield self._replace("return None", last, "return None")

    def _call(self, node: ast.Call) -> Iterator[Mutant]:
        function = node.func
        name = function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")
        if name in OPPOSITE:
            end = self._end(function)
            yield self._make("opposite", end - len(name), end, OPPOSITE[name], function.end_lineno or 0)
        if (
            isinstance(function, ast.Attribute)
            and name in DROPPED
            and getattr(function.value, "id", "") not in ("torch", "F")
        ):
            yield self._replace("drop call", node, f"({self._text(function.value)})")
        if name in SWAPPED and len(node.args) > SWAPPED[name][1]:
            one, two = (node.args[i] for i in SWAPPED[name])
            between = self.source[self._end(one) : self._start(two)].decode()
            text = self._text(two) + between + self._text(one)
            yield self._make("swap arguments", self._start(one), self._end(two), text, one.lineno)
        if name in ("clamp", "clamp_"):
            for keyword in node.keywords:
                if keyword.arg in ("min", "max"):
                    start = self._start(keyword)
                    yield self._make("opposite", start, start + 3, OPPOSITE[keyword.arg], keyword.lineno)

    def _between(self, operator: str, left: ast.AST, right: ast.AST, pattern: str, new: str) -> Iterator[Mutant]:
        """Replace the operator that stands between two operands, which parentheses or a comment may stand between
        too.
        """
        start, end = self._end(left), self._start(right)
        if match := re.search(pattern, self.source[start:end].decode()):
            yield self._make(operator, start + match.start(), start + match.end(), new, getattr(left, "end_lineno", 0))

    def _replace(self, operator: str, node: ast.AST, text: str) -> Mutant:
        return self._make(operator, self._start(node), self._end(node), text, getattr(node, "lineno", 0))

    def _make(self, operator: str, start: int, end: int, text: str, line: int) -> Mutant:
        head = self.source.rfind(b"\n", 0, start) + 1
        tail = self.source.find(b"\n", end)
        before = " ".join(self.source[head:tail].decode().split())
        after = " ".join((self.source[head:start].decode() + text + self.source[end:tail].decode()).split())
        return Mutant(self.file, line, operator, before, after, start, end, text)

    def _line(self, node: ast.AST) -> bytes:
        """The node's line, and its column in it."""
        line, column = getattr(node, "lineno", 1), getattr(node, "col_offset", 0)
        return self.source[self.starts[line - 1] : self.starts[line]].strip() + str(column).encode()

    def _start(self, node: ast.AST) -> int:
        return self.starts[getattr(node, "lineno", 1) - 1] + int(getattr(node, "col_offset", 0))

    def _end(self, node: ast.AST) -> int:
        return self.starts[getattr(node, "end_lineno", 1) - 1] + int(getattr(node, "end_col_offset", 0))

    def _text(self, node: ast.AST) -> str:
        return self.source[self._start(node) : self._end(node)].decode()


def _never_here(test: str) -> bool:
    return bool(ON_GPU.search(test)) and "not " not in test


def _is_type_checking(node: ast.If | ast.IfExp) -> bool:
    return isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def _is_text(node: ast.AST) -> bool:
    return isinstance(node, ast.JoinedStr) or (isinstance(node, ast.Constant) and isinstance(node.value, str))


def _is_class(node: ast.AST) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, "id", "")
    return name[:1].isupper() or (isinstance(node, ast.Constant) and node.value is None)
