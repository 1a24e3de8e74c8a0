"""Write the documentation that comes from the code and from results.

These are docs/configuration.md and docs/model-keys.md, from the schema of the configuration, the tables of
docs/devices.md and docs/readers.md, the names of other programs in docs/porting.md, the signatures in docs/api.md,
docs/environment.md, and the addresses of `[project.urls]` where pages say how to begin.
"""

import inspect
import json
import re
import textwrap
import tomllib
from collections.abc import Collection, Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import get_args, get_origin, is_typeddict

import pydantic
import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from scripts import environment_variables, pipeline_tables
from shardwise.config import Config, UserModelConfig
from shardwise.config.model import FAMILIES
from shardwise.config.other_names import FORMULAS, OTHER_NAMES, WITHOUT_KEY
from shardwise_use import other_readers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
MODEL_PAGE = ROOT / "docs" / "model-keys.md"
API = ROOT / "docs" / "api.md"
PORTING = ROOT / "docs" / "porting.md"
_NAMES_BEGIN, _NAMES_END = "<!-- names:begin -->\n", "<!-- names:end -->\n"
NAME_OF_API = re.compile(r"<!--(:::(\S+)\.(\w+))-->\n.*?<!--end-->\n", re.DOTALL)
"""A public name of docs/api.md. The site has mkdocstrings write its text in place of the text between the comments."""
BEGINNINGS = tuple(ROOT / name for name in ("README.md", "docs/quickstart.md", "docs/tutorials/all-five.md"))
"""Pages that begin in a copy of the repository."""
_COPY = re.compile(r"a copy of (?:the repository|\[the repository\]\([^)]*\) \(`git clone [^`]*`\))")
_ISSUES = re.compile(r"(?: \[Say\]\([^)]*\) what is wrong\.)?<!--issues-->")
CALLED_BY_OTHERS = ("DropoutKey", "Group", "LAMB", "Muon", "Piece")
"""Classes whose methods layers and optimizers call, seldom a program: docs/api.md names the methods alone."""
DEVICES = ROOT / "docs" / "devices.md"
RESULTS = ROOT / "benchmarks" / "results" / "devices.json"
"""What `make test-device` found (scripts/device_tests.py)."""
_NEVER_RUN = "**Nothing has been run on ROCm, XPU, Trainium or MPS yet, and nothing over NCCL.**"
READERS = ROOT / "docs" / "readers.md"
OPTIONS = ROOT / "tests" / "unit" / "use" / "others" / "tutorial_options.yaml"
VARIABLES = ("training_precision", "zero_use_master_weight", "gbs_multiple", "xla_use_bf16", "xla_downcast_bf16")
"""Of the tutorials' scripts, which set them in the environment or in the configuration."""
_BEGIN, _END = "<!-- tested:begin -->\n", "<!-- tested:end -->\n"

INTRODUCTION = """\
# Configuration

All keys of a recipe, except those of `model` ([keys of the model](model-keys.md)). A key is set in the recipe, or on
the command line:

```sh
shardwise train quickstart --nproc 2 train.steps=2M --dry-run | grep -v '^#'
```

<!-- excerpt -->
```text
model:
  family: llama
  vocab_size: 1024
  hidden_size: 128
  intermediate_size: 256
  num_hidden_layers: 2
  num_attention_heads: 4
...
train:
  steps: 977
  global_batch: 8
  micro_batch: 8
  sequence_length: 256
  eval_every: 90
optimizer:
  name: muon
  lr: 0.025
  warmup_steps: 8
...
```

A dry run prints the keys that differ from their defaults, and checks rules about several keys together. Below, in
brackets is the default: `required` means that a recipe must set the key, and `derived` that it depends on other keys.

- **Steps or tokens**: a key that counts steps, such as `train.steps`, `optimizer.warmup_steps` or `checkpoint.every`,
  also takes tokens: `500M`, `20B`, `1.5T`. A run reads it as the nearest number of steps.
- **In an editor**: `shardwise recipes --schema > recipe.schema.json` writes the JSON Schema. With the line
  `# yaml-language-server: $schema=recipe.schema.json` at the top of a recipe, editors with the YAML language server
  complete keys and mark wrong values.
"""

