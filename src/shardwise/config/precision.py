"""The section `precision`: the dtypes of a training, by what they hold."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from pydantic import Field, model_validator

from shardwise.config.base_section import Section, reject

DtypeName = Literal["float32", "bfloat16"]
DTYPE_BYTES: dict[DtypeName, int] = {"float32": 4, "bfloat16": 2}
Rounding = Literal["nearest", "stochastic"]
Matmul = Literal["fp8"]


@dataclass(frozen=True)
class Precision:
    """The dtypes to which the section `precision` of a configuration resolves."""

    parameter: DtypeName  # dtype of parameters, activations and matmuls
    gradient: DtypeName  # dtype in which gradients are summed over micro-batches
    reduce: DtypeName  # dtype in which gradients are summed over ranks
    optimizer: DtypeName  # dtype of masters
    moments: DtypeName  # dtype of moments; if it is not that of masters, they are rounded stochastically
    rounding: Rounding  # rule by which the update rounds masters

    @property
    def master_bytes(self) -> int:
        """Bytes of a master; 0 if it has the dtype of the parameters, which then serve."""
        return DTYPE_BYTES[self.optimizer] if self.parameter != self.optimizer else 0

    def rounded(self, states: int) -> int:
        """Return the values of an element that an update rounds stochastically, of its master and so many states."""
        if self.rounding == "stochastic":
            return 1 + states
        return states if self.moments != self.optimizer else 0


class PrecisionConfig(Section):
    """The dtypes, by what they hold."""

    mode: Literal["float32", "mixed", "bfloat16"] | None = Field(
        default=None,
        description="mixed = bfloat16 with float32 masters; null = mixed on accelerators and with precision.matmul, "
        "float32 on CPU",
    )
    gradient: DtypeName | None = Field(default=None, description="dtype of gradient sums; null = the mode's own")
    reduce: DtypeName | None = Field(default=None, description="dtype of gradient reduction; null = the mode's own")
    optimizer: DtypeName | None = Field(default=None, description="dtype of masters and moments; null = the mode's own")
    moments: DtypeName | None = Field(
        default=None,
        description="dtype of moments; bfloat16, with adamw, saves 4 bytes of each parameter in mode float32 or mixed; "
        "null = as precision.optimizer",
    )
    rounding: Rounding | None = Field(
        default=None,
        description="how the update rounds bfloat16 masters and moments: stochastic = up or down at random with the "
        "mean kept, alike in every layout; null = stochastic with mode bfloat16, else nearest",
    )

    matmul: Matmul | None = Field(
        default=None,
        description="fp8 = matrix products of blocks multiply 8-bit numbers, by one scale for each tensor; null = in "
        "the mode's dtype",
    )

    @model_validator(mode="before")
    @classmethod
    def _fp8_is_mixed_by_default(cls, values: Any) -> Any:
        is_left_out = isinstance(values, dict) and values.get("matmul") is not None and values.get("mode") is None
        return {**values, "mode": "mixed"} if is_left_out else values

    @model_validator(mode="after")
    def _check(self) -> PrecisionConfig:
        if self.rounding == "stochastic" and self.resolved(accelerator=False).optimizer != "bfloat16":
            reject(
                [
                    "precision.rounding (stochastic) rounds to bfloat16, and masters and moments are float32: set "
                    "precision.mode=bfloat16, or precision.rounding=nearest"
                ]
            )
        if self.moments == "float32" and self.resolved(accelerator=False).optimizer == "bfloat16":
            reject(
                [
                    "precision.moments (float32) must be bfloat16 where masters are bfloat16: leave it out, or set "
                    "precision.mode=mixed"
                ]
            )
        return self

    @property
    def rounds_stochastically(self) -> bool:
        """True if masters are rounded at random on accelerators."""
        return self.resolved(accelerator=True).rounding == "stochastic"

    def resolved(self, accelerator: bool) -> Precision:
        """The dtype of each role; the default mode depends on whether there is an accelerator."""
        mode = self.mode or ("mixed" if accelerator else "float32")
        parameter: DtypeName = "float32" if mode == "float32" else "bfloat16"
        state: DtypeName = "bfloat16" if mode == "bfloat16" else "float32"
        optimizer = self.optimizer or state
        # bfloat16 has 8 bits: a master would lose nearly every update that is rounded to nearest.
        default: Rounding = "stochastic" if mode == optimizer == "bfloat16" else "nearest"
        return Precision(
            parameter,
            self.gradient or state,
            self.reduce or state,
            optimizer,
            self.moments or optimizer,
            self.rounding or default,
        )
