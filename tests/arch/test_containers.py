"""The Dockerfile and the manifest of docs/containers.md are right by the rules of those who read them."""

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import kubernetes_validate
import yaml

from tests.arch.source import ROOT

PAGE = (ROOT / "docs/containers.md").read_text(encoding="utf-8")
DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
LINTER = Path(sys.executable).parent / "hadolint"


def manifests() -> list[dict[str, object]]:
    (block,) = re.findall(r"^```yml\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)
    return [*yaml.safe_load_all(block)]


def test_the_manifest_fits_the_schema_of_kubernetes_and_names_data() -> None:
    versions = kubernetes_validate.latest_version(), "1.29.0"
    assert [manifest["kind"] for manifest in manifests()] == ["Service", "Job"]
    for manifest in manifests():
        for version in versions:
            kubernetes_validate.validate(manifest, version, strict=True)
    for page in (PAGE, (ROOT / "docs/cluster.md").read_text(encoding="utf-8")):
        started = re.findall(r"shardwise train llama2-7b\b(?:[\s\\]+(\S+))?", page)
        assert len(started) > 1
        assert {word.partition("=")[0] for word in started} == {"data.dataset"}
    job: Any = manifests()[1]
    assert job["spec"]["template"]["spec"]["containers"][0]["args"][0] == "data.dataset=python"


def test_the_linter_finds_nothing_and_would_find_a_fault() -> None:
    done = subprocess.run([LINTER, ROOT / "Dockerfile"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (0, "")
    wrong = DOCKERFILE.replace("WORKDIR /train", "RUN cd /train")
    assert subprocess.run([LINTER, "-"], input=wrong, text=True, capture_output=True, check=False).returncode == 1


def test_the_image_gets_each_file_that_it_copies_and_has_the_arguments_of_the_page() -> None:
    copied = [name for line in re.findall(r"^COPY (.*) \S+$", DOCKERFILE, re.MULTILINE) for name in line.split()]
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert set(copied) == kept
    assert all((ROOT / name).exists() for name in copied)
    named = re.findall(r"^- `([A-Z]+)`: ", PAGE, re.MULTILINE)
    assert named == re.findall(r"^ARG ([A-Z]+)=", DOCKERFILE, re.MULTILINE)
    assert len(PAGE.split()) <= 700