MODEL_INTRODUCTION = """\
# Keys of the model

The keys of the section `model`, by family. They have the names of Hugging Face's `config.json`. A recipe shows them:

```sh
shardwise recipes llama2-tiny | grep -A 8 '^model:' | sed 's/ *#.*//'
```

```text
model:
  family: llama
  vocab_size: 512
  hidden_size: 64
  intermediate_size: 176
  num_hidden_layers: 8
  num_attention_heads: 4
  num_key_value_heads: 4
  max_position_embeddings: 64
```

In brackets are the families that have a key ("as Llama": all but gpt, gpt_neox and bert), and its default: `required`
means that a recipe must set it.
[Configuration](configuration.md) has the other sections.

`model.config=PATH` takes the model from a Hugging Face `config.json`, or from its folder; `model.*` keys that are given
with it change single values. A field that describes another model than those here is refused, and so is an unknown
field. If you know that an unknown field changes nothing, leave it out by `model.ignore=[NAME,…]`. This key also applies
to the `config.json` of `checkpoint.load`, and in `shardwise evaluate` and `shardwise generate`.
"""

NOTES = {
    "precision": """\
[Precision](precision.md) says which dtype each mode has for weights, gradients, masters and moments.""",
    "hooks": """\
[Hooks](hooks.md) says what each function and class is called with, and what it must return.""",
    "launch": """\
`launch.timeout` is for every run; all other keys are for `shardwise submit` ([several machines](cluster.md)).""",
    "optimizer": """\
No step has a learning rate of 0. Step s of the warmup has `lr · s / warmup_steps`; without warmup, step 1 has `lr`. The
decay would reach `min_lr` one step after the last step of the run, or before the last `constant_steps`, which have it.

`schedule=wsd` (warmup, stable, decay; [arXiv:2404.06395](https://arxiv.org/abs/2404.06395)) stays at `lr` until the
last `decay_steps`, over which the rate falls to `min_lr` in the shape `decay_shape`: `linear`, `cosine` or `sqrt`
(1 - √p, [arXiv:2405.18392](https://arxiv.org/abs/2405.18392)). `schedule=points` follows any curve:

```yaml
optimizer:
  lr: 1.0e-3
  schedule: points
  points:
    - {at: 0, factor: 0}
    - {at: 100M, factor: 1}                 # linear, as no shape is given
    - {at: 8B, factor: 1}
    - {at: 10B, factor: 0.1, shape: sqrt}   # the way from 8B to 10B
```

A dry run draws the rates. Before the first point and after the last, the rate is theirs.

The rates of 100 steps, 10 of them warmup, with `lr` 1 and `min_lr` 0, beside those of `transformers`
(`get_…_with_warmup`), and of NeMo as neuronx-nemo-megatron has it:

| rate of step | 1 | 10 | 11 | 80 | 81 | 100 |
|---|---|---|---|---|---|---|
| `cosine` | 0.1000 | 1.0000 | 0.9997 | 0.1257 | 0.1145 | 0.0003 |
| `get_cosine_schedule_with_warmup` | 0.0000 | 0.9000 | 1.0000 | 0.1284 | 0.1170 | 0.0003 |
| NeMo's `CosineAnnealing` | 0.0909 | 0.9091 | 1.0000 | 0.1284 | 0.1170 | 0.0003 |
| `linear` | 0.1000 | 1.0000 | 0.9890 | 0.2308 | 0.2198 | 0.0110 |
| `get_linear_schedule_with_warmup` | 0.0000 | 0.9000 | 1.0000 | 0.2333 | 0.2222 | 0.0111 |
| `cosine`, `constant_steps=20` | 0.1000 | 1.0000 | 0.9995 | 0.0005 | 0.0000 | 0.0000 |
| NeMo's, `constant_steps=20` | 0.0909 | 0.9091 | 1.0000 | 0.0005 | 0.0000 | 0.0000 |

- `transformers`: the first update has the rate 0. In a run that is one step longer, its step s + 1 has the rate of step
  s here. Without warmup, all rates are equal.
- NeMo: for its rates, set `optimizer.warmup_steps` to its number plus 1. Without warmup, all rates are equal. In
  NVIDIA's own NeMo, the first update of a run with `constant_steps` has the rate 0.""",
}


