"""Names of Hugging Face, Megatron-LM, nanoGPT, torchtitan and DeepSpeed, by the key or option that they stand for here.

The answer to a wrong key or option that is one of these names is the key of ours. A target with a value, such as
`precision.mode=mixed`, is the whole answer; a name with a dot counts in that section alone.
"""

from __future__ import annotations

_NAMES = {
    # how long, and in what portions
    "train.steps": "steps max_steps max_iters train_iters total_steps num_steps num_train_steps num_iterations "
    "iterations training_steps train_steps num_train_epochs num_epochs max_epochs epochs n_steps",
    "train.stop_after": "exit_interval max_steps_per_run steps_this_run",
    "train.global_batch": "batch_size global_batch_size train_batch_size total_batch_size effective_batch_size bs",
    "train.micro_batch": "per_device_train_batch_size micro_batch_size local_batch_size device_batch_size mbs "
    "train_micro_batch_size_per_gpu batch_size_per_device per_gpu_train_batch_size batch_size bs",
    "train.sequence_length": "seq_length seq_len seqlen sequence_len block_size max_seq_length max_seq_len context "
    "max_length context_length ctx_len n_ctx cutoff_len",
    "train.seed": "random_seed data_seed manual_seed rng_seed",
    "train.eval_every": "eval_steps eval_interval eval_freq evaluation_steps evaluate_every val_check_interval",
    "train.eval_batches": "eval_iters max_eval_batches limit_val_batches",
    "train.recompute": "recompute_granularity activation_checkpointing activation_checkpoint "
    "activation_checkpoint.mode remat",
    "train.recompute=full": "gradient_checkpointing grad_checkpointing checkpoint_activations",
    "train.recompute=selective": "recompute_activations selective_checkpoint_enabled",
    # the update rule
    "optimizer.lr": "learning_rate max_lr peak_lr base_lr lr_max",
    "optimizer.min_lr": "min_learning_rate lr_min eta_min final_lr lr_min_ratio min_lr_ratio",
    "optimizer.warmup_steps": "warmup_iters lr_warmup_iters lr_warmup_steps num_warmup_steps warmup warmup_ratio "
    "lr_warmup_fraction lr_warmup_samples",
    "optimizer.decay_steps": "lr_wsd_decay_iters num_decay_steps",
    "optimizer.schedule": "lr_scheduler_type lr_scheduler lr_schedule lr_decay_style scheduler "
    "scheduler_type decay_type",
    "optimizer.schedule=cosine": "decay_lr",
    "optimizer.weight_decay": "wd adam_weight_decay",
    "optimizer.betas": "beta1 beta2 adam_beta1 adam_beta2",
    "optimizer.eps": "adam_eps adam_epsilon epsilon",
    "optimizer.max_norm": "max_grad_norm grad_clip clip_grad gradient_clipping gradient_clip_val "
    "clip_grad_norm grad_norm",
    "optimizer.name": "optimizer optim optimizer_type optimizer_name optimizer.type",
    "optimizer.zero": "zero_stage zero_optimization.stage zero_optimization sharding_strategy fsdp use_torch_fsdp2 "
    "data_parallel_sharding_strategy",
    "optimizer.zero=1": "use_distributed_optimizer distributed_optimizer use_zero_1",
    "optimizer.offload=true": "optimizer_cpu_offload cpu_offload offload_optimizer",
    "optimizer.bucket_mib": "bucket_size bucket_cap_mb ddp_bucket_size reduce_bucket_size",
    # the layout
    "parallel.tensor": "tensor_model_parallel_size tensor_parallel_size tensor_parallel_degree tp_size tp tp_degree "
    "tensor_parallel model_parallel_size",
    "parallel.context": "context_parallel_size context_parallel_degree cp cp_size cp_degree context_parallel",
    "parallel.pipeline": "pipeline_model_parallel_size pipeline_parallel_size pipeline_parallel_degree pp_size pp "
    "pp_degree pipeline_parallel",
    "parallel.schedule": "pipeline_parallel_schedule pp_schedule pipeline_schedule",
    "parallel.virtual_stages": "virtual_pipeline_model_parallel_size num_layers_per_virtual_pipeline_stage "
    "num_virtual_stages_per_pipeline_rank",
    "parallel.sequence=true": "sequence_parallel sequence_parallel_enabled enable_sequence_parallel",
    "parallel.replicate": "data_parallel_replicate_degree num_distributed_optimizer_instances dp_replicate",
    "parallel.vocab_multiple": "make_vocab_size_divisible_by pad_vocab_size_multiple pad_to_multiple_of",
    "parallel.tensor_overlap": "tp_comm_overlap",
    "parallel.tensor_overlap=symmetric_memory": "enable_async_tensor_parallel",
    # the model
    "model.family": "model_type architecture arch model.name",
    "model.num_hidden_layers": "num_layers n_layer n_layers layers depth",
    "model.num_attention_heads": "num_heads n_head n_heads attention_heads",
    "model.num_key_value_heads": "num_query_groups n_kv_heads num_kv_heads n_kv_head",
    "model.hidden_size": "n_embd d_model embed_dim hidden_dim n_embed model_dim dim",
    "model.intermediate_size": "ffn_hidden_size ffn_dim n_inner d_ff mlp_dim",
    "model.max_position_embeddings": "n_positions max_positions",
    "model.attention_dropout": "dropout attn_dropout",
    "model.resid_pdrop": "dropout",
    "model.hidden_dropout_prob": "dropout",
    "model.initializer_range": "init_method_std init_std",
    "model.rope_theta": "rotary_base rotary_emb_base rope_base",
    "model.rms_norm_eps": "norm_epsilon norm_eps",
    "model.tie_word_embeddings": "tie_embeddings tied_embeddings tie_weights weight_tying",
    "model.tie_word_embeddings=false": "untie_embeddings_and_output_weights",
    # numbers
    "precision.mode": "dtype torch_dtype mixed_precision mixed_precision_param data_type param_dtype",
    "precision.mode=mixed": "bf16 amp autocast use_amp use_mix_precision",
    "precision.mode=float32": "fp32",
    "precision.matmul=fp8": "fp8 float8 use_fp8 fp8_training fp8_format fp8_recipe enable_fp8 fp8_hybrid "
    "enable_fp8_linear",
    "precision.reduce": "reduce_dtype grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 communication_data_type",
    # data
    "data.path": "data_path train_data_path data_dir train_file data_file dataset_path dataset_dir train_data "
    "input_file",
    "data.dataset": "dataset_name dataset",
    "data.config": "dataset_config dataset_config_name",
    "data.tokenizer": "tokenizer_name tokenizer_path tokenizer_model tokenizer_name_or_path vocab_file merge_file",
    "data.text_key": "text_column text_field text_column_name dataset_text_field json_keys",
    "data.workers": "num_workers dataloader_num_workers n_workers",
    "data.blend": "data_blend blend_weights",
    "data.packing": "sample_packing pack_sequences packing_strategy sequence_packing",
    # checkpoints
    "checkpoint.every": "save_steps save_interval save_every save_freq checkpoint_interval checkpoint_every "
    "checkpoint.interval checkpoint_steps ckpt_interval every_n_train_steps",
    "checkpoint.keep": "save_total_limit keep_last keep_latest_k max_checkpoints save_top_k",
    "checkpoint.path": "save save_dir checkpoint_dir ckpt_dir checkpoint.folder checkpoint.dir",
    "checkpoint.load": "model_name_or_path pretrained_model_name_or_path init_from pretrained pretrained_checkpoint "
    "initial_load_path initial_checkpoint_dir pretrained_model",
    "--run-dir": "output_dir out_dir resume_from_checkpoint resume_from logging_dir run_name log_dir outdir out output "
    "workdir work_dir dump_folder",
    # compilation, launch, log
    "compile.enabled=true": "compile torch_compile use_compile compile.enable compile_model",
    "compile.backend": "torch_compile_backend",
    "launch.nodes": "num_nodes nnodes n_nodes machines",
    "launch.timeout": "ddp_timeout distributed_timeout_minutes distributed_timeout nccl_timeout",
    "--max-tokens": "max_new_tokens max_length n_predict num_tokens",
    "--nproc": "nproc_per_node nprocs num_processes num_gpus gpus ngpus n_gpus world_size devices n np num_proc "
    "gpus_per_node",
    "log.every": "logging_steps log_interval log_every log_freq log_every_n_steps logging_interval print_every",
    "log.trackers": "report_to wandb_project trackers logger",
    "log.trackers=[wandb]": "wandb wandb_log use_wandb enable_wandb",
    "log.tensorboard": "tensorboard_dir enable_tensorboard use_tensorboard",
    "log.profile": "profiler enable_profiling use_pytorch_profiler",
}

