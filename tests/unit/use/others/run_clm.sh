#!/bin/bash
# pretrain GPT-2 from scratch
export WANDB_PROJECT=lm
MODEL="gpt2"
torchrun --nproc_per_node 4 run_clm.py \
    --config_name $MODEL --tokenizer_name "$MODEL" \
    --dataset_name wikitext --dataset_config_name wikitext-103-raw-v1 \
    --per_device_train_batch_size 8 \
    --gradient_accumulation_steps 4 --block_size 1024 \
    --do_train --do_eval --learning_rate 6e-4 --lr_scheduler_type cosine --warmup_ratio 0.05 \
    --max_steps 10000 --weight_decay 0.1 --adam_beta1 0.9 --adam_beta2 0.95 \
    --bf16 --gradient_checkpointing --save_steps 1000 --save_total_limit 2 --logging_steps 10 \
    --report_to wandb --run_name first --output_dir out/gpt2 --overwrite_output_dir