def with_addresses(text: str, project: str) -> str:
    """A page with the addresses that `[project.urls]` has in the text of a pyproject.toml."""
    urls = tomllib.loads(project)["project"].get("urls", {})
    repository, issues = urls.get("Repository"), urls.get("Issues")
    copy = f"[the repository]({repository}) (`git clone {repository}`)" if repository else "the repository"
    text = _COPY.sub(f"a copy of {copy}", text)
    return _ISSUES.sub(f" [Say]({issues}) what is wrong.<!--issues-->" if issues else "<!--issues-->", text)


def default_of(field: FieldInfo) -> str:
    if field.default_factory is dict or field.default_factory is field.annotation is not None:
        return "`{}`"
    if field.default_factory is not None:
        return "derived"
    if field.default is PydanticUndefined:
        return "required"
    return f"`{json.dumps(field.default)}`"


def sections(annotation: object) -> list[type[pydantic.BaseModel]]:
    """The one section that a key holds, or one for each family."""
    if isinstance(annotation, type) and issubclass(annotation, pydantic.BaseModel):
        return [annotation]
    # The values of a mapping have the keys of a section of their own, which has its table.
    if get_origin(annotation) is dict:
        return []
    return [section for argument in get_args(annotation) for section in sections(argument)]


def rows(section: type[pydantic.BaseModel], prefix: str) -> Iterator[str]:
    for name, field in section.model_fields.items():
        assert field.description, f"{prefix}.{name} has no description"
        yield f"- `{prefix}.{name}` ({default_of(field)}): {field.description}"
        # Of the sections in a list, such as the points of a schedule, the page has one.
        in_list = "" if isinstance(field.annotation, type) else "[]"
        for nested in sections(field.annotation):
            yield from rows(nested, f"{prefix}.{name}{in_list}")


def page() -> str:
    """docs/configuration.md: every section but `model`."""
    keys = page_of([name for name in Config.model_fields if name != "model"], INTRODUCTION)
    return f"{keys}\nNext: [the keys of the model](model-keys.md), or [data](data.md), for what a run reads.\n"


_DEFAULT_IN_TEXT = re.compile(r"; (if there is a window, )?default: (.+)$")
"""The end of a description that says what a derived default is."""


def model_page() -> str:
    """docs/model-keys.md: what a family is, each key of several families once, and the keys of one family."""
    families = dict(FAMILIES)
    found: dict[tuple[str, str], dict[str, list[str]]] = {}
    for family, section in families.items():
        for name, field in section.model_fields.items():
            assert field.description, f"model.{name} has no description"
            default, meaning = default_of(field), field.description
            if (derived := _DEFAULT_IN_TEXT.search(meaning)) and default == "derived":
                default, meaning = derived[2], meaning[: derived.start()]
                meaning += "; the default is that of a model with a window" if derived[1] else ""
            found.setdefault((name, meaning), {}).setdefault(default, []).append(family)
    shared, single = [], []
    for (name, meaning), defaults in found.items():
        of_key = [family for named in defaults.values() for family in named]
        row = f"- `model.{name}` ({_of_families(of_key, families)}; {_defaults(defaults)}): {meaning}"
        (shared if len(of_key) > 1 else single).append(row)
    kinds = [f"- `{name}`: {_summary(section)}" for name, section in families.items()]
    parts = [MODEL_INTRODUCTION, "## Families", "", *kinds, ""]
    for title, keys in (("Keys of several families", shared), ("Keys of one family", single)):
        parts += [f"## {title}", "", *keys, ""]
    parts += ["## Your own class", "", _summary(UserModelConfig), "", *rows(UserModelConfig, "model"), ""]
    return "\n".join([*parts, "Next: [your own model](own-model.md), if none of these families is yours.", ""])


def _summary(section: type[pydantic.BaseModel]) -> str:
    """The docstring of a section of `model`, of a class of one's own its first paragraph."""
    text = inspect.cleandoc(section.__doc__ or "")
    return " ".join((text.partition("\n\n")[0] if section is UserModelConfig else text).split())


