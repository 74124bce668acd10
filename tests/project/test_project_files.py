"""Statements about the project agree: make targets, paths, versions, variables."""

import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path
from unittest import mock

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
WORKFLOW = yaml.safe_load((ROOT / ".github/workflows/tests.yml").read_text())
RELEASE = yaml.safe_load((ROOT / ".github/workflows/release.yml").read_text())
PAGES = sorted(
    str(page.relative_to(ROOT))
    for folder in ("*.md", "docs/**/*.md", "benchmarks/*.md")
    for page in ROOT.glob(folder)
)
VERSION = r"\d+\.\d+"


def rows():
    """The rows of the workflow's matrix of tests."""
    return WORKFLOW["jobs"]["test"]["strategy"]["matrix"]["include"]


def text(path):
    return (ROOT / path).read_text()


def between(first, last):
    """All versions of a range, ends included, as in "3.10 to 3.13"."""
    (major, begin), (_, end) = (map(int, version.split(".")) for version in (first, last))
    return [f"{major}.{minor}" for minor in range(begin, end + 1)]


def lines_that_run(workflow):
    """The commands of every job of a workflow, with the matrix's values filled in."""
    for job in workflow["jobs"].values():
        matrix = job.get("strategy", {}).get("matrix", {})
        for step in job["steps"]:
            run = step.get("run", "")
            names = re.findall(r"\$\{\{ matrix\.(\w+) \}\}", run)
            values = matrix.get(names[0], [""]) if names else [""]
            yield from (re.sub(r"\$\{\{.*?\}\}", str(value), run) for value in values)


def targets_in(line):
    """The targets in a `make` command line, without variables and options."""
    for words in re.findall(r"\bmake ([\w= .\"*{}$-]+)", line):
        yield from (word for word in words.split() if re.fullmatch(r"[a-z][a-z-]*", word))


def test_make_targets():
    makefile = text("Makefile")
    real = {name for line in re.findall(r"^([\w -]+):", makefile, re.M) for name in line.split()}
    listed = {
        name for line in re.findall(r"^\.PHONY: (.*)$", makefile, re.M) for name in line.split()
    }
    assert listed <= real
    used = {target for line in lines_that_run(WORKFLOW) for target in targets_in(line)}
    assert used == {"lint", "test", "test-slow", "mutants", "tsan", "asan"}
    released = {target for line in lines_that_run(RELEASE) for target in targets_in(line)}
    assert released == {"wheel", "try-wheel"}
    used |= released
    for page in ("CONTRIBUTING.md", "README.md"):
        code = re.findall(r"`([^`\n]+)`|^(make .*?)(?:#.*)?$", text(page), re.M)
        used |= {target for line in map("".join, code) for target in targets_in(line)}
    hooks = yaml.safe_load(text(".pre-commit-config.yaml"))["repos"][0]["hooks"]
    used |= {target for hook in hooks for target in targets_in(hook["entry"])}
    assert {"compile-commands", "cuda-check", "demo"} < used
    assert used <= listed


def test_every_test_has_a_target():
    """Tests that `make test` leaves out have targets, and the gate runs all that need no GPU."""
    left_out = re.findall(r"not (\w+)", PROJECT["tool"]["pytest"]["ini_options"]["addopts"])
    assert left_out == ["gpu", "slow"]
    for marker in left_out:
        recipe = rf"^test-{marker}:.*\n\t.* -m \W?{marker}\b.* tests$"
        assert re.search(recipe, text("Makefile"), re.M)
    assert {"test", "mutants", "tsan", "racecheck", "asan"} <= set(targets_in(text(".ci/run")))
    assert 'make test MARKED="not gpu"' in text(".ci/run")


def targets_of_the_gate(folder, *arguments, day=0):
    """The targets that `.ci/run` makes for a commit of a day since 1970."""
    for name, body in {"make": f"echo $1 >>{folder}/made", "git": f"echo {day * 86400}"}.items():
        (folder / name).write_text(f"#!/bin/sh\n{body}\n")
        (folder / name).chmod(0o755)
    path = f"{folder}:{os.environ['PATH']}"
    gate = [ROOT / ".ci/run", *arguments]
    subprocess.run(gate, env={"PATH": path}, check=True, capture_output=True, timeout=60)
    made = (folder / "made").read_text().split()
    (folder / "made").unlink()
    return made


