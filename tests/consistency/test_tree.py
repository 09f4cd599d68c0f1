"""The shape of the tree: who imports whom, lengths, names, docstrings."""

import ast
import re
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "recipes/Korean/ASR/whisper"
SCRIPTS = {"train", "evaluate", "transcribe", "export"}
LOCAL = sorted((RECIPE / "local").rglob("*.py"))
PYTHON = [*sorted(RECIPE.glob("*.py")), *LOCAL]


def named(path):
    return str(path.relative_to(RECIPE))


every_file = pytest.mark.parametrize("path", PYTHON, ids=named)
every_module = pytest.mark.parametrize("path", LOCAL, ids=named)


def read(path):
    return path.read_text(encoding="utf-8")


def imported(tree):
    """Full names of what a module imports."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative import"
            for alias in node.names:
                yield f"{node.module}.{alias.name}"


def test_there_are_modules():
    assert {"train.py", "local/text.py", "local/corpora/zeroth.py"} <= {
        named(path) for path in PYTHON
    }


@every_module
def test_local_imports_no_script(path):
    roots = {name.split(".")[0] for name in imported(ast.parse(read(path)))}
    assert not roots & SCRIPTS


@every_module
def test_local_takes_values_and_no_hparams(path):
    names = set()
    for node in ast.walk(ast.parse(read(path))):
        if isinstance(node, ast.Name):
            names.add(node.id)
        elif isinstance(node, ast.Attribute):
            names.add(node.attr)
        elif isinstance(node, ast.arg):
            names.add(node.arg)
    assert "hparams" not in names


@pytest.mark.parametrize(
    "module, allowed",
    [
        ("text", set()),
        ("files", set()),
        ("manifest", {"files", "text"}),
        ("audio", set()),
        ("loss", set()),
        ("ranks", set()),
        ("batching", {"audio"}),
        ("random_model", set()),
        ("numbers", {"text"}),
        ("channel", {"audio"}),
        ("metrics", {"files", "text"}),
    ],
)
def test_the_lower_modules_stand_alone(module, allowed):
    tree = ast.parse(read(RECIPE / f"local/{module}.py"))
    ours = {
        name.split(".")[1]
        for name in imported(tree)
        if name.startswith("local.")
    }
    assert ours <= allowed


def test_text_rules_need_the_standard_library_alone():
    tree = ast.parse(read(RECIPE / "local/text.py"))
    roots = {name.split(".")[0] for name in imported(tree)}
    assert roots <= sys.stdlib_module_names


@every_module
def test_a_module_says_what_goes_in_and_comes_out(path):
    content = read(path)
    if not content:  # a package of modules that say it
        assert path.name == "__init__.py"
        return
    docstring = ast.get_docstring(ast.parse(content)) or ""
    assert len(docstring.splitlines()) >= 3
    assert re.search(r"^In: .", docstring, re.M)
    assert re.search(r"^Out: .", docstring, re.M)


@every_file
def test_lengths(path):
    limit = 450 if path.name == "train.py" else 400
    assert len(read(path).splitlines()) <= limit


@every_file
def test_names_that_speechbrain_would_take_for_tests(path):
    assert not re.match(r"(test|check|example)_", path.name)


@every_file
def test_the_readme_names_the_file(path):
    folder, name = path.parent, path.name
    if name == "__init__.py":
        return
    if folder.name in ("corpora", "report"):
        name = f"{folder.name}/"
    readme = read(ROOT / "README.md")
    assert re.search(rf"^ +{re.escape(name)} +\w", readme, re.M)


def test_the_readme_names_no_file_that_is_not_there():
    tree = read(ROOT / "README.md")
    names = re.findall(r"^ +(\w+\.py) +\w", tree, re.M)
    assert len(names) >= 13
    deployed = (ROOT / "deploy").rglob("*.py")
    assert set(names) <= {path.name for path in (*PYTHON, *deployed)}


def test_flags_are_read_by_value():
    calls = [
        node.func.id
        for node in ast.walk(ast.parse(read(RECIPE / "train.py")))
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert "hasattr" not in calls
