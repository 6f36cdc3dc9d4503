"""What a release needs is there and agrees: versions, formats, features, forms, workflows, what is left to fill in."""

import re
import shutil
from pathlib import Path

import pytest
import release_check
import yaml

import csd_optim
from csd_optim.replica.versions import FORMAT
from csd_optim.store.format import FEATURES, VERSION

ROOT = Path(__file__).parents[2]
GITHUB = ROOT / ".github"


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A copy of the files that name the version, in the place of the project."""
    for name in (*release_check.FILLED_IN, "CHANGELOG.md"):
        shutil.copy(ROOT / name, tmp_path)
    monkeypatch.setattr(release_check, "ROOT", tmp_path)
    return tmp_path


def refusal(tag):
    with pytest.raises(SystemExit) as e:
        release_check.check_tag(tag)
    return e.value.code


def test_the_version_is_the_same_everywhere():
    assert release_check.version() == csd_optim.__version__
    assert release_check.disagreements() == []


def test_a_tag_is_refused_until_all_is_there(project):
    version = release_check.version()
    left = release_check.to_fill_in()
    assert {line.partition(":")[0] for line in left} == {*release_check.FILLED_IN}
    assert all(line in refusal(f"v{version}") for line in left)
    for name in release_check.FILLED_IN:
        path = project / name
        path.write_text(path.read_text().replace("OWNER", "the maintainers"))
    assert refusal(f"v{version}").splitlines() == [f"CHANGELOG.md has no date for {version}: ## {version} (YYYY-MM-DD)"]
    changes = project / "CHANGELOG.md"
    changes.write_text(changes.read_text().replace("(not released yet)", "(2026-12-01)", 1))
    assert refusal(f"v{version}") is None
    assert refusal("v9.9.9") == f"the tag is v9.9.9, the version {version}"
    changes.write_text(changes.read_text().replace(f"## {version}", "## 9.9.9", 1))
    assert "CHANGELOG.md names another version than setup.cfg" in refusal(f"v{version}")


def test_nobody_else_is_asked_to_fill_in_anything():
    files = [p for p in (*ROOT.glob("*.*"), *GITHUB.rglob("*.*"), *(ROOT / "docs").glob("*.md")) if p.is_file()]
    marked = {p.name for p in files if "OWNER:" in p.read_text(errors="ignore")}
    assert marked == {*release_check.FILLED_IN}


def test_the_page_has_every_format_and_feature():
    page = (ROOT / "docs/versions.md").read_text()
    assert {*re.findall(r"^\| `(\w+)` \| \d+\.\d+\.\d+ \|", page, re.MULTILINE)} == FEATURES
    assert f"format **{VERSION}**" in page
    assert f"`{FORMAT}`" in page
    described = (ROOT / "docs/store-format.md").read_text().partition("| feature | |")[2].partition("\n\n")[0]
    assert {*re.findall(r"^\| `(\w+)` \|", described, re.MULTILINE)} == FEATURES


def test_every_form_asks_for_what_doctor_finds():
    forms = [yaml.safe_load(p.read_text()) for p in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if p.stem != "config"]
    assert len(forms) == 3
    for form in forms:
        fields = [field for field in form["body"] if field["type"] != "markdown"]
        assert len({field["id"] for field in fields}) == len(fields)
        assert any("`csd-optim doctor --json`" in field["attributes"]["label"] for field in fields)


def test_workflows_run_what_there_is():
    makefile = (ROOT / "Makefile").read_text()
    for path in (GITHUB / "workflows").glob("*.yml"):
        workflow = yaml.safe_load(path.read_text())
        assert workflow["permissions"] == {"contents": "read"}  # unless a job asks for more
        for job in workflow["jobs"].values():
            assert job["timeout-minutes"] > 0
            for step in job["steps"]:
                command = step.get("run", "")
                assert all((ROOT / script).exists() for script in re.findall(r"tests/\S+\.py", command))
                assert all(re.search(rf"^{t}:", makefile, re.M) for t in re.findall(r"^make (\w+)", command, re.M))
    release = yaml.safe_load((GITHUB / "workflows/release.yml").read_text())["jobs"]
    assert release["publish"]["permissions"]["id-token"] == "write"
    assert {"sdist", "wheels"} == {*release["publish"]["needs"]}