OTHER_NAMES: dict[str, tuple[str, ...]] = {}
for _target, _names in _NAMES.items():
    for _name in _names.split():
        OTHER_NAMES[_name] = (*OTHER_NAMES.get(_name, ()), _target)
"""Another library's name, in lower case with underscores → our keys, `key=value` or options; the first valid counts."""

_OTHER_VALUES = (
    "num_train_epochs num_epochs max_epochs epochs total_batch_size warmup_ratio lr_warmup_fraction lr_warmup_samples "
    "lr_min_ratio min_lr_ratio beta1 beta2 adam_beta1 adam_beta2 optim zero_optimization sharding_strategy fsdp "
    "use_torch_fsdp2 data_parallel_sharding_strategy bucket_size bucket_cap_mb ddp_bucket_size reduce_bucket_size "
    "activation_checkpointing mixed_precision mixed_precision_param dtype torch_dtype param_dtype data_type "
    "sample_packing pack_sequences packing_strategy num_layers_per_virtual_pipeline_stage report_to wandb_project "
    "logger tensorboard_dir distributed_timeout_minutes tp_comm_overlap profiler enable_profiling "
    "use_pytorch_profiler grad_reduce_in_fp32 accumulate_allreduce_grads_in_fp32 architecture model_type model.name "
    "arch resume_from_checkpoint resume_from"
)
OTHER_VALUES = frozenset(_OTHER_VALUES.split())
"""Names whose values are of another unit or kind than those of our key."""