def _of_families(named: Sequence[str], families: Collection[str]) -> str:
    """The families that have a key, or those that do not where these are fewer."""
    others = [family for family in families if family not in named]
    if not others:
        return "all"
    if others == ["gpt", "gpt_neox", "bert"]:
        return "as Llama"
    return f"all but {', '.join(others)}" if len(others) < len(named) / 2 else ", ".join(named)


def _defaults(defaults: Mapping[str, Sequence[str]]) -> str:
    """The default of most families, and those of the others."""
    most, *others = sorted(defaults, key=lambda default: -len(defaults[default]))
    return "; ".join([most, *(f"{default} in {', '.join(defaults[default])}" for default in others)])


def page_of(names: list[str], introduction: str) -> str:
    parts = [introduction]
    for name in names:
        field = Config.model_fields[name]
        parts.append(f"## {name}: {field.description}\n")
        if name in NOTES:
            parts.append(f"{NOTES[name]}\n")
        for section in sections(field.annotation):
            parts.append("\n".join([*rows(section, name), ""]))
    return "\n".join(parts)


def devices_page() -> str:
    """docs/devices.md, with the table of the devices on which the tests passed."""
    head, rest = DEVICES.read_text(encoding="utf-8").split(_BEGIN)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    columns = ("device", "torch", "python", "passed", "skipped", "date", "commit")
    refusals = [f", {row['refused']} of them by a refusal" if "refused" in row else "" for row in results]
    shown = [{**row, "passed": f"{row['passed']}{text}"} for row, text in zip(results, refusals, strict=True)]
    found = [tuple(str(row[name]) for name in columns) for row in shown]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ("---",) * len(columns), *found)]
    lines += ["", _NEVER_RUN]
    return f"{head}{_BEGIN}" + "\n".join(lines) + f"\n{_END}{rest.partition(_END)[2]}"


def readers_page() -> str:
    """docs/readers.md, with what each program refuses or computes otherwise, of each family and key."""
    head, rest = READERS.read_text(encoding="utf-8").split("<!-- readers:begin -->\n")
    record = other_readers.reader_record()
    lines = ["Families that a program of `--for` refuses:", ""]
    for name, reader in record["readers"].items():
        told = [family for family, keys in record["lines"].items() if "says" in keys[other_readers.PLAIN].get(name, {})]
        lines.append(f"- `{name}` ({reader['title']} {reader['version']}): {', '.join(told) or 'none'}")
    by_key: dict[str, dict[str, list[str]]] = {}
    for family, of_family in record["lines"].items():
        able = [
            name
            for name in record["readers"]
            if other_readers.is_computed_right(of_family[other_readers.PLAIN].get(name))
        ]
        for key, of_key in of_family.items():
            found = {name: of_key.get(name) for name in able}
            refused = ", ".join(name for name, result in found.items() if result and "says" in result)
            others = ", ".join(
                _off(name, r) for name, r in found.items() if r and "by" in r and not other_readers.is_computed_right(r)
            )
            if refused or others:
                untried = ", ".join(name for name, result in found.items() if not result)
                told = (refused and f"no {refused}", others, untried and f"not tried: {untried}")
                by_key.setdefault(key, {}).setdefault("; ".join(filter(None, told)), []).append(family)
    lines += ["", "Keys:", ""]
    for key, alike in sorted(by_key.items()):
        lines.append(f"- `{key}`: " + "; ".join(f"{', '.join(families)} ({told})" for told, families in alike.items()))
    behind = rest.partition("<!-- readers:end -->")[2]
    return "\n".join([f"{head}<!-- readers:begin -->", *lines, f"<!-- readers:end -->{behind}"])


def _off(name: str, result: dict[str, float]) -> str:
    return f"{name} {result['by']:.2g}"


