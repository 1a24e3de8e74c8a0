#!/usr/bin/env bash
# The sizes of one model; the script beside it has the rest.
export WIDTH=256
export TENSOR=8
export STAGES=4
export BLOCKS=4
./common.sh
