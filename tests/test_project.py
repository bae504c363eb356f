"""What surrounds the code: the map of the folders, the pinned versions, links, and words that do
not belong here."""

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version
from readme_renderer import markdown

from kdcli import losses, pruners
from kdcli.cli.about import TOPICS
from kdcli.errors import KdcliError
from kdcli.version import install_command

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "kdcli"
TEXT = {".py", ".md", ".toml", ".yaml", ".yml", ".txt", ".jinja", ".sh", ".json", ""}

# Written in pieces, so that this file does not hold what it looks for.
PARTS = [
    r"(?<![\w.])/wo" + r"rk/",
    r"\.\./sha" + "red",
    r"/opt/" + "pypi",
    r"\biss" + r"ue #?\d",
    r"/root" + "/",
]
PARTS.append(r"\b(?:this|our|an?|earlier|previous|next|last|other|another) sess" + r"ions?\b")
FOREIGN = re.compile("|".join(PARTS), re.IGNORECASE)


def tracked() -> list[Path]:
    """Files of the repository, or every file where there is no git."""
    done = subprocess.run(
        ["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    names = done.stdout.splitlines() if done.returncode == 0 else []
    return [p for n in names if (p := ROOT / n).is_file()]


def test_the_map_names_every_room():
    page = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    block = re.search(r"```\n(kdcli/\n.*?)```", page, re.DOTALL)
    assert block
    lines = [line.strip().split(maxsplit=1) for line in block[1].splitlines()[1:]]
    folders = {p.parent.name for p in PACKAGE.glob("*/__init__.py")}
    assert {name.rstrip("/") for name, _ in lines if name.endswith("/")} >= folders


@pytest.mark.parametrize("name", ["README.md", "CONTRIBUTING.md", "recipes/README.md"])
def test_links_lead_to_files_that_exist(name):
    text = (ROOT / name).read_text("utf-8")
    targets = [t.split("#")[0] for t in re.findall(r"\]\(([^)]+)\)", text) if "://" not in t]
    assert [t for t in targets if t and not (ROOT / name).parent.joinpath(t).exists()] == []


def test_versions_are_pinned_and_free_of_local_builds():
    lines = [
        s
        for s in (ROOT / "constraints.txt").read_text("utf-8").splitlines()
        if s and not s.startswith("#")
    ]
    assert "torch==2.13.0" in lines
    assert [s for s in lines if not re.fullmatch(r"[A-Za-z0-9._-]+==[\w.]+", s)] == []


def test_the_hook_before_a_commit_runs_the_pinned_ruff():
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text("utf-8"))["repos"]
    (version,) = [row["rev"] for row in hooks if row["repo"].endswith("/ruff-pre-commit")]
    pinned = (ROOT / "constraints.txt").read_text("utf-8").splitlines()
    assert f"ruff=={version.removeprefix('v')}" in pinned


def test_every_direct_dependency_is_pinned():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    wanted = [*project["dependencies"], *project["optional-dependencies"]["dev"]]
    names = {re.split(r"[\[<>=!]", w)[0].lower() for w in wanted} - {"kdcli"}
    pinned = {
        s.split("==")[0].lower().replace("_", "-")
        for s in (ROOT / "constraints.txt").read_text().splitlines()
    }
    assert names <= pinned


def test_hints_and_pages_name_the_packages_of_an_extra():
    """And not kdcli itself, which is not on PyPI under this name."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    for extra in ("onnx", "openvino", "generation", "embed", "triton"):
        packages = project["optional-dependencies"][extra]
        names = sorted(Requirement(package).name for package in packages)
        command = install_command(extra)
        assert sorted(command.removeprefix("pip install ").split()) == names
    pages = {
        page: page.read_text("utf-8")
        for page in [*ROOT.glob("docs/**/*"), *PACKAGE.rglob("*")]
        if page.suffix in (".md", ".ipynb", ".py", ".jinja", ".toml")
    }
    assert [str(page) for page, text in pages.items() if "'kdcli[" in text] == []


def test_the_lowest_versions_are_those_of_pyproject():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    groups = [project["dependencies"], *project["optional-dependencies"].values()]
    floors = {
        match[1].lower().replace("_", "-"): Version(match[2])
        for wanted in itertools.chain(*groups)
        if (match := re.match(r"([\w-]+)[^>]*>=([\w.]+)", wanted))
    }
    lines = (ROOT / "constraints-lowest.txt").read_text("utf-8").splitlines()
    pinned = {name: Version(version) for name, version in (line.split("==") for line in lines)}
    del floors["triton"]  # torch needs an exact version of its own
    assert {name: pinned[name] for name in floors} == floors


@pytest.mark.parametrize("place", ["ci", "release"])
def test_workflows_try_the_wheel_and_pin_their_actions(place):
    text = (ROOT / ".github" / "workflows" / f"{place}.yml").read_text("utf-8")
    steps = [step for job in yaml.safe_load(text)["jobs"].values() for step in job["steps"]]
    assert ".ci/wheel" in [step.get("run") for step in steps]
    used = [step["uses"] for step in steps if "uses" in step]
    assert [name for name in used if not re.fullmatch(r"[\w./-]+@[0-9a-f]{40}", name)] == []
    script = (ROOT / ".ci" / "wheel").read_text("utf-8")
    assert re.search(r"-m build\n.*twine check", script)


def test_ci_runs_on_linux_and_macos_with_each_supported_python():
    jobs = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))["jobs"]
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    supported = {c.split(" :: ")[-1] for c in project["classifiers"] if ":: Python :: 3." in c}
    matrix = jobs["test"]["strategy"]["matrix"]
    assert set(matrix["python"]) == supported
    assert set(matrix["os"]) == {"ubuntu-latest", "macos-latest"}
    assert "make check CONSTRAINTS=constraints-lowest.txt" in str(jobs["lowest"])


@pytest.fixture(scope="module")
def built(tmp_path_factory):
    """The wheel unpacked, and the names in the sdist."""
    folder = tmp_path_factory.mktemp("built")
    command = [sys.executable, "-m", "hatchling", "build", "-d", folder]
    subprocess.run(command, cwd=ROOT, capture_output=True, check=True)
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    zipfile.ZipFile(wheel).extractall(folder / "wheel")
    return folder / "wheel", {name.split("/", 1)[1] for name in tarfile.open(sdist).getnames()}


def test_wheel_and_sdist_hold_every_recipe_and_every_file_of_the_package(built):
    wheel, sdist = built
    of_package = {
        p.relative_to(ROOT).as_posix()
        for p in PACKAGE.rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }
    recipes = {p.relative_to(ROOT).as_posix() for p in (ROOT / "recipes").rglob("*") if p.is_file()}
    in_wheel = {
        p.relative_to(wheel).as_posix() for p in (wheel / "kdcli").rglob("*") if p.is_file()
    }
    assert recipes
    assert in_wheel == of_package | {f"kdcli/{name}" for name in recipes}
    assert sdist >= of_package | recipes | {"pyproject.toml", "README.md", "LICENSE"}


def test_the_readme_of_the_wheel_has_only_absolute_links_and_pictures(built):
    (metadata,) = built[0].glob("*.dist-info/METADATA")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    pattern = r'\]\(([^)]+)\)|(?:src|srcset)="([^"]+)"'
    targets = [link or picture for link, picture in re.findall(pattern, metadata.read_text())]
    assert [t for t in targets if not re.match("https://|#", t)] == []
    assert f"{project['urls']['Repository']}/raw/main/docs/images/front-light.svg" in targets


def test_pypi_renders_the_readme(built):
    """With the renderer of PyPI, which drops what it does not allow."""
    (metadata,) = built[0].glob("*.dist-info/METADATA")
    readme = metadata.read_text("utf-8").split("\n\n", 1)[1]
    page = markdown.render(readme)
    assert page is not None
    written = (ROOT / "README.md").read_text("utf-8")
    tables, commands = len(re.findall(r"^\|-", written, re.MULTILINE)), written.count("```sh")
    assert (page.count("<table>"), page.count('<pre lang="sh">')) == (tables, commands)
    # Of the two themes of a picture, the light one is left.
    picture = r'<img src="([^"]+)"'
    assert re.findall(picture, page) == re.findall(picture, readme)


def test_recipes_are_listed_from_a_wheel_and_from_a_bare_checkout(built, tmp_path):
    command, how = [sys.executable, "-m", "kdcli", "recipes", "ls"], {"cwd": tmp_path, "text": True}
    places = (os.environ | {"PYTHONPATH": str(where)} for where in (built[0], ROOT))
    listed, other = (subprocess.check_output(command, env=place, **how) for place in places)
    assert listed == other
    recipes = [
        path for path in (ROOT / "recipes").glob("*/*.yaml") if path.parent.name != "ablations"
    ]
    assert len(listed.splitlines()) == len(recipes)


def test_what_ci_runs_is_what_a_developer_runs():
    assert "make test" in (ROOT / ".ci" / "run").read_text("utf-8")
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    assert any(step.get("run") == ".ci/run" for step in workflow["jobs"]["test"]["steps"])
    assert (ROOT / ".ci" / "run").stat().st_mode & 0o111


def test_ci_installs_the_programs_that_load_exports():
    workflow = yaml.safe_load((ROOT / ".github" / "workflows" / "ci.yml").read_text("utf-8"))
    commands = [step.get("run", "") for step in workflow["jobs"]["test"]["steps"]]
    (install,) = [command for command in commands if "KDCLI_FOREIGN=1" in command]
    assert commands.index(install) < commands.index(".ci/run")
    assert re.search(r"@huggingface/transformers@\d+\.\d+\.\d+\n", install)
    assert re.search(r"fastembed==\d+\.\d+\.\d+\n", install)
    # The variables that the tests read.
    clients = (ROOT / "tests" / "verbs" / "clients.py").read_text("utf-8")
    exported = re.findall(r'echo "(\w+)=', install)
    assert set(exported) == set(re.findall(r'environ\.get\("(\w+)"', clients))


def test_the_licence_is_apache_and_names_nobody():
    text = (ROOT / "LICENSE").read_text("utf-8")
    assert "Apache License" in text
    assert "END OF TERMS AND CONDITIONS" in text
    assert re.findall(r"^\s*Copyright (?!\[yyyy\])\S*\d{4}.*$", text, re.MULTILINE) == []


def test_the_version_is_the_tag_or_that_of_the_next_release(tmp_path):
    text = (ROOT / "pyproject.toml").read_text("utf-8")
    (tmp_path / "pyproject.toml").write_text(text)
    for name in (".gitattributes", ".git_archival.txt"):
        shutil.copy(ROOT / name, tmp_path)
    fallback = tomllib.loads(text)["tool"]["hatch"]["version"]["fallback-version"]
    released = re.findall(r"^## (\d\S+)", (ROOT / "CHANGELOG.md").read_text("utf-8"), re.MULTILINE)
    assert Version(fallback) > Version(released[0])

    def git(*arguments):
        user = ["-c", "user.name=a", "-c", "user.email=a@b"]
        subprocess.run(["git", *user, *arguments], cwd=tmp_path, check=True)

    def version(folder=tmp_path):
        command = [sys.executable, "-m", "hatchling", "version"]
        return subprocess.check_output(command, cwd=folder, text=True).strip()

    assert version() == fallback
    git("init", "-q")
    git("add", ".")
    git("commit", "-q", "-m", "one")
    assert version().startswith(fallback.removesuffix("0") + "1+g")
    git("tag", "v7.1.0")
    assert version() == "7.1.0"
    git("archive", "--output", "archive.zip", "HEAD")
    shutil.unpack_archive(tmp_path / "archive.zip", tmp_path / "archive")
    assert version(tmp_path / "archive") == "7.1.0"
    git("commit", "-q", "--allow-empty", "-m", "two")
    assert re.fullmatch(r"7\.1\.1\.dev1\+g\w+", version())


@pytest.mark.skipif(
    not (ROOT / ".git").exists(), reason="only in a checkout are the project's own files known"
)
def test_no_word_of_where_it_was_written():
    read = [path for path in tracked() if path.suffix in TEXT and path.name != "tokenizer.json"]
    lines = (
        (p, n, line) for p in read for n, line in enumerate(p.read_text("utf-8").splitlines(), 1)
    )
    assert [
        f"{p.relative_to(ROOT)}:{n}: {line.strip()}" for p, n, line in lines if FOREIGN.search(line)
    ] == []


@pytest.mark.parametrize(
    "line",
    ["cd /wo" + "rk/main", "../sha" + "red/data", "see iss" + "ue 12", "in this sess" + "ion"],
)
def test_the_search_for_such_words_finds_them(line):
    assert FOREIGN.search(line)


def test_every_page_is_reached_from_the_navigation():
    site = yaml.safe_load((ROOT / "mkdocs.yml").read_text("utf-8"))
    reached = set(re.findall(r"[\w/-]+\.md", json.dumps(site["nav"])))
    assert {
        p.relative_to(ROOT / "docs").as_posix() for p in (ROOT / "docs").rglob("*.md")
    } == reached


def test_every_method_has_a_section_in_the_documentation():
    pages = [ROOT / "docs" / "embedding.md", *(ROOT / "docs" / "methods").glob("*.md")]
    headings = {
        re.sub(r"\W+", "-", heading.split(":")[0].lower())
        for page in pages
        for heading in re.findall(r"^#+ (.+)$", page.read_text("utf-8"), re.MULTILINE)
    }
    # The page of embedding models describes the method `embedding`.
    missing = {*losses.methods(), *pruners.methods()} - headings - {"embedding"}
    assert missing == set()
    assert "embedding-models" in headings


def test_every_exit_code_is_documented():
    table = TOPICS["exit-codes"].removeprefix("Exit codes\n")
    assert f"```\n{table}```" in (ROOT / "docs" / "errors.md").read_text("utf-8")
    codes = {int(c) for c in re.findall(r"^  (\d+) ", table, re.MULTILINE)}
    named = {e.exit_code for e in [KdcliError, *KdcliError.__subclasses__()]}
    # A shell adds 128 to the number of the signal that ended a process.
    assert codes == {0, 128 + signal.SIGTERM} | named