_OWN_MEANING = (
    "config data enabled every format keep load loss mode name nodes optimizer options path reduce resume schedule "
    "stages steps timeout"
)
OWN_MEANING = frozenset(_OWN_MEANING.split())
"""Leaves of keys that have another meaning in another section: there they are no advice."""

_WITHOUT_KEY = {
    "the data-parallel degree is the number of ranks (--nproc) / (parallel.tensor × parallel.context × "
    "parallel.pipeline)": (
        "parallel.data data_parallel_size data_parallel_degree dp dp_size dp_degree data_parallel_shard_degree "
        "data_parallel"
    ),
    "train.global_batch / (train.micro_batch × the data-parallel degree) micro-batches are accumulated": (
        "gradient_accumulation_steps gradient_accumulation_iters grad_accum grad_accum_steps grad_accum_usteps "
        "accumulate_grad_batches"
    ),
    "train.steps takes tokens with their unit, such as train.steps=20B": (
        "max_tokens train_tokens training_tokens total_tokens"
    ),
    "--run-dir RUN continues a run, and checkpoint.load=PATH begins a new one with the weights of a model": (
        "load load_checkpoint"
    ),
    "float16 is not trained: precision.mode=mixed computes in bfloat16": "fp16 float16 half",
    "no file of DeepSpeed is read: optimizer.zero is its stage of ZeRO": "deepspeed deepspeed_config",
    "the recipe is the first argument, without an option": "config config_file job.config_file",
    "there are no experts": (
        "expert_model_parallel_size expert_parallel_size expert_parallel_degree ep ep_size num_experts "
        "num_local_experts"
    ),
}
WITHOUT_KEY = {name: reason for reason, names in _WITHOUT_KEY.items() for name in names.split()}
"""Names of what no key or option sets → why."""

SECTIONS = {
    "training": "train",
    "trainer": "train",
    "optim": "optimizer",
    "parallelism": "parallel",
    "logging": "log",
    "checkpointing": "checkpoint",
}
"""Another library's section → ours."""

ACTIONS = {"compare": "diff"}
"""Other names of actions of a command, with ours."""
COMMANDS = {
    "pretrain": "train",
    "run": "train",
    "launch": "train",
    "resume": "train",
    "fit": "train",
    "finetune": "train",
    "fork": "branch",
    "estimate": "plan",
    "search": "plan",
    "queue": "jobs",
    "squeue": "jobs",
    "sbatch": "submit",
    "list": "ls",
    "ps": "ls",
    "runs": "ls",
    "status": "ls",
    "watch": "top",
    "dashboard": "top",
    "kill": "stop",
    "cancel": "stop",
    "eval": "evaluate",
    "test": "evaluate",
    "talk": "chat",
    "infer": "generate",
    "sample": "generate",
    "predict": "generate",
    "replay": "audit",
    "export": "checkpoint export",
    "import": "checkpoint import",
    "convert": "checkpoint import",
    "inspect": "checkpoint inspect",
    "prune": "checkpoint prune",
    "preprocess": "data prepare",
    "prepare": "data prepare",
    "tokenize": "data prepare",
    "fetch": "data fetch",
    "download": "data fetch",
    "check": "doctor",
    "diagnose": "doctor",
    "env": "doctor",
    "recipe": "recipes",
    "models": "recipes",
    "help": "--help",
    "version": "--version",
}
"""A word that is no command → the command that does it."""