def test_the_gates_of_two_days_make_all_targets(tmp_path):
    """The sanitizers take turns, day by day, and nightly leaves none out."""
    even, odd = (targets_of_the_gate(tmp_path, day=day) for day in (20000, 20001))
    everything = targets_of_the_gate(tmp_path, "nightly")
    assert {"tsan", "racecheck", "asan"} < set(everything)
    nightly = {"wheel", "test-integrations"} | ({"cuda-build"} if shutil.which("nvcc") else set())
    if shutil.which("aarch64-linux-gnu-g++") and shutil.which("qemu-aarch64"):
        nightly.add("aarch64")
    assert set(everything) - set(odd) == {"tsan", "racecheck"} | nightly
    assert set(everything) - set(even) == {"asan"} | nightly
    assert targets_of_the_gate(tmp_path, day=20002) == even


def test_the_parts_of_five_days_are_all_long_tests(pytestconfig):
    """Each of the gate's parts is a fifth of the tests marked slow, and none is left out."""
    choose = pytestconfig.pluginmanager.get_plugin(str(ROOT / "tests/conftest.py"))
    slow, quick = [f"test_{n}" for n in range(13)], ["test_a", "test_z"]

    def listed(part):
        items = [mock.Mock(nodeid=test) for test in (*reversed(slow), *quick)]
        for item in items:
            item.get_closest_marker = {"slow": item.nodeid in slow}.get
        found, config = list(items), mock.Mock()
        config.getoption = {"part": part}.get
        choose.pytest_collection_modifyitems(config, found)
        told = config.hook.pytest_deselected.call_args
        left_out = told.kwargs["items"] if told else []
        assert [item for item in items if item not in left_out] == found
        return [item.nodeid for item in found]

    assert listed(None) == [*reversed(slow), *quick]
    parts = [listed(part) for part in range(5)]
    assert all(part[-2:] == quick for part in parts)
    assert sorted(len(part) - 2 for part in parts) == [2, 2, 3, 3, 3]
    assert sorted(test for part in parts for test in part[:-2]) == sorted(slow)


def anchors_of(page):
    """The anchors that GitHub and the site give to a page's headings."""
    prose = re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)
    found = set()
    for heading in re.findall(r"^#+ +(.*)$", prose, re.MULTILINE):
        name = re.sub(r"\]\([^)]*\)", "", heading).lower()
        name = re.sub(r"[^\w\- ]", "", name).replace(" ", "-")
        found.add(name if name not in found else f"{name}-1")
    return found


@pytest.mark.parametrize("page", PAGES)
def test_links(page):
    """Links lead to files and headings that exist, and paths in the text to files or folders."""
    prose = re.sub(r"^```.*?^```$", "", text(page), flags=re.MULTILINE | re.DOTALL)
    prose, names = re.sub(r"`[^`]*`", "", prose), re.findall(r"`([^`\s]+)`", prose)
    broken = []
    for path, anchor in re.findall(r"\]\(([^)#:\s]*)(?:#([^)\s]*))?\)", prose):
        target = os.path.normpath(Path(page).parent / path) if path else page
        if not (ROOT / target).exists() or (anchor and anchor not in anchors_of(target)):
            broken.append(f"{path}#{anchor}")
    folders = r"(?:csrc|pycomm|tests|docs|benchmarks|examples|\.github)/[\w./-]+"
    named = [name for name in names if re.fullmatch(folders, name)]
    assert broken + [name for name in named if not (ROOT / name).exists()] == []


