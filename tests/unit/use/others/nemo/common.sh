#!/usr/bin/env bash
source ./cluster.sh
: ${WIDTH:=4096}
: ${LENGTH:=512}
: ${ITERATIONS:=300000}
BATCH=$((MACHINES*32))
torchrun --nproc_per_node $CORES megatron_gpt_pretraining.py \
    --config-path=conf \
    --config-name=gpt \
    trainer.devices=$CORES \
    trainer.num_nodes=$MACHINES \
    trainer.max_steps=$ITERATIONS \
    trainer.precision=32 \
    model.micro_batch_size=1 \
    model.global_batch_size=$BATCH \
    model.tensor_model_parallel_size=$TENSOR \
    model.pipeline_model_parallel_size=$STAGES \
    model.max_position_embeddings=$LENGTH \
    model.encoder_seq_length=$LENGTH \
    model.hidden_size=$WIDTH \
    model.ffn_hidden_size=$(($WIDTH*4)) \
    model.num_layers=$BLOCKS \
    model.num_attention_heads=8 \
    model.hidden_dropout=0.1 \
    model.tokenizer.vocab_file=$HOME/gpt2/gpt2-vocab.json \
    model.data.data_prefix=[1.0,$HOME/gpt2/text_document] \
    model.optim.name=$RULE \
    model.optim.lr=0.00015 \
    model.optim.betas=[0.9,0.95] \
    model.optim.sched.name=CosineAnnealing \
    model.optim.sched.warmup_steps=750 \
    model.optim.sched.constant_steps=80000 \
    model.optim.sched.min_lr=1.0e-5 \
    model.sequence_parallel=True \
    model.activations_checkpoint_granularity=selective \
    +model.save_xser=True \
    +exp_manager.checkpoint_callback_params.train_time_interval=3600 \
    2>&1 | tee log
