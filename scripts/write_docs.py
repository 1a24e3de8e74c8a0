"""Write the documentation that comes from the code and from results.

These are docs/configuration.md and docs/model-keys.md, from the schema of the configuration, the tables of
docs/devices.md and docs/readers.md, the names of other programs in docs/porting.md, and the signatures in docs/api.md.
"""

import inspect
import json
import re
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import get_args, get_origin, is_typeddict

import pydantic
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from shardwise.config import Config, UserModelConfig
from shardwise.config.model import FAMILIES
from shardwise.config.other_names import FORMULAS, OTHER_NAMES, WITHOUT_KEY
from shardwise_use import readers

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "configuration.md"
MODEL_PAGE = ROOT / "docs" / "model-keys.md"
API = ROOT / "docs" / "api.md"
PORTING = ROOT / "docs" / "porting.md"
_NAMES_BEGIN, _NAMES_END = "<!-- names:begin -->\n", "<!-- names:end -->\n"
NAME_OF_API = re.compile(r"<!-- (::: (\S+)\.(\w+)) -->\n.*?<!-- end -->\n", re.DOTALL)
"""A public name of docs/api.md. The site has mkdocstrings write its text in place of the text between the comments."""
DEVICES = ROOT / "docs" / "devices.md"
RESULTS = ROOT / "benchmarks" / "results" / "devices.json"
"""What `make test-device` found (scripts/device_tests.py)."""
_NEVER_RUN = "**Nothing has been run on ROCm, XPU, Trainium or MPS yet, and nothing over NCCL.**"
READERS = ROOT / "docs" / "readers.md"
_BEGIN, _END = "<!-- tested:begin -->\n", "<!-- tested:end -->\n"

INTRODUCTION = """\
# Configuration

This page lists all keys of a recipe except those of `model`, which have [a page of their own](model-keys.md). Set a
key in the recipe, or on the command line: `shardwise train RECIPE key=value …`. The default `required` means that a
recipe must set the key, and `derived` that the default depends on other keys. `make pages` writes both pages from the
code.

**Steps or tokens**: a key that counts steps, such as `train.steps`, `optimizer.warmup_steps` or `checkpoint.every`,
also takes tokens: `500M`, `20B`, `1.5T`. A run reads it as the nearest number of steps of `train.global_batch` ×
`train.sequence_length` tokens. The dry run and the run's `config.yaml` have the steps.

**In an editor**: `shardwise recipes --schema > recipe.schema.json` writes the JSON Schema of recipes. Put the line
`# yaml-language-server: $schema=recipe.schema.json` at the top of a recipe in the same folder. Then editors that use
the YAML language server (VS Code with the YAML extension, Neovim, Emacs, Helix) complete keys, show their meaning and
mark wrong values. `shardwise train --dry-run` also checks rules about several keys together, such as whether
`parallel.tensor` divides the number of heads.

**Changed most often**, with the pages that explain them:

- the layout: `parallel.tensor`, `parallel.sequence`, `parallel.pipeline`, `parallel.schedule`
  ([pipeline](pipeline.md)), `optimizer.zero` ([memory](memory.md)); data parallelism takes the ranks that remain
- the batch: `train.global_batch`, `train.micro_batch`, `train.sequence_length`, `train.recompute`
- the length: `train.steps`, and `train.stop_after`, which ends a run earlier and leaves the schedule unchanged
- the optimizer: `optimizer.name` ([optimizers](optimizers.md)), `optimizer.lr`, `optimizer.warmup_steps`,
  `optimizer.schedule`, `optimizer.max_norm`, `precision.mode` ([precision](precision.md))
- the data: `data.path`, `data.dataset`, `data.tokenizer`, `data.split` ([data](data.md)), `train.eval_every`
- checkpoints: `checkpoint.every`, `checkpoint.keep`, `checkpoint.load` ([checkpoints](checkpoints.md))
- bits: `train.bitwise` ([bit-equal training](bitwise.md)), `train.dropout_mode`
- speed: `compile.enabled` ([compiled training](compile.md)), `parallel.tensor_overlap`
  ([communication](communication.md))
"""