def test_architecture():
    """It names files that exist and that contain the named functions."""
    page = text("docs/contributing/architecture.md")
    named = re.findall(r"\b((?:csrc|pycomm|tests)/[\w/.]*[\w/])", page)
    assert [name for name in named if not (ROOT / name).exists()] == []
    hops = re.findall(r'"([\w:.]+): ((?:csrc|pycomm)/[\w/.]+)"', page)
    assert len(hops) > 10
    for name, file in hops:
        assert re.search(rf"\b{re.split('[:.]', name)[-1]}\b", text(file)), (name, file)


def unindented(code):
    return re.sub(r"^ +", "", code, flags=re.MULTILINE)


def test_extending():
    """It names files that exist, and its code stands in the file named last before it."""
    pieces = re.split(
        r"```(?:c\+\+|python)\n(.*?)\n```\n",
        text("docs/contributing/extending.md"),
        flags=re.DOTALL,
    )
    assert len(pieces) > 20
    prose, blocks = "\n".join(pieces[::2]), pieces[1::2]
    named = re.findall(r"`((?:csrc|pycomm|tests)/[^`*\s]*)`", prose)
    assert [name for name in named if not (ROOT / name).exists()] == []
    file = ""
    for before, code in zip(pieces[::2], blocks, strict=False):
        file = (re.findall(r"`([\w/]+\.(?:h|cu|py))`", before) or [file])[-1]
        assert unindented(code) in unindented(text(file)), f"{file} has no such code:\n{code}"


def test_python_versions():
    classifiers = PROJECT["project"]["classifiers"]
    prefix = "Programming Language :: Python :: 3."
    supported = [c.rpartition(" ")[2] for c in classifiers if c.startswith(prefix)]
    assert PROJECT["project"]["requires-python"] == f">={supported[0]}"
    assert {row["python"] for row in rows()} == set(supported)
    assert RELEASE["jobs"]["build"]["strategy"]["matrix"]["python"] == supported
    assert PROJECT["tool"]["mypy"]["python_version"] == supported[0]
    assert PROJECT["tool"]["ruff"]["target-version"] == f"py{supported[0].replace('.', '')}"
    for page, before in [
        ("README.md", "python3 \\("),
        ("CONTRIBUTING.md", "Python "),
        ("Makefile", "python3 \\("),
    ]:
        found = re.search(rf"{before}({VERSION}) to ({VERSION})", text(page))
        assert between(*found.groups()) == supported, page


def test_torch_versions():
    supported = between(
        *re.search(rf"\(({VERSION}) to ({VERSION}), CPU", text("README.md")).groups()
    )
    assert {row["torch"] for row in rows()} == set(supported)
    tried = re.findall(rf'TORCH="torch==({VERSION})\.\*"', str(RELEASE["jobs"]["build"]["steps"]))
    assert tried == [supported[0], supported[-1]]
    (built_with,) = re.findall(rf"^TORCH \?= torch==({VERSION})\.\d+$", text("Makefile"), re.M)
    assert built_with in supported
    needed = [
        requirement.removeprefix("torch>=")
        for requirement in PROJECT["project"]["dependencies"] + PROJECT["build-system"]["requires"]
        if requirement.startswith("torch")
    ]
    assert needed == [supported[0]] * 2


def run_release_step(job, beginning, folder, tag="v1.2.0"):
    """Runs a step of the release, the one whose name begins so, in a folder."""
    steps = RELEASE["jobs"][job]["steps"]
    (script,) = (step["run"] for step in steps if step.get("name", "").startswith(beginning))
    names = {"GITHUB_REPOSITORY": "owner/name", "GITHUB_REF_NAME": tag}
    command = ["bash", "-e", "-c", script]
    return subprocess.run(command, cwd=folder, env=os.environ | names, check=False).returncode


def test_links_of_a_released_readme(tmp_path):
    """None leads to a file beside it, for it stands on the package index alone."""
    (tmp_path / "README.md").write_text(text("README.md"))
    assert run_release_step("build", "links", tmp_path) == 0
    links = re.findall(r"\]\(([^)]*)\)", (tmp_path / "README.md").read_text())
    here = re.findall(r"\]\(([^)]*)\)", text("README.md"))
    repository = "https://github.com/owner/name/"
    kinds = {f"{repository}raw/v1.2.0/": "docs/images/", f"{repository}blob/v1.2.0/": ""}
    for link, before in zip(links, here, strict=True):
        kind = next(kind for kind in kinds if link.startswith(kind))
        assert link == kind + before
        assert before.startswith(kinds[kind])
        assert (kind == f"{repository}raw/v1.2.0/") == before.endswith(".png")


