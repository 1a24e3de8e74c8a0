#!/bin/bash
# A small Llama on one node of 8 GPUs, as Megatron-LM's examples set up theirs.
export CUDA_DEVICE_MAX_CONNECTIONS=1
GPUS_PER_NODE=8
NUM_NODES=${SLURM_NNODES:-1}
WORLD_SIZE=$(($GPUS_PER_NODE*$NUM_NODES))
CHECKPOINT_PATH=${1:-/ckpt/small}
DATA_PATH="0.7 /data/a_text_document 0.3 /data/b_text_document"
SEQ=512

DISTRIBUTED_ARGS=(
    --nproc_per_node $GPUS_PER_NODE
    --nnodes $NUM_NODES
    --master_addr ${MASTER_ADDR:-localhost}
)
MODEL_ARGS=(
    --use-mcore-models
    --num-layers 4
    --hidden-size 256
    --ffn-hidden-size 688
    --num-attention-heads 8
    --group-query-attention
    --num-query-groups 2      # a comment inside of an array
    --seq-length $SEQ
    --max-position-embeddings $SEQ
    --position-embedding-type rope
    --rotary-base 500000
    --rotary-percent 1.0
    --attention-dropout 0.0
    --hidden-dropout 0.0
    --swiglu
    --init-method-std 0.0134
    --attention-backend fused
    --normalization RMSNorm
    --untie-embeddings-and-output-weights
    --disable-bias-linear
    --vocab-size 32000
)
TRAINING_ARGS="
    --micro-batch-size 2 \
    --global-batch-size 64 \
    --train-samples 64000 \
    --lr-decay-samples 57600 \
    --lr-warmup-samples 3200 \
    --lr 0.0003 --min-lr 0.00003 --decoupled-lr 5.0e-4 \
    --lr-decay-style cosine --weight-decay 0.1
    --adam-beta1 0.9 --adam-beta2 0.95 --bf16
    --overlap-grad-reduce --use-distributed-optimizer
"
TRAINING_ARGS+=" --manual-gc"
torchrun ${DISTRIBUTED_ARGS[@]} \
    pretrain_gpt.py \
    ${MODEL_ARGS[@]} \
    ${TRAINING_ARGS[@]} \
    --tensor-model-parallel-size 2 --sequence-parallel \
    --data-path $DATA_PATH --tokenizer-type HuggingFaceTokenizer --tokenizer-model /data/tokenizer \
    --split '99,1,0' --save "$CHECKPOINT_PATH" --save-interval 100 \
    --eval-iters 32 --eval-interval 100 --log-interval 1 --ckpt-format torch_dist 2>&1 | tee log.txt
