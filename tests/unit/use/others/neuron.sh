#!/bin/bash
# A run of neuronx-distributed's training program, with the batch as a goal and the accumulation computed from it.
HERE=$( cd -- "$( dirname -- "$0" )" && pwd )
CORES=32
TENSOR=8
MIXED=1
: ${BATCH:=1024}
PER_CORE=1
NODES=1
LAUNCH="--nproc_per_node $CORES"
if [ -n "$SLURM_NNODES" ]; then
    NODES=$SLURM_NNODES
    LAUNCH="--nproc_per_node $CORES --nnodes $NODES --node_rank $SLURM_NODEID"
fi
MORE=""
if [ $MIXED -gt 0 ]; then
    MORE+=" --use_mix_precision"
fi
REPLICAS=$(($CORES * $NODES / $TENSOR))
if [ "$1" = compile ]; then
    STOP=2
else
    STOP=-1
fi
echo "tensor parallel $TENSOR"
torchrun $LAUNCH pretrain.py --model_path $HERE/model --data_dir $HOME/tokens \
    --tensor_parallel_size $TENSOR --batch_size $PER_CORE --grad_accum_usteps $(($BATCH / $PER_CORE / $REPLICAS)) \
    --steps_this_run $STOP --max_steps 10000 --warmup_steps 100 --lr 1.5e-4 --seq_len 64 \
    --sequence_parallel_enabled --selective_checkpoint_enabled --use_zero_1 --logging_interval 10 --qkv_linear \
    $MORE |& tee $LOG