def test_notes_of_a_release(tmp_path):
    """The changelog's section; a tag without one, or of another version, releases nothing."""
    changes = "# Changelog\n\n## [1.2.0] - 2030\n\n### Added\n\n- This.\n\n## [1.1.0]\n\n- That.\n"
    (tmp_path / "CHANGELOG.md").write_text(changes)
    (tmp_path / "dist").mkdir()
    for file in ("torch_pycomm-1.2.0-cp311-cp311-manylinux_2_28.whl", "torch_pycomm-1.2.0.tar.gz"):
        (tmp_path / "dist" / file).touch()
    assert run_release_step("publish", "the changelog", tmp_path) == 0
    assert (tmp_path / "notes.md").read_text().split() == ["###", "Added", "-", "This."]
    assert (
        run_release_step("publish", "the changelog", tmp_path, "v1.1.0") != 0
    )  # the files' is 1.2.0
    assert run_release_step("publish", "the changelog", tmp_path, "v1.3.0") != 0
    for file in (tmp_path / "dist").iterdir():
        file.rename(str(file).replace("1.2.0", "1.3.0"))
    assert run_release_step("publish", "the changelog", tmp_path, "v1.3.0") != 0  # no section


def test_extras_are_documented():
    """One table has them all."""
    (table,) = re.findall(
        r"^\| extra \|.*\n((?:\|.*\n)+)", text("docs/how-to/build-options.md"), re.M
    )
    assert re.findall(r"^\| `(\w+)`", table, re.M) == list(
        PROJECT["project"]["optional-dependencies"]
    )


def test_nobody_is_told_to_install_what_is_not_published():
    """The first release removes this test."""
    for path in [*map(ROOT.joinpath, PAGES), *ROOT.glob("pycomm/**/*.py")]:
        assert not re.search(r"pip install ['\"]?torch-pycomm", path.read_text()), path


def test_tools_are_pinned_in_one_place():
    for requirement in PROJECT["dependency-groups"]["lint"]:
        name, version = requirement.split("==")
        assert f"{name}==" not in text("Makefile")
        assert version not in text(".pre-commit-config.yaml")
    assert "--group lint" in text("Makefile")


def test_widths_agree():
    """Line widths are the same for editors and for linters."""
    widths = re.findall(
        r"^\[\*\.\{([\w,]+)\}\]\n(?:.+\n)*?max_line_length = (\d+)", text(".editorconfig"), re.M
    )
    assert [suffixes for suffixes, _ in widths] == ["py,pyi", "h,cuh,cpp,cu"]
    assert f"ColumnLimit: {widths[1][1]}" in text(".clang-format")
    assert PROJECT["tool"]["ruff"]["line-length"] == int(widths[0][1])


