"""ZeRO: optimizer state, gradients and parameters cut over the data-parallel ranks (arXiv:1910.02054 §5).

With n data-parallel ranks and P parameters on this rank, a step of stage 1 moves what plain data parallelism moves: a
reduce-scatter of P gradients and an all-gather of P parameters, each `P·(n-1)/n`. Each rank updates P/n elements and
keeps only their state. Stage 2 reduces gradients in every micro-batch, or once a step as stage 1 does, and stage 3
gathers parameters twice in every micro-batch, for its forward and its backward pass, or once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext
from heapq import merge
from typing import TYPE_CHECKING, Any, overload

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardwise.base.errors import ConfigError
from shardwise.config import Frequency, Rounding
from shardwise.distributed import collectives, devices
from shardwise.distributed.mesh import Group, Mesh
from shardwise.distributed.placement import named_pieces, of_or_whole
from shardwise.distributed.torch_private import WithoutCompiler
from shardwise.optim import checks, gradient_norms, wrapped_class
from shardwise.optim.bucket_collectives import Gathers, PartialGradients, Reductions
from shardwise.optim.buckets import Bucket, weak_hook
from shardwise.optim.freed_buckets import draw_outside_buckets, make_buckets, places_in
from shardwise.optim.gradient_norms import ElementRun, ModelNorms, clipping_factor, require_max_norm
from shardwise.optim.master_update import HostUpdate, Update
from shardwise.optim.sharding import Cut, OptimizerDtypes, Ranks, Sharding, by_replicas
from shardwise.optim.wrapped_class import ModelSlices, SliceOptimizer, options_of

if TYPE_CHECKING:
    from shardwise.optim.unit_weights import UnitWeights


class ZeroRedundancyOptimizer(WithoutCompiler):
    """Wrap an elementwise `torch.optim` class, `LAMB` or `Muon`: each data-parallel rank keeps 1/n of its state.

    Before: `torch.optim.AdamW(model.parameters(), lr=1e-4)`. After:
    `ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-4)`. Then `backward()`, `step()`,
    `zero_grad()` as usual; `step()` averages the gradients over the group, clips, updates, and brings the parameters
    back in step. What a parameter's placement says is still partial (a norm under sequence parallelism, a replicated
    K/V head) is summed too.

    Any number of `backward()` calls may come before one `step()`; gradients add up exactly. To overlap the reduction
    with the last of them, put the others under `with optimizer.accumulate():` (or the last under
    `accumulate(last=True)`).

    `step()` uses the gradients up: afterwards they are 0. A parameter without a gradient counts as one whose gradient
    is 0. At group size 1 there is no communication and the result is that of the wrapped class. Making the optimizer
    is collective: all ranks give the same parameters in the same order, and all of them, frozen ones too, take the
    values of the group's first rank. So do, over the mesh's tensor-parallel ranks, parameters that are not cut, whose
    gradients must be equal there. A `torch.amp.GradScaler` skips a step on all ranks or on none; leave out its
    `unscale_`.

    Attributes:
        steps: number of updates so far.
        state_dtype: dtype of the wrapped class's state; None: that of masters.
        gathers: all-gathers that bring new parameters to all ranks.
        buckets: flat buckets of this rank's trained parameters.
        tensor: the tensor-parallel ranks.
        compares_values: True if each step compares the parameters with their masters, so that changes of parameters
            through `.data` count too. False is for models of which nobody changes a parameter so: a step then looks at
            the versions of the parameters alone, which costs nothing.

    Args:
        params: parameters, or parameter groups with options of the wrapped class.
        optimizer_class: an elementwise class: Adam, AdamW, SGD, RMSprop, Lion, …; `shardwise.LAMB`, whose trust ratios
            are then those of whole canonical tensors (one all-reduce more a step, of two numbers a tensor); or
            `shardwise.Muon`, which then orthogonalizes whole canonical matrices, each on one rank.
        optimizer_dtype: dtype of masters and state; None: float32. If parameters have another dtype, each rank keeps a
            master copy of its part (float64 parameters keep theirs).
        grad_clipping, max_norm: clip the norm over all gradients of the model to `max_norm` (None: no clipping).
        group: the ranks that have the same part of the model; default: `mesh.replicas`, else the world.
        mesh: needed where the model itself is cut, since the norm then runs over all its ranks.
        gradient_dtype: dtype of accumulated gradients (default: the parameter's).
        reduce_dtype: dtype of gradients on the wire (default: as accumulated).
        stage: what is cut over the group. 0: nothing (plain data parallelism, by all-reduces); 1: masters and state;
            2: gradients too, whose whole buckets have memory only until they are reduced; 3: parameters too, which a
            rank has only while a unit of `model` uses them.
        model: the model, whose embeddings, blocks (entries of a `torch.nn.ModuleList`) and heads are the units at which
            buckets end; stage 3 needs it.
        replicate: number of runs of neighbouring ranks of the group that are cut each by itself, as copies.
        reduce: at stages 2 and 3, whether gradients are reduced in every `micro_batch` or once a `step`. In every one,
            all ranks must call backward() equally often.
        gather: at stage 3, whether parameters are released in every `micro_batch` or once a `step`, after the update.
        prefetch: at stage 3, units whose parameters are gathered ahead of their use.
        offload: whether an accelerator's masters and state are in the host's memory and the host updates them
            (`optim/master_update.py`); with torch.optim.AdamW, give `fused=True` too. Changes of parameters through
            `.data` are then lost.
        average: False sums gradients over the group instead.
        bucket_mib: gradients that travel together, in MiB; None: by the model and the link (`optim.bucket_layout`).
        rounding: `stochastic` rounds masters and state to bfloat16, which `optimizer_dtype` must be, so that their mean
            is kept: `optim/stochastic_rounding.py`.
        state_dtype: dtype of the wrapped class's state; None: that of masters. `torch.bfloat16` with float32 masters,
            for elementwise classes, halves the state, which is then rounded stochastically.
        rounding_seed: seed of random bits, which also depend on the step, the canonical tensor and the element.
        defaults: options of the wrapped class.

    Raises:
        TypeError: an argument that neither class takes, with what replaces it where another library's
            ZeroRedundancyOptimizer takes it.
        ValueError: a class that is not elementwise, LAMB or Muon; parameters that DDP or FSDP already manage, or that
            are others, or in another order, on another rank; a cut model without `mesh`.
        RuntimeError: a launcher started several ranks, but no process group was initialised.
    """

    compares_values = True
    steps = 0
    _clipped = False
    _norms: Tensor | None = None
    _has_weight_norm = False
    _inner: torch.optim.Optimizer | None = None
    _before_changes: torch.Event | None = None
    _weights: UnitWeights | None = None
    _uncut: checks.UncutGradients | None = None
    _update_stream: torch.Stream | None = None

    def __init__(
        self,
        params: Iterable[Any],
        optimizer_class: type[torch.optim.Optimizer],
        optimizer_dtype: torch.dtype | None = None,
        grad_clipping: bool = True,
        max_norm: float | None = 1.0,
        *,
        group: Group | dist.ProcessGroup | None = None,
        mesh: Mesh | None = None,
        gradient_dtype: torch.dtype | None = None,
        reduce_dtype: torch.dtype | None = None,
        stage: int = 1,
        model: nn.Module | None = None,
        replicate: int = 1,
        reduce: Frequency = "micro_batch",
        gather: Frequency = "micro_batch",
        prefetch: int = 1,
        offload: bool = False,
        average: bool = True,
        bucket_mib: float | None = None,
        rounding: Rounding = "nearest",
        state_dtype: torch.dtype | None = None,
        rounding_seed: int = 0,
        **defaults: Any,
    ) -> None:
        if grad_clipping:
            require_max_norm(max_norm)
        self._sharding = Sharding(stage, replicate, reduce, gather, prefetch, offload, bucket_mib)
        self._dtypes = OptimizerDtypes(
            gradient_dtype, reduce_dtype, optimizer_dtype or torch.float32, state_dtype, rounding, rounding_seed
        )
        checks.require_known_options(ZeroRedundancyOptimizer, optimizer_class, defaults)
        self._inner_class = wrapped_class.class_for_slices(optimizer_class, defaults)
        wrapped_class.require_suitable(self._inner_class, self._sharding, self._dtypes, model)
        self.optimizer_class = optimizer_class
        self.grad_clipping = grad_clipping
        self.max_norm = max_norm
        self._ranks = Ranks.of(group, mesh)
        self.group = self._ranks.data
        self.tensor = self._ranks.tensor
        self.cut = self._sharding.cut(self.group)
        self.state_dtype = self._dtypes.state
        self._places = {} if model is None else places_in(model)
        self._scale = 1.0 / self.group.size if average else 1.0
        self._defaults = defaults
        self.buckets: list[Bucket] = []
        self._bucket_places: dict[nn.Parameter, tuple[Bucket, int]] = {}
        each_pass = stage >= 2 and reduce == "micro_batch" and self.cut.ranks.size > 1
        self._reductions = Reductions(self.buckets, self._bucket_places, each_pass=each_pass)
        self._partial: list[PartialGradients] = []
        self.gathers = Gathers()
        self._watch = checks.ParameterWatch(self._bucket_places)
        self._frozen: list[nn.Parameter] = []
        super().__init__(params, self._make_inner({"params": [nn.Parameter(torch.zeros(1))]}).defaults)
        self._take_over(self.param_groups)
        if model is not None and stage == 3:
            from shardwise.optim.unit_weights import UnitWeights  # for this stage alone

            self._weights = UnitWeights(model, self.buckets, prefetch, once_a_step=gather == "step")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add `param_group`; its parameters move into buckets of their own. Collective, as making the optimizer is."""
        if self._inner is not None and self.cut.stage == 3:
            raise ValueError("a parameter group cannot be added at stage 3: give all groups when the optimizer is made")
        super().add_param_group(param_group)
        if self._inner is not None:  # else it is one of the constructor's, which takes all of them over at once
            try:
                self._take_over(self.param_groups[-1:])
            except ValueError:
                self.param_groups.pop()
                raise

    def _take_over(self, groups: list[dict[str, Any]]) -> None:
        mesh = self._ranks.mesh
        checks.require_plain((p for options in groups for p in options["params"]), has_mesh=mesh is not None)
        device = self._device
        checks.require_same_parameters(groups, self.group)
        if issubclass(self._inner_class, SliceOptimizer):
            for options in groups:
                for shape in {piece.shape for p in options["params"] for piece in of_or_whole(p).pieces}:
                    self._inner_class.require_tensor(shape, options)
        checks.take_first_values(groups, self._ranks)
        self._partial.append(PartialGradients([bucket for options in groups for bucket in self._move(options)]))
        if self.tensor.size > 1:
            self._uncut = checks.UncutGradients(self.param_groups, self.buckets, self._ranks, device)
        sum_dtype = gradient_norms.sum_dtype(self._dtypes, self.group, device)
        self._model = ModelNorms(self.buckets, device, self._ranks, sum_dtype)
        # Norms that were measured before lack the gradients of the new buckets.
        self._norms = None
        self._updates = self._make_update(device, sum_dtype)

    def cut_over(self, replicas: Group) -> Cut:
        """Return the cut of parameters of which these data-parallel ranks have the same part."""
        return self._sharding.cut(replicas)

    @property
    def _device(self) -> torch.device:
        mesh = self._ranks.mesh
        otherwise = torch.device("cpu") if mesh is None else mesh.device
        first = next((p.device for options in self.param_groups for p in options["params"]), otherwise)
        return torch.device("cpu") if first.type == "meta" else first

    def _move(self, options: dict[str, Any]) -> list[Bucket]:
        """Broadcast the first rank's values of a group's parameters; put the trained ones into buckets. Collective."""
        frozen = [p for p in options["params"] if not p.requires_grad]
        for p in frozen:
            draw_outside_buckets(p)
            collectives.broadcast_value(p, of_or_whole(p).pieces[0].replicas or self.group)
        self._frozen += frozen
        trainable = [p for p in options["params"] if p.requires_grad and p.numel()]
        hook = weak_hook(self._reductions.take)
        alike = [
            make_buckets(parameters, self._sharding, self.cut_over(replicas), self._dtypes, self._places)
            for replicas, parameters in by_replicas(trainable, self.group).items()
        ]
        # In the order in which a backward pass completes them, as each waits for those before.
        first = {p: number for number, p in enumerate(trainable)}
        buckets = list(merge(*alike, key=lambda bucket: -min(first[p] for p in bucket.parameters)))
        for bucket in buckets:
            for index, p in enumerate(bucket.parameters):
                self._bucket_places[p] = (bucket, index)
                p.register_post_accumulate_grad_hook(hook)
        inner = {**options, "params": [b.master for b in buckets]}
        if self._inner is None:
            self._inner = self._make_inner(inner)
        else:
            self._inner.add_param_group(inner)
        self.buckets += buckets
        return buckets

    def _make_inner(self, group: dict[str, Any]) -> torch.optim.Optimizer:
        return self._inner_class([group], **self._defaults)

    def _make_update(self, device: torch.device, sum_dtype: torch.dtype | None) -> Update:
        mesh = self._ranks.mesh
        pieces = named_pieces(self.param_groups, 0 if mesh is None else mesh.pp.rank)
        bucket_of = {bucket.master: bucket for bucket in self.buckets}
        groups = [[bucket_of[master] for master in group["params"]] for group in self.inner.param_groups]
        model = ModelSlices(groups, pieces, device, self._ranks, sum_dtype)
        if self._dtypes.rounds_at_random:
            from shardwise.optim import stochastic_rounding

            bits = stochastic_rounding.RandomBits(pieces, self._dtypes.rounding_seed)
            return stochastic_rounding.StochasticUpdate(self.inner, model, self._make_inner, bits)
        update_class = HostUpdate if any(bucket.on_host for bucket in self.buckets) else Update
        return update_class(self.inner, model)

    # ---- when gradients are ready

    @contextmanager
    def accumulate(self, *, last: bool = False) -> Iterator[None]:
        """Inside, backward() only accumulates; the first after it, or one under `last=True`, overlaps its reduction."""
        self._reductions.overlaps = last
        try:
            yield
        except BaseException:
            self._reductions.overlaps = False
            raise
        self._reductions.overlaps = not last

    @torch.no_grad()
    def end_group(self, leaves: Iterable[Tensor] | None = None) -> None:
        """Keep the gradients of the micro-batches since the last group: those of the next ones add up by themselves.

        The reduction adds all groups (`buckets.GroupSums`).

        Args:
            leaves: parameters `[…]` and leaves of heads (`head_leaf`) whose group ends; None: all.
        """
        chosen = None if leaves is None else set(leaves)
        for bucket in self.buckets:
            bucket.end_group(chosen)

    def provide_gradients(self) -> None:
        """Give all gradients memory in their buckets, for a backward pass that adds to `.grad` by itself."""
        for bucket in self.buckets:
            bucket.provide_gradients()

    @contextmanager
    def local_gradients(self) -> Iterator[None]:
        """Inside, backward() leaves each rank the gradients of its own samples, at any stage."""
        self._reductions.is_local = True
        try:
            yield
        finally:
            self._reductions.is_local = False

    @property
    def reduces_each_pass(self) -> bool:
        """True if each backward() reduces its gradients, and not only the last one of a step."""
        return self._reductions.each_pass and not self._reductions.is_local

    def gradient_ready(self, parameter: nn.Parameter) -> None:
        """Report that a parameter's gradient is complete for this step. A full bucket starts its reduction at once."""
        self._reductions.ready(parameter)

    @torch.no_grad()
    def update_in_backward(self) -> None:
        """Update each bucket of the next step as its reduction in `accumulate(last=True)` ends, by the options of then.

        Elsewhere it does nothing. On an accelerator updates run beside the backward pass. The last buckets, and those
        of which tensor-parallel ranks have copies, wait for `step`, and take its options. `zero_grad` ends this.
        Once a bucket is updated, `zero_grad`, `clip_grad_norm_` and a scaler's `step` raise RuntimeError.
        """
        given: dict[str, Any] = {"stage": self.cut.stage > 1 and self.cut.stage, "offload": self._sharding.offload}
        given["max_norm"] = self.grad_clipping and self.max_norm
        given["optimizer_class"] = issubclass(self._inner_class, SliceOptimizer) and self.optimizer_class.__name__
        if wrong := ", ".join(f"{name} ({value})" for name, value in given.items() if value):
            needs = "max_norm=None, stage 0 or 1, offload=False and an elementwise class"
            raise ConfigError(f"{wrong} must be changed for update_in_backward(), which needs {needs}")
        self._adopt_changes()
        self._update_stream = devices.side_stream(self._device)
        if self._update_stream is not None and self._before_changes is not None:
            self._update_stream.wait_event(self._before_changes)
        self._reductions.update_reduced = self._update_reduced

    def _update_reduced(self, bucket: Bucket) -> None:
        if any(piece.copies.size > 1 for p in bucket.parameters for piece in of_or_whole(p, tensor=self.tensor).pieces):
            return
        if self._update_stream is not None:
            self._update_stream.wait_stream(torch.accelerator.current_stream(self._device))
        with self._update_stream or nullcontext():
            self.gathers.run(self._updates.ahead(self.param_groups, self._scale, self.steps + 1, bucket))

    def reduce_gradients(self) -> None:
        """Finish this step's gradients: each rank then has the sum (not yet averaged or clipped) of what it owns."""
        self._reduce(measures_weights=False)

    @torch.no_grad()
    def _reduce(self, *, measures_weights: bool) -> Tensor:
        if self._norms is not None:
            return self._norms
        if any(p.grad is not None for p in self._frozen):
            raise RuntimeError("a parameter that was frozen when the optimizer was made has a gradient: make it again")
        self._reductions.overlaps = False
        if self._update_stream is not None:
            torch.accelerator.current_stream(self._device).wait_stream(self._update_stream)
        self._reductions.update_reduced = self._update_stream = None
        self.gathers.wait()
        if self._watch.is_due:
            self._watch.check()
        if self._before_changes is not None:
            torch.accelerator.current_stream(self._device).wait_event(self._before_changes)
            self._before_changes = None
        self._adopt_changes()
        self._reductions.finish()
        for gradients in self._partial:
            gradients.sum_()
        if self._uncut is not None:
            self._uncut.take_first()
        # Two numbers in any case: the order in which an all-reduce adds may depend on its length.
        self._norms = self._model.measure(ElementRun.gradient, ElementRun.weights if measures_weights else None)
        self._norms[0] *= self._scale
        self._has_weight_norm = measures_weights
        for bucket in self.buckets:
            bucket.note_gradients()
        return self._norms

    def _adopt_changes(self) -> None:
        """Let masters adopt what the user wrote to parameters since the last step (load_state_dict, clamp_).

        Where values are compared, that reads and writes 12 bytes for each bfloat16 parameter, and the host waits once
        for the device.
        """
        differs: dict[Bucket, Tensor] = {}
        for bucket in self.buckets:
            bucket.check_parameters()
            bucket.adopt_changes()
            if self.compares_values and (compared := bucket.differs_from_masters()) is not None:
                differs[bucket] = compared
        if differs:
            for bucket, has_changed in zip(differs, torch.stack(list(differs.values())).tolist(), strict=True):
                if has_changed:
                    bucket.adopt_values()

    def norms(self) -> tuple[Tensor, Tensor]:
        """L2 norms `[]` of the whole model's gradient (before `step` clips) and parameters; reduces gradients first."""
        norms = self._reduce(measures_weights=True)
        if not self._has_weight_norm:
            norms[1] = self.weight_norm()
            self._has_weight_norm = True
        return norms[0], norms[1]

    def weight_norm(self) -> Tensor:
        """The second of `norms`, `[]`, of the weights that the optimizer has now. Collective."""
        return self._model.measure(None, ElementRun.weights)[1]

    def gradient_norm(self) -> Tensor:
        """The first of `norms`, `[]`, for steps that need not read all parameters for the second."""
        return self._reduce(measures_weights=False)[0]

    def _final_norm(self) -> Tensor:
        """The gradient norm; raises if the gradients were changed after they were reduced. Collective."""
        norms = self._reduce(measures_weights=False)
        for bucket in self.buckets:
            bucket.check_gradients()
        return norms[0]

    @torch.no_grad()
    def clip_grad_norm_(self, max_norm: float | None, *, error_if_nonfinite: bool = False) -> Tensor:
        """Clip this step's gradients, in the norm over the whole model, and return the norm `[]` that they had.

        Use it where a loop of a plain optimizer calls `torch.nn.utils.clip_grad_norm_`: that function sees this rank's
        gradients only, before they are reduced. It replaces the optimizer's own `max_norm` for this step. Reduces the
        gradients first, so this step takes no more backward(). Collective.

        Args:
            max_norm: None does not clip.
            error_if_nonfinite: raise if the norm is not finite.
        """
        require_max_norm(max_norm)
        gradient_norm = self._final_norm().clone()
        if error_if_nonfinite and not torch.isfinite(gradient_norm):
            raise RuntimeError(f"the gradient norm ({gradient_norm.item()}) of the whole model must be finite")
        if max_norm is not None:
            self._updates.refuse_ahead(f"clip_grad_norm_({max_norm})")
            factor = clipping_factor(gradient_norm, max_norm)
            self.gradient_norm().mul_(factor)
            for bucket in self.buckets:
                bucket.gradient.mul_(factor)
                bucket.note_gradients()
        self._clipped = True
        return gradient_norm

    grad_scale: Tensor | None  # a scaler sets this and `found_inf` while it calls step()
    found_inf: Tensor

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """True: step() unscales. A scaler asks this just before it looks for inf in this rank's `p.grad`.

        It skips the step, and changes its factor, by the gradients of its own rank, and one rank's step must not pair
        with another rank's next step: the gradients are reduced now, so that all ranks' scalers find the same.
        """
        gradient_norm = self._final_norm()
        for bucket in self.buckets:
            bucket.spoil(gradient_norm)
        return True

    # ---- the torch.optim interface

    @overload
    def step(self, closure: None = None) -> None: ...

    @overload
    def step(self, closure: Callable[[], float]) -> float: ...

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:
        """Reduce, clip, update, share the new parameters; gradients are 0 then. `closure` computes the loss before."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        scaled = hasattr(self, "found_inf")
        # As a scaler looks for inf it multiplies the gradients by 1 in place, which counts as a change of them.
        gradient_norm = self.gradient_norm() if scaled else self._final_norm()
        factor: Tensor | float = self._scale
        if scaled:
            self._updates.refuse_ahead("a GradScaler")
            scale = checks.require_scaled(self.grad_scale, self.buckets, clipped=self._clipped)
            if not torch.isfinite(gradient_norm):
                self.zero_grad()
                return loss
            factor = factor / scale
            gradient_norm = gradient_norm / scale
        if self.grad_clipping and self.max_norm is not None and not self._clipped:
            factor = clipping_factor(gradient_norm, self.max_norm) * factor
        self.steps += 1
        self.gathers.run(self._updates.step(self.param_groups, factor, self.steps))
        self.zero_grad()
        return loss

    def overwrite_after(self, event: torch.Event) -> None:
        """Let the next step change masters, state and parameters only after an event, such as the end of their copy."""
        self._before_changes = event

    @contextmanager
    def gathered(self, *, all_units: bool = True) -> Iterator[None]:
        """Inside, all parameters have their values on every rank, also at stage 3, and changes of them count.

        Collective over the group.

        Args:
            all_units: False leaves embeddings, blocks and heads, which gather theirs when they run, so that methods of
                the model other than its forward can be called.
        """
        self.gathers.wait()
        with nullcontext() if self._weights is None else self._weights.gathered(all_units=all_units):
            yield
            self.gathers.wait()

    @property
    def gathers_in_passes(self) -> bool:
        """True if a pass of the model is collective over the group: units gather parameters, or tokens travel."""
        gathers = self._weights is not None and self.cut.ranks.size > 1
        return gathers or len(by_replicas([*self._bucket_places], self.group)) > 1

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Set gradients to 0: views into the buckets, whatever `set_to_none` says, and None from stage 2 on."""
        self._reductions.reset()
        for bucket in self.buckets:
            bucket.reset()
            bucket.zero_gradients()
        for p in self._frozen:
            p.grad = None
        for gradients in self._partial:
            gradients.summed = False
        self._norms = None
        self._clipped = False
        self._updates.refuse_ahead("zero_grad() in place of step()")

    @property
    def inner(self) -> torch.optim.Optimizer:
        """The wrapped optimizer, whose parameters are the buckets' masters."""
        assert self._inner is not None
        return self._inner

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part: the wrapped class's state, the options, the layout they belong to, and the masters.

        Masters that are the parameters' own memory stand as None: save the model's weights too.
        """
        inner = self.inner.state_dict()
        groups = zip(self.param_groups, inner["param_groups"], strict=True)
        return {
            "state": inner["state"],
            "param_groups": [{**options_of(outer), "params": group["params"]} for outer, group in groups],
            "masters": [b.master.detach() if b.separate else None for b in self.buckets],
            "class": type(self.inner).__name__,
            "layout": wrapped_class.layout_of(self.buckets, self.cut.ranks),
            "steps": self.steps,
        }

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore what `state_dict` gave on the same rank of the same layout. Collective over the group.

        Raises:
            ValueError: the state belongs to another layout, bucket size, model or class.
        """
        wrapped_class.require_loadable(
            state_dict, self.inner, self._make_inner, wrapped_class.layout_of(self.buckets, self.cut.ranks)
        )
        devices.synchronize(self._device)  # masters may be on their way to the device
        self.inner.load_state_dict({k: state_dict[k] for k in ("state", "param_groups")})
        if self.state_dtype is not None:
            from shardwise.optim import stochastic_rounding

            stochastic_rounding.cast_states(self.inner, self.state_dtype)
        # States of earlier versions have no "steps": the buckets' own counts stand in.
        counts = (int(state.get("step", 0)) for state in state_dict["state"].values())
        self.steps = state_dict.get("steps", max(counts, default=0))
        for outer, loaded in zip(self.param_groups, state_dict["param_groups"], strict=True):
            outer.update(options_of(loaded))
        for bucket, master in zip(self.buckets, state_dict["masters"], strict=True):
            if bucket.separate:
                bucket.master.copy_(master)
        self.gathers.run(bucket for bucket in self.buckets if bucket.separate)

    def __getstate__(self) -> dict[str, Any]:
        raise TypeError(
            "ZeroRedundancyOptimizer cannot be copied or pickled: its buffers are the model's own memory, "
            "and other ranks hold the rest of its state. Save state_dict() instead"
        )

    def state_bytes(self) -> dict[str, int]:
        """Return bytes on this rank by kind: masters and the wrapped class's state, and how many are padding."""
        states = [value for state in self.inner.state.values() for value in state.values()]
        state_bytes = sum(value.nbytes for value in states if isinstance(value, Tensor) and value.dim())
        master_bytes = sum(bucket.master.nbytes for bucket in self.buckets if bucket.separate or bucket.on_host)
        elements = sum(bucket.master.numel() for bucket in self.buckets)
        padding = elements - sum(bucket.elements for bucket in self.buckets)
        per_element = (state_bytes + master_bytes) / max(elements, 1)
        return {"state": state_bytes, "masters": master_bytes, "padding": round(padding * per_element)}