MODEL_INTRODUCTION = """\
# Keys of the model

This page lists the keys of the section `model` for each family of models. The other sections are in
[Configuration](configuration.md). The default `required` means that a recipe must set the key, and `derived` that the
default depends on other keys. `make pages` writes this page from the code.
"""

NOTES = {
    "model": """\
`model.config=PATH` takes the model from a Hugging Face `config.json`, or from its folder, instead of the recipe's
model. `model.*` keys that are given with it change single values. Fields that do not change what the model computes
(names, tools, text generation, other heads) have no effect. A field that describes another model than those here is
refused, and so is an unknown field. If you know that an unknown field changes nothing, leave it out by
`model.ignore=[NAME,…]`. This key also applies to the `config.json` of `checkpoint.load`, and in `shardwise evaluate`
and `shardwise generate`.""",
    "precision": """\
[Precision](precision.md) says which dtype each mode has for weights, gradients, masters and moments.""",
    "hooks": """\
[Hooks](hooks.md) says what each function and class is called with, and what it must return.""",
    "launch": """\
`launch.timeout` is for every run; all other keys are for `shardwise submit` ([several machines](cluster.md)).""",
    "optimizer": """\
No step of the warmup or the decay has a learning rate of 0. Step s of the warmup has the rate `lr · s / warmup_steps`,
so the last step of the warmup has `lr`; without warmup, step 1 has `lr`. The decay would reach `min_lr` one step after
the last step of the run. With `constant_steps`, the decay ends earlier: the last `constant_steps` steps of the run all
have `min_lr`, which is 0 by default.

`schedule=wsd` (warmup, stable, decay; [arXiv:2404.06395](https://arxiv.org/abs/2404.06395)) stays at `lr` until the
last `decay_steps` steps, over which the rate falls to `min_lr` in the shape `decay_shape`: `linear`, `cosine` or
`sqrt` (1 - √p, [arXiv:2405.18392](https://arxiv.org/abs/2405.18392)). `schedule=points` follows any curve:

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

Before the first point the rate is that of the first point, and after the last point that of the last point.
`shardwise train --dry-run` draws the rates of the whole run.

The table compares the rates of a run of 100 steps, 10 of them warmup, with `lr` 1 and `min_lr` 0. It has the rates of
shardwise (`cosine`, `linear`), of `transformers` (`get_…_with_warmup`), and of NeMo as neuronx-nemo-megatron has it.

| rate of step | 1 | 2 | 10 | 11 | 80 | 81 | 99 | 100 |
|---|---|---|---|---|---|---|---|---|
| `cosine` | 0.1000 | 0.2000 | 1.0000 | 0.9997 | 0.1257 | 0.1145 | 0.0012 | 0.0003 |
| `get_cosine_schedule_with_warmup` | 0.0000 | 0.1000 | 0.9000 | 1.0000 | 0.1284 | 0.1170 | 0.0012 | 0.0003 |
| NeMo's `CosineAnnealing` | 0.0909 | 0.1818 | 0.9091 | 1.0000 | 0.1284 | 0.1170 | 0.0012 | 0.0003 |
| `linear` | 0.1000 | 0.2000 | 1.0000 | 0.9890 | 0.2308 | 0.2198 | 0.0220 | 0.0110 |
| `get_linear_schedule_with_warmup` | 0.0000 | 0.1000 | 0.9000 | 1.0000 | 0.2333 | 0.2222 | 0.0222 | 0.0111 |
| `cosine`, `constant_steps=20` | 0.1000 | 0.2000 | 1.0000 | 0.9995 | 0.0005 | 0.0000 | 0.0000 | 0.0000 |
| NeMo's, `constant_steps=20` | 0.0909 | 0.1818 | 0.9091 | 1.0000 | 0.0005 | 0.0000 | 0.0000 | 0.0000 |

- The first update of `transformers` has the rate 0. In a run that is one step longer, its step s + 1 has the rate that
  step s has here. Without warmup, all rates are equal to those here.
- NeMo's warmup reaches the peak one step later than its `warmup_steps` says. To get NeMo's rates, with or without
  `constant_steps`, set `optimizer.warmup_steps` to NeMo's number plus 1. Without warmup, all rates are equal to those
  here. In NVIDIA's own NeMo, the first update of a run with `constant_steps` has the rate 0, as in `transformers`.""",
}


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
        yield f"| `{prefix}.{name}` | {default_of(field)} | {field.description} |"
        # Of the sections in a list, such as the points of a schedule, the page has one.
        in_list = "" if isinstance(field.annotation, type) else "[]"
        for nested in sections(field.annotation):
            yield from rows(nested, f"{prefix}.{name}{in_list}")


