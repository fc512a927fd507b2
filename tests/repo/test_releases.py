"""What a release states: its version, its changes, and how others report and check."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

import qcut
from benchmarks.__main__ import SUBJECTS
from tests.support import ROOT

CHANGES = (ROOT / "CHANGELOG.md").read_text()
SECTIONS = ["Added", "Changed", "Deprecated", "Removed", "Fixed"]
FORMS = sorted((ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yml"))


def test_changelog_begins_with_the_packages_version() -> None:
    version, state = re.findall(r"^## (\S+)(.*)$", CHANGES, re.MULTILINE)[0]
    assert version == qcut.__version__
    assert re.fullmatch(r" - (unreleased|\d{4}-\d\d-\d\d)", state)


def test_changelog_has_each_section_once() -> None:
    for version in re.split(r"^## ", CHANGES, flags=re.MULTILINE)[1:]:
        sections = re.findall(r"^### (.+)$", version, re.MULTILINE)
        assert sections == [name for name in SECTIONS if name in sections]
        entries = re.findall(r"^- .*$", version, re.MULTILINE)
        assert len(entries) == len(set(entries))


def test_changelog_names_what_exists() -> None:
    paths = re.findall(r"`((?:benchmarks|docs|examples|tests)/[\w/.-]+\.\w+)`", CHANGES)
    assert paths
    assert [path for path in paths if not (ROOT / path).exists()] == []
    commands = re.findall(r"`python (?:-m )?benchmarks (\w+) (\w+)", CHANGES)
    assert commands
    assert [one for one in commands if one != ("SUBJECT", "NAME") and one[1] not in SUBJECTS[one[0]].split()] == []


@pytest.mark.parametrize("form", FORMS, ids=lambda path: path.stem)
def test_issues_must_have_the_doctors_output(form: Any) -> None:
    data = yaml.safe_load(form.read_text())
    assert {"name", "description", "body"} <= data.keys()
    fields = {field["id"]: field for field in data["body"]}
    assert fields["doctor"]["validations"]["required"] is True
    assert "`qcut doctor`" in fields["doctor"]["attributes"]["description"]


def test_bugs_have_a_form() -> None:
    assert "bug" in [path.stem for path in FORMS]


def test_workflow_runs_the_projects_own_checks() -> None:
    text = (ROOT / ".github" / "workflows" / "ci.yml").read_text()
    workflow = yaml.safe_load(text)
    assert workflow[True].keys() == {"push", "pull_request"}  # YAML reads `on` as true
    assert workflow["permissions"] == {"contents": "read"}
    (job,) = workflow["jobs"].values()
    assert [step["run"] for step in job["steps"] if "run" in step] == [".ci/run"]
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in job["steps"] if "uses" in step)
    assert "secrets" not in text
