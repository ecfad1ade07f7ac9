"""The layers of docs/architecture.md, as a scan of includes and imports."""

from __future__ import annotations

import ast
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parent.parent
PACKAGE = ROOT / "python" / "mlxcel_ext"

# folder -> what an #include there must not match
FORBIDDEN_INCLUDES = {
    "csrc/params": r"mlx/|nanobind|ops/|cpu/|common/|backend\.h|cuda",
    "csrc/plan": r"mlx/|nanobind|ops/|cpu/|backend\.h|cuda",
    "csrc/common": r"nanobind|ops/|cpu/|backend\.h|cuda",
    "csrc/cpu/kernels": r"mlx/|nanobind|ops/|backend\.h|cuda",
    "csrc/ops": r"nanobind|cpu/|cuda|metal",
    "csrc/cpu": r"nanobind|cuda|metal",
    "csrc/bindings": r"cpu/|cuda|metal",
    "cuda/kernels": r"mlx/|nanobind|ops/|backend\.h",
    "metal/kernels": r"mlx/|nanobind|ops/|backend\.h",
}
SOURCE_SUFFIXES = {".h", ".cpp", ".cu", ".cuh", ".metal"}

# module prefix -> modules it must not import (prefixes of "mlxcel_ext." names, or top-level packages)
PURE = (
    "mlx",
    "mlxcel_ext._ext",
    "mlxcel_ext.ops",
    "mlxcel_ext.models",
    "mlxcel_ext.server",
    "mlxcel_ext.engine",
)
FORBIDDEN_IMPORTS = {
    "mlxcel_ext.ops": (
        "mlxcel_ext.kvcache",
        "mlxcel_ext.scheduler",
        "mlxcel_ext.models",
        "mlxcel_ext.engine",
        "mlxcel_ext.server",
        "mlxcel_ext.cli",
    ),
    "mlxcel_ext.scheduler": PURE,
    "mlxcel_ext.kvcache.page_allocator": PURE,
    "mlxcel_ext.kvcache.prefix_tree": PURE,
    "mlxcel_ext.kvcache.pool": ("mlxcel_ext.scheduler", "mlxcel_ext.models", "mlxcel_ext.server"),
    "mlxcel_ext.models": ("mlxcel_ext.scheduler", "mlxcel_ext.engine", "mlxcel_ext.server", "mlxcel_ext.cli"),
    "mlxcel_ext.engine": ("mlxcel_ext.server", "mlxcel_ext.cli"),
    "mlxcel_ext.server": ("mlx", "mlxcel_ext._ext", "mlxcel_ext.ops", "mlxcel_ext.cli"),
}
# Only these may import the binary module.
EXT_USERS = ("mlxcel_ext", "mlxcel_ext._backends", "mlxcel_ext.ops")


def in_folder(folder: str) -> list[pathlib.Path]:
    """Sources of `folder` that no longer key claims."""
    deeper = [key for key in FORBIDDEN_INCLUDES if key.startswith(folder + "/")]
    return [
        path
        for path in sorted((ROOT / folder).rglob("*"))
        if path.suffix in SOURCE_SUFFIXES and not any(path.is_relative_to(ROOT / key) for key in deeper)
    ]


@pytest.mark.parametrize("folder", FORBIDDEN_INCLUDES)
def test_includes_keep_their_layer(folder):
    pattern = re.compile(rf'#\s*include\s*[<"](?:{FORBIDDEN_INCLUDES[folder]})')
    found = [
        f"{path.relative_to(ROOT)}:{number}: {line.strip()}"
        for path in in_folder(folder)
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if pattern.search(line) and not (folder == "cuda/kernels" and re.search(r"<cuda", line))
    ]
    assert found == []


def module_name(path: pathlib.Path) -> str:
    parts = path.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports(path: pathlib.Path) -> list[tuple[int, str]]:
    """Absolute names of the modules that a file imports, lazily imported ones included; TYPE_CHECKING blocks not."""
    tree = ast.parse(path.read_text())
    typing_only = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for inner in ast.walk(node)
    }
    package = module_name(path).split(".")
    if path.name != "__init__.py":
        package = package[:-1]
    out = []
    for node in ast.walk(tree):
        if id(node) in typing_only:
            continue
        if isinstance(node, ast.Import):
            out += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            stem = ".".join([*base, *([node.module] if node.module else [])])
            out.append((node.lineno, stem))
            out += [(node.lineno, f"{stem}.{alias.name}") for alias in node.names]
    return out


def under(name: str, prefix: str) -> bool:
    return name == prefix or name.startswith(prefix + ".")


@pytest.mark.parametrize("layer", FORBIDDEN_IMPORTS)
def test_imports_keep_their_layer(layer):
    found = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted(PACKAGE.rglob("*.py"))
        if under(module_name(path), layer)
        for line, name in imports(path)
        if any(under(name, bad) for bad in FORBIDDEN_IMPORTS[layer])
    ]
    assert found == []


def test_only_ops_import_the_binary():
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for line, name in imports(path)
        if under(name, "mlxcel_ext._ext")
        and not any(
            under(module_name(path), user) if user != "mlxcel_ext" else module_name(path) == user
            for user in EXT_USERS
        )
    ]
    assert found == []


def test_environment_is_read_in_one_place():
    found = [
        str(path.relative_to(ROOT))
        for path in sorted(PACKAGE.rglob("*.py"))
        if re.search(r"os\.(environ|getenv)", path.read_text()) and path.name != "env.py"
    ]
    assert found == []


def test_import_is_light():
    """Importing the ops must not pull in the server, the models or a tokenizer."""
    code = (
        "import sys, mlxcel_ext; "
        "heavy = {'starlette', 'uvicorn', 'tokenizers', 'gguf', 'jinja2', 'llguidance', 'rich', 'mlxcel_ext.server', "
        "'mlxcel_ext.models', 'mlxcel_ext.engine'} & set(sys.modules); print(sorted(heavy))"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