def page() -> str:
    """docs/configuration.md: every section but `model`."""
    keys = page_of([name for name in Config.model_fields if name != "model"], INTRODUCTION)
    return f"{keys}\nNext: [the keys of the model](model-keys.md), or [data](data.md), for what a run reads.\n"


def model_page() -> str:
    """docs/model-keys.md."""
    keys = page_of(["model"], MODEL_INTRODUCTION)
    return f"{keys}\nNext: [your own model](own-model.md), if none of these families is yours.\n"


def page_of(names: list[str], introduction: str) -> str:
    parts = [introduction]
    for name in names:
        field = Config.model_fields[name]
        parts.append(f"## {name}: {field.description}\n")
        if name in NOTES:
            parts.append(f"{NOTES[name]}\n")
        # The annotation of `model` names the base class of the families, not each of them.
        choices = [*FAMILIES.values(), UserModelConfig] if name == "model" else sections(field.annotation)
        for section in choices:
            if len(choices) > 1:
                family = get_args(section.model_fields["family"].annotation)
                parts.append(f"### {family[0] if family else 'package.module:Class'}\n")
                parts.append(f"{inspect.cleandoc(section.__doc__ or '')}\n")
            table = "\n".join(rows(section, name))
            parts.append(f"| key | default | meaning |\n|---|---|---|\n{table}\n")
    return "\n".join(parts)


def devices_page() -> str:
    """docs/devices.md, with the table of the devices on which the tests passed."""
    head, rest = DEVICES.read_text(encoding="utf-8").split(_BEGIN)
    results = json.loads(RESULTS.read_text(encoding="utf-8"))
    columns = ("device", "torch", "python", "passed", "skipped", "date", "commit")
    found = [tuple(str(row[name]) for name in columns) for row in results]
    lines = [f"| {' | '.join(cells)} |" for cells in (columns, ("---",) * len(columns), *found)]
    lines += ["", _NEVER_RUN]
    return f"{head}{_BEGIN}" + "\n".join(lines) + f"\n{_END}{rest.partition(_END)[2]}"


def readers_page() -> str:
    """docs/readers.md, with what each program refuses or computes otherwise, of each family and key."""
    head, rest = READERS.read_text(encoding="utf-8").split("<!-- readers:begin -->\n")
    record = readers.record()
    lines = ["| `--for` | program | families that it refuses, with its words |", "|---|---|---|"]
    for name, reader in record["readers"].items():
        by_words: dict[str, list[str]] = {}
        for family, of_family in record["lines"].items():
            if words := of_family[readers.PLAIN].get(name, {}).get("says"):
                # Without the class of a family's configuration, and what else the program prints.
                words = re.sub(r"\w+Config\b", "…Config", words).replace("<", "&lt;").partition(" (supported")[0]
                words = textwrap.shorten(words, 80, placeholder="…")
                by_words.setdefault(words, []).append(family)
        told = "; ".join(f"{', '.join(families)} ({words})" for words, families in by_words.items())
        lines.append(f"| `{name}` | {reader['title']} {reader['version']} | {told or 'none'} |")
    by_key: dict[str, dict[str, list[str]]] = {}
    for family, of_family in record["lines"].items():
        able = [name for name in record["readers"] if readers.is_right(of_family[readers.PLAIN].get(name))]
        for key, of_key in of_family.items():
            found = {name: of_key.get(name) for name in able}
            refused = ", ".join(name for name, result in found.items() if result and "says" in result)
            others = ", ".join(
                _off(name, r) for name, r in found.items() if r and "by" in r and not readers.is_right(r)
            )
            if refused or others:
                untried = ", ".join(name for name, result in found.items() if not result)
                told = (refused and f"no {refused}", others, untried and f"not tried: {untried}")
                by_key.setdefault(key, {}).setdefault("; ".join(filter(None, told)), []).append(family)
    lines.append("")
    for key, alike in sorted(by_key.items()):
        lines.append(f"- `{key}`: " + "; ".join(f"{', '.join(families)} ({told})" for told, families in alike.items()))
    behind = rest.partition("<!-- readers:end -->")[2]
    return "\n".join([f"{head}<!-- readers:begin -->", *lines, f"<!-- readers:end -->{behind}"])