def porting_page() -> str:
    """docs/porting.md, with other programs' names, by our keys, and the options of the tutorials that no key sets."""
    by_key: dict[str, dict[str, dict[str, None]]] = {}
    for name, targets in OTHER_NAMES.items():
        for target in targets:
            key, _, value = target.partition("=")
            formula = FORMULAS.get((name, target), value)
            by_key.setdefault(key, {}).setdefault(formula, {})[f"`{name.rpartition(':')[2]}`"] = None
    lines = []
    for key, by_value in by_key.items():
        # The same value first, then what it becomes where unit or kind differ.
        parts = [
            f"{f'`{value}` for ' if value else ''}{', '.join(names)}"
            for value, names in sorted(by_value.items(), key=lambda item: item[0] != "")
        ]
        lines.append(f"- `{key}`: {'; '.join(parts)}")
    listed = yaml.safe_load(OPTIONS.read_text(encoding="utf-8"))
    options = {*VARIABLES, *(name for names in listed.values() for name in names)}
    names = dict.fromkeys(name for each in WITHOUT_KEY if (name := each.rpartition(":")[2]) in options)
    without = "No key sets what these options do; a command that has one of them says why, or what instead: "
    lines += ["", f"{without}{', '.join(f'`{name}`' for name in names)}."]
    head, rest = PORTING.read_text(encoding="utf-8").split(_NAMES_BEGIN)
    return f"{head}{_NAMES_BEGIN}" + "\n".join(lines) + f"\n{_NAMES_END}{rest.partition(_NAMES_END)[2]}"


def api_page() -> str:
    """docs/api.md, with the signature and the first paragraph of each public name, and the methods of classes.

    `help` and the site have the types of parameters.
    """

    def written(found: re.Match[str]) -> str:
        value = getattr(import_module(found[2]), found[3])
        lines = [f"<!--{found[1]}-->", f"### {found[3]}", "", "```text", _signature(found[3], value), "```", ""]
        lines.append(_first_paragraph(value))
        own = vars(value).items() if inspect.isclass(value) else ()
        methods = {name: getattr(raw, "__func__", raw) for name, raw in own if not name.startswith("_")}
        called = {name: raw for name, raw in methods.items() if inspect.isfunction(raw) and raw.__doc__}
        if found[3] in CALLED_BY_OTHERS:
            listed = [f"Methods: {', '.join(f'`{_call(name, raw)}`' for name, raw in called.items())}."]
        else:
            listed = [f"- `{_call(name, raw)}`: {_first_paragraph(raw)}" for name, raw in called.items()]
        return "\n".join([*lines, *([""] if listed else []), *listed, "<!--end-->", ""])

    return NAME_OF_API.sub(written, API.read_text(encoding="utf-8"))


_WIDTH = 80
"""Columns of a signature's lines."""


class _Plain(str):
    """A text that `inspect` would put into quotes."""

    __repr__ = str.__str__


def _untyped(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter without its annotation, and without a default that is long or an address."""
    bare = parameter.replace(annotation=parameter.empty)
    is_long = inspect.isfunction(bare.default) or len(str(bare)) > _WIDTH / 2
    return bare.replace(default=_Plain("…")) if is_long and bare.default is not bare.empty else bare


def _call(name: str, value: object) -> str:
    """A call of a function, class or method, with the names of its parameters and their defaults."""
    if is_typeddict(value):
        return f"{name}({', '.join(f'{key}=…' for key in value.__annotations__)})"
    found = inspect.signature(value)  # type: ignore[arg-type]
    own = [_untyped(each) for each in found.parameters.values() if each.name not in ("self", "cls")]
    return f"{name}{found.replace(parameters=own, return_annotation=found.empty)}"


def _signature(name: str, value: object) -> str:
    """`_call` in lines of a page; of a function, with what it returns."""
    returns = None if inspect.isclass(value) else inspect.signature(value).return_annotation  # type: ignore[arg-type]
    call = _call(name, value) + (f" -> {returns}" if returns else "")
    return "\n".join(textwrap.wrap(call, _WIDTH, subsequent_indent="    ", break_long_words=False))


def _first_paragraph(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    for beginning in BEGINNINGS:
        project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
        beginning.write_text(with_addresses(beginning.read_text(encoding="utf-8"), project), encoding="utf-8")
    API.write_text(api_page(), encoding="utf-8")
    DEVICES.write_text(devices_page(), encoding="utf-8")
    READERS.write_text(readers_page(), encoding="utf-8")
    PORTING.write_text(porting_page(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    MODEL_PAGE.write_text(model_page(), encoding="utf-8")
    environment_variables.PAGE.write_text(environment_variables.page(), encoding="utf-8")
    pipeline_tables.PAGE.write_text(pipeline_tables.page(), encoding="utf-8")
