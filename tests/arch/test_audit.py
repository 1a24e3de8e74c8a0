"""The audit of the five tutorials: tests/arch/tutorials says what each term of a tutorial is here, or why nothing.

A row is a term of the tutorial and its answer, which is checked:

    key      a configuration key, or key=value with a value that the key accepts
    command  a command, and its options, as its help has them
    code     a public name of the package
    output   text that the package prints or writes
    page     a page, and a heading of it
    none     a sentence: why there is no such thing here
    why      a remark

`names` are the terms that `RULES` extract from the tutorial: flags, variables, keys, printed values, files, names;
`extracted` lists them, so that no row is lost where the tutorials are not at hand. `steps` are other words of the
tutorial; every line of its code has one. `script` has flags and variables of the scripts that the tutorial starts.
"""

import re
from functools import cache
from pathlib import Path
from typing import Annotated, Any

import pydantic
import pytest
import yaml

import shardwise
from tests.arch.source import CASES, ROOT, SOURCE, config_fields, headings

TUTORIALS = ROOT.parent / "shared" / "seeds"
AUDITS = {
    path.stem: yaml.safe_load(path.read_text("utf-8")) for path in sorted(Path(__file__).parent.glob("tutorials/*"))
}
RULES = CASES["terms of a tutorial"]
SHARED = ROOT / "docs/tutorials/all-five.md"
"""What is the same in all five tutorials: their pages link it."""
CODE = re.compile(r"(?:\.\. code:.*|::)\n\s*\n((?:(?:   .*)?\n)+)|^```\w*\n([\s\S]*?)^```", re.MULTILINE)
FLAG = re.compile(r"--\w[\w-]+|[A-Z][A-Z0-9]*_[A-Z0-9_]+|(?:model|trainer|exp_manager)\.[\w.]+")


def rows(audit: dict[str, Any]) -> dict[str, dict[str, Any]]:
    return {term: row for part in ("names", "steps", "script") for term, row in audit[part].items()}


@pytest.fixture(params=AUDITS)
def audit(request: pytest.FixtureRequest) -> Any:
    return AUDITS[request.param]


@pytest.fixture
def tutorial(audit: dict[str, Any]) -> str:
    """Its text; of each address only the last part, which may be the name of a file."""
    path = TUTORIALS / audit["tutorial"]
    if not path.exists():
        pytest.skip(f"the text of the tutorial ({path}) is not here")
    return re.sub(r"https?://(?:[^\s/?`)>]*/)*|\?highlight=\w+", "", path.read_text(encoding="utf-8"))


def test_the_list_has_every_flag_and_name_of_the_tutorial(audit: dict[str, Any], tutorial: str) -> None:
    found = {term for rule in RULES for term in re.findall(rule, tutorial, re.MULTILINE)}
    assert found == set(audit["extracted"]), "a term of the tutorial has no row, or a row has no term"


def test_every_line_of_the_tutorials_code_has_a_row(audit: dict[str, Any], tutorial: str) -> None:
    lines = [line.strip() for found in CODE.findall(tutorial) for line in "".join(found).splitlines()]
    lines = [line for line in lines if re.search(r"\w", line)]
    assert lines or "literalinclude" in tutorial
    terms = [re.compile(rf"(?<!\w){re.escape(term)}(?!\w)") for term in rows(audit)]
    assert [line for line in lines if not any(term.search(line) for term in terms)] == []


def test_every_step_is_of_the_tutorial(audit: dict[str, Any], tutorial: str) -> None:
    text = " ".join(tutorial.split()).lower()
    assert [term for term in audit["steps"] if " ".join(term.split()).lower() not in text] == []


def test_every_answer_is_so(audit: dict[str, Any]) -> None:
    wrong = []
    for term, row in rows(audit).items():
        assert set(row) <= {*CHECKS, "none", "why"}, f"{term}: {row}"
        assert set(row) - {"why"}, f"{term} has no answer"
        for kind, check in CHECKS.items():
            answers = row.get(kind, [])
            for answer in answers if isinstance(answers, list) else [answers]:
                if not check(answer):
                    wrong.append(f"{term}: there is no {kind} {answer}")
        wrong += [
            f"{term}: {row[kind]!r} is no reason"
            for kind in ("none", "why")
            if len(str(row.get(kind, "a b c")).split()) < 3
        ]
    assert not wrong, "\n".join(wrong)


def test_every_term_has_a_row_and_its_page_names_every_flag_and_variable(audit: dict[str, Any]) -> None:
    assert set(audit["extracted"]) == set(audit["names"]), "extracted and names differ"
    page = (ROOT / audit["page"]).read_text(encoding="utf-8")
    assert "(all-five.md)" in page
    page += SHARED.read_text(encoding="utf-8")
    flags = {term for part in ("names", "script") for term in audit[part] if FLAG.fullmatch(term)}
    assert flags
    missing = [flag for flag in sorted(flags) if not re.search(rf"(?<![\w.-]){re.escape(flag)}(?![\w])", page)]
    assert missing == [], f"{audit['page']} does not say what these are here"
    compiles = {
        term: row for term, row in rows(audit).items() if re.search("compil|graph|NEURON_CC", term, re.IGNORECASE)
    }
    compiles.pop("compile_helper", None)  # it builds the index of samples, and no graph
    assert compiles
    assert [term for term, row in compiles.items() if "none" in row] == []


def is_key(answer: str) -> bool:
    name, has_value, value = answer.partition("=")
    field = config_fields().get(name)
    if name == "model.config" or field is None or not has_value:
        return name == "model.config" or field is not None  # model.config becomes the fields of a family
    try:
        pydantic.TypeAdapter(Annotated[field.annotation, field]).validate_python(yaml.safe_load(value))
    except pydantic.ValidationError:
        return False
    return True


def is_command(answer: str) -> bool:
    words = [word for word in answer.split() if not word.startswith("-")]
    help_text = ROOT / "tests/arch/help" / f"{'-'.join(words)}.txt"
    options = answer.split()[len(words) :]
    return help_text.exists() and all(
        re.search(rf"(?<![\w-]){option}(?![\w-])", help_text.read_text(encoding="utf-8")) for option in options
    )


@cache
def package_text() -> str:
    return "".join(path.read_text(encoding="utf-8") for path in sorted(SOURCE.rglob("*.py")))


def is_place(answer: str) -> bool:
    file, _, anchor = answer.partition("#")
    return (ROOT / file).exists() and (not anchor or anchor in headings(ROOT / file))


CHECKS = {
    "key": is_key,
    "command": is_command,
    "code": lambda answer: answer in shardwise.__all__,
    "output": lambda answer: answer in package_text(),
    "page": is_place,
}