def _off(name: str, result: dict[str, float]) -> str:
    return f"{name} {result['by']:.2g}"


def porting_page() -> str:
    """docs/porting.md, with the record of other programs' names, by our keys, and those that no key sets."""
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
    names = dict.fromkeys(f"`{name.rpartition(':')[2]}`" for name in WITHOUT_KEY)
    without = "No key sets what these names do; a command that has one of them says why, or what instead: "
    lines += ["", f"{without}{', '.join(names)}."]
    head, rest = PORTING.read_text(encoding="utf-8").split(_NAMES_BEGIN)
    return f"{head}{_NAMES_BEGIN}" + "\n".join(lines) + f"\n{_NAMES_END}{rest.partition(_NAMES_END)[2]}"


def api_page() -> str:
    """docs/api.md, with the signature and the first paragraph of each public name, and the methods of classes."""

    def written(found: re.Match[str]) -> str:
        value = getattr(import_module(found[2]), found[3])
        lines = [f"<!-- {found[1]} -->", f"### {found[3]}", "", "```text", _signature(found[3], value), "```", ""]
        lines.append(_first_paragraph(value))
        own = vars(value).items() if inspect.isclass(value) else ()
        methods = {name: getattr(raw, "__func__", raw) for name, raw in own if not name.startswith("_")}
        listed = [
            f"- `{_signature(name, raw, width=10_000)}`: {_first_paragraph(raw)}"
            for name, raw in methods.items()
            if inspect.isfunction(raw) and raw.__doc__
        ]
        return "\n".join([*lines, *([""] if listed else []), *listed, "<!-- end -->", ""])

    return NAME_OF_API.sub(written, API.read_text(encoding="utf-8"))


class _Plain(str):
    """A text that `inspect` would put into quotes."""

    __repr__ = str.__str__


def _plain(parameter: inspect.Parameter) -> inspect.Parameter:
    """The parameter without quotes around its annotation, and without the address of a function."""
    if isinstance(parameter.annotation, str):
        parameter = parameter.replace(annotation=_Plain(parameter.annotation))
    return parameter.replace(default=_Plain("…")) if inspect.isfunction(parameter.default) else parameter


def _signature(name: str, value: object, width: int = 100) -> str:
    """A call of a function or class as Python code, or the keywords of a group of them."""
    if is_typeddict(value):
        return f"{name}({', '.join(f'{key}=…' for key in value.__annotations__)})"
    found = inspect.signature(value)
    own = [_plain(parameter) for name, parameter in found.parameters.items() if name not in ("self", "cls")]
    returns = found.return_annotation
    shown = "" if returns is found.empty or inspect.isclass(value) else f" -> {returns}"
    call = str(found.replace(parameters=own, return_annotation=found.empty))
    if len(name + call + shown) <= width:
        return f"{name}{call}{shown}"
    star = next((place for place, each in enumerate(own) if each.kind is each.KEYWORD_ONLY), None)
    parts = [str(each) for each in own]
    if star is not None and not any(each.kind is each.VAR_POSITIONAL for each in own):
        parts.insert(star, "*")
    return f"{name}(\n" + "".join(f"    {part},\n" for part in parts) + f"){shown}"


def _first_paragraph(value: object) -> str:
    return " ".join((inspect.getdoc(value) or "").partition("\n\n")[0].split())


if __name__ == "__main__":
    API.write_text(api_page(), encoding="utf-8")
    DEVICES.write_text(devices_page(), encoding="utf-8")
    READERS.write_text(readers_page(), encoding="utf-8")
    PORTING.write_text(porting_page(), encoding="utf-8")
    PAGE.write_text(page(), encoding="utf-8")
    MODEL_PAGE.write_text(model_page(), encoding="utf-8")
