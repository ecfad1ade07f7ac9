"""Rewrite MSL so that clang's C++ for OpenCL accepts it, and collect what a launcher needs.

A header of macros and typedefs (msl/) does most of the work; this pass does what no macro can: threadgroup
arrays inside functions, function constants, explicit instantiations of kernels, vector constructors, suffixes
of half literals. Line markers are kept, so every later message names the line of the .metal file.
"""

from __future__ import annotations

import dataclasses
import re

#: Kernel inputs that the hardware provides, by the slot of the runtime's ThreadInputs.
BUILTIN_INPUTS = {
    "threadgroup_position_in_grid": 0,
    "thread_position_in_threadgroup": 1,
    "thread_position_in_grid": 2,
    "threads_per_threadgroup": 3,
    "threadgroups_per_grid": 4,
    "threads_per_grid": 5,
    "thread_index_in_threadgroup": 6,
    "simdgroup_index_in_threadgroup": 7,
    "thread_index_in_simdgroup": 8,
    "simdgroups_per_threadgroup": 9,
    "threads_per_simdgroup": 10,
    "thread_execution_width": 10,
    "dispatch_threads_per_threadgroup": 11,
    "thread_index_in_quadgroup": 12,
    "quadgroup_index_in_threadgroup": 13,
}

_TOKEN = re.compile(
    r"(?P<space>[ \t\r\f\v]+)|(?P<newline>\n)"
    r'|(?P<string>"(?:\\.|[^"\\\n])*")|(?P<char>\'(?:\\.|[^\'\\\n])+\')'
    r"|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|(?P<name>[A-Za-z_]\w*)|(?P<directive>\#[^\n]*)"
    r"|(?P<op>::|->|\+\+|--|<<=|&&|\|\||[-+*/%&|^<>=!]=|.)",
    re.S,
)
_ELEMENTS = ("float", "half", "bfloat", "int", "uint", "short", "ushort", "char", "uchar", "long", "ulong")
_VECTORS = frozenset(f"{t}{n}" for t in _ELEMENTS for n in (2, 3, 4))
_CLOSING = {"(": ")", "[": "]", "{": "}"}
_BLANK = ("space", "newline", "directive")

Token = tuple[str, str]


class MetalError(Exception):
    """A kernel does not compile, or a dispatch did something that Metal does not allow."""


@dataclasses.dataclass
class Parameter:
    """One parameter of a kernel."""

    text: str
    name: str
    attributes: dict[str, str]

    @property
    def is_pointer(self) -> bool:
        return any(c in self.text for c in "*&[")

    @property
    def builtin(self) -> int | None:
        return next((BUILTIN_INPUTS[a] for a in self.attributes if a in BUILTIN_INPUTS), None)


def split_commas(text: str) -> list[str]:
    """Split at commas outside of brackets."""
    parts, depth, start = [], 0, 0
    for i, c in enumerate(text):
        if c in "([{<":
            depth += 1
        elif c in ")]}>":
            depth -= 1
        elif c == "," and depth == 0:
            parts.append(text[start:i])
            start = i + 1
    parts.append(text[start:])
    return [p for p in parts if p.strip()]


def _unquote(text: str) -> str:
    """Adjacent string literals, joined."""
    return "".join(re.findall(r'"([^"]*)"', text)) or text