def test_names_of_tests_are_unique():
    """pytest imports test files by their base names and refuses the second of one name."""
    names = sorted(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert names == sorted(set(names))


def test_examples_ask_for_this_version():
    minor = PROJECT["project"]["version"].rpartition(".")[0]
    for path in ("docs/how-to/cpp.md", "examples/cpp/CMakeLists.txt"):
        asked = re.findall(r"find_package\(pycomm ([\d.]+)", text(path))
        assert asked
        assert set(asked) == {minor}
    assert re.findall(r" pycomm (\d+\.\d+)\.", text("docs/how-to/observing.md")) == [minor]


def test_the_citation_is_of_this_version():
    citation = yaml.safe_load(text("CITATION.cff"))
    for field in ("version", "license"):
        assert citation[field] == PROJECT["project"][field]
    assert citation["cff-version"] == "1.2.0"
    assert citation["authors"]


def test_forms_of_issues():
    folder = ROOT / ".github/ISSUE_TEMPLATE"
    forms = {path.stem: yaml.safe_load(path.read_text()) for path in folder.iterdir()}
    for form in forms.values():
        assert {"name", "description", "body"} <= set(form)
        names = [field["id"] for field in form["body"]]
        assert len(set(names)) == len(names)
    assert "python -m pycomm.check" in str(forms["bug_report"])


def test_environment_variables_are_documented():
    """All environment variables of pycomm are documented; none exists for tests only."""
    read = set()
    for path in [*ROOT.glob("pycomm/**/*.py"), ROOT / "setup.py"]:
        read |= set(
            re.findall(r'(?:environ\S*?[\[(]|in os\.environ.*?)"(PYCOMM_\w+)"', path.read_text())
        )
    for path in [path for path in (ROOT / "csrc").rglob("*") if path.is_file()]:
        assert "getenv" not in path.read_text(), path
    assert read == {
        "PYCOMM_CUDA",
        "PYCOMM_DIAGNOSE",
        "PYCOMM_LOG",
        "PYCOMM_NODE",
        "PYCOMM_STRICT",
        "PYCOMM_TORCH_HEADERS",
    }


@pytest.mark.slow
def test_compile_commands(tmp_path):
    """They name all sources, and folders of headers that exist."""
    bin_ = Path(sys.executable).parent
    subprocess.run(
        ["cmake", "-S", ROOT, "-B", tmp_path, "-GNinja", "-DPYCOMM_BUILD_TESTS=ON",
         "-DCMAKE_EXPORT_COMPILE_COMMANDS=ON",
         f"-DPYCOMM_PYTHON={sys.executable}"],
        env={"PATH": f"{bin_}:/usr/bin:/bin"}, check=True, capture_output=True, timeout=200,
    )  # fmt: skip
    commands = json.loads((tmp_path / "compile_commands.json").read_text())
    listed = {Path(entry["file"]) for entry in commands}
    kinds = ["*.cpp"] + ["*.cu"] * (platform.machine() == "x86_64")
    sources = {path for kind in kinds for path in (ROOT / "csrc").rglob(kind)}
    assert len(sources) > 20
    assert sources <= listed
    bound = [entry["command"] for entry in commands if "csrc/bind" in entry["file"]]
    assert "torch/include" in bound[0]
    assert "pybind11/include" in bound[0]
    folders = {folder for line in bound for folder in re.findall(r"-(?:I|isystem ?)(\S+)", line)}
    assert all(Path(folder).is_dir() for folder in folders)


def requirements(lines):
    """The versions that are asked for, by package, with conda's name of torch."""
    found = dict(re.fullmatch(r"([\w-]+) ?(.*)", line).groups() for line in lines)
    return {{"torch": "pytorch"}.get(name, name): version for name, version in found.items()}


def test_conda_asks_for_what_pip_asks_for():
    recipe = yaml.safe_load(text("packaging/conda/recipe.yaml"))
    project, asked = PROJECT["project"], recipe["requirements"]
    assert recipe["context"]["version"] == project["version"]
    assert recipe["package"]["name"] == project["name"]
    host = [line for line in asked["host"] if line not in ("python", "pip")]
    build = [line for line in asked["build"] if not line.startswith("${{")]
    assert requirements(host + build) == requirements(PROJECT["build-system"]["requires"])
    python = f"python {project['requires-python']}"
    assert requirements(asked["run"]) == requirements([python, *project["dependencies"]])


def test_the_container_runs_the_demo():
    container = json.loads(text(".devcontainer/devcontainer.json"))
    assert container["postCreateCommand"] == "make demo"
    dockerfile = text(f".devcontainer/{container['build']['dockerfile']}")
    (python,) = re.findall(rf"^FROM python:({VERSION})-", dockerfile, re.MULTILINE)
    assert f"Programming Language :: Python :: {python}" in PROJECT["project"]["classifiers"]
    assert re.search(r"^VENV \?=", text("Makefile"), re.MULTILINE), "it sets VENV"