class Transform:
    """One translation unit. `run` returns the rewritten text and fills the tables below."""

    def __init__(self, preprocessed: str):
        self.tokens: list[Token] = [(m.lastgroup or "", m.group()) for m in _TOKEN.finditer(preprocessed)]
        self.kernels: dict[str, list[Parameter]] = {}  # by function name
        self.host_names: dict[str, str] = {}  # name for the host -> expression that names the function
        self.function_constants: dict[str, tuple[int, str]] = {}  # variable -> (index, type)
        self._vector_names = set(_VECTORS)
        self._num_arrays = 0
        self._line, self._file = 0, ""
        self._out: list[str] = []
        self._statement = 0  # where in _out the current statement starts

    # -- reading tokens -----------------------------------------------------------------------------------------
    def _skip_blank(self, i: int) -> int:
        while i < len(self.tokens) and self.tokens[i][0] in _BLANK:
            i += 1
        return i

    def _matching(self, i: int) -> int:
        """Index of the bracket that closes the one at i."""
        opening = self.tokens[i][1]
        closing, depth = _CLOSING[opening], 0
        for j in range(i, len(self.tokens)):
            kind, text = self.tokens[j]
            if kind == "op":
                depth += (text == opening) - (text == closing)
                if depth == 0:
                    return j
        raise MetalError(f"unbalanced {opening}")

    def _matching_angle(self, i: int) -> int | None:
        """Index of the > that closes the < at i, or None where it is a comparison."""
        depth = 0
        while i < len(self.tokens):
            kind, text = self.tokens[i]
            if kind == "op":
                if text == "<":
                    depth += 1
                elif text == ">":
                    depth -= 1
                    if depth == 0:
                        return i
                elif text == "(":
                    i = self._matching(i)
                elif text in ";{}":
                    return None
            i += 1
        return None

    def _text(self, begin: int, end: int) -> str:
        joined = "".join(text for kind, text in self.tokens[begin:end] if kind != "directive")
        return re.sub(r"\s+", " ", joined).strip()

    def _end_of_statement(self, i: int) -> int:
        while self.tokens[i][1] != ";":
            i = self._matching(i) + 1 if self.tokens[i][1] in _CLOSING else i + 1
        return i

    def _attribute(self, i: int) -> tuple[dict[str, str], int] | None:
        """The attributes of a [[...]] at i and the index after it, or None."""
        if self.tokens[i][1] != "[":
            return None
        inner = self._skip_blank(i + 1)
        if inner >= len(self.tokens) or self.tokens[inner][1] != "[":
            return None
        end = self._matching(i)
        body = self._text(inner + 1, end)
        found = {}
        for part in split_commas(body[: body.rindex("]")]):
            m = re.match(r"\s*([\w:]+)\s*(?:\((.*)\))?\s*$", part)
            if m:
                found[m.group(1)] = (m.group(2) or "").strip()
        return found, end + 1

    # -- writing ------------------------------------------------------------------------------------------------
    def _error(self, text: str) -> MetalError:
        return MetalError(f"{self._file}:{self._line + 1}: error: {text}")

    def _drop(self, begin: int, end: int) -> None:
        """Leave tokens out but keep their lines."""
        lines = sum(1 for kind, _ in self.tokens[begin:end] if kind == "newline")
        self._line += lines
        self._out.append("\n" * lines)

    def _written_statement(self) -> str:
        """The current statement so far, without line markers."""
        return re.sub(r"(?m)^#.*$", "", "".join(self._out[self._statement :]))

    # -- constructs ---------------------------------------------------------------------------------------------
    def _parameter(self, begin: int, end: int) -> Parameter:
        attributes: dict[str, str] = {}
        kept, i = [], begin
        while i < end:
            attribute = self._attribute(i)
            if attribute:
                attributes.update(attribute[0])
                i = attribute[1]
            else:
                if self.tokens[i][0] != "directive":
                    kept.append(self.tokens[i][1])
                i += 1
        text = re.sub(r"\s+", " ", "".join(kept)).strip()
        name = re.findall(r"[A-Za-z_]\w*", text.split("=")[0].split("[")[0])[-1]
        space = "threadgroup" if "threadgroup" in attributes else None
        space = "(device|constant)" if "buffer" in attributes else space
        if space and not re.search(rf"\b{space}\b", text):
            raise self._error(
                f"kernel parameter '{text}' has attribute {attributes} but is not in address space {space}"
            )
        return Parameter(text, name, attributes)

    def _signature(self, name: str, opening: int, host_name: str | None) -> None:
        closing = self._matching(opening)
        parameters, begin, depth = [], opening + 1, 0
        for i in range(opening + 1, closing + 1):
            op = self.tokens[i][1] if self.tokens[i][0] == "op" else ""
            if (op == "," and depth == 0) or i == closing:
                if self._text(begin, i):
                    parameters.append(self._parameter(begin, i))
                begin = i + 1
            elif op and op in "([{<":
                depth += 1
            elif op and op in ")]}>":
                depth -= 1
        self.kernels[name] = parameters
        if host_name or not re.match(r"\s*template\b", self._written_statement().strip()):
            self.host_names[host_name or name] = name

    def _function_constant(self, index: str, i: int) -> int:
        """`constant bool x [[function_constant(0)]];` becomes an external symbol that the runtime defines."""
        statement = re.sub(r"\s+", " ", self._written_statement()).strip()
        m = re.match(r"(?:static )?constant (?:constexpr )?(?:const )?(\w+) (\w+)$", statement)
        i = self._skip_blank(i)
        if not m or self.tokens[i][1] != ";":
            raise self._error(f"this form of function constant is not understood: {statement}")
        kind, variable = m.groups()
        self.function_constants[variable] = (int(index), kind)
        lines = "".join(self._out[self._statement :]).count("\n")
        del self._out[self._statement :]
        self._out.append("\n" * lines + f'extern constant {kind} {variable} __asm__("mtlh_fc_{int(index)}");')
        self._statement = len(self._out)
        return i + 1

    def _explicit_instantiation(self, i: int) -> int | None:
        """`template [[host_name("n")]] [[kernel]] decltype(f<..>) f<..>;` goes to the table of host names."""
        p = self._skip_blank(i + 1)
        if self.tokens[p][1] == "<":
            return None
        end = self._end_of_statement(p)
        host_name = None
        while p < end:
            attribute = self._attribute(p)
            if attribute:
                host_name = attribute[0].get("host_name", host_name)
                p = attribute[1]
            elif self.tokens[p][0] in _BLANK or self.tokens[p][1] == "kernel":
                p += 1
            else:
                break
        if host_name:
            if self.tokens[p][1] == "decltype":
                opening = self._skip_blank(p + 1)
                expression = self._text(opening + 1, self._matching(opening))
            else:
                m = re.match(r"void\s+(.*?)\s*\((?:[^()]|\([^()]*\))*\)$", self._text(p, end))
                if not m:
                    raise self._error(f"instantiation not understood: {self._text(p, end)}")
                expression = m.group(1)
            self.host_names[_unquote(host_name)] = expression
        self._drop(i, end + 1)
        self._statement = len(self._out)
        return end + 1

    def _threadgroup_arrays(self, declaration: str) -> str | None:
        """Declarations of threadgroup variables in a body, as references into the threadgroup's arena."""
        first, *rest = split_commas(declaration)
        m = re.match(r"(.*?[\w>\]])\s+(\w+)\s*((?:\[.*\])?)\s*(?:=.*)?$", first, re.S)
        if not m or any(c in first.split("[")[0].split("=")[0] for c in "*&"):
            return None
        kind = m.group(1)
        variables = [(m.group(2), m.group(3))]
        variables += [re.match(r"\s*(\w+)\s*(.*)$", r, re.S).groups() for r in rest]
        out = []
        for name, dims in variables:
            self._num_arrays += 1
            array = f"threadgroup {kind} (*){dims}"
            out.append(
                f"threadgroup {kind} (&{name}){dims} = *({array})"
                f"mtlh_threadgroup_alloc({self._num_arrays}u, sizeof({kind}{dims}), 16)"
            )
        return "; ".join(out)

    def _vector_constructor(self, i: int) -> tuple[str, int] | None:
        """`float4(` or `vec<T, 4>(` at i: the name of the maker and the index of the parenthesis."""
        end: int | None = i
        if self.tokens[i][1] == "vec":
            opening = self._skip_blank(i + 1)
            is_angle = opening < len(self.tokens) and self.tokens[opening][1] == "<"
            end = self._matching_angle(opening) if is_angle else None
        if end is None:
            return None
        after = self._skip_blank(end + 1)
        if after >= len(self.tokens) or self.tokens[after][1] != "(":
            return None
        return f"metal::mtlh_make<{self._text(i, end + 1)}>", end + 1

    @staticmethod
    def _number(text: str) -> str:
        """1.0h and 1.0bf as casts."""
        m = re.match(r"^([\d.]+(?:[eE][+-]?\d+)?)(h|H|bf|BF)$", text)
        if not m or text.startswith("0x"):
            return text
        kind = "half" if m.group(2) in "hH" else "bfloat"
        point = "" if "." in m.group(1) or "e" in m.group(1) else ".0"
        return f"(({kind}){m.group(1)}{point}f)"

    def _scope(self) -> str:
        """What the brace that opens now belongs to."""
        statement = self._written_statement()
        if re.search(r"\bnamespace\b", statement) or re.search(r'extern\s+"C"', statement):
            return "namespace"
        plain = re.sub(r"<[^<>]*>", "", statement)
        is_class = re.search(r"\b(struct|class|union|enum)\b", plain) and "(" not in plain
        return "class" if is_class else "code"

    # -- the pass -----------------------------------------------------------------------------------------------
    def run(self) -> str:
        scopes: list[str] = []
        parens = 0
        is_kernel, host_name = False, None
        previous = ";"
        i = 0
        while i < len(self.tokens):
            kind, text = self.tokens[i]
            if kind in _BLANK:
                if kind == "newline":
                    self._line += 1
                m = re.match(r'#\s*(?:line\s+)?(\d+)\s+"([^"]*)"', text)
                if m:
                    self._line, self._file = int(m.group(1)) - 1, m.group(2)
                if kind != "directive" or m:  # pragmas are dropped
                    self._out.append(text)
                i += 1
                continue
            in_code = bool(scopes) and scopes[-1] == "code"
            attribute = self._attribute(i)
            if attribute:
                found, after = attribute
                self._drop(i, after)
                if "function_constant" in found and not parens and "code" not in scopes:
                    after = self._function_constant(found["function_constant"], after)
                is_kernel = is_kernel or "kernel" in found
                if "host_name" in found:
                    host_name = _unquote(found["host_name"])
                i = after
                continue
            if kind == "name":
                following = self.tokens[j][1] if (j := self._skip_blank(i + 1)) < len(self.tokens) else ""
                if text == "template" and (after := self._explicit_instantiation(i)) is not None:
                    i, previous = after, ";"
                    continue
                if text == "kernel":
                    is_kernel = True
                    i += 1
                    continue
                if is_kernel and following == "(" and text != "decltype":
                    self._signature(text, j, host_name)
                    is_kernel, host_name = False, None
                starts_statement = in_code and not parens and previous in (";", "{", "}")
                if text == "threadgroup" and starts_statement:
                    end = self._end_of_statement(i)
                    declaration = self._threadgroup_arrays(self._text(i + 1, end))
                    if declaration:
                        self._out.append(declaration)
                        self._drop(i, end)
                        i, previous = end, ";"
                        continue
                if text == "static" and in_code:
                    declared = self._text(i, i + 16).split(";")[0].split("=")[0]
                    if not re.search(r"\b(constexpr|constant)\b", declared):
                        raise self._error("MSL has no static local variables")
                if text == "using":
                    vector = r"(?:metal ?:: ?)?vec ?<|(?:" + "|".join(sorted(_VECTORS)) + r") ?;"
                    m = re.match(rf"using (\w+) = (?:{vector})", self._text(i, i + 20))
                    if m:
                        self._vector_names.add(m.group(1))
                is_vector = text in self._vector_names or text == "vec"
                if is_vector and previous not in ("operator", "struct", "class", "using"):
                    made = self._vector_constructor(i)
                    if made:
                        self._out.append(made[0])
                        i, previous = made[1], ">"
                        continue
                # A method for objects in thread memory: temporaries need the unqualified form.
                if text == "thread" and previous in (")", "const") and following in (":", "{", ";"):
                    i += 1
                    continue
            if kind == "number":
                text = self._number(text)
            if kind == "op":
                if text == "{":
                    scopes.append(self._scope())
                elif text == "}" and scopes:
                    scopes.pop()
                parens += (text == "(") - (text == ")")
            self._out.append(text)
            if kind == "op" and text in ";{}" and not parens:
                self._statement = len(self._out)
            previous = text
            i += 1
        return "".join(self._out)
